"""Folders of torch's distributed checkpoints: weights and AdamW's state with the names of `get_state_dict`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from clusterctl.wire.requests import ExportRequest, ImportRequest
from trainer.checkpoint.access import check_access
from trainer.checkpoint.part import MOMENTS
from trainer.errors import CheckpointError
from trainer.weights.contents import Contents, Progress
from trainer.weights.files.distcp import METADATA, Chunk, Item, read_distcp, write_folder
from trainer.weights.files.torch_write import Scalar
from trainer.weights.huggingface import family_for, named_by, write_rest
from trainer.weights.lazy import DTYPES, Lazy, NamedState, cast
from trainer.weights.named.mapping import contents_by_name, group_of
from trainer.weights.target import Target

_STATE = re.compile(rf"(?:.*\.)?state\.(?P<name>.+)\.(?P<entry>{'|'.join(MOMENTS)}|step)")
# Prefixes that programs put before the names of the whole model.
WRAPPERS = ("app.", "model.", "module.", "state_dict.", "_orig_mod.")


def is_dcp(folder: Path) -> bool:
    """Return whether a folder is a distributed checkpoint of torch."""
    return (folder / METADATA).is_file()


def read_dcp(folder: Path, request: ImportRequest) -> Contents:
    """Return the contents of a folder; tensors are not read yet."""
    check_access(folder)
    weights: dict[str, Lazy] = {}
    state: dict[str, dict[str, Lazy]] = {}
    for key, tensor in read_distcp(folder).items():
        if match := _STATE.fullmatch(key):
            state.setdefault(match["entry"], {})[_unwrapped(match["name"])] = tensor
        elif not re.search(r"(^|\.)(optim|optimizer)\.", key):
            weights[key] = tensor
    if not weights:
        raise CheckpointError(f"{folder}: its {METADATA} lists no tensors")
    steps = {int(tensor.whole().view(-1)[0]) for tensor in list(state.pop("step", {}).values())[:1]}
    step = max(steps, default=0)
    named = NamedState(_stripped(weights), state)
    return contents_by_name(folder, "dcp", [named], {}, request, Progress(step, step))


def _stripped(weights: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """Return the weights without the wrapper prefixes that all names share."""
    names = dict(weights)
    for wrapper in WRAPPERS * 2:
        if all(name.startswith(wrapper) for name in names):
            names = {name.removeprefix(wrapper): tensor for name, tensor in names.items()}
    return names


def _unwrapped(name: str) -> str:
    return re.sub(r"^((module|_orig_mod)\.)+", "", name)


def write_dcp(contents: Contents, target: Target, request: ExportRequest) -> None:
    """Write a folder that `torch.distributed.checkpoint.load` reads into a model of transformers on any ranks."""
    family = family_for(contents)
    items = list(_items(contents, DTYPES[request.dtype]))
    write_folder(target, "", items)
    write_rest(contents, family, target, request)


def _items(contents: Contents, dtype: torch.dtype) -> Iterator[Item]:
    """Yield the tensors of `{"model": ..., "optim": ...}`, as `get_state_dict` returns both."""
    family = family_for(contents)
    named = named_by(family, contents)
    for name, tensor in named.weights.items():
        yield _item(f"model.{name}", cast(tensor, dtype))
    if contents.model.tied:
        # A transformers model also lists the output matrix if it is the token table.
        table = next(rule.theirs[0] for rule in family.rules if rule.ours == "tokens.weight")
        whole = next(tensor for name, tensor in named.weights.items() if name.endswith(table))
        yield _item(f"model.{family.head}", cast(whole, dtype))
    if not named.moments:
        return
    for name in named.weights:
        for moment, averages in named.moments.items():
            yield _item(f"optim.state.{name}.{moment}", averages[name])
        yield Item(f"optim.state.{name}.step", value=Scalar(float(contents.progress.optimizer_steps)))
    yield Item("optim.param_groups", value=[{**group_of(contents.config), "params": list(named.weights)}])


def _item(key: str, tensor: Lazy) -> Item:
    return Item(key, tensor.shape, [Chunk((0,) * len(tensor.shape), tensor)])
