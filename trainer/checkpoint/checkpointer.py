"""The checkpoints of one training: the methods for its loop and its start."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from clusterctl.wire.metrics import Saved, SaveSkipped
from trainer.checkpoint.background import BackgroundSave, Staging
from trainer.checkpoint.board import Board
from trainer.checkpoint.folders import meet_at
from trainer.checkpoint.keep import remove_unfinished
from trainer.checkpoint.manifest import BaseWeights, Manifest
from trainer.checkpoint.names import Shape, tensor_table
from trainer.checkpoint.part import MOMENTS, HasParts, Part
from trainer.checkpoint.resume import Loader
from trainer.checkpoint.save import SaveOrder, save_parts
from trainer.checkpoint.store import Checkpoint, folder_of
from trainer.config.data import DataIdentity
from trainer.config.train_config import TrainConfig
from trainer.errors import CheckpointError
from trainer.files import sha256
from trainer.parallel.group import Group
from trainer.side_files import CHAT_TEMPLATE, GENERATION, TOKENIZER, SideFiles

# Bytes of one rank from which saving in the background, with a copy in memory, is worthwhile.
SMALL = 64 << 20
Report = Saved | SaveSkipped


class LossScaleState(Protocol):
    """The loss scale of fp16 in the form for checkpoints."""

    def state(self) -> dict[str, float]:
        """Return the state that a resume needs."""

    def load(self, state: Mapping[str, float]) -> None:
        """Continue from such a state."""


class SavedEngine(HasParts, Protocol):
    """The engine that is saved and resumed."""

    shapes: Mapping[str, Shape]
    """The shape of each whole parameter."""

    @property
    def loss_scale(self) -> LossScaleState:
        """Return fp16's loss scale."""


@dataclass(frozen=True)
class Progress:
    """The progress of a training when it saves."""

    step: int
    loss: float | None = None
    eval_loss: float | None = None
    accuracy: float | None = None
    """The last measured accuracy."""
    tokens: int | None = None
    """The tokens that were read, if samples vary in length; None: as the config says."""


