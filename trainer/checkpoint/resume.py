"""Choose a checkpoint to resume from and load it, wherever its files are among the nodes.

Each node's leader reports what is in its folder, and rank 0 orders the checkpoints that are complete over all nodes,
newest first. A rank reads the slices that it needs. Where a file turns out to be damaged, all ranks try the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from trainer.checkpoint.board import Board
from trainer.checkpoint.disk import disk_failures
from trainer.checkpoint.folders import Folder, exchange_files
from trainer.checkpoint.keep import in_use
from trainer.checkpoint.manifest import MANIFEST, PARTS
from trainer.checkpoint.part import HasParts, Part
from trainer.checkpoint.store import OLD, Checkpoint, check_size, found, open_checkpoint, verify, verify_file
from trainer.errors import CheckpointError
from trainer.files import replace_file
from trainer.json_types import JsonObject
from trainer.parallel.group import Group

Fits = Callable[[Checkpoint], None]
"""Raises a CheckpointError where a checkpoint does not fit the training."""


class Loader:
    """Loads one of a folder's checkpoints into an engine. `load` is for all ranks together."""

    def __init__(self, folder: Folder, board: Board, group: Group) -> None:
        self.folder, self.board, self.group = folder, board, group
        self.notes: list[str] = []
        """Why newer checkpoints were passed over."""

    def load(self, named: Path | None, engine: HasParts, fits: Fits) -> Checkpoint | None:
        """Load the checkpoint `named`, or else the newest sound one; return it, or None without any."""
        paths = [named] if named else found(self.folder.path)
        reports = [_report(path) for path in paths] if self.folder.is_leader else []
        answer = self.board.agree(
            "look", reports, partial(_order, leaders=self.folder.all_leaders, named=bool(named))
        )
        faults = list(answer["faults"])
        for at, entry in enumerate(answer["candidates"]):
            own = str(self.folder.leaders[self.folder.rank])
            path = named or self.folder.path / entry["names"].get(own, entry["name"])
            fault = self._try(f"try-{at}", path, entry, engine, fits)
            if not fault:
                self.notes = [f"passed over a checkpoint: {fault}" for fault in faults + answer["weights"]]
                return open_checkpoint(path)
            faults.append(fault)
        if faults:
            problem = "\n".join(faults if named else ["no checkpoint of this run is sound", *faults])
            raise CheckpointError(problem, "repair or remove them, or use resume: never to begin anew")
        self.notes = [f"passed over a checkpoint: {fault}" for fault in answer["weights"]]
        return None

    def _try(self, key: str, path: Path, entry: JsonObject, engine: HasParts, fits: Fits) -> str:
        """Load a checkpoint; return why it is damaged, or "". A CheckpointError where it does not fit."""
        self._share_manifest(key, path, entry)
        with ExitStack() as stack:
            fault = _fault_of(lambda: stack.enter_context(in_use(path, mark=self.folder.is_leader)))
            answer = self.board.agree(f"{key}/fits", fault, partial(_check_fit, path=path, fits=fits))
            if answer["other"]:
                raise CheckpointError(
                    answer["other"], "correct the config, or use resume: never to begin anew"
                )
            if answer["damaged"]:
                return str(answer["damaged"])
            checkpoint, parts = open_checkpoint(path), engine.parts()
            fault = _fault_of(lambda: _check_keys(checkpoint, parts))
            if not entry["everywhere"]:
                fault = self._bring_files(key, checkpoint, parts, fault)
            if not fault:
                steps = int(checkpoint.manifest["optimizer_steps"])
                fault = _fault_of(lambda: engine.load_parts(checkpoint.fill, steps))
            return str(self.board.agree(f"{key}/loaded", fault, _first))

    def _share_manifest(self, key: str, path: Path, entry: JsonObject) -> None:
        """Give the manifest to nodes that lack it, before their ranks read it."""
        if not entry["lacking"]:
            return
        file = path / MANIFEST
        if self.board.rank == entry["source"]:
            self.board.post(f"{key}/manifest", file.read_text())
        if self.board.rank in entry["lacking"]:
            (content,) = self.board.take([f"{key}/manifest"])
            with disk_failures(path):
                path.mkdir(parents=True, exist_ok=True)
                replace_file(file, content.encode())
        self.board.agree(f"{key}/shared", None, lambda _: None)

    def _bring_files(self, key: str, checkpoint: Checkpoint, parts: Sequence[Part], fault: str) -> str:
        """Copy the files that a node lacks and its ranks read from a node that has them."""
        needs = [] if fault else checkpoint.files_for(parts)
        have = [name for name in checkpoint.files if (checkpoint.path / name).is_file()]
        value = {"needs": needs, "have": have if self.folder.is_leader else [], "fault": fault}
        answer = self.board.agree(f"{key}/needs", value, partial(_moves, leaders=self.folder.leaders))
        if not answer["fault"]:
            sizes = {name: int(entry["bytes"]) for name, entry in checkpoint.files.items()}
            exchange_files(checkpoint.path, sizes, [tuple(move) for move in answer["moves"]], self.group)
            self.board.agree(f"{key}/moved", None, lambda _: None)
        return str(answer["fault"])


