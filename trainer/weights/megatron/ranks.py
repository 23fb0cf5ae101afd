"""Megatron's folders of mp_rank_XX[_YYY]/model_optim_rng.pt: any tensor and pipeline size, versions 0 to 3."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from clusterctl.wire.requests import ExportRequest, ImportRequest
from trainer.checkpoint.access import check_access
from trainer.checkpoint.manifest import Origin
from trainer.checkpoint.part import MOMENTS
from trainer.config.model import ModelConfig
from trainer.errors import CheckpointError, InputError
from trainer.model.cuts import Cut
from trainer.weights.attention import Rows, from_sections, in_sections, order_of
from trainer.weights.contents import Contents, Progress
from trainer.weights.files.torch_read import attributes, read_torch_dict
from trainer.weights.files.torch_state import flat
from trainer.weights.files.torch_write import namespace, write_torch
from trainer.weights.lazy import DTYPES, Lazy, cast, padded
from trainer.weights.megatron.config import arguments_for, check_fits, model_of
from trainer.weights.megatron.names import (
    IGNORED,
    OUTPUT,
    core_name,
    core_of,
    layer_of,
    older_name,
    with_layer,
)
from trainer.weights.megatron.state import with_state
from trainer.weights.ours import cuts_for, shapes_for
from trainer.weights.rules import check_shapes, refuse_unknown, unpadded
from trainer.weights.target import Target
from trainer.weights.tensor_parts import joined, part_of

FILE = "model_optim_rng.pt"
POINTER = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")


@dataclass(frozen=True)
class RankStates:
    """The contents of all ranks' files: documents by (tensor rank, stage), and the numbers of ranks and stages."""

    folder: Path
    documents: Mapping[tuple[int, int], Mapping[str, Any]]
    tensor: int
    pipeline: int

    @property
    def first(self) -> Mapping[str, Any]:
        return self.documents[0, 0]


# -- read ---------------------------------------------------------------------------------------------------


def is_megatron(folder: Path) -> bool:
    """Return whether a folder contains files of Megatron's ranks."""
    return any((path / FILE).is_file() for path in iteration_folder(folder).glob("mp_rank_*"))


def read_megatron(folder: Path, request: ImportRequest) -> Contents:
    """Return the contents of a folder; tensors are not read yet."""
    check_access(folder)
    found = iteration_folder(folder)
    files = {path.name: path / FILE for path in found.glob("mp_rank_*") if (path / FILE).is_file()}
    if not files:
        raise CheckpointError(f"{found}: contains no mp_rank_XX/{FILE}")
    states, progress = read_ranks(found, files), Progress()
    if request.state:
        ranks = {
            key: with_state(document, files[_name_of(key, files)])
            for key, document in states.documents.items()
        }
        states = replace(states, documents={key: document for key, (document, _) in ranks.items()})
        progress = progress_of(states.first, max(taken for _, taken in ranks.values()))
    return replace(contents_of(states, "megatron", request), progress=progress)


def _name_of(key: tuple[int, int], names: Iterable[str]) -> str:
    """Return the name of the folder of a tensor parallel rank on a stage."""
    found = ((name, _RANK.match(name)) for name in names)
    return next(name for name, match in found if match and (int(match[1]), int(match[2] or 0)) == key)


def progress_of(document: Mapping[str, Any], steps: int) -> Progress:
    """Return the progress of a training after `steps` steps."""
    iteration = document.get("iteration")
    samples = attributes(document.get("args")).get("consumed_train_samples")
    return Progress(
        iteration if type(iteration) is int else steps,
        steps,
        samples if type(samples) is int and samples > 0 else 0,
    )


def iteration_folder(folder: Path) -> Path:
    """Return the folder with the ranks: this folder, or the one that its pointer names."""
    pointer = folder / POINTER
    if not pointer.is_file():
        return folder
    text = pointer.read_text(errors="replace")[:64].strip()
    if text != "release" and not text.isdecimal():
        raise CheckpointError(f"{pointer}: is not an iteration: {text!r}")
    return folder / (text if text == "release" else f"iter_{int(text):07d}")


