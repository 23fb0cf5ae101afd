"""Choose a checkpoint to resume from and load it, whichever nodes have its files.

Each node's leader reports what is in its folder, and rank 0 orders the checkpoints that are complete over all nodes,
newest first. A rank reads the slices that it needs. If a file is damaged, all ranks try the next checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from clusterctl.wire.saved import LATEST, MANIFEST, PARTS
from trainer.checkpoint import candidates
from trainer.checkpoint.board import Board
from trainer.checkpoint.candidates import Candidate, Candidates, FileMoves, FolderReport, RankNeeds
from trainer.checkpoint.disk import disk_failures
from trainer.checkpoint.folders import Folder, exchange_files
from trainer.checkpoint.keep import in_use
from trainer.checkpoint.part import HasParts, Part
from trainer.checkpoint.store import (
    UNCONFIRMED,
    Checkpoint,
    check_size,
    found,
    open_checkpoint,
    verify,
    verify_file,
)
from trainer.errors import CheckpointError
from trainer.files import first_of, replace_file
from trainer.parallel.group import Group

Fits = Callable[[Checkpoint], None]
"""Raises a CheckpointError if a checkpoint does not fit the training."""


class Loader:
    """Loads one of a folder's checkpoints into an engine. `load` is for all ranks together."""

    def __init__(self, folder: Folder, board: Board, group: Group) -> None:
        self.folder, self.board, self.group = folder, board, group
        self.notes: list[str] = []
        """Why newer checkpoints were skipped."""

    def load(self, named: Path | None, engine: HasParts, fits: Fits) -> Checkpoint | None:
        """Load the checkpoint `named`, else the newest valid one; return it, or None if there is none."""
        paths = [named] if named else found(self.folder.path)
        reports = [asdict(_report(path)) for path in paths] if self.folder.is_leader else []
        decide = partial(candidates.order, leaders=self.folder.all_leaders, named=bool(named))
        answer = Candidates.of(self.board.agree("look", reports, decide))
        faults = list(answer.faults)
        for at, candidate in enumerate(answer.complete):
            path = named or self.folder.path / candidate.name_on(self.folder.leaders[self.folder.rank])
            fault = self._try(f"try-{at}", path, candidate, engine, fits)
            if not fault:
                self.notes = _passed_over([*faults, *answer.skipped])
                return open_checkpoint(path)
            faults.append(fault)
        if faults:
            problem = "\n".join(faults if named else ["no checkpoint of this run is sound", *faults])
            raise CheckpointError(problem, "repair or remove them, or use resume: never to start from step 0")
        self.notes = _passed_over(answer.skipped)
        return None

    def _try(self, key: str, path: Path, candidate: Candidate, engine: HasParts, fits: Fits) -> str:
        """Load a checkpoint; return why it is damaged, or "". Raise a CheckpointError if it does not fit."""
        self._share_manifest(key, path, candidate)
        with ExitStack() as stack:
            fault = _fault_of(lambda: stack.enter_context(in_use(path, mark=self.folder.is_leader)))
            answer = self.board.agree(f"{key}/fits", fault, partial(_check_fit, path=path, fits=fits))
            if answer["other"]:
                raise CheckpointError(
                    answer["other"], "correct the config, or use resume: never to start from step 0"
                )
            if answer["damaged"]:
                return str(answer["damaged"])
            checkpoint, parts = open_checkpoint(path), engine.parts()
            fault = _fault_of(lambda: _check_keys(checkpoint, parts))
            if not candidate.everywhere:
                fault = self._bring_files(key, checkpoint, parts, fault)
            if not fault:
                steps = checkpoint.manifest.optimizer_steps
                fault = _fault_of(lambda: engine.load_parts(checkpoint.fill, steps))
            return str(self.board.agree(f"{key}/loaded", fault, _first))

    def _share_manifest(self, key: str, path: Path, candidate: Candidate) -> None:
        """Send the manifest to nodes that lack it, before their ranks read it."""
        if not candidate.lacking:
            return
        file = path / MANIFEST
        if self.board.rank == candidate.source:
            self.board.post(f"{key}/manifest", file.read_text())
        if self.board.rank in candidate.lacking:
            (content,) = self.board.take([f"{key}/manifest"])
            with disk_failures(path):
                path.mkdir(parents=True, exist_ok=True)
                replace_file(file, content.encode())
        self.board.agree(f"{key}/shared", None, lambda _: None)

    def _bring_files(self, key: str, checkpoint: Checkpoint, parts: Sequence[Part], fault: str) -> str:
        """Copy files that a node lacks and its ranks need from a node that has them."""
        needs = [] if fault else checkpoint.files_for(parts)
        have = [name for name in checkpoint.files if (checkpoint.path / name).is_file()]
        value = asdict(RankNeeds(needs, have if self.folder.is_leader else [], fault))
        decide = partial(candidates.moves, leaders=self.folder.leaders)
        answer = FileMoves.of(self.board.agree(f"{key}/needs", value, decide))
        if not answer.fault:
            sizes = {name: entry.bytes for name, entry in checkpoint.files.items()}
            exchange_files(checkpoint.path, sizes, answer.moves, self.group)
            self.board.agree(f"{key}/moved", None, lambda _: None)
        return answer.fault


