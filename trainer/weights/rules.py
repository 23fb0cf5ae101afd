"""Tables of names: which tensors of another program correspond to one of ours, and the order of their numbers.

A rule works in both directions, so that one table is used for the import and the export of a family. The optimizer's
averages have the same order as their parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.checkpoint.part import MOMENTS
from trainer.config.lora import layer_of, module_of, sections_of
from trainer.config.model import ModelConfig
from trainer.errors import CheckpointError
from trainer.files import first_of
from trainer.weights.attention import Rows, from_sections, in_sections
from trainer.weights.lazy import Lazy, Shape, one_of, rows_of, stacked, together, transposed

LAYER = "{n}"
EXPERT = "{e}"


@dataclass(frozen=True)
class Rule:
    """One of our tensors and the corresponding tensors of another program; `{n}` is the number of the layer."""

    ours: str
    theirs: tuple[str, ...]
    """With several names, our rows are those of one tensor after the other."""
    transposed: bool = False
    rows: Rows = Rows.SECTIONS
    dense: bool = False
    """Whether it is of layers without experts in a model with experts."""
    experts: int = 0
    """For matrices of experts, which are one tensor in ours: their number; `theirs` are the names of all experts."""

    def of_layer(self, number: int) -> Rule:
        """Return the rule of one layer."""
        names = tuple(name.replace(LAYER, str(number)) for name in self.theirs)
        return replace(self, ours=self.ours.replace(LAYER, str(number)), theirs=names)

    @property
    def is_of_experts(self) -> bool:
        """Return whether its names contain an expert's number."""
        return any(EXPERT in name for name in self.theirs)

    def of_experts(self, experts: int) -> Rule:
        """Return the rule with the names of all experts, if it is of experts."""
        if not self.is_of_experts:
            return self
        names = [name.replace(EXPERT, str(number)) for number in range(experts) for name in self.theirs]
        return replace(self, theirs=tuple(names), experts=experts)


def rule(ours: str, *theirs: str, transposed: bool = False, rows: Rows = Rows.SECTIONS) -> Rule:
    """Return a rule."""
    return Rule(ours, theirs, transposed, rows)


def pairs(
    ours: str,
    *theirs: str,
    transposed: bool = False,
    rows: Rows = Rows.SECTIONS,
    ends: tuple[str, str] = (".weight", ".bias"),
) -> list[Rule]:
    """Return the rules for a weight, which may be transposed, and its bias; `ends`: of their names."""
    weight, bias = ([f"{name}{end}" for name in theirs] for end in ends)
    return [
        rule(f"{ours}.weight", *weight, transposed=transposed, rows=rows),
        rule(f"{ours}.bias", *bias, rows=rows),
    ]


def rules_of(
    rules: Sequence[Rule], model: ModelConfig, shapes: Collection[str] | None = None
) -> Iterator[Rule]:
    """Yield the rules of all layers of a model; `shapes`: only those of tensors that the model has."""
    for entry in rules:
        for number in range(model.layers) if LAYER in entry.ours else (0,):
            layer, experts = entry.of_layer(number), model.each_layer[number].experts
            other = entry.dense if experts else entry.is_of_experts
            if (shapes is None or layer.ours in shapes) and not other:
                yield layer.of_experts(experts)


def to_ours(entry: Rule, model: ModelConfig, found: Mapping[str, Lazy]) -> Lazy:
    """Return our tensor of a rule, made from theirs."""
    parts = [found[name] for name in entry.theirs]
    if entry.experts:
        each = len(parts) // entry.experts
        return together([stacked(parts[at : at + each]) for at in range(0, len(parts), each)])
    joined = stacked([transposed(part) if entry.transposed else part for part in parts])
    return in_sections(joined, entry.rows, model.attention)


def to_theirs(entry: Rule, model: ModelConfig, ours: Lazy) -> dict[str, Lazy]:
    """Return their tensors of a rule, made from ours."""
    if entry.experts:
        return dict(_of_each_expert(entry, ours))
    ours = from_sections(ours, entry.rows, model.attention)
    if len(entry.theirs) == 1:
        return {entry.theirs[0]: transposed(ours) if entry.transposed else ours}
    sections, first, parts = sections_of(layer_of(model, entry.ours), module_of(entry.ours)), 0, {}
    for name, size in zip(entry.theirs, sections.values(), strict=True):
        part = rows_of(ours, first, first + size)
        parts[name] = transposed(part) if entry.transposed else part
        first += size
    return parts


