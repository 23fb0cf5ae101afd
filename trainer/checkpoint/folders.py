"""Find the ranks that share a folder of checkpoints, and copy files between nodes.

Nodes need not share a disk. The first of the ranks that see the same folder is its leader: it publishes, prunes and
reports for the folder.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.checkpoint.disk import disk_failures
from trainer.parallel.group import Group

TRANSFER = 16 << 20
"""Bytes per message between nodes."""


@dataclass(frozen=True)
class Folder:
    """A folder of checkpoints, as the ranks see it."""

    path: Path
    leaders: tuple[int, ...]
    """Of each rank, the leader of its folder."""
    rank: int

    @property
    def is_leader(self) -> bool:
        return self.leaders[self.rank] == self.rank

    @property
    def all_leaders(self) -> list[int]:
        return sorted(set(self.leaders))


def meet_at(path: Path, group: Group) -> Folder:
    """Create the folder `path`; return which ranks share it. For all ranks together."""
    if group.world == 1:
        return Folder(path, (0,), 0)
    token = group.share(uuid.uuid4().hex)
    with disk_failures(path):
        path.mkdir(parents=True, exist_ok=True)
        own = _first_at(path / f".folder-{token}", group.rank)
    folder = Folder(path, tuple(group.gather(own)), group.rank)
    if folder.is_leader:
        (path / f".folder-{token}").unlink(missing_ok=True)
    return folder


def _first_at(file: Path, rank: int) -> int:
    """Return the rank that made a file first, which may be this one."""
    with contextlib.suppress(FileExistsError):
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(handle, "w") as stream:
            stream.write(f"{rank}\n")
        return rank
    while not (content := file.read_text()).endswith("\n"):
        time.sleep(0.005)
    return int(content)


def exchange_files(
    folder: Path, sizes: Mapping[str, int], moves: Sequence[tuple[str, int, int]], group: Group
) -> None:
    """Copy files between nodes: each of `moves` is a name, the rank that has the file, and the rank that lacks it.

    All ranks have the same list; the two ranks of a move meet in its order.
    """
    for name, source, target in moves:
        if group.rank == source:
            _send(folder / name, sizes[name], target, group)
        elif group.rank == target:
            _receive(folder / name, sizes[name], source, group)


def _send(file: Path, size: int, target: int, group: Group) -> None:
    with disk_failures(file), file.open("rb") as stream:
        for start in range(0, size, TRANSFER):
            piece = bytearray(min(TRANSFER, size - start))
            stream.readinto(piece)
            dist.send(torch.frombuffer(piece, dtype=torch.uint8).to(group.device.name), group.members[target])


def _receive(file: Path, size: int, source: int, group: Group) -> None:
    aside = file.with_name(f".{file.name}.incoming")
    with disk_failures(file, size), aside.open("wb") as stream:
        for start in range(0, size, TRANSFER):
            piece = torch.empty(min(TRANSFER, size - start), dtype=torch.uint8, device=group.device.name)
            dist.recv(piece, group.members[source])
            stream.write(piece.cpu().numpy().data)
    os.replace(aside, file)
