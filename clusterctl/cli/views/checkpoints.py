"""Turn checkpoints into tables, texts and JSON; nothing here prints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from clusterctl.cli.views.tables import facts, table
from clusterctl.inventory import nodeset
from clusterctl.text import count, duration, escape_controls, plural, size
from clusterctl.wire.saved import MOMENTS, Manifest

if TYPE_CHECKING:
    from rich.console import RenderableType

    from clusterctl.checkpoints.checkpoint import Checkpoint, CheckpointList
    from clusterctl.checkpoints.diff import Compared
    from clusterctl.checkpoints.holder import SavedLayout
    from clusterctl.checkpoints.prune import Pruned
    from clusterctl.checkpoints.verify import Verified
    from clusterctl.cli.views.progress_bar import Bar

STYLE = {"complete": "green", "incomplete": "yellow", "damaged": "bold red"}
# Files that `info` lists; --json lists all.
MOST_FILES = 64


def list_json(found: CheckpointList) -> dict[str, object]:
    return {
        "source": found.source,
        "latest": found.latest,
        "unreachable": found.unreachable,
        "checkpoints": [checkpoint.as_json() for checkpoint in found.checkpoints],
    }


def list_table(found: CheckpointList) -> RenderableType:
    """Return one row for each checkpoint."""
    rows = []
    for checkpoint in found.checkpoints:
        entry = checkpoint.facts
        rows.append(
            [
                checkpoint.name.removeprefix("step-").lstrip("0") or "0",
                _health(checkpoint, found.latest),
                size(entry.bytes) if entry.bytes else "",
                _number(entry.loss),
                _number(entry.eval_loss),
                count(entry.tokens) if entry.tokens is not None else "",
                _age(entry.time),
                checkpoint.copies or "",
                nodes_text(checkpoint.nodes),
            ]
        )
    names = ["STEP", "HEALTH", "SIZE", "LOSS", "EVAL", "TOKENS", "AGE", "COPIES", "ON"]
    right = ("STEP", "SIZE", "LOSS", "EVAL", "TOKENS", "AGE", "COPIES")
    return table(names, rows, right=right, drop=("TOKENS", "COPIES", "EVAL"))


def _health(checkpoint: Checkpoint, latest: str) -> Text:
    """Return the health with its details: missing files, where it is damaged, weights only, newest, in use."""
    parts = [checkpoint.health.value]
    if checkpoint.missing > 0:
        parts.append(f"{checkpoint.missing} of {checkpoint.facts.count} files missing")
    damaged = tuple(copy.holder.name for copy in checkpoint.holdings if copy.entry.faults)
    if damaged and checkpoint.health.value != "damaged":
        parts.append(f"damaged on {nodes_text(damaged)}")
    parts += ["weights only"] * (checkpoint.facts.state == "weights")
    parts += ["latest"] * (checkpoint.name == latest)
    parts += ["in use"] * checkpoint.in_use
    return Text(", ".join(parts), STYLE[checkpoint.health.value])


def nodes_text(names: tuple[str, ...]) -> str:
    """Return machines in short form: `node[1-4], here`."""
    nodes = [name for name in names if name != "here"]
    return ", ".join([*([nodeset.fold(nodes)] if nodes else []), *["here"] * ("here" in names)])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _age(moment: float | None) -> str:
    return "" if moment is None else duration(max(0.0, time.time() - moment))


def info_json(checkpoint: Checkpoint, manifest: Manifest | None, latest: str) -> dict[str, object]:
    files = {
        name: {"bytes": entry.bytes, "on": [holding.holder.name for holding in checkpoint.holders_of(name)]}
        for name, entry in (manifest.files if manifest else {}).items()
    }
    keys = ("optimizer_steps", "loss_scale", "config", "data", "torch")
    more = {key: manifest.facts.get(key) if manifest else None for key in keys}
    return {
        **checkpoint.as_json(),
        "latest": checkpoint.name == latest,
        "parameters": parameters_of(manifest),
        **more,
        "files": files,
    }


def parameters_of(manifest: Manifest | None) -> int | None:
    """Return the number of weights; None for checkpoints of version 0.1, which have no table of tensors."""
    if manifest is None or not manifest.tensors:
        return None
    return sum(math.prod(shape) for name, shape in manifest.tensors.items() if not name.startswith(MOMENTS))


def info(checkpoint: Checkpoint, manifest: Manifest | None, latest: str) -> list[RenderableType]:
    """Return the facts of a checkpoint and the table of its files."""
    rows = [(name, escape_controls(text)) for name, text in _facts(checkpoint, manifest)]
    parts: list[RenderableType] = [
        Text.assemble(checkpoint.name, ": ", _health(checkpoint, latest)),
        facts(rows),
    ]
    files = list(manifest.files.items()) if manifest else []
    if files:
        shown = [
            [
                name,
                size(entry.bytes),
                nodes_text(tuple(h.holder.name for h in checkpoint.holders_of(name))) or "-",
            ]
            for name, entry in files[:MOST_FILES]
        ]
        parts += ["", table(["FILE", "SIZE", "ON"], shown, right=("SIZE",))]
    if len(files) > MOST_FILES:
        parts.append(f"... and {len(files) - MOST_FILES} more; --json lists all")
    return parts


def _facts(checkpoint: Checkpoint, manifest: Manifest | None) -> Iterator[tuple[str, str]]:
    entry, weights = checkpoint.facts, parameters_of(manifest)
    if manifest:
        each = f", {entry.bytes / weights:.2f} bytes per parameter" if weights else ""
        yield "size", f"{size(entry.bytes)} in {plural(entry.count, 'file')}{each}"
        parameters = [f"{count(weights)} parameters"] if weights else []
        yield "model", ", ".join([*parameters, *_model_sizes(manifest)])
        yield "layout", layout_text(entry.layout)
    losses = [_number(entry.loss) or "unknown"]
    losses += [f"evaluation {_number(entry.eval_loss)}"] if entry.eval_loss is not None else []
    yield "loss", ", ".join(losses)
    if entry.consumed_samples is not None:
        tokens = f"{count(entry.tokens)} tokens, " if entry.tokens is not None else ""
        yield "data", f"{tokens}{entry.consumed_samples:,} samples"
    if entry.time is not None:
        took = f", saved in {entry.save_seconds:.1f} s" if entry.save_seconds is not None else ""
        yield "age", f"{_age(entry.time)}{took}"
    yield "copies", f"{checkpoint.copies} of every file"
    for holding in checkpoint.holdings:
        yield holding.holder.name, f"{holding.entry.path} ({plural(len(holding.entry.have), 'file')})"
    for fault in checkpoint.faults:
        yield "fault", fault


MODEL = (("layers", "layers"), ("hidden", "wide"), ("heads", "heads"), ("sequence", "tokens long"))


def _model_sizes(manifest: Manifest) -> list[str]:
    """Return the sizes of the model, as far as the saved config has them."""
    model = (manifest.facts.get("config") or {}).get("model") or {}
    return [f"{model[key]} {word}" for key, word in MODEL if isinstance(model.get(key), int)]


def layout_text(layout: SavedLayout | None) -> str:
    """Return a layout in words: `4 ranks: tensor 2, data 2, zero 1, torch`."""
    if layout is None or not layout.world:
        return "unknown"
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data}
    parts = [f"{key} {number}" for key, number in sizes.items() if number]
    parts += [f"zero {layout.zero}"] if layout.zero is not None else []
    parts += [word for word in (layout.engine, layout.precision) if word]
    return f"{plural(layout.world, 'rank')}: " + ", ".join(parts)


def counters(drawn: Bar, checkpoint: Checkpoint) -> Callable[[str], Callable[[int], None]]:
    """Return for each machine the function that adds to its bytes on the progress bar."""
    entry = checkpoint.facts

    def of(name: str) -> Callable[[int], None]:
        own = next((h for h in checkpoint.holdings if h.holder.name == name), None)
        total = round(entry.bytes * len(own.entry.have) / entry.count) if own and entry.count else 0
        report, done = drawn.of(f"{checkpoint.name} {name}"), [0]

        def add(number: int) -> None:
            done[0] += number
            report(done[0], max(total, done[0]))

        return add

    return of


def verified_text(result: Verified) -> str:
    """Return one line for a valid checkpoint, else one for each fault."""
    checkpoint = result.checkpoint
    if result.ok:
        files = plural(result.checked, "file")
        nodes = nodes_text(checkpoint.nodes)
        where = nodes if nodes == "here" else f"on {nodes}"
        return (
            f"{checkpoint.name}: valid: {files} {where}, {size(checkpoint.facts.bytes)}, every byte verified"
        )
    return "\n".join([f"{checkpoint.name}: damaged", *(f"  {damage}" for damage in result.damages)])


def pruned_line(result: Pruned, *, dry_run: bool) -> str:
    """Return one line about a checkpoint that was removed, or stays."""
    where = nodes_text(result.checkpoint.nodes)
    if result.kept:
        return f"kept {result.checkpoint.name}: {result.kept}"
    return f"{'would delete' if dry_run else 'deleted'} {result.checkpoint.name} ({size(result.bytes)} on {where})"


# Tensors that `diff` lists; --json lists all.
MOST_TENSORS = 20


def diff_json(compared: Compared) -> dict[str, object]:
    return {
        "equal": compared.equal,
        "tensors": {key: difference.as_json() for key, difference in compared.differences.items()},
        "shapes": {key: list(pair) for key, pair in compared.shapes.items()},
    }


def diff(compared: Compared) -> list[RenderableType]:
    """Return the summary, and the tensors that differ most."""
    total, different = len(compared.differences), compared.different
    parts: list[RenderableType] = [Text(f"{len(different)} of {total} tensors differ")]
    for key, (shape, other) in compared.shapes.items():
        parts.append(
            Text(
                escape_controls(f"{key}: {shape or 'absent'} in the first, {other or 'absent'} in the second")
            )
        )
    if different:
        rows = []
        for key in different[:MOST_TENSORS]:
            one_tensor = compared.differences[key]
            share = f"{one_tensor.different:,} of {one_tensor.numbers:,}"
            rows.append([key, share, f"{one_tensor.gap:.3g}", f"{one_tensor.relative:.3g}"])
        right = ("NUMBERS", "LARGEST", "RELATIVE")
        parts.append(table(["TENSOR", "NUMBERS", "LARGEST", "RELATIVE"], rows, right=right))
    if len(different) > MOST_TENSORS:
        parts.append(f"... and {len(different) - MOST_TENSORS} more; --json lists all")
    return parts
