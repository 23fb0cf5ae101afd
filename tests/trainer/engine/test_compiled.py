"""Blocks as compiled code: the losses are those of op by op within rounding, and a compiler's fault ends nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch import Tensor
from torch._dynamo import exc

import native
from tests.trainer.engine.test_captured import EXPERTS, LLAMA, SHAPE
from trainer.config.layout import Layout
from trainer.config.train_config import TrainConfig
from trainer.device import Device
from trainer.engine.compiled import CompiledBlocks
from trainer.engine.torch_engine import TorchEngine
from trainer.model.gpt import GPT
from trainer.model.layers import Block
from trainer.model.recompute import Recompute
from trainer.parallel.group import Group, Groups
from trainer.plan.resolve import try_config

Ranks = Callable[..., Any]
Make = Callable[..., dict[str, Any]]
Read = Callable[..., list[dict[str, Any]]]


def config_of(compiled: str, model: dict[str, Any], **more: Any) -> TrainConfig:
    raw = {"model": {**SHAPE, **model}, "steps": 9, "data": {"prefix": "x"}, "compile": compiled, **more}
    config, faults = try_config(raw, 1)
    assert not faults, faults
    return config


def trained(config: TrainConfig, lengths: list[int]) -> tuple[list[float], TorchEngine]:
    """Return the loss and norm of a step for each length of its samples."""
    recompute = Recompute(config.recompute.mode, norms=True)
    model, device = GPT(config.model, native.choose("cpu"), seed=3, recompute=recompute), Device("cpu")
    engine = TorchEngine(model, config, Groups.of(Group(0, 1, device), Layout.of(1, 1, 1)), device)
    drawn = torch.Generator().manual_seed(1)
    figures = []
    for seed, length in enumerate(lengths):
        batch = [(torch.randint(0, 64, (2, length), generator=drawn),) for _ in range(2)]
        result = engine.step(batch, 1e-2, seed)
        figures += [result.loss, result.grad_norm]
    figures.append(engine.evaluate([[(torch.randint(0, 64, (2, 17), generator=drawn),)]]))
    return figures, engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture
def cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    yield folder
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "lengths", "more"),
    [
        ({"dropout": 0.1, "attention_dropout": 0.1}, [17, 11], {"recompute": "full"}),
        ({**LLAMA, **EXPERTS}, [17, 17], {"precision": "bf16"}),
    ],
    ids=["dropout, lengths, recompute", "llama, experts, bf16"],
)
def test_losses_of_compiled_blocks_are_those_op_by_op_within_rounding(
    model: dict[str, Any], lengths: list[int], more: dict[str, Any], cache: Path, capsys: Any
) -> None:
    right, _ = trained(config_of("off", model, **more), lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found, engine = trained(config_of("blocks", model, **more), lengths)
    bf16 = more.get("precision") == "bf16"
    assert found == pytest.approx(right, rel=1e-2 if bf16 else 2e-5)
    runner = engine.model.blocks["0"].run
    assert isinstance(runner, CompiledBlocks) and runner is engine.model.blocks["1"].run
    # One graph for all blocks of a shape; with other lengths, one for any length.
    assert 1 <= runner.made <= len(set(lengths))
    assert capsys.readouterr().out.count("a block was compiled in") == runner.made
    assert any(cache.iterdir())
    # A search for a layer that is not finite looks at every module.
    seen: list[int] = []
    engine.model.blocks["1"].norm_2.register_forward_hook(lambda *_: seen.append(1))
    engine.model.observed = True
    engine.step([(torch.zeros(2, 17, dtype=torch.int64),)], 1e-2, 3)
    assert seen


@pytest.mark.parametrize("fault", ["no compiler", "no assembler for the backward pass"])
def test_without_a_compiler_all_runs_op_by_op_after_one_line(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    if fault == "no compiler":
        monkeypatch.setattr(inductor.cpp, "cxx", (None, "/missing"))
    else:
        monkeypatch.setattr(CompiledBlocks, "_compile_backward", lambda *_: (tmp_path / "ptxas").read_bytes())
    with pytest.warns(RuntimeWarning, match=r"run op by op, not in compiled blocks: \w+: ") as told:
        found, _ = trained(config_of("blocks", {"dropout": 0.1}), [17, 11])
    torch.compiler.reset()
    assert len([each for each in told if "op by op" in str(each.message)]) == 1
    assert found == trained(config_of("off", {"dropout": 0.1}), [17, 11])[0]


def test_beyond_the_limit_of_recompilations_blocks_run_op_by_op(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(block: Block, x: Tensor, *rest: Any) -> Tensor:
        if x.shape[1] == 10:
            raise exc.FailOnRecompileLimitHit("recompile_limit reached\nmore")
        return block.compute(x, *rest)

    monkeypatch.setattr(torch, "compile", lambda *_, **__: limited)
    config = config_of("blocks", {"dropout": 0.1}, recompute="full")
    with pytest.warns(RuntimeWarning, match="some blocks run op by op, .*limit reached more") as told:
        found, engine = trained(config, [17, 11, 11, 17])
    assert len(told) == 1 and len(engine.model.blocks["0"].run.failed) == 1
    assert found == trained(config_of("off", {"dropout": 0.1}, recompute="full"), [17, 11, 11, 17])[0]


@pytest.mark.slow
def test_a_pipeline_compiles_its_blocks_and_a_restart_finds_them(
    tmp_path: Path, raw_config: Make, run_ranks: Ranks, metrics: Read
) -> None:
    losses, code = [], []
    for name, how in (("off", "off"), ("first", "blocks"), ("again", "blocks")):
        config = raw_config(parallel={"pipeline": 2}, micro_batch=1, zero=1, compile=how)
        done = run_ranks(2, config, tmp_path / name, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "inductor"))
        assert [each.returncode for each in done] == [0, 0], done[0].stderr
        assert ["a block was compiled in" in each.stdout for each in done] == [how == "blocks"] * 2
        losses.append([line["loss"] for line in metrics(tmp_path / name, "step")])
        code.append(set((tmp_path / "inductor").glob("**/*.so")))
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-5)
    assert code[1] and code[1] == code[2]


@pytest.mark.parametrize(
    ("changes", "world", "reason"),
    [
        ({"parallel": {"tensor": 2}}, 2, "parallel ranks exchange"),
        ({"zero": 3}, 2, "zero is 3"),
        ({"hardware": {"kind": "npu"}}, 1, "for an NPU"),
    ],
)
def test_blocks_that_cannot_be_compiled_are_refused_with_the_reason(
    changes: dict[str, Any], world: int, reason: str
) -> None:
    raw = {"model": SHAPE, "steps": 1, "data": {"prefix": "x"}, "compile": "blocks", **changes}
    _, faults = try_config(raw, world)
    assert [(fault.key, "use compile" in fault.remedy) for fault in faults] == [("train.compile", True)]
    assert reason in faults[0].what
    assert not try_config({**raw, "compile": "auto"}, world)[1]


def test_auto_takes_blocks_on_a_gpu_where_no_graph_is_possible() -> None:
    for changes, world, found in (
        ({}, 1, (True, False)),
        ({"parallel": {"pipeline": 2}}, 2, (False, True)),
        ({"parallel": {"tensor": 2}}, 2, (False, False)),
    ):
        config, faults = try_config({"model": SHAPE, "steps": 1, "data": {"prefix": "x"}, **changes}, world)
        assert not faults
        assert (config.captures("cuda"), config.compiles_blocks("cuda")) == found
        assert not config.compiles_blocks("cpu") and not config.compiles_blocks("npu")
