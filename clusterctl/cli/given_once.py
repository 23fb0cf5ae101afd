"""Options with one value that a user gives twice: node sets and ranks are united, any other is an error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from typer.core import TyperOption

from clusterctl.cli.options import WrongValue
from clusterctl.errors import UsageError

# How the help calls values whose union can be written with a comma.
UNITED = ("SET", "RANKS")


class GivenOnce(TyperOption):
    """An option with one value; the parser collects all that are given, so that none is dropped."""

    def add_to_parser(self, parser: Any, ctx: Any) -> None:
        """Register the option with the parser as one that can be repeated."""
        self.multiple = True
        super().add_to_parser(parser, ctx)
        self.multiple = False

    def handle_parse_result(self, ctx: Any, opts: Any, args: list[str]) -> Any:
        """Set the value of the option; report values that contradict each other."""
        given = opts.get(self.name or "")
        if isinstance(given, list):
            opts = {**opts, str(self.name): self._only(given)}
        return super().handle_parse_result(ctx, opts, args)

    def _only(self, values: list[str]) -> str:
        different = list(dict.fromkeys(values))
        try:
            if self.metavar in UNITED:
                return united(different)
            if len(different) == 1:
                return different[0]
            raise UsageError(f"is given {len(values)} times: {', '.join(different)}", "give it once")
        except UsageError as error:
            raise _wrong(self, error) from None


class KeysOnce(TyperOption):
    """An option with KEY=VALUE that can be repeated, each key once."""

    def handle_parse_result(self, ctx: Any, opts: Any, args: list[str]) -> Any:
        """Set the values of the option; report a key with two values."""
        given: dict[str, str] = {}
        for text in opts.get(self.name or "") or ():
            key = text.partition("=")[0]
            if given.setdefault(key, text) != text:
                problem = f"{key} is given twice: {given[key]}, {text}"
                raise _wrong(self, UsageError(problem, "give each key once"))
        return super().handle_parse_result(ctx, opts, args)


def _wrong(param: TyperOption, error: UsageError) -> WrongValue:
    wrong = WrongValue(error)
    wrong.param = param
    return wrong


def united(sets: Sequence[str]) -> str:
    """Return the union of node sets or ranks as one expression."""
    for text in sets:
        if not text.strip():
            # All nodes would be selected, or none excluded.
            raise UsageError("is empty", "name at least one; is a variable of the shell unset?")
        # An operator would apply to all names on its left.
        if set(text) & set("!&^") and text != sets[0]:
            raise UsageError(f"is given {len(sets)} times, and {text} has an operator", "write one node set")
    return ",".join(sets)


def refuse_contradictions(params: Iterable[Any]) -> None:
    """Make the options of a command refuse or unite values that are given twice."""
    for param in params:
        if type(param) is not TyperOption or param.is_flag or param.count:
            continue
        if not param.multiple:
            param.__class__ = GivenOnce
        elif str(param.metavar).startswith(("KEY=", "NAME=")):
            param.__class__ = KeysOnce
