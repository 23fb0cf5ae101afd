"""MindFormers' GPT-2 in MindSpore's files: .ckpt (protobuf) and safetensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from clusterctl.wire.requests import ExportRequest, ImportRequest
from clusterctl.wire.saved import SavedFile
from trainer.checkpoint.manifest import Origin
from trainer.config.model import ModelConfig
from trainer.errors import CheckpointError, InputError
from trainer.weights.contents import Contents
from trainer.weights.files.protobuf import read_mindspore, write_mindspore
from trainer.weights.files.safetensors import read_safetensors, write_safetensors
from trainer.weights.huggingface import as_json, read_json
from trainer.weights.keys import Keys
from trainer.weights.known_sizes import heads_for
from trainer.weights.lazy import DTYPES, Lazy, cast
from trainer.weights.ours import shapes_for
from trainer.weights.rules import all_theirs, pairs, read_by, rule, rules_of
from trainer.weights.target import Target

# MindSpore's names for the averages of a parameter.
AVERAGES = {"exp_avg": "adam_m", "exp_avg_sq": "adam_v"}
FILE = "gpt2"
DESCRIPTION = "clusterctl_model.json"
RECORDED = ("heads", "activation", "eps", "dropout", "attention_dropout", "init_std")
SHOWN = ("layers", "hidden", "heads", "sequence", "vocab", "ffn")
_TABLE = "backbone.embedding.word_embedding.embedding_table"
_POSITIONS = "backbone.embedding.position_embedding.embedding_table"
# Steps, rates and loss scales that MindSpore saves with the model.
IGNORED = (
    r"global_step|epoch_num|step_num|current_(epoch|step)(_num)?|learning_rate|loss_scale|scale_sense|beta[12]_power|"
    r"last_overflow_iterator_time|current_iterator_step|last_overflow.*|accu_grads\..*|.*\.masked_beta"
)


_NORM = (".gamma", ".beta")
# The matrix for queries, keys and values is outputs x inputs; all others are inputs x outputs.
RULES = [
    rule("tokens.weight", _TABLE),
    rule("positions.weight", _POSITIONS),
    *pairs("blocks.{n}.norm_1", "backbone.blocks.{n}.layernorm1", ends=_NORM),
    *pairs("blocks.{n}.attention.qkv", *(f"backbone.blocks.{{n}}.attention.dense{i}" for i in (1, 2, 3))),
    *pairs("blocks.{n}.attention.out", "backbone.blocks.{n}.attention.projection", transposed=True),
    *pairs("blocks.{n}.norm_2", "backbone.blocks.{n}.layernorm2", ends=_NORM),
    *pairs("blocks.{n}.feed_forward.up", "backbone.blocks.{n}.output.mapping", transposed=True),
    *pairs("blocks.{n}.feed_forward.down", "backbone.blocks.{n}.output.projection", transposed=True),
    *pairs("norm", "backbone.layernorm", ends=_NORM),
]


def is_mindspore(source: Path) -> bool:
    """Return whether a file, or the only file of a folder, contains MindFormers' GPT-2."""
    return _TABLE in _tensors(_file(source))


