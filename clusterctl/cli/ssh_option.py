"""`--ssh`, the same for every command that reaches nodes."""

from __future__ import annotations

import shutil
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperOption

from clusterctl.cli import screen
from clusterctl.settings import load_settings

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster

_CHOSEN: ContextVar[str | None] = ContextVar("ssh", default=None)
HELP = (
    "Reach the nodes with paramiko, with OpenSSH's own program, or (auto, the default) with paramiko wherever it can; "
    "or $CLUSTERCTL_SSH."
)


class Reaching(TyperCommand):
    """A command with `--ssh`, whose value `chosen` gives below it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.params.append(
            TyperOption(param_decls=["--ssh"], type=str, metavar="auto|paramiko|openssh", help=HELP)
        )

    def invoke(self, ctx: Any) -> Any:
        token = _CHOSEN.set(ctx.params.pop("ssh", None))
        try:
            return super().invoke(ctx)
        finally:
            _CHOSEN.reset(token)


def chosen() -> str:
    """What the command line says, else the settings."""
    from clusterctl.ssh.choose import checked

    return checked(_CHOSEN.get() or load_settings().ssh)


def tell_without_ssh(cluster: Cluster) -> None:
    """Say that the user's SSH configuration is there and can't be read as OpenSSH reads it."""
    config = Path("~/.ssh/config").expanduser()
    by_ssh = any(node.host != "local" for node in cluster.nodes)
    if by_ssh and shutil.which("ssh") is None and config.is_file():
        screen.log(f"there is no `ssh` here to read {config}: the inventory alone says how nodes are reached")
