"""Ranks as threads that save and load small checkpoints, on one node or several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer.checkpoint.board import Board
from trainer.checkpoint.folders import Folder
from trainer.checkpoint.manifest import Manifest
from trainer.checkpoint.names import tensor_table
from trainer.checkpoint.part import MOMENTS, Part, whole_box
from trainer.checkpoint.resume import Loader
from trainer.checkpoint.save import SaveOrder, save_parts
from trainer.checkpoint.store import Checkpoint, folder_of, open_checkpoint
from trainer.config.parts import KeepConfig
from trainer.config.train_config import TrainConfig
from trainer.device import Device
from trainer.parallel.group import Group
from trainer.side_files import TOKENIZER

T = TypeVar("T")
MANIFEST = Manifest(0, TrainConfig(), optimizer_steps=7)


class Store:
    """What torch's store does, within one process."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.entries[key] = value

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.entries for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.entries[key] for key in keys]

    def delete_key(self, key: str) -> bool:
        return self.entries.pop(key, None) is not None


def in_threads(work: Callable[[int], T], ranks: int) -> list[T | BaseException]:
    """Return what `work` returns or raises for each rank, all at the same time."""
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def state_at(step: int, rows: int = 12) -> dict[str, Tensor]:
    """Return weights and moments that tell the step."""
    random = torch.Generator().manual_seed(step)
    names = {"a.weight": (rows, 6), "b.bias": (rows,)}
    keys = [*names, *(f"{moment}.{name}" for name in names for moment in MOMENTS)]
    return {
        key: torch.randn(names[key.removeprefix("exp_avg.").removeprefix("exp_avg_sq.")], generator=random)
        for key in keys
    }


def parts_by_rows(state: dict[str, Tensor], rank: int, ranks: int) -> list[Part]:
    """Return a rank's equal share of the rows of each tensor; views, so that a load changes `state`."""
    parts = []
    for key, tensor in state.items():
        first, last = (len(tensor) * at // ranks for at in (rank, rank + 1))
        box = ((first, last), *whole_box(tensor.shape[1:]))
        parts.append(Part(key, tuple(tensor.shape), box, tensor[first:last]))
    return parts


class Held:
    """An engine of one rank's rows."""

    def __init__(self, rank: int, ranks: int, rows: int = 12) -> None:
        self.state = {key: torch.zeros_like(tensor) for key, tensor in state_at(0, rows).items()}
        self.rank, self.ranks = rank, ranks
        self.optimizer_steps = 0

    def parts(self) -> list[Part]:
        return parts_by_rows(self.state, self.rank, self.ranks)

    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        fill(self.parts())
        self.optimizer_steps = optimizer_steps


def seen_by(folders: Sequence[Path], rank: int) -> Folder:
    """Return a rank's folder, where `folders` has that of each rank."""
    return Folder(folders[rank], tuple(folders.index(path) for path in folders), rank)


def save_with(
    folders: Sequence[Path],
    step: int,
    keep: KeepConfig = KeepConfig(9),
    tokenizer: Path | None = None,
    read_back: bool = True,
    rows: int = 12,
    **facts: Any,
) -> list[int | BaseException]:
    """Save the state of a step with one rank for each of `folders`."""
    state, store = state_at(step, rows), Store()
    table = tensor_table(
        {key: tuple(one.shape) for key, one in state.items() if not key.startswith(MOMENTS)}, True
    )

    def work(rank: int) -> int:
        group = Group(rank, len(folders), Device("cpu"), store=store, node=f"node{rank + 1}")
        board = Board(group, "saves")
        manifest = replace(MANIFEST, step=step, tensors=table, **facts)
        texts = {} if tokenizer is None else {TOKENIZER: tokenizer}
        order = SaveOrder(manifest, f"token-{step}", keep, texts, read_back)
        return save_parts(order, parts_by_rows(state, rank, len(folders)), seen_by(folders, rank), board)

    return in_threads(work, len(folders))


def saved(folder: Path, step: int, ranks: int = 1, **more: Any) -> Checkpoint:
    """Save the state of a step on one node."""
    for result in save_with([folder] * ranks, step, **more):
        if isinstance(result, BaseException):
            raise result
    return open_checkpoint(folder_of(folder, step))


def load_with(
    folders: Sequence[Path], named: Path | None = None, rows: int = 12
) -> list[tuple[int, Held, list[str]]]:
    """Load the newest sound checkpoint with one rank for each of `folders`: its step (0: none), state and notes."""
    store = Store()

    def work(rank: int) -> tuple[int, Held, list[str]]:
        group = Group(rank, len(folders), Device("cpu"), store=store)
        loader = Loader(seen_by(folders, rank), Board(group, "loads"), group)
        held = Held(rank, len(folders), rows)
        checkpoint = loader.load(named, held, lambda _: None)
        return checkpoint.step if checkpoint else 0, held, loader.notes

    results = in_threads(work, len(folders))
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]


def whole_state(loaded: Sequence[tuple[int, Held, list[str]]]) -> dict[str, Tensor]:
    """Return the state of all ranks together."""
    total: dict[str, Tensor] = {}
    for _, held, _ in loaded:
        total = {key: total.get(key, 0) + tensor for key, tensor in held.state.items()}
    return total
