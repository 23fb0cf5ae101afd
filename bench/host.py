"""Time the host and count its calls in a training step and in decoding on a GPU, on any machine, without launches.

    PYTHONPATH=. python -m bench.host [--rounds N]

A GPU waits for Python where the host takes longer to start its work than the GPU to do it. So this compares the host
alone: the trainer with plain eager torch, op by op, in bf16. Tensors are small ones of a CPU, and Triton's kernels are
prepared and not launched. In compiled blocks the compiler's own kernels are a CPU's. The time of a block is the
difference between models of few and of many layers, per layer. Times are processor time of one thread, the least of
rounds in which the subjects alternate: what else runs on the machine makes them longer, never shorter.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import native
from bench.serve.decode import prompts, submitted
from bench.train import peers
from bench.train.spec import ModelWork
from tests.support.suppressed import Calls, Counting, Suppressed, without_launches
from trainer.config.layout import Layout
from trainer.config.model import ModelConfig
from trainer.config.train_config import TrainConfig
from trainer.engine.torch_engine import TorchEngine
from trainer.generate.device_network import DeviceNetwork
from trainer.generate.network import device_network, reader_of
from trainer.model.gpt import GPT
from trainer.parallel.group import Group, Groups
from trainer.plan.resolve import try_config

SMALL = {"hidden": 16, "heads": 2, "sequence": 64, "vocab": 64}
SHAPES: dict[str, dict[str, object]] = {
    "GPT": {},
    "GPT, dropout": {"dropout": 0.1},
    "Llama": {"rotary": True, "norm": "rms", "swiglu": True, "bias": "none", "query_groups": 1},
}
MICROS, TEXTS = (1, 8), (1, 16, 64)
FEW, MANY = 2, 10
PAGES = 512


def config_of(shape: str, layers: int, compiled: str = "off") -> TrainConfig:
    raw = {
        "model": {**SMALL, "layers": layers, **SHAPES[shape]},
        "steps": 9,
        "data": {"prefix": "x"},
        "precision": "bf16",
        "compile": compiled,
        "hardware": {"kind": "cuda"},
    }
    config, faults = try_config(raw, 1)
    assert not faults, faults
    return config


def engine_of(config: TrainConfig, device: Suppressed) -> TorchEngine:
    model = GPT(config.model, native.choose("cuda"), seed=None).to(device.name)
    return TorchEngine(model, config, Groups.of(Group(0, 1, device), Layout.of(1, 1, 1)), device)


def batch_of(micros: int) -> list[tuple[Tensor]]:
    return [(torch.zeros(1, 5, dtype=torch.int64),) for _ in range(micros)]


# ---- counts


def step_calls(config: TrainConfig, micros: int) -> tuple[Calls, Calls]:
    """Return the calls of a step's passes, and those of its end: the norm, the optimizer and the report."""
    counting = Counting()
    with without_launches("meta", counting):
        engine = engine_of(config, Suppressed("cuda", 0, "meta", counting))
        wait, passes = engine.rank_state.wait, list[Calls]()

        def waited() -> None:
            wait()
            passes.append(counting.taken())

        engine.rank_state.wait = waited  # type: ignore[method-assign]
        with counting:
            # A pass is captured when it comes for the second time.
            for seed in range(3):
                end = counting.taken()
                engine.step(batch_of(micros), 1e-3, seed)
        end = counting.taken()
    return passes[-1], end


def token_calls(config: ModelConfig, texts: int, captures: bool) -> Calls:
    """Return the calls of a step of one token per text."""
    counting = Counting()
    with without_launches("meta", counting), counting:
        decoder = Decoder(config, texts, Suppressed("cuda", 0, "meta", counting), captures)
        for _ in range(3):
            counting.taken()
            decoder.step()
        return counting.taken()


class Decoder:
    """Texts of which each step computes one more token."""

    def __init__(self, config: ModelConfig, texts: int, device: Suppressed, captures: bool) -> None:
        read = reader_of(GPT(config, native.choose("cpu", "reference"), seed=None))
        network = DeviceNetwork(device_network(config, read, "bf16", PAGES, device), device)
        network.captures &= captures
        orders = [(ids, 50) for ids in prompts(texts, 3, config.vocab)]
        self.batcher, _ = submitted(network, orders, time.perf_counter, PAGES)
        self.step()

    @torch.inference_mode()
    def step(self) -> None:
        self.batcher.step()


# ---- times


@dataclass(frozen=True)
class Passes:
    """The host's seconds of a step: forward and backward passes, and its end."""

    forward: float
    backward: float
    end: float


def ours(config: TrainConfig) -> Callable[[int], Passes]:
    """Return a function that takes a step with so many micro-batches."""
    engine = engine_of(config, Suppressed("cuda"))
    state, device, clock = engine.rank_state, engine.device, time.thread_time

    def step(micros: int) -> Passes:
        state.clear()
        forward = backward = 0.0
        for number, (tokens,) in enumerate(batch_of(micros)):
            if number == micros - 1:
                state.last_backward()
            began = clock()
            with device.autocast("bf16"):
                loss = engine.model(*engine.model.arguments((tokens,)))
            middle = clock()
            loss.backward()
            forward, backward = forward + middle - began, backward + clock() - middle
        began = clock()
        state.wait()
        state.clip(1.0)
        state.update(1e-3)
        return Passes(forward, backward, clock() - began)

    return step


class Dropping(nn.Module):
    """A part of a plain block whose result is dropped in part."""

    def __init__(self, part: nn.Module, chance: float) -> None:
        super().__init__()
        self.part, self.chance = part, chance

    def forward(self, *given: Tensor) -> Tensor:
        return F.dropout(self.part(*given), self.chance)


