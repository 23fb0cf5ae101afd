"""The steps `captured` and `failing capture`: trainings by a captured graph next to op by op, to the last bit.

Small models with and without dropout and dropout of attention, as GPT and as Llama, in three types, with one and three
micro-batches. After a pass that reads a value on the host, which no capture allows, training and decoding must go on op
by op and give the same numbers. On a CPU a stand-in of a graph (tests/support/cpu_graph.py) shows that this works.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import native
from bench.hardware.step import emit, part
from bench.serve.decode import prompts, run
from tests.support.cpu_graph import RecordingDevice, captured_steps
from trainer.config.parts import LossScaleConfig
from trainer.config.train_config import TrainConfig
from trainer.device import Device, open_device
from trainer.engine.captured import CapturedRunner
from trainer.engine.torch_engine import TorchEngine
from trainer.generate.device_network import DeviceNetwork
from trainer.generate.network import device_network, reader_of
from trainer.model.gpt import GPT
from trainer.parallel.group import Group, Groups
from trainer.plan.resolve import read_config

TABLE = "captured next to op by op"
SHAPE = {"layers": 2, "hidden": 128, "heads": 4, "sequence": 64, "vocab": 384}
LLAMA = {"rotary": True, "norm": "rms", "swiglu": True, "bias": "none", "query_groups": 2, "tied": False}
FORMS: dict[str, dict[str, object]] = {
    "GPT": {},
    "dropout": {"dropout": 0.1},
    "attention dropout": {"attention_dropout": 0.1},
    "Llama": LLAMA,
}
STEPS, SAMPLES = 5, 4


@dataclass
class Trained:
    """The losses and norms of each step, the state after the last one, and the warnings."""

    figures: list[tuple[float, float]]
    state: list[Tensor]
    captured: int
    warned: list[str]

    def equals(self, other: Trained) -> bool:
        same = all(torch.equal(x, y) for x, y in zip(self.state, other.state, strict=True))
        return same and self.figures == other.figures


def config_of(compiled: str, precision: str, form: Mapping[str, object]) -> TrainConfig:
    raw = {"model": {**SHAPE, **form}, "steps": STEPS, "data": {"prefix": "x"}, "compile": compiled}
    return replace(read_config(raw), precision=precision, loss_scale=LossScaleConfig(initial=8.0))


def engine_of(config: TrainConfig, device: Device) -> TorchEngine:
    model = GPT(config.model, native.choose(device.kind), seed=3).to(device.name)
    return TorchEngine(model, config, Groups.of(Group(0, 1, device), config.layout(1)), device)


def train(engine: TorchEngine, batches: Sequence[Any]) -> Trained:
    """Take a step with each batch."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results = [engine.step(batch, 1e-2, seed) for seed, batch in enumerate(batches)]
    engine.device.synchronize()
    state = [*engine.model.parameters(), *engine.rank_state.optimizer.moments.values()]
    graphs = len(engine.runner.kinds) if isinstance(engine.runner, CapturedRunner) else 0
    figures = [(each.loss, each.grad_norm) for each in results]
    return Trained(figures, [x.detach().clone() for x in state], graphs, [str(each.message) for each in seen])


def drawn(micros: int) -> list[list[tuple[Tensor]]]:
    shape = (STEPS, micros, SAMPLES, SHAPE["sequence"] + 1)
    ids = torch.randint(0, SHAPE["vocab"], shape, generator=torch.Generator().manual_seed(1))
    return [[(micro,) for micro in step] for step in ids]


def compare(device: Device, form: str, precision: str, micros: int) -> None:
    """Print whether a captured training is the one op by op."""
    about = {"model": form, "type": precision, "micro-batches": micros}
    with part(TABLE, **about):
        given, own = drawn(micros), FORMS[form]
        engine = engine_of(config_of("graph", precision, own), device)
        found = train(engine, given)
        right = train(engine_of(config_of("off", precision, own), plain(device)), given)
        again = train(engine_of(config_of("off", precision, own), plain(device)), given)
        fault = getattr(engine.runner, "fault", "not captured at all")
        emit(
            TABLE,
            **about,
            graphs=found.captured,
            **{"equal bits": found.equals(right), "op by op twice": again.equals(right)},
            loss=found.figures[-1][0],
            **{
                "loss difference": max(
                    abs(a[0] - b[0]) for a, b in zip(found.figures, right.figures, strict=True)
                )
            },
            fault=fault,
            warnings="; ".join(dict.fromkeys(text[:100] for text in found.warned)),
        )


def plain(device: Device) -> Device:
    """Return the device without a stand-in of graphs."""
    return Device(device.kind, device.index)


def fail_in_training(device: Device) -> None:
    """Print what happens if a pass reads a value while it is captured."""
    with part("a capture that fails", by="training"):
        engine = engine_of(config_of("graph", "bf16", {"dropout": 0.1}), device)
        embedded = engine.model._embedded  # type: ignore[union-attr]

        def reading(*given: Tensor) -> Tensor:
            x: Tensor = embedded(*given)
            return x if float(x.detach().float().sum()) else x * 2

        with mock.patch.object(engine.model, "_embedded", reading):
            found = train(engine, drawn(3))
        right = train(engine_of(config_of("off", "bf16", {"dropout": 0.1}), plain(device)), drawn(3))
        show_failure("training", found.warned, found.equals(right))


def fail_in_decoding(device: Device) -> None:
    """Print what happens if a step of the decoder reads a value while it is captured."""
    with part("a capture that fails", by="decoding"):
        config = config_of("off", "fp32", LLAMA).model
        model = GPT(config, native.choose("cpu", "reference"), 3).eval()
        orders = [(ids, 12) for ids in prompts(4, 20, config.vocab)]
        texts, warned = [], list[str]()
        for reads in (False, True):
            network = DeviceNetwork(
                device_network(config, reader_of(model), "fp32", 100, plain(device)), device
            )
            network.captures = reads
            through = network.through

            def reading(ids: Tensor, positions: Tensor, wanted: Tensor, through: Any = through) -> Any:
                # The number of results is read on the host.
                positions.nonzero()
                return through(ids, positions, wanted)

            patched = mock.patch.object(network, "through", reading) if reads else contextlib.nullcontext()
            with patched, warnings.catch_warnings(record=True) as seen, torch.inference_mode():
                warnings.simplefilter("always")
                texts.append([clock.ids for clock in run(network, orders, pages=100)[1]])
            warned = [str(each.message) for each in seen]
        show_failure("decoding", warned, texts[0] == texts[1])


def show_failure(by: str, warned: Sequence[str], equal: bool) -> None:
    lines = [text for text in dict.fromkeys(warned) if "op by op" in text]
    went_on = {"continues op by op": equal, "equal": equal, "warned once": len(lines) == 1}
    emit("a capture that fails", by=by, **went_on, line="; ".join(lines)[:300])


def main() -> None:
    kind, part_of_step = sys.argv[1:]
    device = RecordingDevice("cpu") if kind == "cpu" else open_device(kind, 0, 1, None, deterministic=True)
    with captured_steps() if kind == "cpu" else contextlib.nullcontext():
        if part_of_step == "fail":
            fail_in_decoding(device)
            fail_in_training(device)
            return
        for micros, precision, form in product((1, 3), ("bf16", "fp16", "fp32"), FORMS):
            compare(device, form, precision, micros)


if __name__ == "__main__":
    main()
