"""Folders of THUDM's GLM: mp_rank_XX_model_states.pt, together with DeepSpeed's files of the optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterctl.wire.requests import ImportRequest
from trainer.checkpoint.access import check_access
from trainer.checkpoint.manifest import Origin
from trainer.checkpoint.part import MOMENTS
from trainer.config.model import ModelConfig
from trainer.errors import CheckpointError, InputError
from trainer.weights.attention import Rows
from trainer.weights.contents import Contents, Progress
from trainer.weights.files.deepspeed import Saved, files_of, read_step, step_folder
from trainer.weights.files.torch_read import attributes, read_torch
from trainer.weights.files.torch_state import flat
from trainer.weights.known_sizes import heads_for, vocab_for
from trainer.weights.lazy import Lazy
from trainer.weights.megatron.names import core_name, core_of, layer_of
from trainer.weights.megatron.ranks import mapped
from trainer.weights.ours import shapes_for

LATEST = "latest"
_FILE = re.compile(r"mp_rank_(\d{2})_model_states\.pt")
BLOCK_POSITIONS = "embedding.block_position_embeddings.weight"
# The longest sequence in GLM's pretraining; the position tables may be longer.
SEQUENCE = 512


def is_glm(folder: Path) -> bool:
    """Return whether a folder contains the files of a GLM."""
    files = _files(folder)
    return bool(files) and BLOCK_POSITIONS in _tensors(files[0])


def read_glm(folder: Path, request: ImportRequest) -> Contents:
    """Return the contents of a folder; tensors are not read yet."""
    check_access(folder)
    files = _files(folder)
    if not files or sorted(files) != list(range(len(files))):
        raise CheckpointError(f"{folder}: lacks some of mp_rank_XX_model_states.pt")
    saved = read_step(files[0].parent) if request.state else None
    if saved is not None and saved.unknown is not None:
        raise saved.unknown
    ranks = [_tensors(files[rank]) for rank in range(len(files))]
    if saved is not None:
        ranks = [{**held, **_renamed(own.weights)} for held, own in zip(ranks, saved.ranks, strict=True)]
    names = set(ranks[0])
    if any(set(held) != names for held in ranks) or BLOCK_POSITIONS not in names:
        raise CheckpointError(f"{folder}: the ranks' files contain different tensors, or not those of a GLM")
    model, notes = _model(folder, ranks[0], len(ranks), request, read_torch(files[0]))
    tensors = _whole(folder, model, ranks)
    for moment in MOMENTS if saved else ():
        averages = [_renamed(own.moments.get(moment, {})) for own in saved.ranks] if saved else []
        if not all(core_of(name) in held for held in averages for name in shapes_for(model)):
            raise InputError(f"{folder}: contains no optimizer state", "leave out --state")
        found = _whole(folder, model, averages)
        tensors |= {f"{moment}.{name}": tensor for name, tensor in found.items()}
    origin = Origin("glm", str(folder), {"tensor": len(ranks)})
    return Contents(model, tensors, origin, notes=tuple(notes), progress=_progress(saved))


def _whole(folder: Path, model: ModelConfig, ranks: Sequence[Mapping[str, Lazy]]) -> dict[str, Lazy]:
    """Return the tensors of all ranks, joined and under our names."""
    # A rank's rows are all its queries, then its keys, then its values, as in our order.
    found = {name: [held[name] for held in ranks] for name in ranks[0]}
    return mapped(str(folder), model, found, Rows.SECTIONS)


def _progress(saved: Saved | None) -> Progress:
    if saved is None:
        return Progress()
    facts = {key: value for key, value in saved.facts.items() if type(value) is int and value > 0}
    step = facts.get("iteration", facts.get("global_steps", saved.optimizer_steps))
    taken = saved.optimizer_steps or facts.get("global_steps", step) - facts.get("skipped_steps", 0)
    return Progress(step, taken, facts.get("global_samples", 0))


def _files(folder: Path) -> dict[int, Path]:
    """Return the files of the ranks, in the folder or in the one that `latest` names."""
    found = files_of(step_folder(folder, (LATEST,)), _FILE)
    return {rank: path for (rank,), path in found.items()}


def _tensors(file: Path) -> dict[str, Lazy]:
    """Return a rank's tensors under Megatron-core's names."""
    document = read_torch(file)
    module = document.get("module") if isinstance(document, dict) else None
    if module is None:
        raise CheckpointError(f"{file}: has no entry 'module'")
    return _renamed(dict(flat(module, file)))


def _renamed(held: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """Return the tensors under Megatron-core's names."""
    found = {}
    for path, tensor in held.items():
        name = re.sub(r"^(module\.)+", "", path)
        name = re.sub(
            r"^(transformer\.)?(word|position|block_position)_embeddings\.", r"embedding.\2_embeddings.", name
        )
        found[core_name(name)] = tensor
    return found


def _model(
    folder: Path, held: Mapping[str, Lazy], ranks: int, request: ImportRequest, document: Any
) -> tuple[ModelConfig, list[str]]:
    table, positions = held["embedding.word_embeddings.weight"], held[BLOCK_POSITIONS].rows - 1
    layers = 1 + max((layer_of(name) or 0 for name in held), default=0)
    hidden = table.shape[1]
    recorded = attributes(document.get("args")).get("num_attention_heads")
    given = request.heads or (recorded if type(recorded) is int and recorded > 0 else 0)
    heads, notes = heads_for(str(folder), "glm", layers, hidden, given)
    vocab, more = vocab_for("glm", table.rows * ranks, request.vocab)
    inner = ranks * held["decoder.layers.0.mlp.linear_fc1.weight"].rows
    model = ModelConfig(
        "glm",
        layers,
        hidden,
        heads,
        sequence=min(positions, SEQUENCE),
        positions=positions,
        vocab=vocab,
        ffn=0 if inner == 4 * hidden else inner,
        dropout=0.1,
        attention_dropout=0.1,
    )
    return model, notes + more
