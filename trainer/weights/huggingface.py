"""Folders of Hugging Face: config.json, safetensors files (one, or several with an index), tokenizer, model card."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clusterctl.wire.requests import ExportRequest, ImportRequest
from trainer.checkpoint.access import check_access
from trainer.checkpoint.manifest import Origin
from trainer.config.model import ModelConfig
from trainer.config.rules import model_faults
from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import CheckpointError, DataError, InputError
from trainer.files import first_of
from trainer.side_files import GENERATION, SIDE_FILES, TOKENIZER, TOKENIZER_CONFIG, SideFiles
from trainer.weights.card import model_card
from trainer.weights.contents import Contents
from trainer.weights.families.family import Family
from trainer.weights.families.registry import FAMILIES, UNMAPPED
from trainer.weights.files.quantized import BLOCK, as_numbers
from trainer.weights.files.safetensors import read_safetensors, write_safetensors
from trainer.weights.files.torch_read import read_torch
from trainer.weights.keys import Keys
from trainer.weights.lazy import DTYPES, Lazy, NamedState, Shape, cast
from trainer.weights.ours import shapes_for
from trainer.weights.rules import all_theirs, check_shapes, key_of, refuse_unknown, rules_of, to_ours
from trainer.weights.target import Target

CONFIG_FILE = "config.json"
CARD = "README.md"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OLD_SINGLE = "pytorch_model.bin"
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
OLD_INDEX = "pytorch_model.bin.index.json"
MOST_JSON = 64 << 20
COMPARED_ROWS = 4096
SHARD = 4 << 30
"""The most bytes of tensors in one file of an export."""
LONG = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def is_huggingface(folder: Path) -> bool:
    """Return whether a folder is in Hugging Face's format."""
    names = (SINGLE, INDEX, OLD_SINGLE, OLD_INDEX)
    return (folder / CONFIG_FILE).is_file() and any((folder / name).is_file() for name in names)


# -- read ---------------------------------------------------------------------------------------------------


def read_huggingface(folder: Path, request: ImportRequest) -> Contents:
    """Return the contents of a folder; tensors are not read yet."""
    if request.state:
        problem = f"{folder}: a Hugging Face folder contains no optimizer state"
        raise InputError(problem, "leave out --state")
    check_access(folder)
    return contents_of(folder, str(folder), lambda: NamedState(_tensors(folder)), "huggingface")


def contents_of(folder: Path, source: str, read: Callable[[], NamedState], form: str) -> Contents:
    """Return the contents of `source`, as read by `read`; the folder contains the config.json that describes it."""
    document = read_json(folder / CONFIG_FILE)
    family = _family_of(document, folder)
    keys = Keys(f"{folder / CONFIG_FILE}", document)
    quantized = keys.get("quantization_config")
    if quantized and not _is_known(quantized):
        readable = "only mxfp4, and fp8 with blocks of 128 x 128, can be read"
        keys.faults.append(f"quantization_config: these quantized weights are not supported: {readable}")
    model = family.read(keys)
    keys.faults += [f"{fault}" for fault in model_faults(model)] if not keys.faults else []
    keys.check()
    state, notes = read(), list[str]()
    if quantized:
        state = NamedState(as_numbers(state.weights), state.moments)
        notes.append("quantized weights are read as bf16 numbers, and exported as such")
    if unread := keys.unread():
        notes.append(f"{CONFIG_FILE} has keys that mean nothing to our {family.name}: {first_of(unread, 8)}")
    if model.tied and _has_own_head(family, state.weights):
        model = replace(model, tied=False)
        notes.append(
            f"{family.head} is not the token table, though tie_word_embeddings is true: imported untied"
        )
    shapes, tensors = shapes_for(model), dict[str, Lazy]()
    for prefix, named in {"": state.weights, **state.moments}.items():
        mapped = _mapped(f"{source}: {prefix}" if prefix else source, family, model, shapes, named)
        tensors |= {key_of(prefix, name): tensor for name, tensor in mapped.items()}
    files, more = _side_files(folder)
    notes += more
    ids = {name: document[name] for name in SPECIAL if _is_id(document.get(name), model.vocab)}
    if ids and GENERATION not in files:
        # Transformers then takes the ids of config.json.
        files[GENERATION] = as_json({"_from_model_config": True, **ids})
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    origin = Origin(form, source, {"dtype": "/".join(dtypes)}, family.name)
    return Contents(model, tensors, origin, files, notes=tuple(notes))