class Checkpointer:
    """Saves and resumes one training in `folder`. Every method is for all ranks together."""

    def __init__(
        self,
        config: TrainConfig,
        engine: SavedEngine,
        group: Group,
        folder: Path,
        data: DataIdentity,
        tokenizer: Path | None = None,
        generation: Path | None = None,
    ) -> None:
        """`data` identifies these corpora and the order of their samples; `tokenizer` is a tokenizer.json;
        `generation` is the generation_config.json of the initial weights."""
        self.config, self.engine, self.group = config, engine, group
        self.data = data
        self.tokenizer, self.generation = tokenizer, generation
        # Notes for the user about the resume, on every rank.
        self.notes: list[str] = []
        self.resumed_from = ""
        # The tokens that were read before the first step of this process.
        self.tokens = 0
        # The weights that adapters are added to.
        self.base: BaseWeights | None = None
        self.folder = meet_at(folder, group)
        if self.folder.is_leader:
            remove_unfinished(folder)
        token = group.share(uuid.uuid4().hex[:12])
        self.board = Board(group, f"checkpoints-{token}")
        self.table = tensor_table(engine.shapes, config.save.state == "all")
        self._token, self._count, self._resumes = token, 0, 0
        self._staging = Staging(group.device.name)
        self._writing: BackgroundSave | None = None
        self._in_background: bool | None = None

    def require_shared(self, folder: str) -> None:
        """Raise a CheckpointError if a folder is named that all nodes must share, and they do not."""
        if folder and len(self.folder.all_leaders) > 1:
            problem = f"train.save.dir: {folder}: the nodes do not share it"
            raise CheckpointError(problem, "mount one disk there on every node, or leave dir out")

    def save(self, progress: Progress, last: bool = False) -> list[Report]:
        """Save, or start to; return the checkpoint that was completed since the last call. `last`: training ends
        here.
        """
        began = time.monotonic()
        reports: list[Report] = []
        if self._in_background and self.config.save.busy == "skip" and not last:
            writing = 0 if self._writing is None or self._writing.is_over else self._writing.step
            # Rank 0 decides, because the threads of the ranks do not end at the same time.
            if step := self.group.share(writing):
                return [SaveSkipped(progress.step, step)]
        reports += self.finish()
        parts = self._owned()
        in_background = self._is_large(parts) and not last
        work = partial(self._saved, self._order(progress, self._reads_back(in_background or last)), began)
        if not in_background:
            saved = work(parts, 0.0)
            return [*reports, saved]
        copies = self._staging.copy(parts)
        stall = time.monotonic() - began
        self._writing = BackgroundSave(progress.step, partial(work, copies, stall))
        return reports

    def _saved(self, order: SaveOrder, began: float, parts: Sequence[Part], stall: float) -> Saved:
        """Write and return the report; `stall` is 0 unless this thread is in the background."""
        size = save_parts(order, parts, self.folder, self.board, nice=10 if stall else 0)
        path, seconds = folder_of(self.folder.path, order.manifest.step), time.monotonic() - began
        return Saved(order.manifest.step, path, size, seconds, stall or seconds, background=stall > 0)

    def done(self) -> list[Report]:
        """Return a save that ended in the background since the last call; raise its failure."""
        return self.finish() if self._writing is not None and self._writing.is_over else []

    def finish(self) -> list[Report]:
        """Wait for a save in the background and return it."""
        writing, self._writing = self._writing, None
        return [] if writing is None else [writing.result()]

    def _owned(self) -> list[Part]:
        """Return the parts that this rank writes."""
        wanted = self.config.save.state == "all"
        parts = [part for part in self.engine.parts() if part.owned]
        return [part for part in parts if wanted or not part.key.startswith(MOMENTS)]

    def _is_large(self, parts: Sequence[Part]) -> bool:
        """Return whether saves go to the background; all ranks decide alike, at the first save."""
        if self._in_background is None:
            size = sum(part.tensor.numel() * part.tensor.element_size() for part in parts)
            wanted = {"always": True, "never": False}.get(self.config.save.background)
            self._in_background = self.group.any(size > SMALL) if wanted is None else wanted
        return self._in_background

    def _reads_back(self, without_stall: bool) -> bool:
        """Return whether the files are read back; by default if training does not wait, or if they are small."""
        by_default = without_stall or self.config.save.background != "never"
        return {"always": True, "never": False}.get(self.config.save.verify, by_default)

    def _order(self, progress: Progress, read_back: bool) -> SaveOrder:
        self._count += 1
        manifest, token = self._manifest(progress), f"{self._token}-{self._count}"
        return SaveOrder(manifest, token, self.config.save.keep, self._texts(), read_back)

    def _texts(self) -> dict[str, Path]:
        """Return the tokenizer, and files next to it that say how messages are rendered and which tokens end a text."""
        if self.tokenizer is None:
            return {}
        found = SideFiles.beside(Path(self.config.data.tokenizer)).files
        more = {name: file for name, file in found.items() if name != TOKENIZER and isinstance(file, Path)}
        if self.generation is not None:
            more.setdefault(GENERATION, self.generation)
        if self.config.tune.template:
            more[CHAT_TEMPLATE] = Path(self.config.tune.template)
        return {TOKENIZER: self.tokenizer, **more}

    def _manifest(self, progress: Progress) -> Manifest:
        config, world = self.config, self.group.world
        layout = {
            "world": world,
            **config.layout(world).as_json(),
            "sequence_parallel": config.parallel.sequence,
            "zero": config.zero,
            "engine": config.engine,
            "precision": config.precision,
        }
        return Manifest(
            progress.step,
            config,
            self.table,
            state=config.save.state,
            optimizer_steps=self.engine.optimizer_steps,
            consumed_samples=config.batches.consumed(progress.step),
            tokens=config.tokens(progress.step) if progress.tokens is None else progress.tokens,
            loss=progress.loss,
            eval_loss=progress.eval_loss,
            accuracy=progress.accuracy,
            loss_scale=self.engine.loss_scale.state(),
            data=self.data,
            base=self.base,
            about={
                "schedule": "a function of config.optimizer and consumed_samples",
                "layout": layout,
                "random": "dropout: (seed, step, rank); data: (data.seed, consumed_samples)",
                "torch": torch.__version__,
                "time": time.time(),
            },
        )

    def resume(self) -> int:
        """Load what the config names into the engine; return its finished steps, 0 for a new training."""
        if self.config.resume == "never":
            return 0
        named = None if self.config.resume == "auto" else Path(self.config.resume)
        # Entries of an earlier resume must not be read by this one.
        self._resumes += 1
        board = Board(self.group, f"resume-{self._token}-{self._resumes}")
        loader = Loader(self.folder, board, self.group)
        checkpoint = loader.load(named, self.engine, self._refuse_another)
        self.notes += loader.notes
        if checkpoint is None:
            return 0
        self.notes += self._changes(checkpoint)
        self.resumed_from = str(checkpoint.path)
        self.tokens = checkpoint.manifest.tokens or self.config.tokens(checkpoint.step)
        self.engine.loss_scale.load(checkpoint.manifest.loss_scale)
        return checkpoint.step

    def _refuse_another(self, found: Checkpoint) -> None:
        """Raise a CheckpointError if a checkpoint is of another model, other data or another tokenizer."""
        recorded = found.manifest
        then, now = recorded.config.as_json(), self.config.as_json()
        faults = [
            f"model.{key} was {then['model'][key]!r} and is {value!r}"
            for key, value in now["model"].items()
            if then["model"][key] != value and key != "dropout"
        ]
        if not self.config.resume_other_data:
            faults += self._other_data(found)
        if recorded.consumed_samples != self.config.batches.consumed(found.step):
            faults += [
                f"{key} was {then[key]} and is {now[key]}"
                for key in ("global_batch", "batch_ramp")
                if then[key] != now[key]
            ]
        bases = (base and base.fingerprint for base in (recorded.base, self.base))
        if len(set(bases)) > 1:
            faults.append("its adapters belong to other weights than those of train.init")
        if found.step > self.config.steps:
            faults.append(f"it is at step {found.step}, and train.steps is {self.config.steps}")
        if recorded.state == "weights":
            faults.append("it holds weights alone, and training needs the optimizer's moments")
        if faults:
            raise CheckpointError(f"{found.path}: does not fit this config: " + "; ".join(faults))

    def _other_data(self, found: Checkpoint) -> list[str]:
        faults = []
        then = found.manifest.data
        prefixes = ", ".join(source.prefix for source in self.config.data.sources("train"))
        if then.corpora != self.data.corpora:
            faults.append(f"data: {prefixes}: not what it was trained on (the .idx files are others)")
        elif then.tokens not in (None, self.data.tokens):
            faults.append(f"data: {prefixes}: not what it was trained on (the .bin files hold other tokens)")
        own = self.tokenizer
        if own is not None and TOKENIZER in found.files and sha256(own) != found.files[TOKENIZER].sha256:
            name = self.config.data.tokenizer
            faults.append(f"data.tokenizer: {name}: not the one that it was trained with")
        if faults:
            faults.append("resume_other_data: true allows that")
        return faults

    def _changes(self, found: Checkpoint) -> list[str]:
        """Return a note for each changed setting that changes the course of the training but is allowed."""
        then, now = found.manifest.config.as_json(), self.config.as_json()
        # The results do not depend on how masters are stored.
        now["optimizer"]["masters"] = then["optimizer"]["masters"]
        pairs = {key: (then[key], now[key]) for key in ("steps", "optimizer", "seed")}
        order = found.manifest.data.order
        # Old checkpoints have no `ends`.
        pairs["order of samples"] = (
            order,
            {k: v for k, v in self.data.order.items() if k in order or k != "ends"},
        )
        return [
            f"note: {key} was {before!r} at the checkpoint and is {after!r}: not the course of one run"
            for key, (before, after) in pairs.items()
            if before != after
        ]
