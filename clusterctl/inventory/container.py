"""The `container` part of a job or a node: the image that the ranks run in, and how it is started."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clusterctl.document import recorded_secret, secrets_in
from clusterctl.errors import did_you_mean
from clusterctl.wire.fields import Checked, Problem, setting

RUNTIMES = ("docker", "podman", "apptainer")
# registry:5000/name/name:tag@sha256:..., or for apptainer a file; never an option.
IMAGE = re.compile(r"[A-Za-z0-9./~_][A-Za-z0-9._/:@~+-]{0,400}")
AN_IMAGE = "as in registry.example/team/train:2.1, or train.sif for apptainer"
# HOST:CONTAINER[:ro]
MOUNT = re.compile(r"(?P<host>[/~][^:,\s]*):(?P<inside>/[^:,\s]*)(?P<mode>:(ro|rw))?")
# Options that clusterctl sets itself; with another value it could not control the ranks.
RESERVED = {
    "--name", "--rm", "--detach", "-d", "--network", "--net", "--ipc", "--pid", "--cidfile", "--restart", "--init",
    "--workdir", "-w",
}  # fmt: skip


@dataclass(frozen=True)
class ContainerOptions(Checked):
    """An image, and how the ranks run in it."""

    image: str = setting("", required=True, pattern=IMAGE, noun="an image", example=AN_IMAGE)
    """The image; for apptainer also a .sif file of the node."""
    runtime: str = setting("docker")
    """The program that runs it: docker, podman or apptainer, or the full path of one of them."""
    mounts: tuple[str, ...] = setting(
        (), pattern=MOUNT, noun="a mount", example="HOST:CONTAINER or HOST:CONTAINER:ro"
    )
    """Folders of the node to mount: HOST:CONTAINER or HOST:CONTAINER:ro. The run's folders are always mounted."""
    options: tuple[str, ...] = setting(())
    """More options of the runtime: --ulimit=memlock=-1."""
    python: str = setting("python3")
    """The Python inside the image."""

    @property
    def dialect(self) -> str:
        """The runtime whose command-line options the program accepts."""
        return self.runtime.rpartition("/")[2]

    def problems(self) -> Iterator[Problem]:
        if self.dialect not in RUNTIMES or ("/" in self.runtime and not self.runtime.startswith("/")):
            near = did_you_mean(self.dialect, RUNTIMES) or f"one of {', '.join(RUNTIMES)}"
            yield "runtime", f"unknown runtime {self.runtime!r}", near
        for option in self.options:
            if not option.startswith("-"):
                yield "options", f"{option!r} is not an option", "one word each: --ulimit=memlock=-1"
            elif option.split("=")[0] in RESERVED:
                yield "options", f"{option.split('=')[0]} is set by clusterctl", "leave it out"
        for name in secrets_in(_variables(self.options)):
            yield "options", *recorded_secret(name)


def _variables(options: Sequence[str]) -> dict[str, str]:
    """Return the variables that options such as --env=NAME=VALUE set."""
    found = dict[str, str]()
    for option in options:
        # --env=NAME=VALUE, or -eNAME=VALUE. Apptainer's --env has several variables, with commas between.
        text = option.removeprefix("--env=") if option.startswith("--") else option.removeprefix("-e")
        for variable in text.split(",") if text != option else ():
            name, _, value = variable.lstrip("=").partition("=")
            found[name] = value
    return found
