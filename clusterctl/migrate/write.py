"""Write the job of a translated training as commented YAML."""

from __future__ import annotations

import json
import re
import textwrap

from clusterctl.migrate import manifest
from clusterctl.migrate.translation import Translation, Value

# The order of a job's keys; others follow.
ORDER = (
    "name",
    "nodes",
    "devices",
    "data",
    "data_there",
    "collect",
    "network",
    "restart",
    manifest.PART,
    "train",
)
TRAIN = ("model", "init", "data", "tune", "steps", "length", "micro_batch", "global_batch", "batch_ramp")
WIDTH = 118
# Column at which comments begin.
COLUMN = 42

Tree = dict[str, object]


def job_text(result: Translation) -> str:
    """Return the job as YAML: each key with its option as a comment, and at the end the options that are not mapped."""
    found = result.found
    total = len(result.mapped) + len(result.unmapped)
    counted = (
        f"Written from {found.source} ({found.title}): {len(result.mapped)} of {total} options are mapped."
    )
    each = "Each line names its option; the end lists the others. " if total else ""
    head = [found.summary or counted, f"{each}Check it: clusterctl plan FILE", *result.notes]
    lines = [line for text in head for line in comment(text)]
    tree: Tree = {}
    values = {"name": Value(found.name or "training", ""), **result.values}
    for key, value in values.items():
        _put(tree, key.split("."), value)
    lines += _lines(_sorted(tree, ORDER), 0)
    if result.unmapped:
        lines += ["", "# Not mapped:"]
        for name, reason in sorted(dict(result.unmapped).items()):
            lines += comment(f"{name}: {reason}", "#   ")
    if found.unknown:
        lines += ["", "# Known only when the script runs:"]
        for place, reason in found.unknown.items():
            lines += comment(f"{place}: {reason}", "#   ")
    return "\n".join(lines) + "\n"


def comment(text: str, begin: str = "# ") -> list[str]:
    plain = "".join(char if char.isprintable() else "?" for char in text)
    return textwrap.wrap(
        plain, WIDTH, initial_indent=begin, subsequent_indent=begin + "  ", break_on_hyphens=False
    )


def _put(tree: Tree, path: list[str], value: Value) -> None:
    """Put a value at its path; a word such as `recompute: full` becomes the section's first key if others follow."""
    *parents, last = path
    for part in parents:
        inner = tree.get(part)
        if isinstance(inner, Value):
            word = {"recompute": "mode", "init": "source", "loss_scale": "initial", "model": "name"}[part]
            inner = {word: inner}
        tree[part] = inner if isinstance(inner, dict) else {}
        tree = tree[part]  # type: ignore[assignment]
    tree[last] = value


def _sorted(tree: Tree, order: tuple[str, ...]) -> Tree:
    keys = sorted(tree, key=lambda key: order.index(key) if key in order else len(order))
    return {key: _sorted(tree[key], TRAIN) if key == "train" else tree[key] for key in keys}  # type: ignore[arg-type]


def _lines(tree: Tree, depth: int) -> list[str]:
    lines = []
    for key, value in tree.items():
        begin = "  " * depth + key + ":"
        if isinstance(value, Value):
            text = f"{begin} {_yaml(value.value)}"
            origin = "".join(char if char.isprintable() else "?" for char in value.origin)
            lines.append(f"{text:<{COLUMN}} # {origin}" if origin else text)
        else:
            lines += [begin, *_lines(value, depth + 1)]  # type: ignore[arg-type]
    return lines


def _yaml(value: object) -> str:
    """Return a value as YAML of one line."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        text = f"{value:.12g}"
        return text if re.search(r"[.e]", text) else f"{text}.0" if abs(value) < 1e9 else f"{value:.0f}"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(_yaml(each) for each in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(each)}" for key, each in value.items()) + "}"
    text = str(value)
    plain = re.fullmatch(r"[A-Za-z./][A-Za-z0-9_./ -]*|[0-9.]+[kMB]? (tokens|samples|steps|epochs)", text)
    special = text.lower() in ("true", "false", "null", "none", "yes", "no", "on", "off")
    return text if plain and not special and text == text.strip() else json.dumps(text, ensure_ascii=False)