def read_ranks(folder: Path, files: Mapping[str, Path]) -> RankStates:
    """Return the documents of all ranks; `files`: by the names of their folders."""
    documents = {}
    for name, file in sorted(files.items()):
        match = _RANK.match(name)
        if match is None:
            continue
        if match[3] is not None:
            raise CheckpointError(
                f"{folder / name}: contains a mixture of experts", "experts of Megatron are not supported"
            )
        documents[int(match[1]), int(match[2] or 0)] = read_torch_dict(file)
    tensor, pipeline = (1 + max((key[at] for key in documents), default=0) for at in (0, 1))
    missing = [
        f"mp_rank_{t:02d}_{p:03d}" for t in range(tensor) for p in range(pipeline) if (t, p) not in documents
    ]
    if missing:
        raise CheckpointError(f"{folder}: lacks {', '.join(missing[:4])}", "copy the files of all ranks")
    return RankStates(folder, documents, tensor, pipeline)


def contents_of(states: RankStates, form: str, request: ImportRequest, key: str = "model") -> Contents:
    """Return the contents of all ranks; `key`: the name of the model's state dict in their documents.

    With state, the documents also have `exp_avg` and `exp_avg_sq`, with the model's names.
    """
    if request.state and not any(name.startswith(MOMENTS[0]) for name in states.first):
        raise InputError(f"{states.folder}: contains no optimizer state", "leave out --state")
    arguments = attributes(states.first.get("args"))
    found = _by_name(states, key)
    model, notes = model_of(str(states.folder), arguments, found, request)
    if any(count % states.tensor for count in model.attention.counts.values()):
        raise CheckpointError(f"{states.folder}: {states.tensor} ranks do not divide {model.heads} heads")
    rows = rows_in(states)
    tensors = mapped(str(states.folder), model, found, rows)
    for moment in MOMENTS if request.state else ():
        averages = mapped(str(states.folder), model, _by_name(states, moment), rows)
        tensors |= {f"{moment}.{name}": tensor for name, tensor in averages.items()}
    iteration = states.first.get("iteration")
    facts = {
        "tensor": states.tensor,
        "pipeline": states.pipeline,
        "iteration": iteration if type(iteration) is int else None,
    }
    return Contents(model, tensors, Origin(form, str(states.folder), facts), notes=tuple(notes))


def mapped(
    source: str,
    model: ModelConfig,
    found: Mapping[str, Sequence[Lazy]],
    rows: Rows = Rows.GROUPS,
    ignored: str = IGNORED,
) -> dict[str, Lazy]:
    """Return the tensors of all ranks, joined and under our names; `rows`: the order of queries, keys and values."""
    shapes, cuts = shapes_for(model), cuts_for(model)
    tied = {OUTPUT} if model.tied else set()
    refuse_unknown(source, [core_of(name) for name in shapes], found.keys() - tied, ignored)
    tensors = {}
    for name in shapes:
        parts = found[core_of(name)]
        order, own = order_of(name, rows), model.attention.part(len(parts))
        whole = joined([in_sections(part, order, own) for part in parts], cuts[name])
        tensors[name] = unpadded(name, whole, model.vocab)
    check_shapes(source, shapes, tensors)
    return tensors


def rows_in(states: RankStates) -> Rows:
    """Return the order of the rows of queries, keys and values, which depends on the checkpoint's version."""
    version = states.first.get("checkpoint_version", 0)
    if type(version) not in (int, float) or not 0 <= version <= 3:
        problem = f"{states.folder}: checkpoint_version is {version!r}"
        raise CheckpointError(problem, "versions 0 to 3 are supported")
    if version >= 2:
        return Rows.GROUPS
    return Rows.NUMBERS if version >= 1 else Rows.SECTIONS


