"""Return the errors of a command line in our form: all unknown options and wrong values together."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from clusterctl.cli.options import WRONG_WORDS
from clusterctl.errors import Fault, InputFaults, UsageError, faults_of

INVENTORY_OPTIONS = ("-c", "--cluster", "--hostfile")
# Click's names for the types of paths.
PATHS = ("path", "file", "directory")
# Click's names for kinds of values, and ours.
PLAIN_KINDS = {
    f"is not a valid {kind}{end}": f"is not {plain}"
    for end in (" range", "")
    for kind, plain in (("int", "a whole number"), ("float", "a number"))
}


def usage_error(error: Exception, ctx: Any, typed: Sequence[str] = ()) -> Exception:
    """Return an error of the command line in our form; the help that a command prints without arguments stays
    unchanged. `typed` are the words of the command line.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        return error
    parameter, text = getattr(error, "param", None), str(getattr(error, "message", error))
    if parameter is not None and isinstance(error, typer.BadParameter) and text:
        text = f"{_name_of(parameter, ctx, typed)}: {text}"
    else:
        text = str(getattr(error, "format_message", error.__str__)())
        text = text[:1].lower() + text[1:]
    if limits := _limits(parameter) if " is not in the range " in text else "":
        return UsageError(f"{text.partition(' is not in the range ')[0]} is out of range", f"use {limits}")
    if found := re.fullmatch(r"got unexpected extra arguments? ?(?:\(s\) )?\((.*)\)", text.rstrip(".")):
        return UsageError(f"{found[1]!r} is one argument too many", f"{ctx.command_path} -h")
    if found := re.fullmatch(r"(.*): (?:Path|File|Directory) '(.*)' is not readable\.?", text):
        return UsageError(f"{found[1]}: {found[2]} is not readable", "check its owner and permissions")
    for technical, plain in PLAIN_KINDS.items():
        text = text.replace(technical, plain)
    remedy = getattr(error, "remedy", "")
    if is_unknown_option(error) and (ours := of_others(ctx, error)):
        text, remedy = text.partition(" (Possible")[0], ours
    return UsageError(text.rstrip("."), remedy or f"{ctx.command_path} -h")


def _name_of(parameter: Any, ctx: Any, typed: Sequence[str]) -> str:
    """Return the name of an option as the user typed it last; all its names if it is not among the words."""
    for word in reversed(_before_command(typed)):
        for name in parameter.opts:
            if word == name or word.startswith(f"{name}=" if name.startswith("--") else name):
                return str(name)
    return str(parameter.get_error_hint(ctx)).replace("'", "")


def _before_command(words: Sequence[str]) -> Sequence[str]:
    """Return the words of a command line before `--`."""
    return words[: words.index("--")] if "--" in words else words


def is_unknown_option(error: Exception) -> bool:
    return type(error).__name__ == "NoSuchOption"


def of_others(ctx: Any, error: Exception, words: Sequence[str] | None = None) -> str:
    """Return what to write instead of an unknown option that other programs have, if it is among some words; "" for
    any other option."""
    from clusterctl.cli import habits

    option = str(getattr(error, "option_name", ""))
    if words is not None and _place_of(option, words) is None:
        return ""
    return habits.ours(getattr(ctx.command, "key", ""), option)


def _faults(error: Exception, ctx: Any, typed: Sequence[str]) -> list[Fault]:
    """Return the faults of an error of the command line."""
    wrong = usage_error(error, ctx, typed)
    return faults_of(wrong) if isinstance(wrong, UsageError) else []


def _place_of(option: str, words: Sequence[str]) -> int | None:
    """Return the index of the word with an option that the parser does not know; None if it is not found."""
    for index, word in enumerate(_before_command(words)):
        is_short = len(option) == 2 and word[:1] == "-" and word[:2] != "--" and option[1] in word[1:]
        if word.partition("=")[0] == option or is_short:
            return index
    return None


def _unusable(param: Any, ctx: Any, given: Mapping[str, object], typed: Sequence[str]) -> Fault | None:
    """Return the fault of a value that its type accepts and that cannot be used: NaN, infinity, an empty path."""
    value, raw = ctx.params.get(param.name), given.get(param.name)
    if isinstance(value, float) and not math.isfinite(value):
        problem, remedy = f"{value} is not a number that can be used", "use a finite number"
    elif "" in _items(raw) and param.type.name in PATHS:
        # typer makes Path("") of it, which is the current folder.
        problem, remedy = "is empty", "name a file or folder; is a variable of the shell unset?"
    else:
        return None
    return Fault(_name_of(param, ctx, typed), problem, remedy)


