"""The option `--ssh` of every command that connects to nodes."""

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
    "SSH client: paramiko, the `ssh` program of OpenSSH, or auto: paramiko unless a node's settings need `ssh`. "
    "Default: $CLUSTERCTL_SSH, else auto."
)


class Reaching(TyperCommand):
    """A command with `--ssh`; while it runs, `chosen()` returns the value."""

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
    """Return the SSH client of the command line, else of the settings."""
    from clusterctl.ssh.choose import checked

    return checked(_CHOSEN.get() or load_settings().ssh)


def warn_without_ssh(cluster: Cluster) -> None:
    """Warn that ~/.ssh/config is ignored because the `ssh` program is missing."""
    config = Path("~/.ssh/config").expanduser()
    by_ssh = any(node.host != "local" and not node.allocation for node in cluster.nodes)
    if by_ssh and shutil.which("ssh") is None and config.is_file():
        screen.log(f"`ssh` is not installed, so {config} is ignored; only the inventory is used")