def _is_known(quantized: object) -> bool:
    """Return whether the weights that a `quantization_config` describes can be read."""
    if not isinstance(quantized, dict):
        return False
    method, size = quantized.get("quant_method"), quantized.get("weight_block_size")
    return method == "mxfp4" or (method == "fp8" and size == [BLOCK, BLOCK])


def _has_own_head(family: Family, named: Mapping[str, Lazy]) -> bool:
    """Return whether files contain an output matrix that differs from the token table, as transformers compares."""
    found = {_bare(name, family): tensor for name, tensor in named.items()}
    (table,) = (entry.theirs[0] for entry in family.rules if entry.ours == "tokens.weight")
    head, tokens = found.get(family.head), found.get(table)
    if head is None or tokens is None or head.shape != tokens.shape:
        return False
    pieces = [(at, min(at + COMPARED_ROWS, head.rows)) for at in range(0, head.rows, COMPARED_ROWS)]
    return any(not torch.equal(head.read(*piece), tokens.read(*piece)) for piece in pieces)


def _is_id(value: object, vocab: int) -> bool:
    """Return whether a value is the id of a token, or a list of ids."""
    numbers = value if isinstance(value, list) else [value]
    return bool(numbers) and all(type(number) is int and 0 <= number < vocab for number in numbers)


def _mapped(
    source: str, family: Family, model: ModelConfig, shapes: Mapping[str, Shape], named: Mapping[str, Lazy]
) -> dict[str, Lazy]:
    """Return the tensors of a family under our names."""
    found = {_bare(name, family): tensor for name, tensor in named.items()}
    rules = list(rules_of(family.rules, model, shapes))
    # Old files contain the output matrix although it is the token table.
    tied = {family.head} if model.tied else set()
    needed = [name for rule in rules for name in rule.theirs]
    refuse_unknown(source, needed, found.keys() - tied, family.ignored)
    read = {name: found[name].dtype for name in needed if name in found}
    whole = [f"{name} ({dtype})" for name, dtype in read.items() if not dtype.is_floating_point]
    if whole:
        problem = f"{source}: holds whole numbers: {first_of(whole)}"
        raise CheckpointError(problem, "quantized weights are not supported")
    tensors = {rule.ours: to_ours(rule, model, found) for rule in rules}
    check_shapes(source, shapes, tensors)
    return tensors


def read_json(file: Path) -> dict[str, object]:
    """Return the object in a JSON file."""
    try:
        if file.stat().st_size > MOST_JSON:
            raise CheckpointError(f"{file}: larger than {MOST_JSON >> 20} MB")
        document = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return document


