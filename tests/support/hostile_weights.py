"""A folder of files that try to harm whoever reads them as weights: each is made by a function of its own."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from clusterctl.wire.requests import ExportRequest
from tests.support.weights import GPT, checkpoint, random_state
from trainer.weights.convert import export_weights

MARK = "harmed"
"""A file that the payloads would create next to themselves."""
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 16}


class Runs:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def archive(content: bytes, entries: dict[str, bytes] | None = None, how: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip archive of torch.save with this pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as made:
        made.writestr("archive/data.pkl", content)
        for name, data in (entries or {}).items():
            made.writestr(f"archive/{name}", data)
        made.writestr("archive/version", b"3\n")
    return file.getvalue()


def safetensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=2)


def nested_dicts(depth: int) -> bytes:
    """Return the pickle of a dict in a dict in a dict ..."""
    return b"\x80\x02" + b"}U\x01a" * depth + b"}" + b"s" * depth + b"."


def recursive_dict() -> bytes:
    """Return the pickle of {"module": d} where d contains itself."""
    inner: dict[str, Any] = {}
    inner["again"] = inner
    return pickled({"module": inner, "model": inner})


def storage(count: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """Return the pickle of {"wte.weight": a tensor with this shape in a storage of so many numbers}."""

    class Numbers:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", count) if isinstance(value, Numbers) else None

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Numbers(), 0, shape, strides, False, OrderedDict())

    file = io.BytesIO()
    Pickler(file, protocol=2).dump({"wte.weight": Tensor()})
    return file.getvalue()


def overlapping_zip() -> bytes:
    """Return an archive whose two entries share their bytes."""
    content = bytearray(archive(pickled({}), {"data/0": b"0123", "data/1": b"4567"}))
    name = b"archive/data/1"
    at = content.rindex(name) - 46
    other = content.rindex(b"archive/data/0") - 46
    content[at + 42 : at + 46] = content[other + 42 : other + 46]
    return bytes(content)


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def torch_files(mark: str) -> dict[str, bytes]:
    """Return files of torch.save that try to run code, to allocate, or to read outside their numbers."""
    touch = f"touch {mark}"
    old = pickled(0x1950A86A20F9469CFC6C) + pickled(1001) + pickled({})
    return {
        "os.system": archive(pickled(Runs(os.system, touch))),
        "eval": archive(pickled(Runs(eval, f"open({mark!r}, 'w')"))),
        "a function of torch": archive(pickled(Runs(torch.hub.load, "a/b", "c"))),
        "getattr of a list": archive(pickled({"model": Runs(getattr, [], "append")})),
        "os.system inside of a dict": archive(pickled({"model": {"x": Runs(os.system, touch)}})),
        "old form with os.system": old + pickled(Runs(os.system, touch)) + pickled([]),
        "a bare pickle": pickled(Runs(os.system, touch)),
        "getattr": archive(pickled(Runs(getattr, "", "format"))),
        "memory cells": archive(b"\x80\x02}r\xff\xff\xff\x7f."),
        "length of a text": archive(b"\x80\x02X\xff\xff\xff\x7fabc."),
        "registry of extensions": archive(b"\x80\x02\x82\x01."),
        "numbers on request": archive(pickled(Runs(bytearray, 1 << 40))),
        "deep dicts": archive(nested_dicts(100_000)),
        "a dict in itself": archive(recursive_dict()),
        "no dict": archive(pickled([1, 2, 3])),
        "compressed": archive(pickled({}), {"data/0": bytes(1 << 20)}, zipfile.ZIP_DEFLATED),
        "overlapping entries": overlapping_zip(),
        "a larger shape than its numbers": archive(storage(4, (1 << 20, 8), (8, 1)), {"data/0": bytes(16)}),
        "one number for all": archive(storage(4, (1 << 40, 1 << 20), (0, 0)), {"data/0": bytes(16)}),
        "numbers that are not there": archive(storage(1 << 40, (1 << 20, 8), (8, 1)), {"data/0": bytes(16)}),
        "a negative shape": archive(storage(4, (-1, 8), (8, 1)), {"data/0": bytes(16)}),
        "two pickles": archive(pickled({}), {"other/data.pkl": pickled({})}),
        "half an archive": archive(pickled({}))[:40],
        "nothing": b"",
    }


def safetensors_files() -> dict[str, bytes]:
    """Return safetensors files whose headers lie."""
    return {
        "huge header": struct.pack("<Q", 1 << 62) + b"{}",
        "header beyond the file": struct.pack("<Q", 1000) + b"{}",
        "deep header": safetensors(b"[" * 200_000),
        "overlapping tensors": safetensors({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
        "beyond the end": safetensors({"a": entry([1 << 30], 0, 1 << 32)}, bytes(8)),
        "a gap": safetensors({"a": entry([1], 4, 8)}, bytes(8)),
        "overflowing shape": safetensors({"a": entry([1 << 62, 1 << 62], 0, 8)}, bytes(8)),
        "negative shape": safetensors({"a": entry([-1, -1], 0, 4)}, bytes(4)),
        "metadata that is no text": safetensors({"__metadata__": {"a": {"b": 1}}}),
        "not a header": safetensors(b"\xff\xfe\x00"),
    }


def mindspore_files() -> dict[str, bytes]:
    """Return protobuf files whose lengths lie."""
    name, kind = b"\x0a\x01w", b"\x12\x07Float32"
    return {
        "length beyond the file": b"\x0a" + varint(1 << 60),
        "a number without an end": b"\x0a" + b"\xff" * 20,
        "an endless name": b"\x0a" + varint(9000) + b"\x0a" + varint(8990) + b"x" * 8997,
        "a shape without numbers": b"\x0a\x17"
        + name
        + b"\x12\x12"
        + b"\x08"
        + varint(1 << 40)
        + kind
        + b"\x1a\x00",
        "a group": b"\x0b",
        "a million dimensions": b"\x0a"
        + varint(20005)
        + name
        + b"\x12"
        + varint(20000)
        + b"\x08\x01" * 10000,
    }


def metadata_files(mark: str) -> dict[str, bytes]:
    """Return the metadata of distributed checkpoints that run code, lead out of the folder, or lie."""
    key = "embedding.word_embeddings.weight"

    def metadata(file: str, offset: int, length: int, size: tuple[int, ...]) -> bytes:
        chunk = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size(size))
        described = {key: TensorStorageMetadata(TensorProperties(), torch.Size(size), [chunk])}
        places = {MetadataIndex(key, torch.Size((0, 0))): _StorageInfo(file, offset, length)}
        return pickle.dumps(Metadata(described, storage_data=places))

    cycle: dict[str, Any] = {"state_dict_metadata": {}, "storage_data": {}}
    cycle["state_dict_metadata"]["a"] = cycle
    return {
        "os.system": pickled(Runs(os.system, f"touch {mark}")),
        "a path out of the folder": metadata("../elsewhere.distcp", 0, 8, (2, 2)),
        "a place behind the file": metadata("__0_0.distcp", 1 << 40, 1 << 40, (2, 2)),
        "a negative place": metadata("__0_0.distcp", -8, 8, (2, 2)),
        "a huge shape": metadata("__0_0.distcp", 0, 100, (1 << 60, 1 << 60)),
        "metadata in themselves": pickled(cycle),
        "a number": pickled(7),
        "no pickle": b"\xff\xff",
    }


def folders(folder: Path) -> dict[str, Path]:
    """Write every hostile file in a folder of its own form; return the path to import by what it tries."""
    made = {}
    mark = str(folder / MARK)
    for at, (name, content) in enumerate(torch_files(mark).items()):
        for form, file in (
            ("hf", "pytorch_model.bin"),
            ("megatron", "mp_rank_00/model_optim_rng.pt"),
            ("glm", "mp_rank_00_model_states.pt"),
        ):
            path = folder / f"torch-{at}-{form}"
            (path / file).parent.mkdir(parents=True)
            (path / file).write_bytes(content)
            (path / "config.json").write_text(json.dumps(GPT2))
            made[f"{form}: {name}"] = path
        made |= _deepspeed_folders(folder / f"torch-{at}-deepspeed", name, content)
    for at, (name, content) in enumerate(safetensors_files().items()):
        path = folder / f"safetensors-{at}"
        path.mkdir()
        (path / "model.safetensors").write_bytes(content)
        (path / "config.json").write_text(json.dumps(GPT2))
        made[f"hf: {name}"] = path
    for at, (name, content) in enumerate(mindspore_files().items()):
        path = folder / f"mindspore-{at}.ckpt"
        path.write_bytes(content)
        made[f"mindspore: {name}"] = path
    for at, (name, content) in enumerate(metadata_files(mark).items()):
        path = folder / f"metadata-{at}"
        path.mkdir()
        (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
        (path / ".metadata").write_bytes(content)
        (path / "__0_0.distcp").write_bytes(archive(pickled({})))
        made[f"megatron-core: {name}"] = path
        made[f"dcp: {name}"] = path
    return made | _folders_of_text(folder) | _core_folders(folder, mark)


def _core_folders(folder: Path, mark: str) -> dict[str, Path]:
    """Write distributed checkpoints of Megatron-core whose common.pt, or an object of their optimizer, is hostile."""
    made = {}
    source = checkpoint(folder / "good", GPT, random_state(GPT))
    export_weights(source, folder / "core", "megatron-core", ExportRequest())
    release = folder / "core" / "release"
    key = "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"
    contents = {**torch_files(mark), "a path out of the folder": b""}
    for at, (name, content) in enumerate(contents.items()):
        for kind in ("common", "object"):
            if kind == "common" and name in ("a dict in itself", "deep dicts", "a path out of the folder"):
                # Harmless there: nothing in it is asked for.
                continue
            path = folder / f"core-{at}-{kind}"
            shutil.copytree(release, path)
            metadata = pickle.loads((release / ".metadata").read_bytes())
            if kind == "common":
                (path / "common.pt").write_bytes(content)
            else:
                (path / "evil.distcp").write_bytes(content)
                file = "evil.distcp" if content else "../evil.distcp"
                metadata.state_dict_metadata[key] = BytesStorageMetadata()
                metadata.storage_data[MetadataIndex(key)] = _StorageInfo(file, 0, len(content))
                for moment in ("exp_avg", "exp_avg_sq"):
                    for index, place in list(metadata.storage_data.items()):
                        if not index.fqn.startswith("optimizer"):
                            own = f"optimizer.state.{moment}.{index.fqn}"
                            metadata.state_dict_metadata[own] = metadata.state_dict_metadata[index.fqn]
                            metadata.storage_data[MetadataIndex(own, index.offset)] = place
            (path / ".metadata").write_bytes(pickle.dumps(metadata))
            made[f"megatron-core: {name} in the {kind}"] = path
    return made


def _deepspeed_folders(folder: Path, name: str, content: bytes) -> dict[str, Path]:
    """Write folders of DeepSpeed in which one file is hostile."""
    made = {}
    shapes = [OrderedDict({"transformer.wte.weight": torch.Size([16, 8])})]
    for kind in ("model", "optim", "layer", "zero"):
        path = folder / kind
        (path / "zero" / "a").mkdir(parents=True) if kind == "zero" else path.mkdir(parents=True)
        torch.save({"module": {}, "param_shapes": shapes}, path / "mp_rank_00_model_states.pt")
        file = {
            "model": "mp_rank_00_model_states.pt",
            "optim": "zero_pp_rank_0_mp_rank_00_optim_states.pt",
            "layer": "layer_00-model_00-model_states.pt",
            "zero": "zero/a/fp32.pt",
        }[kind]
        (path / file).write_bytes(content)
        (path / "config.json").write_text(json.dumps(GPT2))
        made[f"deepspeed: {name} in the {kind} file"] = path
    return made


def _folders_of_text(folder: Path) -> dict[str, Path]:
    """Write folders whose JSON files and pointers are hostile."""
    made = {}
    good = safetensors({"a": entry([1], 0, 4)}, bytes(4))
    texts: dict[str, dict[str, str]] = {
        "hf: an index that leads out": {
            "config.json": json.dumps(GPT2),
            "model.safetensors.index.json": json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}),
        },
        "hf: an index without names": {
            "config.json": json.dumps(GPT2),
            "model.safetensors.index.json": json.dumps({"weight_map": [1]}),
        },
        "hf: a deep config": {"config.json": '{"a":' * 100_000, "model.safetensors": ""},
        "hf: a config of billions of layers": {
            "config.json": json.dumps({**GPT2, "n_layer": 1 << 30}),
            "model.safetensors": "",
        },
        "hf: a config with a list for a name": {
            "config.json": json.dumps({**GPT2, "model_type": ["gpt2"], "auto_map": {"AutoConfig": "x.py"}}),
            "model.safetensors": "",
        },
        "megatron: a pointer that leads out": {"latest_checkpointed_iteration.txt": "../../etc"},
        "glm: a pointer that leads out": {"latest": "../../etc"},
    }
    for at, (name, files) in enumerate(texts.items()):
        path = folder / f"text-{at}"
        path.mkdir()
        for file, text in files.items():
            (path / file).write_bytes(text.encode() or good)
        made[name] = path
    return made
