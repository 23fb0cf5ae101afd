"""Follow the statements of a script as a shell would, without running anything, and record what it starts."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.bash.arithmetic import compute
from clusterctl.bash.state import GIVEN, State, Stop
from clusterctl.bash.syntax import Source, errors, parse, source_of
from clusterctl.bash.texts import BEGIN, END, MOST_CHARACTERS, Value, is_open, shown, unknown
from clusterctl.errors import Fault, InputFaults

if TYPE_CHECKING:
    from tree_sitter import Node

# Statements of one script, with those of its loops.
MOST_STEPS = 50_000
MOST_DEPTH = 40
# Rounds of one loop; loops that wait for something have no end that can be known.
MOST_ROUNDS = 256
# Commands whose success is a question, where others are taken to succeed.
QUESTIONS = (
    "grep",
    "egrep",
    "command",
    "which",
    "type",
    "diff",
    "cmp",
    "pgrep",
    "ping",
    "git",
    "nvidia-smi",
    "hash",
)
_BLOCKS = ("program", "do_group", "else_clause", "subshell")


@dataclass(frozen=True)
class Word:
    """A word of a command, with its file and line."""

    text: str
    where: str


@dataclass(frozen=True)
class Command:
    """A command that a script starts."""

    words: list[Word]
    certain: bool = True
    """False if it depends on something that is known only when the script runs."""
    followed: bool = False
    """Whether it starts a script whose commands come before it."""


@dataclass(frozen=True)
class Reason:
    """Why something cannot be known; `lost` says for each variable what it may be."""

    text: str
    lost: Mapping[str, str] = field(default_factory=dict)
    always: bool = True
    """False if it matters only to commands with an unknown part."""


@dataclass
class Script:
    """What a script does: its commands, and what cannot be known without running it."""

    commands: list[Command] = field(default_factory=list)
    unknown: dict[str, Reason] = field(default_factory=dict)
    """The reason by place, as in `train.sh:12`."""
    content: Callable[[str], str | None] = lambda path: None
    """The text of a file that the script writes, or that stands next to it."""

    def reasons(self, words: Iterable[Word]) -> dict[str, str]:
        """Return, by place, why parts of a command cannot be known, and what else its reader should know."""
        parts = " ".join(part for word in words for part in re.findall(f"{BEGIN}([^{END}]*)", word.text))
        kept: dict[str, str] = {}
        # What a condition depends on comes before it.
        for place, reason in reversed(self.unknown.items()):
            names = [name for name in reason.lost if re.search(rf"\b{name}\b", parts)]
            if names:
                parts += reason.text
                kept[place] = shown(f"{'; '.join(reason.lost[name] for name in names)}: {reason.text}")
            elif not reason.lost and (reason.always or parts):
                kept[place] = shown(reason.text)
        return dict(reversed(kept.items()))


Statement = Callable[["Evaluator", Source, "Node"], "bool | None"]
Builtin = Callable[["Evaluator", list[str]], "bool | None"]


@dataclass(frozen=True)
class Function:
    """A function that a script defines."""

    source: Source
    body: Node


@dataclass(frozen=True)
class Language:
    """What the evaluator follows: statements by their type, and commands that are known."""

    statements: Mapping[str, Statement]
    builtins: Mapping[str, Builtin]


class Evaluator:
    """Follows the statements of a script; `state` is what it has set so far."""

    def __init__(
        self, language: Language, script: Script, state: State, path: Path | None, alone: bool
    ) -> None:
        self.language, self.script, self.state, self.path, self.alone = language, script, state, path, alone
        self.steps = self.depth = 0
        self.certain = True
        self.where = ""
        self.local: list[dict[str, Value | None]] = []
        """The values, before each function that runs, of the variables that are local to it."""
        self.hidden: list[str] = []
        """The unknown parts of texts that are evaluated again."""
        self.printed: list[str] | None = None
        """What the commands of a substitution print; None outside of one."""

    def note(self, where: str, text: str, *, always: bool = True) -> None:
        self.script.unknown.setdefault(where, Reason(text, always=always))

    # ---- what the expansion of words asks

    def value(self, name: str) -> Value | None:
        arguments = self.state.arguments
        if name in ("@", "*"):
            return {str(at): each for at, each in enumerate(arguments)}
        if name.isdigit() and name != "0":
            return arguments[int(name) - 1] if int(name) <= len(arguments) else None
        special = {
            "#": str(len(arguments)),
            "?": "0",
            "PWD": self.state.folder,
            "0": str(self.path) if self.path else None,
            "BASH_SOURCE": self.where.rpartition(":")[0] if self.path else None,
        }
        return self.state.variables.get(name, special.get(name))

    def assign(self, name: str, value: Value) -> None:
        if isinstance(value, str) and len(value) > MOST_CHARACTERS:
            value = unknown(f"${name}")
        self.state.variables[name] = value

    def sum(self, text: str) -> str:
        def get(name: str) -> str:
            value = self.value(name)
            if isinstance(value, dict):
                value = next(iter(value.values()), "0")
            if value is None:
                raise ValueError(f"{name} is not set")
            if (
                not is_open(value)
                and re.search(r"[^\s\w]", value)
                and (number := compute(value, get, self.assign))
            ):
                return str(number)
            return value

        result = None if is_open(text) else compute(text, get, self.assign)
        return unknown(f"$(({text}))") if result is None else str(result)

    def output(self, text: str) -> str:
        """Return what a command substitution prints; unknown if one of its commands is a program."""
        inner = Evaluator(self.language, Script(), self.state.copy(), self.path, self.alone)
        inner.steps, inner.depth, inner.where, inner.hidden, inner.printed = (
            self.steps,
            self.depth,
            self.where,
            self.hidden,
            [],
        )
        name, _, line = self.where.rpartition(":")
        source = source_of(name or "the command", text, int(line or 1), inner=True)
        try:
            self.deeper()
            inner.block(source, parse(source))
        except Stop:
            pass
        finally:
            self.depth -= 1
        self.steps = inner.steps
        printed = "".join(inner.printed).rstrip("\n")
        return unknown(f"$({text})") if inner.script.commands or is_open(printed) else printed

    def hide(self, text: str) -> str:
        """Return a text that is evaluated again, with numbers in place of what its unknown parts say."""

        def number(found: re.Match[str]) -> str:
            self.hidden.append(found[0])
            return f"{BEGIN}{len(self.hidden) - 1}{END}"

        return re.sub(f"{BEGIN}[^{END}]*{END}", number, text)

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise Stop("exit", 0, self.where)

    # ---- statements

    def block(self, source: Source, node: Node) -> bool | None:
        """Follow the statements in a node; return whether the last one succeeds."""
        status: bool | None = True
        for child in node.named_children:
            if child.type not in ("comment", "heredoc_body"):
                status = self.statement(source, child)
        return status

    def statement(self, source: Source, node: Node) -> bool | None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            problem = f"takes more than {MOST_STEPS:,} steps"
            raise InputFaults(
                [Fault(source.where(node), problem, "give the command of the training in quotes")]
            )
        self.where = source.where(node)
        handler = self.language.statements.get(node.type)
        if handler is None:
            return self.block(source, node) if node.type in _BLOCKS else True
        return handler(self, source, node)

    def choose(self, source: Source, choices: Iterable[tuple[bool | None, list[Node], str]]) -> bool | None:
        """Follow the first choice that holds; of those that cannot be known all, and keep what they have in common."""
        before, certain, status = self.state, self.certain, None
        begun = self.where
        ends: list[State] = []
        reasons: list[str] = []
        sure = False
        for condition, nodes, reason in choices:
            if condition is False:
                continue
            sure = condition is True
            self.state = before.copy() if ends or condition is None else before
            self.certain = certain and sure and not reasons
            reasons += [] if sure else [reason]
            kept = before.copy() if sure and not reasons else before
            where = self.where
            try:
                for node in nodes:
                    status = self.statement(source, node)
                ends.append(self.state)
            except Stop as stop:
                if not stop.status and not reasons:
                    raise
                if not reasons:
                    self.note(where, f"the script would end at {stop.where}: {reason}")
                    ends.append(kept)
            if sure:
                break
        self.certain = certain
        states = ends if sure else [before, *ends]
        self.state = states[0] if states else before
        lost: dict[str, str] = {}
        for other in states[1:]:
            lost = {**self.state.merge(other), **lost}
        if lost:
            written = " ".join(" or ".join(dict.fromkeys(reasons)).split())[:80]
            cause = Reason(f"`{written}` is known only when the script runs", lost)
            self.script.unknown.setdefault(begun, cause)
        return None if reasons else status

    def loop(self, begin: Callable[[], bool | None], source: Source, body: Node, update: str = "") -> None:
        """Follow the body while `begin` holds; once, if that cannot be known."""
        for _ in range(MOST_ROUNDS):
            holds = begin()
            if holds is False:
                return
            try:
                if holds is None:
                    self.choose(source, [(None, [body], "the condition of a loop")])
                    return
                self.statement(source, body)
            except Stop as stop:
                if stop.kind == "break":
                    return
                if stop.kind != "continue":
                    raise
            if update:
                self.sum(update)

    def run(self, words: list[Word]) -> bool | None:
        """Follow a command: a function, a builtin, a script next to this one; else record it."""
        name, arguments = words[0].text, [word.text for word in words[1:]]
        if name in self.state.functions:
            return self.call(name, arguments)
        if (builtin := self.language.builtins.get(name)) and not (self.alone and name in ("source", ".")):
            return builtin(self, arguments)
        if assigned := re.match(r"([A-Za-z_]\w*)=", name):
            # `eval "A=1 torchrun ..."` and `env A=1 torchrun ...`.
            self.assign(assigned[1], name[assigned.end() :])
            return self.run(words[1:]) if words[1:] else True
        followed = not self.alone and self.nested(words)
        self.script.commands.append(Command(words, self.certain, followed))
        return None if posixpath.basename(name) in QUESTIONS else True

    def call(self, name: str, arguments: list[str]) -> bool | None:
        function = self.state.functions[name]
        assert isinstance(function, Function)
        outer, where = self.state.arguments, self.where
        self.state.arguments = arguments
        self.local.append({})
        self.deeper()
        try:
            return self.statement(function.source, function.body)
        except Stop as stop:
            if stop.kind != "return":
                raise
            return stop.status == 0
        finally:
            self.depth -= 1
            self.state.arguments, self.where = outer, where
            self.state.set_again(self.local.pop())

    def nested(self, words: list[Word]) -> bool:
        """Follow the script that a command names: `bash FILE`, `bash -c TEXT`, `./FILE`; return False for none."""
        texts = [word.text for word in words]
        for at, text in enumerate(texts):
            if posixpath.basename(text) in ("bash", "sh", "zsh") and at + 1 < len(texts):
                rest = texts[at + 1 :]
                while len(rest) > 1 and re.fullmatch(r"-[a-z]+|\+x", rest[0]) and "c" not in rest[0]:
                    del rest[0]
                if re.fullmatch(r"-[a-z]*c", rest[0]) and len(rest) > 1:
                    self.inner(rest[1], self.where, rest[3:])
                    return True
                return self.file(rest[0], rest[1:], own=True)
        found = next((at for at, text in enumerate(texts) if not text.startswith("-")), 0)
        return texts[found].endswith(".sh") and self.file(texts[found], texts[found + 1 :], own=True)

    def inner(self, text: str, where: str, arguments: list[str] | None = None) -> bool | None:
        """Follow a text that a script evaluates; with arguments in a shell of its own."""
        name, _, line = where.rpartition(":")
        source = source_of(name or "the command", self.hide(text), int(line or 1), inner=True)
        self.deeper()
        outer = self.state
        if arguments is not None:
            self.state = outer.copy()
            self.state.arguments = arguments
        try:
            return self.block(source, parse(source))
        except Stop as stop:
            if arguments is None or stop.kind != "exit":
                raise
            return stop.status == 0
        finally:
            self.depth -= 1
            self.where = where
            if arguments is not None:
                self.state = outer

    def file(self, written: str, arguments: list[str], *, own: bool = False) -> bool:
        """Follow a file: in a shell of its own, or in this one; False if there is no such file."""
        path = self.find(written)
        if path is None:
            return False
        text = self.content(written)
        if text is None:
            return False
        outer, outer_path, where = self.state, self.path, self.where
        if own:
            self.state, self.path = outer.copy(), path
        if own or arguments:
            self.state.arguments = arguments
        self.deeper()
        source = source_of(str(path), text)
        tree = parse(source)
        for place, words in errors(source, tree):
            self.note(place, f"cannot be read: {words}")
        try:
            self.block(source, tree)
        except Stop as stop:
            if stop.kind != ("exit" if own else "return"):
                raise
        finally:
            self.depth -= 1
            written_files = self.state.files
            if own:
                self.state, self.path = outer, outer_path
                self.state.files |= written_files
            self.where = where
        return True

    def content(self, written: str) -> str | None:
        """Return the text of a file that the script writes, or that stands next to it; None if there is none."""
        path = self.find(written)
        if path is None or (text := self.state.files.get(posixpath.normpath(written))) is not None:
            return text if path is not None else None
        try:
            return path.read_text("utf-8", "replace") if path.stat().st_size <= MOST_CHARACTERS else None
        except OSError:
            return None

    def find(self, written: str) -> Path | None:
        """Return a file that the script names: seen from where it starts, from its own folder, or from one above."""
        if is_open(written):
            return None
        places = [Path(self.state.folder)]
        if self.path is not None:
            places += [self.path.parent, *list(self.path.absolute().parents)[1:5]]
        if posixpath.normpath(written) in self.state.files:
            return Path(written)
        return next((path for place in places if (path := place / written).is_file()), None)

    def captured(self, source: Source, nodes: list[Node], given: str | None) -> str | None:
        """Follow commands joined by pipes; return what the last one prints, None if it is a program's output."""
        outer, text = self.printed, given
        started = len(self.script.commands)
        for node in nodes:
            self.printed = []
            self.state.variables[GIVEN] = text if text is not None else unknown("standard input")
            try:
                self.statement(source, node)
            finally:
                text = "".join(self.printed)
                self.printed = outer
        self.state.variables.pop(GIVEN, None)
        return text if len(self.script.commands) == started else None