def read_mindformers(source: Path, request: ImportRequest) -> Contents:
    """Return the contents of a file; tensors are not read yet."""
    file = _file(source)
    found = _tensors(file)
    if _TABLE not in found or _POSITIONS not in found:
        raise CheckpointError(f"{file}: does not contain MindFormers' GPT-2: it has no {_TABLE}")
    numbers = [int(match[1]) for name in found if (match := re.match(r"backbone\.blocks\.(\d+)\.", name))]
    vocab, hidden = found[_TABLE].rows, found[_TABLE].shape[-1]
    if request.vocab > vocab:
        raise InputError(f"--vocab is {request.vocab}, but the token table has {vocab} rows")
    layers = 1 + max(numbers, default=0)
    recorded = _recorded(file)
    heads, notes = heads_for(
        str(file), "gpt", layers, hidden, request.heads or (recorded.heads if recorded else 0)
    )
    up = found.get("backbone.blocks.0.output.mapping.bias")
    inner = up.rows if up else 4 * hidden
    model = ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        sequence=found[_POSITIONS].rows,
        vocab=request.vocab or vocab,
        ffn=0 if inner == 4 * hidden else inner,
    )
    if recorded:
        model = replace(recorded, **{name: getattr(model, name) for name in SHOWN})
    if request.state and not any(name.startswith(tuple(AVERAGES.values())) for name in found):
        raise CheckpointError(f"{file}: contains no optimizer state", "leave out --state")
    tensors = read_by(str(file), RULES, model, found, shapes_for(model), _averaged, request.state, IGNORED)
    origin = Origin("mindspore", str(file))
    return Contents(model, tensors, origin, notes=tuple(notes))


def _recorded(file: Path) -> ModelConfig | None:
    """Return the settings of a model that its shapes do not show, from what our export writes next to the tensors."""
    description = file.with_name(DESCRIPTION)
    if not description.is_file():
        return None
    keys, usual = Keys(str(description), read_json(description)), ModelConfig()
    found = replace(
        usual,
        heads=keys.number("heads"),
        activation=keys.choice("activation", {"gelu": "gelu", "gelu_tanh": "gelu_tanh"}, usual.activation),
        eps=keys.real("eps", default=usual.eps),
        dropout=keys.real("dropout", default=usual.dropout),
        attention_dropout=keys.real("attention_dropout", default=usual.attention_dropout),
        init_std=keys.real("init_std", default=usual.init_std),
    )
    keys.check()
    return found


def _averaged(moment: str, name: str) -> str:
    return f"{AVERAGES[moment]}.{name}"


def _file(source: Path) -> Path:
    """Return the file: the source itself, or the only file in a folder."""
    if source.is_file():
        return source
    files = [*sorted(source.glob("*.ckpt")), *sorted(source.glob("*.safetensors"))]
    if len(files) != 1:
        problem = f"{source}: contains {len(files)} files of MindSpore"
        raise CheckpointError(problem, "name the .ckpt or .safetensors file itself")
    return files[0]


def _tensors(file: Path) -> dict[str, Lazy]:
    return read_safetensors(file) if file.suffix == ".safetensors" else read_mindspore(file)


# -- write --------------------------------------------------------------------------------------------------


def write_ckpt(contents: Contents, target: Target, wanted: ExportRequest) -> None:
    """Write a folder with a .ckpt that `mindspore.load_checkpoint` reads."""
    _write(contents, target, wanted, f"{FILE}.ckpt", write_mindspore)


def write_ms_safetensors(contents: Contents, target: Target, wanted: ExportRequest) -> None:
    """Write a folder with a safetensors file under MindSpore's names."""
    write = partial(write_safetensors, metadata={"format": "ms"})
    _write(contents, target, wanted, f"{FILE}.safetensors", write)


def _write(
    contents: Contents, target: Target, wanted: ExportRequest, name: str, write: Callable[..., SavedFile]
) -> None:
    model = contents.model
    if set(shapes_for(model)) != {entry.ours for entry in rules_of(RULES, model)}:
        raise InputError(
            "MindFormers' GPT-2 supports only learned positions and layer norms", "export it as hf"
        )
    found = all_theirs(list(rules_of(RULES, model)), model, contents.tensors, contents.moments)
    tensors = {name: cast(tensor, DTYPES[wanted.dtype]) for name, tensor in found.pop("").items()}
    for moment, named in found.items():
        tensors |= {_averaged(moment, name): tensor for name, tensor in named.items()}
    target.total = sum(tensor.bytes for tensor in tensors.values())
    target.write_tensors(name, target.total, partial(write, tensors=tensors))
    recorded = {name: getattr(model, name) for name in RECORDED}
    target.write_bytes(DESCRIPTION, as_json(recorded))
    target.write_files(contents.files)