def all_theirs(
    entries: Sequence[Rule], model: ModelConfig, tensors: Mapping[str, Lazy], moments: Sequence[str] = ()
) -> dict[str, dict[str, Lazy]]:
    """Return their tensors of all rules by moment; "": the tensors themselves."""
    return {
        moment: {
            name: tensor
            for entry in entries
            for name, tensor in to_theirs(entry, model, tensors[key_of(moment, entry.ours)]).items()
        }
        for moment in ("", *moments)
    }


def _of_each_expert(entry: Rule, ours: Lazy) -> Iterator[tuple[str, Lazy]]:
    """Yield each expert's matrices in the other program: equal parts of our rows."""
    each = len(entry.theirs) // entry.experts
    size = ours.shape[1] // each
    for at, name in enumerate(entry.theirs):
        expert, part = divmod(at, each)
        yield name, rows_of(one_of(ours, expert), part * size, (part + 1) * size)


def read_by(
    source: str,
    rules: Sequence[Rule],
    model: ModelConfig,
    found: Mapping[str, Lazy],
    shapes: Mapping[str, Shape],
    averaged: Callable[[str, str], str],
    state: bool,
    ignored: str,
) -> dict[str, Lazy]:
    """Return the tensors of a file under our names; refuse missing or unknown names, and other shapes.

    `averaged`: returns the name of a moment of one of their tensors; without `state` the moments are not read.
    """
    entries = list(rules_of(rules, model))
    needed = [name for entry in entries for name in entry.theirs]
    moments = {moment: {name: averaged(moment, name) for name in needed} for moment in MOMENTS}
    of_moment = {"": {name: name for name in needed}, **(moments if state else {})}
    wanted = {name for names in of_moment.values() for name in names.values()}
    left_out = {name for names in moments.values() for name in names.values()} - wanted
    refuse_unknown(source, wanted, found.keys() - left_out, ignored)
    tensors = {}
    for moment, names in of_moment.items():
        for entry in entries:
            whole = to_ours(entry, model, {name: found[names[name]] for name in entry.theirs})
            tensors[key_of(moment, entry.ours)] = unpadded(entry.ours, whole, model.vocab)
    every = {key_of(moment, name): shape for moment in of_moment for name, shape in shapes.items()}
    check_shapes(source, every, tensors)
    return tensors


def key_of(moment: str, name: str) -> str:
    """Return the name of a tensor's moment; "": of the tensor itself."""
    return f"{moment}.{name}" if moment else name


def unpadded(ours: str, whole: Lazy, vocab: int) -> Lazy:
    """Return one of our tensors, a table of tokens without padding."""
    is_table = ours in ("tokens.weight", "output.weight") and whole.rows >= vocab
    return rows_of(whole, 0, vocab) if is_table else whole


def refuse_unknown(
    source: str, needed: Collection[str], found: Collection[str], ignored: str = r"(?!)"
) -> None:
    """Raise a CheckpointError that lists missing tensors, or tensors without a rule."""
    missing = sorted(set(needed) - set(found))
    unknown = sorted(name for name in set(found) - set(needed) if not re.fullmatch(ignored, name))
    faults = []
    if missing:
        faults.append(f"{source}: lacks {first_of(missing, 4)}")
    if unknown:
        faults.append(f"{source}: contains {first_of(unknown, 4)}, which this kind of model does not have")
    if faults:
        raise CheckpointError("\n".join(faults), "check that the config belongs to these weights")


def check_shapes(source: str, wanted: Mapping[str, Shape], found: Mapping[str, Lazy]) -> None:
    """Raise a CheckpointError that lists tensors whose shape is not that of the config."""
    faults = [
        f"{source}: {name} is {list(found[name].shape)}, but the config needs {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    if faults:
        raise CheckpointError("\n".join(faults[:5]), "check that the config belongs to these weights")


def with_moments(names: Sequence[str]) -> list[str]:
    """Return the names together with those of their averages."""
    return [*names, *(f"{moment}.{name}" for moment in MOMENTS for name in names)]
