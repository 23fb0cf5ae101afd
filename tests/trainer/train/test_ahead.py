"""Batches that are read while the device computes the step before, with a stand-in for the device's streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clusterctl.wire.metrics import Ended
from trainer import device
from trainer.device import CopiedAhead, Device
from trainer.samples.dataset import Batches
from trainer.train import assemble
from trainer.train.loop import Training, train

# Seconds that a read takes, more than a step.
SLOW = 0.2


class Stream:
    """What torch.cuda has of streams; `notes` gets what happens."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def Stream(self) -> Stream:
        return Stream(self.notes)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        assert stream is not self
        self.notes.append("copy")
        yield

    def record_event(self) -> str:
        return "copied"

    def current_stream(self) -> Stream:
        return self

    def wait_event(self, event: str) -> None:
        self.notes.append(event)


def trained(
    folder: Path, train_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> list[Tensor]:
    """Train as on a GPU; note the order of reads, copies and waits; return all copies."""
    copies = list[Tensor]()
    runtime = Stream(notes)
    fetch, read = Device.fetch, Batches.at

    def ahead(micro: Sequence[Tensor]) -> Sequence[Tensor]:
        found = Device("cuda").ahead(micro)
        assert isinstance(found, CopiedAhead)
        copies.extend(found)
        return found

    def noted(self: Device, values: Any) -> Callable[[], list[float]]:
        numbers = fetch(self, values)
        notes.append("queued")
        return lambda: (notes.append("result"), numbers())[1]

    def read_noted(self: Batches, *given: int) -> Any:
        notes.append("read")
        time.sleep(SLOW)
        return read(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(device, "_runtime", lambda kind: runtime)
        patch.setattr(device, "_side_stream", lambda kind: runtime.Stream())
        patch.setattr(Device, "pinned", lambda self, tensor: tensor)
        patch.setattr(Device, "name", "cpu")
        patch.setattr(Tensor, "record_stream", lambda self, stream: notes.append("kept"))
        patch.setattr(Device, "fetch", noted)
        patch.setattr(Batches, "at", read_noted)

        def on_a_gpu(run: Training, step: int) -> Ended:
            return train(replace(run, ahead=ahead), step)

        patch.setattr(assemble, "train", on_a_gpu)
        train_here(folder, steps=3, global_batch=2, eval={"batches": 0})
    return copies


def test_each_batch_is_read_and_copied_while_the_step_before_computes(
    tmp_path: Path,
    train_here: Callable[..., Any],
    metrics: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = list[str]()
    copies = trained(tmp_path / "ahead", train_here, monkeypatch, notes)
    first = ["read", "queued", "read", "copy", "result"]
    second = ["copied", "kept", "queued", "read", "copy", "result"]
    # After the last step there is nothing to read.
    assert notes == [*first, *second, "copied", "kept", "queued", "result"]
    assert len(copies) == 2
    train_here(tmp_path / "plain", steps=3, global_batch=2, eval={"batches": 0})
    plain, ahead = (
        [line["loss"] for line in metrics(tmp_path / name, "step")] for name in ("plain", "ahead")
    )
    assert ahead == plain
    # A slow disk makes a slow rank: what the step reads ahead is its own time.
    for step in metrics(tmp_path / "ahead", "step")[:2]:
        assert SLOW <= step["own_seconds"] <= step["step_seconds"]


def test_an_npu_copies_nothing_ahead() -> None:
    micro = (torch.zeros(2, 3),)
    assert Device("npu").ahead(micro) is micro
