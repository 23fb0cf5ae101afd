"""Compare two checkpoints: their tensors, and the numbers in them, on the machines that have the files.

The trainer reads the numbers, with torch: on a node that has both files, or on this machine after fetching them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clusterctl.checkpoints.checkpoint import Checkpoint
from clusterctl.checkpoints.holder import HERE, NodeHolder
from clusterctl.errors import UsageError, WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.inventory.setup import rank_python, request_for
from clusterctl.jobs.ask_trainer import ask_trainer
from clusterctl.transport.fanout import on_each, values
from clusterctl.wire.requests import DiffQuestion
from clusterctl.wire.results import Difference
from clusterctl.wire.saved import OLD_FORMAT, PARTS, Damaged, Manifest, boxes_of
from clusterctl.wire.typed_json import BadValue, decode, encode, parse

Pair = tuple[str, str]


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints."""

    checkpoint: Checkpoint
    manifest: Manifest
    code: Mapping[str, str]
    """On each node, the folder with the trainer."""

    def path_on(self, name: str) -> str:
        return next(h.entry.path for h in self.checkpoint.holdings if h.holder.name == name)


@dataclass(frozen=True)
class Compared:
    """The result: each tensor that both have in the same shape, and tensors that only one has."""

    differences: Mapping[str, Difference]
    shapes: Mapping[str, tuple[str, str]]
    """The shapes of tensors that only one has, or that have two shapes; "" for an absent one."""

    @property
    def different(self) -> list[str]:
        """Return the tensors that differ, the most different first."""
        names = [name for name, difference in self.differences.items() if difference.different]
        return sorted(names, key=lambda name: -self.differences[name].relative)

    @property
    def equal(self) -> bool:
        return not self.different and not self.shapes


def pairs_of(first: Side, second: Side) -> list[Pair]:
    """Return the pairs of files that share numbers of a tensor."""
    boxes = [_boxes(side.manifest) for side in (first, second)]
    if all(boxes) and boxes[0] == boxes[1]:
        # In the usual case, two steps of one run, each file has a counterpart with the same boxes.
        return [(name, name) for name in boxes[0]]
    by_tensor: dict[str, list[tuple[str, list[int]]]] = {}
    for name, held in boxes[1].items():
        for key, box in held:
            by_tensor.setdefault(key, []).append((name, box))
    found: dict[Pair, None] = {}
    for name, held in boxes[0].items():
        for key, box in held:
            for other, other_box in by_tensor.get(key, ()):
                if _meet(box, other_box):
                    found[name, other] = None
    return list(found)


def _boxes(manifest: Manifest) -> dict[str, list[tuple[str, list[int]]]]:
    """Return the boxes of each file with tensors."""
    if manifest.format == OLD_FORMAT:
        raise UsageError(
            "a checkpoint of version 0.1 has no table of tensors", "save it again with this version"
        )
    names = [name for name in manifest.files if name.endswith(PARTS)]
    try:
        return {name: list(boxes_of(manifest, name)) for name in names}
    except Damaged as problem:
        raise WorkFailed(str(problem), "see `clusterctl checkpoint verify`") from None


def _meet(box: Sequence[int], other: Sequence[int]) -> bool:
    return len(box) == len(other) and all(
        box[at] < other[at + 1] and other[at] < box[at + 1] for at in range(0, len(box), 2)
    )


def shapes_that_differ(first: Side, second: Side) -> dict[str, tuple[str, str]]:
    """Return the shapes of tensors that are not the same in both."""
    tables = [{key: str(shape) for key, shape in side.manifest.tensors.items()} for side in (first, second)]
    keys = sorted(tables[0].keys() | tables[1].keys())
    shapes = {key: (tables[0].get(key, ""), tables[1].get(key, "")) for key in keys}
    return {key: pair for key, pair in shapes.items() if pair[0] != pair[1]}


def assign(first: Side, second: Side, pairs: Sequence[Pair]) -> dict[str, list[Pair]] | None:
    """Return which machine compares which pairs; None if no machine has both files of some pair."""
    machines = {holding.holder.name: holding.holder.node for holding in first.checkpoint.holdings}
    others = {holding.holder.name: holding.holder.node for holding in second.checkpoint.holdings}
    common = [name for name, node in machines.items() if others.get(name) == node]
    work: dict[str, list[Pair]] = {}
    for name, other in pairs:
        having = [
            machine
            for machine in common
            if _has(first.checkpoint, machine, name) and _has(second.checkpoint, machine, other)
        ]
        if not having:
            return None
        work.setdefault(min(having, key=lambda machine: len(work.get(machine, ()))), []).append((name, other))
    return work


def _has(checkpoint: Checkpoint, machine: str, file: str) -> bool:
    return any(holding.holder.name == machine for holding in checkpoint.holders_of(file))


def compare(first: Side, second: Side, work: Mapping[str, Sequence[Pair]]) -> Compared:
    """Return how much the tensors differ; every machine compares its pairs."""
    holders = {h.holder.name: h.holder for h in first.checkpoint.holdings}

    def on_machine(node: Node) -> dict[str, Difference]:
        paths = Path(first.path_on(node.name)), Path(second.path_on(node.name))
        question = json.dumps(encode(DiffQuestion(*paths, tuple(work[node.name]))))
        holder = holders[node.name]
        if isinstance(holder, NodeHolder):
            return _decoded(_ask_node(holder, first.code.get(node.name, ""), question), node.name)
        return ask_trainer(partial(_decoded, name=HERE), ["checkpoint-diff"], question)

    total: dict[str, Difference] = {}
    for found in values(on_each([holders[name].node for name in work], on_machine)).values():
        for key, difference in found.items():
            total[key] = total[key].plus(difference) if key in total else difference
    return Compared(total, shapes_that_differ(first, second))


def compare_here(first: Path, second: Path, sides: tuple[Side, Side]) -> Compared:
    """Return the differences of two complete local folders."""
    question = json.dumps(encode(DiffQuestion(first, second, tuple(pairs_of(*sides)))))
    found = ask_trainer(partial(_decoded, name=HERE), ["checkpoint-diff"], question)
    return Compared(found, shapes_that_differ(*sides))


def _ask_node(holder: NodeHolder, code: str, question: str) -> object:
    """Run the trainer of the run on a node; return its answer."""
    python = rank_python(holder.node.python, holder.node.setup)
    if python.startswith("~/"):
        python = python.replace("~", holder.connection.hello().home, 1)
    argv = [python, "-m", "trainer", "checkpoint-diff"]
    done = holder.connection.run(
        argv, cwd=code or None, setup=request_for(holder.node.setup), stdin=question.encode()
    )
    if not done.ok:
        lines = [line for line in done.error_text.splitlines() if line.startswith("error: ")]
        problem = (
            lines[0].removeprefix("error: ")
            if lines
            else done.error_text.strip()[-300:] or f"exit {done.code}"
        )
        raise WorkFailed(f"{holder.name}: {problem}", "see `clusterctl checkpoint verify`")
    return parse(done.stdout)


def _decoded(answer: object, name: str) -> dict[str, Difference]:
    try:
        if not isinstance(answer, dict):
            raise BadValue("not an object")
        return {str(key): decode(Difference, value) for key, value in answer.items()}
    except BadValue as problem:
        raise WorkFailed(f"{name}: the trainer's answer is wrong: {problem}") from None
