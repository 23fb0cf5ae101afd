"""Report nodes that failed for the same reason together: one message for all of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from clusterctl.errors import ClusterctlError
from clusterctl.inventory import nodeset

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node

    Failure = tuple[Node, ClusterctlError]
    Divided = tuple[str, list[str]]
    """A text with a SLOT in place of each name and address of its node, and what stood there."""

# An address that ssh's own configuration gives a node.
ADDRESS = r"\d+(?:\.\d+){3}"
SLOT = "\0"
# Characters; a longer node set of addresses is not shown.
SHORT = 60


def fold_failures(failures: Iterable[Failure]) -> list[ClusterctlError]:
    """Return the errors of nodes; those with the same text, apart from names and addresses, become one error."""
    items = list(failures)
    texts = [(node, (error.message.removeprefix(f"{node.name}: "), error.hint)) for node, error in items]
    errors = []
    for members, (reason, hint) in fold_texts(texts):
        names = nodeset.fold(items[index][0].name for index in members)
        first, line_end, rest = reason.partition("\n")
        together = f"{names}: {first} ({len(members)} nodes){line_end}{rest}"
        errors.append(items[members[0]][1] if len(members) == 1 else ClusterctlError(together, hint))
    return errors


def fold_texts(items: Iterable[tuple[Node, Sequence[str]]]) -> list[tuple[list[int], list[str]]]:
    """Group the items of nodes whose texts are the same apart from names and addresses.

    Return for each group the indexes of its items, and the texts with the names and addresses folded.
    """
    alike: dict[tuple[str, ...], list[tuple[int, list[Divided]]]] = {}
    for index, (node, texts) in enumerate(items):
        divided = [_divided(node, text) for text in texts]
        alike.setdefault(tuple(text for text, _ in divided), []).append((index, divided))
    return [
        (
            [index for index, _ in group],
            [_joined(same) for same in zip(*(divided for _, divided in group), strict=True)],
        )
        for group in alike.values()
    ]


def _divided(node: Node, text: str) -> Divided:
    own = sorted({node.name, node.host, node.address} - {""}, key=len, reverse=True)
    words = re.compile(rf"(?<![\w.-])(?:{'|'.join([*map(re.escape, own), ADDRESS])})(?![\w-])")
    return words.sub(SLOT, text), words.findall(text)


def _joined(texts: Sequence[Divided]) -> str:
    """Return the common text of several nodes with their names and addresses folded."""
    pieces = texts[0][0].split(SLOT)
    values = [_short([own[index] for _, own in texts]) for index in range(len(pieces) - 1)]
    return "".join(piece + value for piece, value in zip(pieces, [*values, ""], strict=True))


def _short(words: Sequence[str]) -> str:
    """Return one word if all are equal, else their node set; if that is long, the first word and `, ...`."""
    if len(set(words)) == 1:
        return words[0]
    text = nodeset.fold(words) if not any(map(nodeset.name_fault, words)) else ""
    return text if 0 < len(text) <= SHORT else f"{words[0]}, ..."