def _items(value: object) -> Sequence[object]:
    """Return the values of an option that can be repeated, or the only value."""
    return value if isinstance(value, (list, tuple)) else [value]


def require_usable(command: Any, ctx: Any, typed: list[str]) -> None:
    """Raise InputFaults for the values of a parsed command line that cannot be used."""
    given, _, _ = command.make_parser(ctx).parse_args(args=list(typed))
    faults = [fault for param in command.get_params(ctx) if (fault := _unusable(param, ctx, given, typed))]
    if faults:
        raise InputFaults(faults)


def _limits(parameter: Any) -> str:
    """Return which numbers an option takes, in words."""
    least, most = parameter.type.min, parameter.type.max
    if least is None:
        return f"at most {most:g}"
    if most is None:
        return f"{least:g} or more"
    return f"above {least:g}, at most {most}" if parameter.type.min_open else f"{least:g} to {most}"


def options_of_command(
    command: Any, ctx: Any, typed: list[str], start: int, short: Sequence[str] = ()
) -> Exception:
    """Return the error for options that seem to belong to the user's own command, which begins at `start`.

    `short`: those among them that are also ours.
    """
    unknown, _ = _without_unknown(command, ctx, typed)
    names = list(dict.fromkeys([*short, *(str(getattr(error, "option_name", "")) for error in unknown)]))
    if typed[-2:-1] and typed[-2] in INVENTORY_OPTIONS and Path(typed[-1]).is_file():
        # It is the last word and belongs to us: the command does not get it.
        typed, start = typed[-2:] + typed[:-2], start + 2
    quoted = [shlex.quote(word) for word in typed]
    example = " ".join(["clusterctl", command.key, *quoted[:start], "--", *quoted[start:]])
    words = f"of `clusterctl {command.key}`"
    ending = f"to your command, write -- before the command: {example}"
    if len(names) == 1:
        return UsageError(f"{names[0]} is not an option {words}", f"if it belongs {ending}")
    return UsageError(
        f"{', '.join(names[:-1])} and {names[-1]} are not options {words}", f"if they belong {ending}"
    )


def all_wrong(command: Any, first: Exception, ctx: Any, typed: list[str]) -> Exception:
    """Return the error of a command line, with all its unknown options and wrong values.

    An argument may seem to be missing because an option is unknown: it is reported only without unknown options.
    """
    if not is_unknown_option(first) and getattr(first, "param", None) is None:
        return usage_error(first, ctx)
    from clusterctl.cli.habits import OF_NODES

    errors, words = _without_unknown(command, ctx, typed)
    if command.key == "exec":
        errors = [error for error in errors if getattr(error, "option_name", "") not in OF_NODES] or errors
    lacks_words = bool(errors)
    given, rest, late = dict[str, object](), list[str](), []
    try:
        given, rest, _ = command.make_parser(ctx).parse_args(args=list(words))
        # `--help` would print the help and exit.
        late = [param for param in command.get_params(ctx) if not param.is_eager]
    except WRONG_WORDS as error:
        errors.append(error)
    faults = [fault for error in errors for fault in _faults(error, ctx, typed)]
    for param in late:
        try:
            param.handle_parse_result(ctx, given, rest)
            faults += [fault] if (fault := _unusable(param, ctx, given, words)) else []
        except WRONG_WORDS as error:
            if not lacks_words or type(error).__name__ != "MissingParameter":
                faults += _faults(error, ctx, words)
    faults = list(dict.fromkeys(faults))
    return InputFaults(faults) if len(faults) > 1 else usage_error(first, ctx, typed)


def _without_unknown(command: Any, ctx: Any, typed: list[str]) -> tuple[list[Exception], list[str]]:
    """Return an error for each unknown option, and the words without these options."""
    errors, words = list[Exception](), list(typed)
    while True:
        try:
            command.make_parser(ctx).parse_args(args=list(words))
        except WRONG_WORDS as error:
            index = _place_of(str(getattr(error, "option_name", "")), words)
            if is_unknown_option(error) and index is not None:
                errors.append(error)
                # A negative number after it is its value, not another option.
                has_value = re.fullmatch(r"-\d\S*", "".join(words[index + 1 : index + 2]))
                del words[index : index + (2 if has_value else 1)]
                continue
        return errors, words
