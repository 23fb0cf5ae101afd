"""A training's checkpoints: rank 0 writes and reads, every rank gives and takes. No disk need be shared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint import store as checkpoints
from trainer.checkpoint.saved import Saved
from trainer.checkpoint.store import Checkpoint
from trainer.config.train_config import TrainConfig
from trainer.engine.optimizer import MOMENTS
from trainer.engine.torch_engine import Engine, TrainState
from trainer.errors import CheckpointError
from trainer.parallel.group import Group


class Checkpointer:
    """Saves and resumes one training below `folder`. Every method is for all ranks together."""

    def __init__(
        self, config: TrainConfig, engine: Engine, group: Group, folder: Path, data: Mapping[str, Any]
    ) -> None:
        """`data`: what tells these corpora, and the order of their samples, from others."""
        self.config, self.engine, self.group, self.folder = config, engine, group, folder
        self.data = dict(data)
        # What a user should know of the resume; on rank 0.
        self.notes: list[str] = []
        # On rank 0.
        self.resumed_from = ""

    def save(self, step: int) -> Saved | None:
        """Rank 0 writes and answers; the others wait, so that none runs into a time-out of its own."""
        began = time.monotonic()
        state = self.engine.state()
        saved = None
        if self.group.rank == 0:
            tensors = {checkpoints.MODEL: state.model, checkpoints.OPTIMIZER: state.optimizer}
            tokenizer = Path(self.config.data.tokenizer) if self.config.data.tokenizer else None
            written = checkpoints.save(self.folder, step, tensors, self._facts(state, step), tokenizer)
            checkpoints.prune(self.folder, self.config.save.keep)
            saved = Saved(step, written.path, written.bytes, time.monotonic() - began)
        self.group.barrier()
        return saved

    def _facts(self, state: TrainState, step: int) -> dict[str, Any]:
        return {
            "optimizer_steps": state.optimizer_steps,
            "consumed_samples": self.config.batches.consumed(step),
            "world": self.group.world,
            "loss_scale": self.engine.loss_scale.state(),
            "config": self.config.as_json(),
            "data": self.data,
            "random": "dropout: (seed, step, rank); data: (data.seed, consumed_samples)",
            "torch": torch.__version__,
            "time": time.time(),
        }

    def resume(self) -> int:
        """Load what the config says into the engine; the steps that it has finished, 0 for a beginning."""
        found, fault = None, ""
        if self.group.rank == 0:
            try:
                found = self._find()
            except CheckpointError as error:
                fault = error.message
        fault, step = self.group.share((fault, found.step if found else 0))
        if fault:
            raise CheckpointError(fault, "correct the config, or use resume: never to begin anew")
        if step:
            taken = self.group.share(found.manifest["optimizer_steps"] if found else 0)
            self.engine.loss_scale.load(
                self.group.share(found.manifest.get("loss_scale", {}) if found else {})
            )
            shapes = self.engine.shapes
            moments = {f"{moment}.{name}": shape for name, shape in shapes.items() for moment in MOMENTS}
            model = self._arriving(shapes, found, checkpoints.MODEL)
            self.engine.load(model, self._arriving(moments, found, checkpoints.OPTIMIZER), taken)
        return step

    def _find(self) -> Checkpoint | None:
        if self.config.resume == "never":
            return None
        if self.config.resume == "auto":
            found, skipped = checkpoints.latest(self.folder)
            self.notes += [f"passed over a checkpoint: {why}" for why in skipped]
        else:
            found = checkpoints.verify(Path(self.config.resume))
        if found:
            self.notes += self._compare(found)
            self.resumed_from = str(found.path)
        return found

    def _compare(self, found: Checkpoint) -> list[str]:
        """Refuse another model or other data; note what changes the course without making it wrong."""
        then, now = dict(found.manifest["config"]), self.config.as_json()
        # What a checkpoint says nothing of was as it is by default.
        plain = TrainConfig().as_json()
        for key in ("model", "optimizer"):
            then[key] = {**plain[key], **then[key]}
        faults = [
            f"model.{key} was {then['model'][key]!r} and is {value!r}"
            for key, value in now["model"].items()
            if then["model"][key] != value and key != "dropout"
        ]
        if found.manifest["data"].get("corpora") != self.data["corpora"]:
            prefixes = ", ".join(source.prefix for source in self.config.data.sources("train"))
            faults.append(f"data: {prefixes}: not what it was trained on (the .idx files are others)")
        if found.manifest["consumed_samples"] != self.config.batches.consumed(found.step):
            faults += [
                f"{key} was {then[key]} and is {now[key]}"
                for key in ("global_batch", "batch_ramp")
                if then[key] != now[key]
            ]
        if found.step > self.config.steps:
            faults.append(f"it is at step {found.step}, and train.steps is {self.config.steps}")
        if faults:
            raise CheckpointError(f"{found.path}: does not fit this config: " + "; ".join(faults))
        pairs = {key: (then[key], now[key]) for key in ("steps", "optimizer", "seed")}
        pairs["order of samples"] = (found.manifest["data"].get("order"), self.data["order"])
        return [
            f"note: {key} was {before!r} at the checkpoint and is {after!r}: not the course of one run"
            for key, (before, after) in pairs.items()
            if before != after
        ]

    def _arriving(
        self, shapes: Mapping[str, tuple[int, ...]], found: Checkpoint | None, file: str
    ) -> Iterator[tuple[str, Tensor]]:
        """Each tensor on every rank; names and shapes are the model's own, so only bytes travel."""
        # On rank 0.
        given = found.tensors(file) if found else {}
        for name, shape in shapes.items():
            whole = torch.zeros(shape, device=self.group.device.name)
            if found:
                whole.copy_(given.pop(name))
            self.group.broadcast([whole])
            yield name, whole
