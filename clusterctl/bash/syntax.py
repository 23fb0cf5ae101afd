"""Parse a script with tree-sitter's grammar of bash."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from clusterctl.bash.texts import shown
from clusterctl.errors import Fault, InputFaults, UsageError

if TYPE_CHECKING:
    from tree_sitter import Node

# Script files are short.
MOST_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Source:
    """A text of shell: its file or origin, and the line where it begins there."""

    name: str
    text: bytes
    first_line: int = 1
    inner: bool = False
    """Whether the text is a word of another script, so that its lines are not those of a file."""

    def where(self, node: Node) -> str:
        return f"{self.name}:{self.first_line + (0 if self.inner else node.start_point[0])}"

    def written(self, node: Node) -> str:
        return self.text[node.start_byte : node.end_byte].decode()


@cache
def _parser() -> Any:
    try:
        import tree_sitter
        import tree_sitter_bash
    except ModuleNotFoundError as error:
        problem = (
            f"the package {error.name.replace('_', '-')} is missing: it reads shell scripts"
            if error.name
            else ""
        )
        raise UsageError(problem, "pip install tree-sitter tree-sitter-bash") from None
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def parse(source: Source) -> Node:
    """Return the tree of a script; raise InputFaults if it is too long."""
    if len(source.text) > MOST_CHARACTERS:
        raise InputFaults([Fault(source.name, "is too long for a script", "is this the right file?")])
    root: Node = _parser().parse(source.text).root_node
    return root


def source_of(name: str, text: str, first_line: int = 1, *, inner: bool = False) -> Source:
    """Return a source without the characters that mark unknown parts, in the form that the grammar reads."""
    cleaned = text if inner else shown(text).replace("\r\n", "\n")
    # The grammar divides a word before `$1` without braces.
    cleaned = re.sub(r"(?<=[\w/.:=})-])\$([0-9])", r"${\1}", cleaned)
    # A place to fill in, as in NAME=<your path>, is no redirection.
    cleaned = re.sub(r"(?m)^(\s*(?:export\s+)?\w+=)[ ]?(<[^<>\n]+>)(?=\s|$)", r"\1'\2'", cleaned)
    return Source(name, cleaned.encode("utf-8", "replace"), first_line, inner)


def errors(source: Source, node: Node) -> Iterator[tuple[str, str]]:
    """Yield the place and the first words of each part that is no shell."""
    if node.type == "ERROR" or (node.is_missing and node.type in "`\"'"):
        words = node.type if node.is_missing else source.written(node).strip().partition("\n")[0][:60]
        if words.strip("\\"):
            yield source.where(node), words
        return
    for child in node.children if node.has_error else ():
        yield from errors(source, child)
