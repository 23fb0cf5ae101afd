"""The option `--kind` of every command that reads an inventory."""

from __future__ import annotations

from typing import Any

from typer.core import TyperOption

from clusterctl.cli import choices

HELP = (
    "Kind of the devices if the file does not name it: cpu, cuda or npu. Default: $CLUSTERCTL_KIND, else cpu."
)


class WithKind:
    """Adds `--kind` to a command with `--cluster`; while it runs, `choices.KIND` has the value."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        names = {name for parameter in self.params for name in parameter.opts}  # type: ignore[has-type]
        self.adds_kind = "--cluster" in names and "--kind" not in names
        if self.adds_kind:
            option = TyperOption(param_decls=["--kind"], type=str, metavar="KIND", help=HELP)
            self.params = [*self.params, option]  # type: ignore[has-type]

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an inner command's own value takes precedence."""
        given = ctx.params.pop("kind", None) if self.adds_kind else None
        token = choices.KIND.set(given or choices.KIND.get())
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        finally:
            choices.KIND.reset(token)