def _fault_of(work: Callable[[], object]) -> str:
    """Return the message of the CheckpointError that `work` raises, or ""."""
    try:
        work()
    except CheckpointError as error:
        return error.message
    return ""


def _check_fit(faults: Sequence[str], path: Path, fits: Fits) -> dict[str, str]:
    """Return which rank cannot open the checkpoint, or else why it does not fit the training."""
    damaged = _first(faults)
    return {"damaged": damaged, "other": "" if damaged else _fault_of(lambda: fits(open_checkpoint(path)))}


def _first(faults: Sequence[str]) -> str:
    return next(filter(None, faults), "")


def _report(path: Path) -> JsonObject:
    """Return what this folder holds of a checkpoint, without reading its tensors."""
    try:
        checkpoint = open_checkpoint(path)
        have = [name for name in checkpoint.files if (path / name).exists()]
        for name in have:
            check_size(checkpoint, name)
            if not name.endswith(PARTS):
                # A load reads no other file than those of tensors.
                verify_file(checkpoint, name)
        if checkpoint.is_old and len(have) == len(checkpoint.files):
            verify(path)
        digest = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
    except (CheckpointError, OSError) as error:
        return {
            "name": path.name,
            "fault": error.message if isinstance(error, CheckpointError) else str(error),
        }
    return {
        "name": path.name,
        "path": str(path),
        "step": checkpoint.step,
        "state": checkpoint.manifest.get("state", "all"),
        "digest": digest,
        "have": have,
        "count": len(checkpoint.files),
    }


def _order(reports: Sequence[Sequence[JsonObject]], leaders: Sequence[int], named: bool) -> JsonObject:
    """Return the complete checkpoints, newest first, and what is wrong with the others."""
    faults = [entry["fault"] for own in reports for entry in own if "fault" in entry]
    found = [(rank, entry) for rank, own in enumerate(reports) for entry in own if "fault" not in entry]
    candidates, weights = [], []
    found.sort(key=lambda item: (-item[1]["step"], OLD in item[1]["name"], item[1]["digest"]))
    # A step that was being saved again when a run was killed may have its older name on some nodes.
    groups: dict[tuple[int, str], list[tuple[int, JsonObject]]] = {}
    for rank, entry in found:
        groups.setdefault((entry["step"], entry["digest"]), []).append((rank, entry))
    for (step, _), members in groups.items():
        first = members[0][1]
        union = {name for _, entry in members for name in entry["have"]}
        if len(union) < first["count"]:
            missing = first["count"] - len(union)
            faults.append(
                f"{first['path']}: {missing} of its {first['count']} files are on no node of this run"
            )
        elif first["state"] == "weights" and not named:
            weights.append(
                f"{first['path']}: holds weights alone, and training needs the optimizer's moments"
            )
        else:
            names = {rank: entry["name"] for rank, entry in members}
            lacking = [leader for leader in leaders if leader not in names]
            full = not lacking and all(len(entry["have"]) == first["count"] for _, entry in members)
            alone = sum(number == step for number, _ in groups) == 1
            name = first["name"].partition(OLD)[0] if alone else f"{first['name'].partition(OLD)[0]}{OLD}9"
            found_at = {str(rank): own for rank, own in names.items()}
            candidate = {"name": name, "names": found_at, "source": members[0][0]}
            candidates.append({**candidate, "lacking": lacking, "everywhere": full})
    return {"candidates": candidates, "faults": faults, "weights": weights}


def _moves(values: Sequence[JsonObject], leaders: Sequence[int]) -> JsonObject:
    """Return which file goes from which leader to which."""
    fault = _first([value["fault"] for value in values])
    have = {leader: set(values[leader]["have"]) for leader in set(leaders)}
    lacking = {
        (name, leaders[rank])
        for rank, value in enumerate(values)
        for name in value["needs"]
        if name not in have[leaders[rank]]
    }
    moves = []
    for name, target in sorted(lacking):
        sources = [leader for leader in sorted(have) if name in have[leader]]
        if not sources:
            fault = fault or f"{name} is on no node of this run"
        else:
            moves.append((name, sources[0], target))
    return {"fault": fault, "moves": moves}


def _check_keys(checkpoint: Checkpoint, parts: Sequence[Part]) -> None:
    """Refuse a checkpoint that lacks tensors of the model, or has them in another shape."""
    wrong = sorted({part.key for part in parts if checkpoint.table.get(part.key) != part.shape})
    if wrong:
        some = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise CheckpointError(f"{checkpoint.path}: lacks tensors of this model or has other shapes: {some}")