def _passed_over(faults: Sequence[str]) -> list[str]:
    return [f"passed over a checkpoint: {fault}" for fault in faults]


def _fault_of(work: Callable[[], object]) -> str:
    """Return the message of the CheckpointError that `work` raises, or ""."""
    try:
        work()
    except CheckpointError as error:
        return _with_remedy(error)
    return ""


def _with_remedy(error: CheckpointError) -> str:
    """Return the message, with the remedy if it is not the usual one."""
    return error.message + (f" ({error.hint})" if error.hint != error.usual_hint else "")


def _check_fit(faults: Sequence[str], path: Path, fits: Fits) -> dict[str, str]:
    """Return which rank cannot open the checkpoint, else why it does not fit the training."""
    damaged = _first(faults)
    return {"damaged": damaged, "other": "" if damaged else _fault_of(lambda: fits(open_checkpoint(path)))}


def _first(faults: Sequence[str]) -> str:
    return next(filter(None, faults), "")


def _report(path: Path) -> FolderReport:
    """Return a report about a checkpoint's files in this folder, without reading tensors."""
    try:
        checkpoint = open_checkpoint(path)
        have = [name for name in checkpoint.files if (path / name).exists()]
        for name in have:
            check_size(checkpoint, name)
            if not name.endswith(PARTS):
                # A load reads only tensor files.
                verify_file(checkpoint, name)
        if checkpoint.is_old and len(have) == len(checkpoint.files):
            verify(path)
        digest = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
    except (CheckpointError, OSError) as error:
        fault = _with_remedy(error) if isinstance(error, CheckpointError) else str(error)
        return FolderReport(path.name, str(path), fault)
    state = checkpoint.manifest.state
    lacks = sorted(checkpoint.files.keys() - set(have))
    count = len(checkpoint.files)
    named = lacks if len(lacks) <= candidates.MOST_NAMED else []
    unconfirmed = (path / UNCONFIRMED).exists() and not (path.parent / LATEST).exists()
    return FolderReport(
        path.name, str(path), "", checkpoint.step, state, digest, have, count, named, unconfirmed
    )


def _check_keys(checkpoint: Checkpoint, parts: Sequence[Part]) -> None:
    """Refuse a checkpoint that lacks tensors of the model, or has them in another shape."""
    wrong = sorted({part.key for part in parts if checkpoint.table.get(part.key) != part.shape})
    if wrong:
        problem = f"{checkpoint.path}: lacks tensors of this model or has other shapes: "
        raise CheckpointError(problem + first_of(wrong, 5))
