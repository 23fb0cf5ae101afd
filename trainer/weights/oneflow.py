"""Snapshots of OneFlow's GPT: a folder per variable, with raw numbers in `out` and its shape in `meta`."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path

import torch

from clusterctl.wire.requests import ImportRequest
from trainer.checkpoint.access import check_access
from trainer.checkpoint.manifest import Origin
from trainer.config.model import ModelConfig
from trainer.errors import CheckpointError
from trainer.weights.attention import Rows
from trainer.weights.contents import Contents, Progress
from trainer.weights.files.raw import stored
from trainer.weights.known_sizes import heads_for, vocab_for
from trainer.weights.lazy import Lazy, shaped
from trainer.weights.ours import shapes_for
from trainer.weights.rules import pairs, read_by, rule

MOST_META = 4096
TYPES = {"kFloat": torch.float32, "kFloat16": torch.float16, "kDouble": torch.float64}
_SNAPSHOT = re.compile(r"iter\D*(\d+).*snapshot")
# The endings that make the names of a variable's averages.
ENDINGS = {"exp_avg": "-m", "exp_avg_sq": "-v"}


_MATRIX = partial(pairs, transposed=True, ends=("-weight", "-bias"))
_NORM = partial(pairs, ends=("-gamma", "-beta"))
# Matrices are inputs x outputs; the heads are in Megatron's order.
RULES = [
    rule("tokens.weight", "model-wte"),
    rule("positions.weight", "model-wpe"),
    *_NORM("blocks.{n}.norm_1", "model-h{n}-layernorm_1"),
    *_MATRIX("blocks.{n}.attention.qkv", "model-h{n}-attn-c_attn", rows=Rows.GROUPS),
    *_MATRIX("blocks.{n}.attention.out", "model-h{n}-attn-c_proj"),
    *_NORM("blocks.{n}.norm_2", "model-h{n}-layernorm_2"),
    *_MATRIX("blocks.{n}.feed_forward.up", "model-h{n}-mlp-c_fc"),
    *_MATRIX("blocks.{n}.feed_forward.down", "model-h{n}-mlp-c_proj"),
    *_NORM("norm", "model-layernorm_f"),
]


def is_oneflow(folder: Path) -> bool:
    """Return whether a folder is a snapshot, or contains snapshots."""
    return (_snapshot(folder) / "model-wte" / "out").is_file()


def read_oneflow(folder: Path, request: ImportRequest) -> Contents:
    """Return the contents of a snapshot; of several in the folder, the newest."""
    check_access(folder)
    snapshot = _snapshot(folder)
    found = {path.parent.name: _variable(path.parent) for path in snapshot.glob("*/out")}
    if "model-wte" not in found or "model-wpe" not in found:
        raise CheckpointError(f"{snapshot}: has no variables model-wte and model-wpe")
    numbers = [int(match[1]) for name in found if (match := re.match(r"model-h(\d+)-", name))]
    table, positions = found["model-wte"], found["model-wpe"].rows
    layers, hidden = 1 + max(numbers, default=0), table.shape[-1]
    heads, notes = heads_for(str(snapshot), "gpt", layers, hidden, request.heads)
    vocab, more = vocab_for("gpt", table.rows, request.vocab)
    inner = found["model-h0-mlp-c_fc-bias"].rows if "model-h0-mlp-c_fc-bias" in found else 4 * hidden
    model = ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        sequence=positions,
        vocab=vocab,
        ffn=0 if inner == 4 * hidden else inner,
    )
    match = _SNAPSHOT.fullmatch(snapshot.name)
    step = int(match[1]) if match and request.state else 0
    shapes, ignored = shapes_for(model), "System-Train-.*"
    tensors = read_by(str(snapshot), RULES, model, found, shapes, _averaged, request.state, ignored)
    origin = Origin("oneflow", str(snapshot))
    return Contents(model, tensors, origin, progress=Progress(step, step), notes=(*notes, *more))


def _averaged(moment: str, name: str) -> str:
    return f"{name}{ENDINGS[moment]}"


def _snapshot(folder: Path) -> Path:
    """Return the snapshot: this folder, or the newest in it."""
    if (folder / "model-wte").is_dir():
        return folder
    named = [
        (int(match[1]), path)
        for path in folder.glob("iter*snapshot")
        if (match := _SNAPSHOT.fullmatch(path.name))
    ]
    if not named:
        raise CheckpointError(f"{folder}: is not a snapshot of OneFlow's GPT and contains none")
    return max(named)[1]


def _variable(folder: Path) -> Lazy:
    """Return one variable; its file must have the size of its shape."""
    file, meta = folder / "out", folder / "meta"
    try:
        with meta.open(errors="replace") as stream:
            text = stream.read(MOST_META)
        size = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{meta}: {error.strerror}") from None
    shape = tuple(int(number) for number in re.findall(r"\bdim:\s*(\d{1,9})\b", text))
    name = re.search(r"\bdata_type:\s*(\w+)", text)
    dtype = TYPES.get(name[1] if name else "kFloat")
    if dtype is None or not shape:
        raise CheckpointError(f"{meta}: names no shape, or a type that is not one of {', '.join(TYPES)}")
    if size != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{file}: has {size:,} bytes, which do not fit its shape {list(shape)}")
    return shaped(stored(file, 0, size), shape, dtype)
