"""Commands whose effect on a script is known: builtins of the shell, and programs that only change texts."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from math import prod
from typing import Protocol

from clusterctl.bash.state import GIVEN, State, Stop
from clusterctl.bash.texts import Shell, is_open, shown, unknown


class Run(Shell, Protocol):
    """What a builtin changes."""

    state: State
    where: str
    printed: list[str] | None

    def note(self, where: str, text: str, *, always: bool = True) -> None: ...

    def inner(self, text: str, where: str, arguments: list[str] | None = None) -> bool | None: ...

    def file(self, written: str, arguments: list[str], *, own: bool = False) -> bool: ...

    def content(self, written: str) -> str | None: ...


def unset(run: Run, arguments: list[str]) -> bool:
    for name in arguments:
        run.state.variables.pop(name, None)
    return True


def _print(run: Run, text: str) -> bool:
    if run.printed is not None:
        run.printed.append(text)
    return True


def _echo(run: Run, arguments: list[str]) -> bool:
    while arguments and re.fullmatch(r"-[neE]+", arguments[0]):
        arguments = arguments[1:]
    return _print(run, " ".join(arguments) + "\n")


def _printf(run: Run, arguments: list[str]) -> bool:
    target = arguments[1] if arguments[:1] == ["-v"] and len(arguments) > 2 else ""
    form, *values = arguments[2:] if target else arguments or [""]
    rest = iter(values)
    text = re.sub(r"%[0-9.-]*[sdif]", lambda match: next(rest, ""), form).replace("\\n", "\n")
    if target:
        run.assign(target, text)
        return True
    return _print(run, text)


def _shift(run: Run, arguments: list[str]) -> bool:
    count = int(arguments[0]) if arguments and arguments[0].isdigit() else 1
    del run.state.arguments[:count]
    return True


def _set(run: Run, arguments: list[str]) -> bool:
    if "--" in arguments:
        run.state.arguments = arguments[arguments.index("--") + 1 :]
    elif arguments and not arguments[0].startswith(("-", "+")):
        run.state.arguments = arguments
    return True


def _cd(run: Run, arguments: list[str]) -> bool:
    target = next((word for word in arguments if not word.startswith("-")), unknown("~"))
    run.state.folder = (
        target if is_open(target) else posixpath.normpath(posixpath.join(run.state.folder, target))
    )
    return True


def _read(run: Run, arguments: list[str]) -> bool:
    for name in arguments:
        if re.fullmatch(r"[A-Za-z_]\w*", name):
            run.assign(name, unknown(f"${name}"))
    return True


def _source(run: Run, arguments: list[str]) -> bool:
    if arguments and not run.file(arguments[0], arguments[1:]):
        reason = "which file this is, is not known" if is_open(arguments[0]) else "there is no such file"
        run.note(run.where, f"source {shown(arguments[0])}: {reason}; what it sets is missing", always=False)
    return True


def _stop(kind: str) -> Callable[[Run, list[str]], bool]:
    def stop(run: Run, arguments: list[str]) -> bool:
        status = (
            int(arguments[0]) if arguments and arguments[0].isdigit() and kind in ("exit", "return") else 0
        )
        raise Stop(kind, status, run.where)

    return stop


def _let(run: Run, arguments: list[str]) -> bool | None:
    values = [run.sum(text) for text in arguments]
    return None if not values or is_open(values[-1]) else values[-1] != "0"


def _expr(run: Run, arguments: list[str]) -> bool:
    return _print(run, run.sum(" ".join(arguments)) + "\n")


def _calculator(run: Run, arguments: list[str]) -> bool:
    """Print what bc prints for sums and products."""
    text = _given(run).strip()
    return _print(run, _decimal(text, f"bc <<< {text}") + "\n")


def _awk(run: Run, arguments: list[str]) -> bool:
    """Print a computed number: `awk "BEGIN { printf \\"%.0f\\", 2 * 3 }"`, which scripts use for large products."""
    text = " ".join(arguments)
    found = re.fullmatch(r"BEGIN\s*\{\s*(?:print|printf\s*\"%\.(\d)f(?:\\n)?\"\s*,)\s*([^;]*?);?\s*\}", text)
    value = _decimal(found[2], text) if found else unknown(f"awk {text}")
    if found and found[1] and not is_open(value):
        value = f"{Decimal(value):.{found[1]}f}"
    return _print(run, value + "\n")


def _decimal(text: str, written: str) -> str:
    """Return the value of a sum of products of decimal numbers; unknown for other texts."""
    terms = re.findall(r"([-+]?)\s*([0-9.]+(?:\s*\*\s*[0-9.]+)*)\s*", text)
    if not terms or "".join(sign + factors for sign, factors in terms).replace(" ", "") != text.replace(
        " ", ""
    ):
        return unknown(written)
    try:
        products = [prod(Decimal(factor.strip()) for factor in factors.split("*")) for _, factors in terms]
    except InvalidOperation:
        return unknown(written)
    return str(
        sum(-product if sign == "-" else product for (sign, _), product in zip(terms, products, strict=True))
    )


def _given(run: Run) -> str:
    """Return the standard input of a command."""
    value = run.value(GIVEN)
    return value if isinstance(value, str) else unknown("standard input")


def _cat(run: Run, arguments: list[str]) -> bool:
    texts = [run.content(path) or unknown(f"$(cat {path})") for path in arguments]
    return _print(run, "".join(texts) if arguments else _given(run))


def _tee(run: Run, arguments: list[str]) -> bool:
    for path in arguments:
        if not path.startswith("-"):
            run.state.files[posixpath.normpath(path)] = _given(run)
    return _print(run, _given(run))


def _cut(run: Run, arguments: list[str]) -> bool:
    found = re.search(r"-d\s*(\S|\s)\s+-f\s*(\d+)(-?)", " ".join(arguments))
    text = _given(run)
    if found is None or is_open(text):
        return _print(run, unknown("cut " + " ".join(arguments)))
    parts = [line.split(found[1])[int(found[2]) - 1 :] for line in text.splitlines()]
    return _print(run, "".join(found[1].join(part if found[3] else part[:1]) + "\n" for part in parts))


def _sed(run: Run, arguments: list[str]) -> bool:
    """Replace plain words, as scripts do that fill in a template."""
    words = [word for word in arguments if word not in ("-e", "-E", "-r")]
    text = _given(run)
    if words and not words[0].startswith("-") and len(words) == 2:
        path = words.pop()
        text = run.content(path) or unknown(f"$(cat {path})")
    for word in words:
        found = re.fullmatch(r"s(.)(.*?)\1(.*?)\1(g?)", word, re.S)
        if found is None or re.search(r"[][\\.*^$]", found[2]):
            return _print(run, unknown("sed " + " ".join(arguments)))
        text = text.replace(found[2], found[3], -1 if found[4] else 1)
    return _print(run, text)


def _sequence(run: Run, arguments: list[str]) -> bool:
    if not all(re.fullmatch(r"-?\d{1,4}", word) for word in arguments) or not 1 <= len(arguments) <= 3:
        return _print(run, unknown("seq " + " ".join(arguments)))
    numbers = [int(word) for word in arguments]
    first, step, last = (1, 1, numbers[0]) if len(numbers) == 1 else (numbers[0], 1, numbers[1])
    if len(numbers) == 3:
        step, last = numbers[1] or 1, numbers[2]
    return _print(
        run, "".join(f"{number}\n" for number in range(first, last + (1 if step > 0 else -1), step))
    )


def _path(change: Callable[[Run, str], str]) -> Callable[[Run, list[str]], bool]:
    def path(run: Run, arguments: list[str]) -> bool:
        texts = [word for word in arguments if not word.startswith("-")]
        made = change(run, texts[0]) if texts and not is_open(texts[0]) else unknown(" ".join(texts))
        return _print(run, made + "\n")

    return path


def _basename(run: Run, arguments: list[str]) -> bool:
    path, *ending = arguments or [unknown("basename")]
    name = posixpath.basename(path.rstrip("/"))
    return _print(
        run, (unknown(f"$(basename {path})") if is_open(path) else name.removesuffix("".join(ending))) + "\n"
    )


def _absolute(run: Run, path: str) -> str:
    return posixpath.normpath(posixpath.join(run.state.folder, path))


Builtin = Callable[["Run", list[str]], "bool | None"]
BUILTINS: dict[str, Builtin] = {
    **dict.fromkeys(
        ("true", ":", "wait", "trap", "ulimit", "mkdir", "sleep", "shopt", "umask"), lambda run, words: True
    ),
    "false": lambda run, words: False,
    "echo": _echo,
    "printf": _printf,
    "shift": _shift,
    "set": _set,
    "cd": _cd,
    "pushd": _cd,
    "read": _read,
    "unset": unset,
    "source": _source,
    ".": _source,
    "eval": lambda run, words: run.inner(" ".join(words), run.where),
    "exit": _stop("exit"),
    "return": _stop("return"),
    "break": _stop("break"),
    "continue": _stop("continue"),
    "let": _let,
    "expr": _expr,
    "bc": _calculator,
    "awk": _awk,
    "cat": _cat,
    "tee": _tee,
    "cut": _cut,
    "sed": _sed,
    "seq": _sequence,
    "pwd": lambda run, words: _print(run, run.state.folder + "\n"),
    "dirname": _path(lambda run, path: posixpath.dirname(path.rstrip("/")) or "."),
    "basename": _basename,
    "realpath": _path(_absolute),
    "readlink": _path(_absolute),
}