def eager(config: TrainConfig) -> Callable[[int], Passes]:
    """Return what `ours` returns, of the model as it is written by hand."""
    own = config.model
    model = {"layers": own.layers, "hidden": own.hidden, "heads": own.heads, "groups": own.groups}
    more = {"sequence": own.sequence, "vocab": own.vocab, "eps": own.eps, "init_std": own.init_std}
    more |= {"inner": own.inner, "norm": own.norm, "rope_base": own.rope.base}
    peer = peers.build("eager", ModelWork({**model, **more}, "bf16", "cpu", 1, 1e-3))
    if own.dropout:
        for block in peer.model.blocks:  # type: ignore[union-attr]
            block.attention = Dropping(block.attention, own.dropout)
            block.feed_forward = Dropping(block.feed_forward, own.dropout)
    clock = time.thread_time

    def step(micros: int) -> Passes:
        forward = backward = 0.0
        for (tokens,) in batch_of(micros):
            began = clock()
            with torch.autocast("cpu", torch.bfloat16):
                loss = peer.run(tokens)
            middle = clock()
            loss.backward()
            forward, backward = forward + middle - began, backward + clock() - middle
        began = clock()
        torch.nn.utils.clip_grad_norm_(peer.kept, 1.0)
        peer.optimizer.step()
        peer.optimizer.zero_grad(set_to_none=True)
        return Passes(forward, backward, clock() - began)

    return step


def least(steps: list[Callable[[], Any]], rounds: int) -> list[Passes]:
    """Return the least of each figure of each step; the steps alternate."""
    for _ in range(3):
        for step in steps:
            step()
    found = [[step() for step in steps] for _ in range(rounds)]
    columns = list(zip(*found, strict=True))
    names = ("forward", "backward", "end")
    return [Passes(*(min(getattr(each, name) for each in column) for name in names)) for column in columns]


def training_rows(rounds: int) -> Iterator[tuple[str, ...]]:
    for shape in SHAPES:
        makers = [(ours, "off"), (ours, "blocks"), (eager, "off")]
        made = [make(config_of(shape, layers, how)) for make, how in makers for layers in (FEW, MANY)]
        for micros in MICROS:
            steps = [partial(step, micros) for step in made]
            # A compilation says how long it took.
            with contextlib.redirect_stdout(sys.stderr):
                few, many, *compiled, other_few, other_many = least(steps, rounds)
            cells = []
            for name in ("forward", "backward"):
                first, blocks, second = (
                    (getattr(more, name) - getattr(less, name)) / (MANY - FEW) / micros * 1e6
                    for less, more in ((few, many), compiled, (other_few, other_many))
                )
                cells += [f"{first:.0f} / {blocks:.0f} / {second:.0f}", f"{first / second:.2f}"]
            layer = [step_calls(config_of(shape, layers), micros)[0] for layers in (FEW, FEW + 1)]
            launches = (layer[1].launches.total() - layer[0].launches.total()) / micros
            end = step_calls(config_of(shape, MANY), micros)[1]
            cells += [f"{launches:.0f}", f"{many.end * 1e6:.0f} / {other_many.end * 1e6:.0f}"]
            yield shape, str(micros), *cells, f"{end.launches.total()}", f"{end.waits.total()}"


def decoding_rows(rounds: int) -> Iterator[tuple[str, ...]]:
    for shape in ("GPT", "Llama"):
        for texts in TEXTS:
            decoders = [
                Decoder(config_of(shape, layers).model, texts, Suppressed("cuda"), captures)
                for layers, captures in ((FEW, False), (MANY, False), (FEW, True))
            ]

            def timed(decoder: Decoder) -> Passes:
                began = time.thread_time()
                decoder.step()
                return Passes(time.thread_time() - began, 0.0, 0.0)

            steps = [partial(timed, decoder) for decoder in decoders]
            less, more = (each.forward for each in least(steps[:2], min(rounds, 40)))
            # Alone, as in reality: after other code, the processor's caches are cold.
            captured = least(steps[2:], min(rounds, 40))[0].forward
            layer = (more - less) / (MANY - FEW)
            calls = [token_calls(config_of(shape, n).model, texts, False) for n in (FEW, FEW + 1)]
            graph = token_calls(config_of(shape, FEW).model, texts, True)
            launches = calls[1].launches.total() - calls[0].launches.total()
            rest = calls[0].launches.total() - FEW * launches
            yield (
                shape, str(texts), f"{layer * 1e6:.0f}", f"{(less - FEW * layer) * 1e6:.0f}",
                f"{captured * 1e6:.0f}", f"{launches}", f"{rest}", f"{graph.launches.total()}",
                f"{graph.waits.total()}",
            )  # fmt: skip


def table(columns: str, rows: Iterator[tuple[str, ...]]) -> None:
    names = columns.split(", ")
    print("| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|", flush=True)
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.host", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("Microseconds: ours op by op / ours in compiled blocks / eager; of a step's end, ours / eager.\n")
    with without_launches("cpu"):
        table(
            "shape, micro-batches, forward of a block, ratio, backward, ratio, launches, end of a step of 10 layers, "
            "launches, waits",
            training_rows(rounds),
        )
        print()
        table(
            "shape, texts, a layer, the rest of a token, a token with a graph, launches of a layer, of the rest, "
            "with a graph, waits",
            decoding_rows(rounds),
        )


if __name__ == "__main__":
    main()