def _by_name(states: RankStates, key: str) -> dict[str, list[Lazy]]:
    """Return the parts of each tensor by Megatron-core's name, with the layer numbers of the whole model."""
    keys = (
        [key] if key in states.first else [name for name in states.first if re.fullmatch(rf"{key}\d+", name)]
    )
    if not keys:
        raise CheckpointError(f"{states.folder}: contains no weights: its files have no entry {key!r}")
    found: dict[str, list[Lazy]] = {}
    before = 0
    # Interleaved stages have several pieces of the model: the first pieces of all stages come first.
    for name in sorted(keys, key=lambda name: (len(name), name)):
        for stage in range(states.pipeline):
            pieces = [
                {
                    core_name(path): tensor
                    for path, tensor in flat(states.documents[t, stage].get(name), states.folder)
                }
                for t in range(states.tensor)
            ]
            numbers = {layer_of(path) for path in pieces[0]} - {None}
            for path in pieces[0]:
                number = layer_of(path)
                parts = [piece.get(path) for piece in pieces]
                if any(part is None for part in parts):
                    raise CheckpointError(f"{states.folder}: not every rank of stage {stage} has {path}")
                whole = path if number is None else with_layer(path, before + number)
                found.setdefault(whole, [part for part in parts if part is not None])
            before += len(numbers)
    return found


# -- write --------------------------------------------------------------------------------------------------


def write_megatron(contents: Contents, target: Target, wanted: ExportRequest) -> None:
    """Write a folder that Megatron-LM loads with `--load`: version 3, with names of its older generation."""
    parts = {
        key: (held, sum(tensor.bytes for tensor in held.values()))
        for key, held in divided(contents, wanted).items()
    }
    target.total = sum(size for _, size in parts.values())
    arguments = arguments_for(contents, wanted)
    for (rank, stage), (held, size) in parts.items():
        name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if wanted.pipeline > 1 else "")
        document = {
            "args": namespace(arguments),
            "checkpoint_version": 3.0,
            "iteration": 0,
            "model": nested(held),
        }
        target.write_tensors(f"release/{name}/{FILE}", size, partial(write_torch, document=document))
    target.write_bytes(POINTER, b"release")
    target.write_files(contents.files)


def divided(contents: Contents, wanted: ExportRequest) -> dict[tuple[int, int], dict[str, Lazy]]:
    """Return the tensors of each rank and stage under Megatron-core's names; layers of a stage count from 0."""
    model, tensor, pipeline = contents.model, wanted.tensor, wanted.pipeline
    check_fits(model, wanted)
    each, cuts, parameters = model.layers // pipeline, cuts_for(model), contents.parameters
    found = {}
    for stage in range(pipeline):
        names = [name for name in parameters if stage in stages_of(core_of(name), each, pipeline)]
        for rank in range(tensor):
            held = {}
            for name in names:
                core = core_of(name)
                number = layer_of(core)
                local = core if number is None else with_layer(core, number - stage * each)
                part = rank_part(parameters[name], name, cuts[name], model, rank, tensor)
                held[local] = cast(part, DTYPES[wanted.dtype])
            if stage and stage == pipeline - 1 and model.tied:
                table = rank_part(
                    parameters["tokens.weight"], "tokens.weight", cuts["tokens.weight"], model, rank, tensor
                )
                held["word_embeddings_for_head.weight"] = cast(table, DTYPES[wanted.dtype])
            found[rank, stage] = held
    return found


def stages_of(core: str, each: int, pipeline: int) -> tuple[int, ...]:
    """Return the stages that have a tensor."""
    number = layer_of(core)
    if number is not None:
        return (number // each,)
    return (0,) if core.startswith("embedding.") else (pipeline - 1,)


def rank_part(whole: Lazy, name: str, cut: Cut, model: ModelConfig, rank: int, ranks: int) -> Lazy:
    """Return a rank's part of one of our tensors, with rows in Megatron's order."""
    if cut.rows is not None:
        whole = padded(whole, model.padded(ranks))
    part = part_of(whole, cut, rank, ranks)
    return from_sections(part, order_of(name), model.attention.part(ranks))


def nested(held: Mapping[str, Lazy]) -> dict[str, object]:
    """Return the state dict of a rank with the nesting of the older generation."""
    language: dict[str, dict[str, object]] = {}
    document: dict[str, object] = {"language_model": language}
    for core, tensor in held.items():
        if core.startswith("word_embeddings_for_head"):
            document["word_embeddings_for_head"] = {"weight": tensor}
            continue
        part, _, rest = older_name(core).partition(".")
        if part == "embedding":
            table, _, leaf = rest.partition(".")
            language.setdefault(part, {})[table] = {leaf: tensor}
        else:
            language.setdefault(part, {})[rest] = tensor
    return document