def _family_of(document: Mapping[str, object], folder: Path) -> Family:
    name = document.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        reason = f": {UNMAPPED[name]}" if isinstance(name, str) and name in UNMAPPED else ""
        problem = f"{folder / CONFIG_FILE}: model_type is {name!r}{reason}"
        raise CheckpointError(problem, f"these can be mapped: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _bare(name: str, family: Family) -> str:
    """Return the name without a prefix."""
    prefix = next((prefix for prefix in family.prefixes if prefix and name.startswith(prefix)), "")
    return name[len(prefix) :]


def _tensors(folder: Path) -> dict[str, Lazy]:
    """Return all tensors of a folder under the names in its files."""
    for single, index, read in (
        (SINGLE, INDEX, read_safetensors),
        (OLD_SINGLE, OLD_INDEX, read_torch_tensors),
    ):
        if (folder / index).is_file():
            return dict(_from_shards(folder, index, read))
        if (folder / single).is_file():
            return read(folder / single)
    raise CheckpointError(f"{folder}: has neither {SINGLE} nor {INDEX}")


def read_torch_tensors(file: Path) -> dict[str, Lazy]:
    """Return the tensors of a pytorch_model.bin."""
    document = read_torch(file)
    if not isinstance(document, dict):
        raise CheckpointError(f"{file}: not a mapping of names to tensors")
    return {name: tensor for name, tensor in document.items() if isinstance(tensor, Lazy)}


def _from_shards(folder: Path, index: str, read: Any) -> Iterator[tuple[str, Lazy]]:
    names = read_json(folder / index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{folder / index}: has no weight_map of names to files")
    shards, files = {}, sorted(set(names.values()))
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise CheckpointError(
            f"{folder}: {len(absent)} of {len(files)} files of {index} are missing: {first_of(absent)}"
        )
    for file in files:
        if file != Path(file).name or file in ("", ".", ".."):
            raise CheckpointError(f"{folder / index}: {file!r} is not the name of a file in this folder")
        shards[file] = read(folder / file)
    for name, file in names.items():
        if name not in shards[file]:
            raise CheckpointError(f"{folder / file}: does not contain {name}, although {index} says so")
        yield name, shards[file][name]


def _side_files(folder: Path) -> tuple[dict[str, Path | bytes], list[str]]:
    """Return the tokenizer and other files for our checkpoint, and notes."""
    files: dict[str, Path | bytes] = {name: folder / name for name in SIDE_FILES if (folder / name).is_file()}
    notes = []
    try:
        tokenizer = Tokenizer.load(folder)
        files.setdefault(TOKENIZER, json.dumps(tokenizer.definition()).encode())
    except DataError as error:
        if TOKENIZER in files:
            notes.append(f"the tokenizer is copied, but `generate` cannot use it: {error.message}")
        else:
            notes.append(f"there is no tokenizer: {error.message}")
    return files, notes


# -- write --------------------------------------------------------------------------------------------------


def write_huggingface(contents: Contents, target: Target, wanted: ExportRequest) -> None:
    """Write a folder that transformers loads."""
    family = family_for(contents)
    tensors = {
        name: cast(tensor, DTYPES[wanted.dtype])
        for name, tensor in named_by(family, contents).weights.items()
    }
    shards = list(_shards(tensors))
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{at:05d}-of-{len(shards):05d}.safetensors" for at in range(1, len(shards) + 1)]
    target.total = sum(tensor.bytes for tensor in tensors.values())
    for file, held in zip(names, shards, strict=True):
        size = sum(tensor.bytes for tensor in held.values())
        target.write_tensors(file, size, partial(write_safetensors, tensors=held, metadata={"format": "pt"}))
    if len(shards) > 1:
        weight_map = {name: file for file, held in zip(names, shards, strict=True) for name in sorted(held)}
        numbers = sum(tensor.bytes // tensor.dtype.itemsize for tensor in tensors.values())
        index = {
            "metadata": {"total_parameters": numbers, "total_size": target.total},
            "weight_map": weight_map,
        }
        target.write_bytes(INDEX, as_json(index))
    write_rest(contents, family, target, wanted)


def named_by(family: Family, contents: Contents) -> NamedState:
    """Return a model's tensors, with state also its averages, under a family's names."""
    model = contents.model
    rules = list(rules_of(family.rules, model, contents.parameters))
    if unmapped := sorted(set(contents.parameters) - {rule.ours for rule in rules}):
        problem = f"{family.architecture} has no place for {unmapped[0]}"
        raise InputError(problem, "export it to another format")
    found = {
        moment: {family.full_name(name): tensor for name, tensor in named.items()}
        for moment, named in all_theirs(rules, model, contents.tensors, contents.moments).items()
    }
    return NamedState(found.pop(""), found)


def family_for(contents: Contents) -> Family:
    """Return the family in whose form our model is written: the one that it came from, if it still fits."""
    fitting = [family for family in FAMILIES.values() if family.fits(contents.model)]
    if not fitting:
        problem = f"no family of Hugging Face fits this model: {_variant(contents)}"
        raise InputError(problem, "export it to another format")
    before = contents.origin.before
    return next((family for family in fitting if before and family.name == before.family), fitting[0])


def _variant(contents: Contents) -> str:
    model = contents.model
    if model.kind != "gpt":
        return f"it is a {model.kind}"
    odd = {
        "rotary": model.rotary,
        "swiglu": model.swiglu,
        "query_groups": model.groups != model.heads,
        "window": model.window > 0,
        "experts": model.experts > 0,
        "shared_ffn": model.shared_ffn > 0,
        f"norm {model.norm}": True,
        f"bias {model.bias}": True,
        "qk_norm": model.qk_norm,
        "sandwich_norms": model.sandwich_norms,
        "parallel_residual": model.parallel_residual,
    }
    return ", ".join(name for name, given in odd.items() if given)


def _shards(tensors: Mapping[str, Lazy]) -> Iterator[dict[str, Lazy]]:
    current, size = dict[str, Lazy](), 0
    for name, tensor in tensors.items():
        if current and size + tensor.bytes > SHARD:
            yield current
            current, size = {}, 0
        current[name] = tensor
        size += tensor.bytes
    yield current


def write_rest(contents: Contents, family: Family, target: Target, wanted: ExportRequest) -> None:
    """Write the config, the tokenizer, the generation config and the model card."""
    tokenizer, side = _tokenizer_of(contents), SideFiles(contents.files)
    ids = _ids(contents, side, tokenizer)
    dtype = LONG[DTYPES[wanted.dtype]]
    config = {
        "architectures": [family.architecture],
        "model_type": family.name,
        **family.write(contents.model),
        **ids,
        "tie_word_embeddings": contents.model.tied,
        # Write both spellings, the new and the old one.
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    target.write_bytes(CONFIG_FILE, as_json(config))
    known = {name: number for name, number in ids.items() if number is not None}
    generation = {**(side.generation or {"_from_model_config": True}), **known}
    files = dict(contents.files)
    if TOKENIZER in files:
        files.setdefault(TOKENIZER_CONFIG, as_json(_tokenizer_config(contents, tokenizer)))
    if generation != side.generation:
        files[GENERATION] = as_json(generation)
    target.write_files(files)
    target.write_bytes(CARD, model_card(contents, wanted.dtype).encode())


def _tokenizer_of(contents: Contents) -> Tokenizer | None:
    """Return the tokenizer; None if there is none with an end-of-document token."""
    file = contents.files.get(TOKENIZER)
    if not isinstance(file, Path):
        return None
    try:
        return Tokenizer.load(file)
    except DataError:
        return None


def _ids(contents: Contents, side: SideFiles, tokenizer: Tokenizer | None) -> dict[str, object]:
    """Return the ids of the special tokens; null means no default.

    A model that was trained here also ends a text with the tokens that the training may have taught it.
    """
    known, eod = side.generation, contents.config.data.eod
    found, ends = dict[str, object](), list[int]()
    if tokenizer is not None:
        found |= {name: tokenizer.id_of(side.tokens.get(name.removesuffix("_id"), "")) for name in SPECIAL}
        if found["bos_token_id"] is None:
            found["bos_token_id"] = tokenizer.eod
        ends = list(dict.fromkeys([*side.ends(tokenizer), tokenizer.eod, *([] if eod is None else [eod])]))
    found |= {name: known[name] for name in SPECIAL if name in known}
    if ends and (contents.progress.step or "eos_token_id" not in known):
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return {name: found.get(name) for name in SPECIAL}


def _tokenizer_config(contents: Contents, tokenizer: Tokenizer | None) -> dict[str, object]:
    end = tokenizer.token_of(tokenizer.eod) if tokenizer else None
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": contents.model.sequence,
        "clean_up_tokenization_spaces": False,
        **(dict.fromkeys(("bos_token", "eos_token"), end) if end else {}),
    }


def as_json(document: object) -> bytes:
    """Return an object as the bytes of a JSON file."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
