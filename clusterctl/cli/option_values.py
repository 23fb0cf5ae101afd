"""The values that a shell offers for an option; each command checks its own values when it runs."""

from __future__ import annotations

from typing import Any

from clusterctl.hostfile.node_lists import TARGETS
from clusterctl.wire.requests import KINDS, MATRICES, READ_FORMATS, SPLITS, TYPES, WRITTEN_FORMATS

SORTS = ("given", "address", "name", "inventory")
HARDWARE = ("910a", "a2", "a3", "a5")

# The key is an option, or command and option where commands differ.
VALUES: dict[str, tuple[str, ...]] = {
    "--kind": KINDS,
    "--ssh": ("auto", "paramiko", "openssh"),
    "--relay": ("auto", "on", "off", "plain"),
    "--env-style": ("torchrun", "mindspore", "mpi"),
    "--mode": ("auto", "namespaces", "loopback", "embedded"),
    "--format": TARGETS,
    "--for": HARDWARE,
    "--sort": SORTS,
    "--dtype": TYPES,
    "--device": KINDS,
    "--weights": MATRICES,
    "eval --weights": TYPES,
    "--task": ("ppl", "lambada", "wikitext", "copa", "choice"),
    "--split": SPLITS,
    "submit k8s --kind": ("job", "jobset", "trainjob", "vcjob", "acjob"),
    "hostfile convert --to": TARGETS,
    "hostfile check --for": TARGETS,
    "ranktable convert --to": ("1.0", "1.2", "2.0", "plan", *TARGETS),
    "ranktable show --by": ("rank", "server"),
    "ranktable diff --by": ("rank", "node"),
    "checkpoint export --to": WRITTEN_FORMATS,
    "checkpoint import --from": READ_FORMATS,
}


def offer_values(command: str, parameters: list[Any]) -> None:
    """Let a shell complete the values of the options of a command."""
    for parameter in parameters:
        values = next(
            (VALUES[key] for name in parameter.opts for key in (f"{command} {name}", name) if key in VALUES),
            (),
        )
        if values:
            parameter._custom_shell_complete = _Offer(values)


class _Offer:
    """Returns the values that begin with the typed text."""

    def __init__(self, values: tuple[str, ...]) -> None:
        self._values = values

    def __call__(self, ctx: Any, parameter: Any, incomplete: str) -> list[str]:
        return [value for value in self._values if value.startswith(incomplete)]
