"""Buckets of ZeRO 1: what each rank owns, when weights are waited for, and the same training as with ZeRO 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn

import native
from tests.support.cpu_graph import RecordedGraph, RecordingDevice, captured_steps
from trainer.config.layout import Layout
from trainer.config.train_config import TrainConfig
from trainer.device import Device
from trainer.engine import buckets
from trainer.engine.buckets import ALIGNMENT, Buckets
from trainer.engine.torch_engine import TorchEngine
from trainer.model.gpt import GPT
from trainer.parallel.group import Group, Groups
from trainer.parallel.pipeline import TIED
from trainer.plan.resolve import read_config

Make = Callable[..., dict[str, Any]]
RANKS = 4


def parameters_of(**sizes: int) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.arange(size).float()) for name, size in sizes.items()}


def test_the_shares_of_all_ranks_are_equally_large_and_together_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4 * 1000)
    sizes = {TIED: 1001, "a": 900, "norm": 5, "b": 99, "c": 3000, "d": 1}
    parameters = parameters_of(**sizes)
    types = {name: torch.float32 if name == "norm" else torch.bfloat16 for name in sizes}
    ranks = [Buckets(parameters, rank, RANKS, types) for rank in range(RANKS)]
    # As a backward pass completes them; the norm has another type, and the tied table is alone.
    assert [bucket.names for bucket in ranks[0].all] == [["d", "c"], ["norm"], ["b", "a"], [TIED]]
    assert all(bucket.size % (RANKS * ALIGNMENT) == 0 for bucket in ranks[0].all)
    flat = torch.zeros(ranks[0].size)
    for name, parameter in parameters.items():
        ranks[0].view(name, flat).copy_(parameter.data)
        shares = [rank.shares({name: parameter}).get(name, flat[:0]) for rank in ranks]
        assert torch.equal(torch.cat(shares), parameter.data)
    for bucket in ranks[0].all:
        for rank, share in enumerate(bucket.of(flat).chunk(RANKS)):
            own = [parameters[name].data[ranks[rank].own[name]] for name in bucket.names]
            assert share.sum() == sum(part.sum() for part in own)


class Sent:
    """Work of a stand-in group: the other rank's share arrives when it is waited for."""

    def __init__(self, share: Tensor, value: float, waited: list[int]) -> None:
        self.share, self.value, self.waited = share, value, waited

    def wait(self) -> None:
        self.waited.append(self.share.numel())
        self.share.fill_(self.value)


def engine_of_rank_1(
    config: TrainConfig, device: Device, waited: list[int], monkeypatch: pytest.MonkeyPatch
) -> TorchEngine:
    """Return the engine of one of two ranks, whose group is a stand-in."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4 * 12000)
    monkeypatch.setattr(Group, "sum_shares", lambda self, x: Sent(x[:0], 0.0, []))
    monkeypatch.setattr(Group, "sum", lambda self, x: None)
    monkeypatch.setattr(
        Group, "gather_shares", lambda self, x: [Sent(x.chunk(self.world)[1 - self.rank], 1e-3, waited)]
    )
    monkeypatch.setattr(Group, "total", lambda self, value: value)
    model = GPT(config.model, native.choose("cpu"), seed=3)
    return TorchEngine(model, config, Groups.of(Group(1, 2, device), Layout.of(2, 1, 1)), device)


def test_a_captured_pass_waits_for_all_weights_before_its_graph_starts(
    raw_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited, starts = list[int](), list[int]()
    replay = RecordedGraph.replay

    def noted(self: RecordedGraph) -> None:
        starts.append(len(waited))
        replay(self)

    monkeypatch.setattr(RecordedGraph, "replay", noted)
    with captured_steps():
        config = read_config(raw_config(zero=1, global_batch=4, compile="graph"))
        engine = engine_of_rank_1(config, RecordingDevice("cpu"), waited, monkeypatch)
        for step in range(4):
            engine.step([(torch.randint(0, 60, (2, 17)),)], 1e-2, step)
    number = len(engine.rank_state.buckets.all)  # type: ignore[attr-defined]
    # The first pass runs op by op; the weights of the update before have arrived at each start.
    assert starts == [number, 2 * number, 3 * number]


def test_a_pass_waits_for_the_weights_of_each_block_when_it_comes_to_it(
    raw_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    config = read_config(raw_config(zero=1, global_batch=4))
    engine = engine_of_rank_1(config, Device("cpu"), waited, monkeypatch)
    model = engine.model
    before: dict[str, int] = {}

    def note(name: str, *_: object) -> None:
        before[name] = len(waited)

    for name, module in model.named_modules():
        module.register_forward_hook(partial(note, name))
    micro = (torch.randint(0, 60, (2, 17)),)
    engine.step([micro], 1e-2, 1)
    assert before["blocks.1"] == 0 and not waited
    before.clear()
    engine.step([micro], 1e-2, 2)
    # Embeddings, two blocks; the last norm shares a bucket with the second block.
    assert 0 < before["tokens"] < before["blocks.0"] < before["blocks.1"] == len(waited)
    assert len(waited) == len(engine.rank_state.buckets.all)  # type: ignore[attr-defined]
    engine.parts()
    assert len(waited) == 2 * before["blocks.1"]
    values = model.tokens.weight.detach().view(-1)
    assert torch.all(values[: engine.rank_state.buckets.own[TIED].start] == 1e-3)  # type: ignore[attr-defined]


def exchange(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=3)
    group = Group(rank, 3, Device("cpu"))
    given = [torch.randn(3072, generator=torch.Generator().manual_seed(one)) for one in range(3)]
    summed = given[rank].clone()
    group.sum_shares(summed).wait()
    right = given[0].clone()
    for other in given[1:]:
        right += other
    share = slice(rank * 1024, (rank + 1) * 1024)
    # In the order of the ranks, so that the place in a bucket has no effect on the bits.
    assert torch.equal(summed[share], right[share])
    weights = summed.bfloat16()
    for work in group.gather_shares(weights):
        work.wait()
    assert torch.equal(weights, right.bfloat16())
    dist.destroy_process_group()


def test_shares_are_summed_in_the_order_of_the_ranks_and_gathered(tmp_path: Path) -> None:
    processes.spawn(exchange, (str(tmp_path),), 3)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_ranks_train_to_the_same_bits_with_zero_0_and_1(
    precision: str, tmp_path: Path, raw_config: Make, run_ranks: Any, metrics: Any
) -> None:
    found = []
    for zero in (0, 1):
        # Clipping would depend on the last bit of the norm, which is added in another order.
        config = raw_config(zero=zero, precision=precision)
        config["optimizer"]["clip"] = 0.0
        if precision == "fp16":
            config["loss_scale"] = {"initial": 2**20, "hysteresis": 1}
        done = run_ranks(2, config, tmp_path / f"{zero}")
        assert [each.returncode for each in done] == [0, 0], done[0].stderr
        steps = metrics(tmp_path / f"{zero}", "step")
        found.append(([step["loss"] for step in steps], [step["grad_norm"] or 0.0 for step in steps]))
    assert found[0][0] == found[1][0]
    # In fp16 the first steps overflow.
    assert (found[0][1][0] == 0.0) is (precision == "fp16") and found[0][1][-1] > 0.0
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6)
