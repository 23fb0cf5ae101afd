"""Placeholders such as `{data}` and `{node.address}` in a job's command, environment and train part.

The same names work in all three places; {rank} and {local_rank} do not work in the train part, which is the same for
all ranks. `{{name}}` writes the text {name} itself. Other braces, such as those of JSON, stay as they are. In a command
without a job file, which may be code, so do unknown names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from clusterctl.errors import UsageError, did_you_mean
from clusterctl.wire.fields import Key

OF_NODE = (
    "data", "run_dir", "node_rank", "world_size", "master", "master_port",
    "node", "node.name", "node.address", "node.host", "node.interface",
)  # fmt: skip
OF_RANK = (*OF_NODE, "rank", "local_rank")

# Not after "$": a shell's own variable.
_PLACEHOLDER = re.compile(r"(?<!\$)\{(\{)?([a-z][a-z_.]*)\}(?(1)\})")
# A text that begins with a placeholder, which YAML would take for a mapping.
BEGINS_WITH_PLACEHOLDER = re.compile(r"\s*\{[a-z][a-z_.]*\}")


def fill(text: str, values: Mapping[str, str], where: str, *, strict: bool = True) -> str:
    """Return `text` with its placeholders replaced; raise UsageError for an unknown one.

    Without `strict`, an unknown one stays as it is unless it begins with `node.`.
    """

    def replacement(match: re.Match[str]) -> str:
        if match[1]:
            return match[0][1:-1]
        if match[2] not in values and not (strict or match[2].startswith("node.")):
            return match[0]
        if match[2] not in values:
            raise UsageError(f"{where}: {describe_unknown(match[2])}", remedy_for(match[2], tuple(values)))
        return values[match[2]]

    return _PLACEHOLDER.sub(replacement, text) if "{" in text else text


def fill_all(value: Any, values: Mapping[str, str], where: str) -> Any:
    """Return a JSON value with the placeholders in all of its texts replaced."""
    if isinstance(value, dict):
        return {key: fill_all(inner, values, f"{where}.{key}") for key, inner in value.items()}
    if isinstance(value, list):
        return [fill_all(inner, values, f"{where}[{index}]") for index, inner in enumerate(value)]
    return fill(value, values, where) if isinstance(value, str) else value


def used_in(value: Any, path: Key = ()) -> Iterator[tuple[Key, str]]:
    """Yield every placeholder in a JSON value, with the path to its text."""
    if isinstance(value, str):
        yield from ((path, match[2]) for match in _PLACEHOLDER.finditer(value) if not match[1])
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from used_in(inner, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from used_in(inner, (*path, index))


def describe_unknown(name: str) -> str:
    """Return the message about an unknown placeholder."""
    return f"unknown placeholder {{{name}}}"


def remedy_for(name: str, known: tuple[str, ...]) -> str:
    """Return what to write in place of an unknown placeholder."""
    literal = f"{{{{{name}}}}} writes the text itself"
    if name in OF_RANK and name not in known:
        return "the train part is the same for all ranks of a node"
    near = did_you_mean(name, known)
    return f"{near or 'known: ' + ', '.join('{' + each + '}' for each in known)}; {literal}"
