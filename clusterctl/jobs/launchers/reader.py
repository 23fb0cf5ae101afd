"""Find the launchers in a command: behind `env` and other wrappers, in `bash -c`, and in scripts that are pushed.

Nothing is run. A launcher that is started in another way, such as by a program of Python, is not found here.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from clusterctl.bash.evaluate import evaluate
from clusterctl.bash.texts import shown
from clusterctl.errors import InputFaults
from clusterctl.jobs.launchers.known import PYTHON, Launcher, launcher_at, module_of

SHELL = re.compile(r"(ba|da|z|k|a)?sh")
# Programs that start the command in their arguments: the options that take a value in the next word, and the number of
# words before the command.
WRAPPERS: dict[str, tuple[str, int]] = {
    "env": ("-u --unset -C --chdir -a -g", 0),
    "exec": ("-a", 0),
    "command": ("", 0),
    "builtin": ("", 0),
    "nohup": ("", 0),
    "setsid": ("", 0),
    "time": ("-f --format -o --output", 0),
    "nice": ("-n --adjustment", 0),
    "ionice": ("-c -n -p --class --classdata", 0),
    "stdbuf": ("-i -o -e", 0),
    "timeout": ("-k -s --kill-after --signal", 1),
    "numactl": ("-N -m -C -i -p -P -w --cpunodebind --membind --physcpubind --interleave --preferred", 0),
    "taskset": ("", 1),
    "chrt": ("", 1),
    "sudo": ("-u -g -h -p -C -D -r -t --user --group --chdir", 0),
    "xargs": ("-n -P -I -L -d -a", 0),
    "unbuffer": ("", 0),
    "catchsegv": ("", 0),
    "conda": ("-n --name -p --prefix --cwd", 1),
    "mamba": ("-n --name -p --prefix --cwd", 1),
    "micromamba": ("-n --name -p --prefix --cwd", 1),
    "uv": ("--with --python -p --project --directory --extra --group", 1),
    "poetry": ("", 1),
    "pipenv": ("", 1),
    "nsys": ("-o --output -t --trace -s -c --sample --capture-range", 1),
    "ncu": ("-o --export", 0),
    "busybox": ("", 0),
    "pixi": ("-e --environment --manifest-path", 1),
    **dict.fromkeys(
        ("apptainer", "singularity"), ("-B --bind --env --env-file -H --home -W --pwd --overlay -C", 2)
    ),
    "strace": ("-o -e -p -s -u -E", 0),
    "perf": ("-o --output -e --event -F -g -c", 1),
    "flock": ("-w --timeout -E", 1),
    **dict.fromkeys(("tini", "dumb-init", "xvfb-run", "chronic"), ("", 0)),
}
ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
# Python's program in a variable.
PYTHON_VARIABLE = re.compile(r"\$\{?\w*python\w*\}?", re.IGNORECASE)
# The path of a program in a substitution.
PATH_OF = re.compile(r"(?:\$\(|`)\s*(?:which|command -v|type -p)\s+([^\s`()]+)\s*[)`]")
POSITIONAL = re.compile(r"\$(?:([1-9])|\{([1-9][0-9]*)(?::?-[^{}]*)?\})")
# Scripts that start each other.
DEEPEST = 10
LARGEST = 1 << 20


@dataclass(frozen=True)
class Use:
    """A launcher that a command starts."""

    launcher: Launcher
    words: tuple[str, ...]
    """Its command, from its own name on; in a script, variables without a known value stay as written."""
    before: int = 0
    """How many words of the whole command stand before it."""
    where: str = ""
    """The script, or the option of a shell, in which it stands; empty if it is in the command itself."""


@dataclass(frozen=True)
class _Reader:
    code: Path | None
    variables: Mapping[str, str]
    seen: set[tuple[Path, tuple[str, ...]]] = field(default_factory=set)

    def command(self, words: tuple[str, ...], where: str, depth: int, before: int = 0) -> Iterator[Use]:
        """Yield the launchers that a command starts; `before` words stand in front of it."""
        if words and words[0].startswith("-"):
            # The reader of the shell drops `env`, `exec` and `sudo`, but not their options.
            words, before = ("env", *words), before - 1
        if PurePath(words[0] if words else "").name == "env" and words[1:2] in (("-S",), ("--split-string",)):
            yield from self.text(" ".join((*words[2:3], shlex.join(words[3:]))), where or "env -S", depth + 1)
            return
        skipped = _skip_wrappers(words)
        words, before = words[skipped:], before + skipped
        if not words or depth > DEEPEST:
            return
        words = tuple(PATH_OF.sub(r"\1", word) for word in words)
        if PYTHON_VARIABLE.fullmatch(words[0]):
            words = ("python", *words[1:])
        if found := launcher_at(words):
            yield Use(found, words, before, where)
            return
        # The name of the path "." is empty.
        name = PurePath(words[0]).name or words[0]
        if name == "eval":
            yield from self.text(" ".join(words[1:]), where or "eval", depth + 1)
        elif SHELL.fullmatch(name):
            yield from self._shell(words, where, depth)
        elif name in ("source", "."):
            yield from self._file(words[1:], depth)
        elif PYTHON.fullmatch(name):
            script = module_of(words)[0]
            if script.endswith(".sh"):
                yield from self._file(words[words.index(script) :], depth)
        elif "/" in words[0] or words[0].endswith(".sh"):
            yield from self._file(words, depth)

    def _shell(self, words: tuple[str, ...], where: str, depth: int) -> Iterator[Use]:
        index = 1
        while index < len(words) and words[index][:1] in ("-", "+"):
            word = words[index]
            index += 1
            if word[1:2] != "-" and "c" in word:
                text = words[index] if index < len(words) else ""
                name = where or f"{PurePath(words[0]).name} -c"
                yield from self.text(text, name, depth + 1, words[index + 2 :])
                return
            if word in ("-o", "+o", "-O", "+O", "--rcfile", "--init-file"):
                index += 1
        yield from self._file(words[index:], depth)

    def _file(self, words: tuple[str, ...], depth: int) -> Iterator[Use]:
        """Yield the launchers of a script of the pushed folder, with its arguments; a variable before its name counts
        as that folder.
        """
        name = re.sub(r"^(\$\{?\w+\}?|\$\(.*\)|`[^`]*`)/", "", words[0] if words else "")
        if self.code is None or not name or os.path.isabs(name):
            return
        path = self.code / name
        try:
            if (path, words[1:]) in self.seen or not path.is_file() or path.stat().st_size > LARGEST:
                return
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        first = text.partition("\n")[0]
        if first.startswith("#!") and "sh" not in first:
            return
        self.seen.add((path, words[1:]))
        yield from self.text(text, name, depth + 1, words[1:])

    def text(self, text: str, where: str, depth: int, given: tuple[str, ...] = ()) -> Iterator[Use]:
        """Yield the launchers that a text of the shell starts, also in its functions and substitutions."""
        for words in shell_commands(text, self.variables, given):
            yield from self.command(words, where, depth)
            for word in words:
                for inner in _substitutions(word):
                    yield from self.text(inner, where, depth + 1)


def uses(
    command: Sequence[str], code: Path | None = None, variables: Mapping[str, str] | None = None
) -> list[Use]:
    """Return the launchers that a command starts; `code` is the folder that is pushed and in which it runs.

    `variables` are those of the environment that scripts are known to have.
    """
    return list(_Reader(code, variables or {}).command(tuple(command), "", 0))


def _skip_wrappers(words: Sequence[str]) -> int:
    """Return how many words come before the program: wrappers such as `env A=1` with their options."""
    index = 0
    while index < len(words):
        name = PurePath(words[index]).name
        if ASSIGNMENT.fullmatch(words[index]):
            index += 1
            continue
        if name not in WRAPPERS:
            return index
        valued, positional = WRAPPERS[name]
        index += 1
        while index < len(words) and (words[index].startswith("-") or positional):
            word = words[index]
            index += 1
            if word == "--":
                break
            if not word.startswith("-"):
                positional -= 1
            elif word in valued.split():
                index += 1
    return index


def shell_commands(
    text: str, variables: Mapping[str, str], given: Sequence[str] = ()
) -> Iterator[tuple[str, ...]]:
    """Yield the commands that a text of the shell may start, with what is known of its variables and of its `given`
    arguments filled in.
    """
    known = "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())
    if given:
        known += f"set -- {shlex.join(given)}\n"
    else:
        # A value that the caller of a script gives is not known.
        text = POSITIONAL.sub(lambda found: f"$argument_{found[1] or found[2]}", text)
    try:
        script = evaluate(known + text, "", alone=True)
    except InputFaults:
        return
    for command in script.commands:
        yield tuple(shown(word.text) for word in command.words)


def _substitutions(word: str) -> Iterator[str]:
    """Yield the commands in `$(...)` and backquotes of a word."""
    yield from re.findall(r"`([^`]*)`", word)
    start = word.find("$(")
    while start >= 0 and word[start : start + 3] != "$((":
        depth, index = 0, start + 1
        while index < len(word):
            depth += (word[index] == "(") - (word[index] == ")")
            index += 1
            if not depth:
                break
        yield word[start + 2 : index - 1]
        start = word.find("$(", index)
