"""What the plan counts, held to what torch keeps: tensor by tensor, to a hundredth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import native
from native import vocabulary
from native.compiled import library
from trainer.config.attention import AttentionCore
from trainer.config.chips import NAMED
from trainer.config.layout import Layout
from trainer.config.model import ModelConfig
from trainer.config.model_sizes import SIZES
from trainer.config.rope import RopeConfig
from trainer.config.train_config import TrainConfig
from trainer.model import layers
from trainer.model.attention.sight import Sight
from trainer.model.dropout import Seeds
from trainer.model.layers import Block
from trainer.model.recompute import Recompute
from trainer.model.rotary import turns
from trainer.parallel.tensor import Parallel
from trainer.plan import activations as kept
from trainer.plan import memory
from trainer.plan.hardware import CPU_LEVELS
from trainer.plan.memory import attention_core, sizes_of, stages
from trainer.plan.resolve import try_config

# The counts are those of the compiled kernels.
pytestmark = pytest.mark.usefixtures("compiled")
Make = Callable[..., dict[str, Any]]
SHAPES = [
    {},
    {"rotary": True},
    {"query_groups": 2},
    {"query_groups": 2, "rotary": True},
    {"swiglu": True},
    {"norm": "rms"},
    {"norm": "rms", "bias": "none", "sandwich_norms": True},
    {"parallel_residual": True, "rotary": True, "rope": RopeConfig(part=0.25)},
    {"query_groups": 2, "rotary": True, "qk_norm": True, "head_dim": 32},
    {"rotary": True, "qk_norm": True, "rope": RopeConfig(interleaved=True)},
    {"window": 64},
    {"norm": "rms", "bias": "none", "sandwich_norms": True, "input_norms": False},
    {"norm": "rms_offset", "swiglu": True, "gate": "gelu_tanh"},
    {"query_groups": 2, "rotary": True, "qk_norm": True, "qk_norm_whole": True},
    {"attention_cap": 5.0},
    {"attention_scale": 0.1},
    {"sinks": True},
    {"experts": 4, "norm": "rms", "swiglu": True},
    {"experts": 4, "norm": "rms", "swiglu": True, "scoring": "sigmoid", "router_bias": True},
    {"dropout": 0.1},
    {"attention_dropout": 0.1},
    {"attention_dropout": 0.1, "query_groups": 2, "rotary": True},
]


def kept_by(run: Callable[[], Tensor], parameters: list[nn.Parameter]) -> int:
    """Bytes of every storage that a graph keeps, parameters left out."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    seen: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage()
        if place.data_ptr() not in known:
            seen[place.data_ptr()] = place.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(seen.values())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape) or "plain")
@pytest.mark.parametrize(("samples", "sequence"), [(1, 256), (3, 300)])
@pytest.mark.parametrize(
    ("kind", "precision"), [("cpu", "fp32"), ("cpu", "bf16"), ("npu", "bf16"), ("npu", "bf16, cast")]
)
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_a_blocks_activations_are_counted_as_torch_keeps_them(
    shape: dict[str, Any], samples: int, sequence: int, precision: str, mode: str, kind: str
) -> None:
    """By a CPU's kernels, those that this processor has, and by plain torch, which is what a device without has."""
    chip = NAMED["910A"] if kind == "npu" else NAMED[CPU_LEVELS[library.attention_level()]]
    core = attention_core(chip, precision.removesuffix(", cast"))
    check_a_block(shape, samples, sequence, precision, Recompute(mode), kind, core)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape) or "plain")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_results_of_norms_that_are_computed_again_are_not_kept(
    shape: dict[str, Any], precision: str
) -> None:
    core = attention_core(NAMED[CPU_LEVELS[library.attention_level()]], precision)
    for mode in ("none", "selective"):
        check_a_block(shape, 3, 300, precision, Recompute(mode, norms=True), "cpu", core)


@pytest.fixture
def four_ranks() -> Iterator[dist.ProcessGroup]:
    """A group of four ranks of which only this one exists: exchanges have shapes and no meaning."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def sequence_parallel_block(
    shape: dict[str, Any], group: dist.ProcessGroup, sequence: bool
) -> tuple[int, int]:
    """Return the bytes that torch keeps for a block of one of four tensor parallel ranks, and those planned."""
    model = ModelConfig(layers=1, hidden=128, heads=8, sequence=256, **shape)
    block = Block(model, native.choose("cpu"), Parallel(1, 4, group, sequence)).bfloat16()
    for name, parameter in block.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if "norm" in name else torch.bfloat16)
    x = torch.randn(2, 64 if sequence else 256, 128, dtype=torch.bfloat16, requires_grad=True)
    found = kept_by(lambda: block(x * 1.0), list(block.parameters()))
    core = attention_core(NAMED[CPU_LEVELS[library.attention_level()]], "bf16")
    return found, kept.layer(kept.MicroBatch(model, 2, 2, "cpu", core, 4, sequence))


@pytest.mark.parametrize(
    "shape", [{}, {"swiglu": True}, {"dropout": 0.1}], ids=lambda shape: "-".join(shape) or "plain"
)
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_a_block_of_tensor_parallel_ranks_is_counted_as_torch_keeps_it(
    shape: dict[str, Any], sequence: bool, four_ranks: dist.ProcessGroup
) -> None:
    found, counted = sequence_parallel_block(shape, four_ranks, sequence)
    assert counted == pytest.approx(found, rel=0.02)


def test_sequence_parallel_keeps_a_fourth_of_what_tensor_parallel_leaves_whole(
    four_ranks: dist.ProcessGroup,
) -> None:
    """By the formula of Megatron-LM, everything except the scores is divided: 34 bytes a token and hidden size / 4."""
    (whole, _), (divided, _) = (
        sequence_parallel_block({}, four_ranks, sequence) for sequence in (False, True)
    )
    inputs = 4 * 2 * 2 * 256 * 128
    # Norms' inputs and what enters the matrices, of which a fourth is left.
    assert whole - divided == pytest.approx(inputs * 3 / 4, rel=0.02)


def torch_dropout_add(
    ops: native.Choice, x: Tensor, residual: Tensor, probability: float, _: Seeds
) -> Tensor:
    return residual + F.dropout(x, probability)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, layer_norm(total, *rest)


def check_a_block(
    shape: dict[str, Any],
    samples: int,
    sequence: int,
    precision: str,
    recompute: Recompute,
    kind: str,
    core: AttentionCore,
) -> None:
    """Compare the count for one block with the bytes that torch keeps for it."""
    model = ModelConfig(layers=1, hidden=64, heads=4, sequence=sequence, **shape)
    ops = native.choose("cpu", "auto" if kind == "cpu" else "reference")
    if kind == "npu" and precision == "bf16":
        # CANN's layer norm makes no fp32 copies, and neither does torch's.
        ops.layer_norm, ops.add_layer_norm = layer_norm, add_layer_norm  # type: ignore[method-assign]
    block = Block(model, ops, recompute=recompute)
    x = torch.randn(samples, sequence, 64, requires_grad=True)
    if precision == "bf16":
        x = x.detach().bfloat16().requires_grad_()
        for name, parameter in block.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if "norm" in name else torch.bfloat16)
    turning = turns(torch.arange(sequence), model) if model.rotary else None
    mask = native.Mask(model.window if model.window < sequence else 0)
    # Ascend has no kernel for it.
    dropout = layers.dropout_add if kind == "cpu" else torch_dropout_add
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision != "fp32")
    with autocast, patch.object(layers, "dropout_add", dropout):
        found = kept_by(lambda: block(x * 1.0, Sight(mask, turning)), list(block.parameters()))
    cast = precision == "bf16, cast"
    width, norms = 4 if precision == "fp32" else 2, recompute.norms
    one = kept.MicroBatch(model, samples, width, kind, core, cast=cast, norms_again=norms)
    # Too little to be counted; in bf16 each use has its copy.
    angles = 0 if turning is None else 8 * sequence * (model.rotary_size // 2)
    counted = kept.layer(one, recompute.mode == "selective") + kept.cast_layer(one)
    assert counted == pytest.approx(found - angles, rel=0.01)


def config_of(raw: dict[str, Any], world: int = 1) -> TrainConfig:
    config, faults = try_config({"steps": 1, "data": {"prefix": "x"}, **raw}, world)
    assert not faults, faults
    return config


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_every_number_of_the_model_is_on_some_rank(tensor: int, pipeline: int) -> None:
    model = SIZES["gpt2-345M"]
    world = tensor * pipeline
    parallel = {"tensor": tensor, "pipeline": pipeline}
    config = config_of(
        {"model": "gpt2-345M", "micro_batch": 1, "global_batch": 8, "parallel": parallel}, world
    )
    found = sum(sizes_of(config, Layout(1, tensor, pipeline), stage).all for stage in range(pipeline))
    table = model.padded(tensor) // tensor * model.hidden
    twice = table if pipeline > 1 else 0
    whole = model.layers * 6 * model.hidden + 2 * model.hidden + model.sequence * model.hidden
    cut = model.parameters() - whole - model.vocab * model.hidden
    assert found == cut // tensor + whole + table + twice


def test_zero_divides_moments_then_gradients_then_weights() -> None:
    raw = {"model": "gpt2-345M", "micro_batch": 1, "global_batch": 8}
    need = [stages(config_of({**raw, "zero": zero}, 4), Layout(4))[0].memory for zero in range(4)]
    one = need[0]
    assert [m.optimizer * 4 for m in need[1:]] == [one.optimizer] * 3
    assert [m.gradients * 4 for m in need[2:]] == [one.gradients] * 2 and need[1].gradients == one.gradients
    assert [m.weights * 4 for m in need[2:]] == [one.weights] * 2 and need[2].buffers > need[3].buffers


def test_recomputation_keeps_less_and_every_kth_layer_less_still() -> None:
    raw = {"model": "gpt2-345M", "micro_batch": 4, "precision": "bf16"}
    modes: list[Any] = ["none", "selective", "full", {"mode": "full", "every": 4}]
    need = [stages(config_of({**raw, "recompute": mode}), Layout())[0] for mode in modes]
    kept = [stage.activations for stage in need]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 4
    assert need[0].memory.total > need[2].memory.total


def test_the_first_stage_keeps_the_most_micro_batches() -> None:
    raw = {"model": "gpt2-345M", "micro_batch": 1, "global_batch": 16, "parallel": {"pipeline": 4}}
    found = stages(config_of(raw, 4), Layout(1, 1, 4))
    needs = [stage.activations for stage in found]
    assert needs == sorted(needs, reverse=True) and needs[0] > 3 * needs[3]
    assert [stage.layers for stage in found] == [((0, 6),), ((6, 12),), ((12, 18),), ((18, 24),)]


def test_a_cpu_stores_no_results_of_norms_where_they_can_be_computed_again() -> None:
    raw = {"model": "gpt2-345M", "micro_batch": 1}
    cases: list[dict[str, Any]] = [{}, {"engine": "deepspeed"}, {"hardware": {"kind": "cuda"}}]
    configs = [config_of({**raw, **case}) for case in cases]
    assert [memory.micro_batch_of(config, Layout()).norms_again for config in configs] == [True, False, False]


def test_a_large_device_computes_the_loss_of_more_tokens_at_a_time() -> None:
    model = {"name": "gpt2-345M", "vocab": 151936}
    need = []
    for memory_gb in (24, 141):
        hardware = {"kind": "cuda", "memory": memory_gb}
        raw = {"model": model, "micro_batch": 8, "precision": "bf16", "hardware": hardware}
        (stage,) = stages(config_of(raw), Layout())
        need.append(stage.memory.logits)
    whole = 8 * 1024 * 2 * 151936
    assert need[0] == pytest.approx(1 << 30, rel=0.01) and need[1] == pytest.approx(whole, rel=0.01)


# Model, global batch, and the peak in bytes that the trainer reported on an H200 (torch 2.11, 8 x 1,024 tokens, bf16).
ON_AN_H200 = [
    ("gpt2-345M", 8, 10_379_503_104),
    ("gpt2-345M", 64, 11_832_829_952),
    ("gpt2-1.3B", 8, 28_899_821_056),
]


@pytest.mark.parametrize(("model", "batch", "measured"), ON_AN_H200)
def test_the_peak_measured_on_a_card_is_explained_by_what_is_allocated(
    model: str, batch: int, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = {"kind": "cuda"}
    raw = {"model": model, "micro_batch": 8, "global_batch": batch, "precision": "bf16", "hardware": hardware}
    (now,) = stages(config_of(raw), Layout())
    # The loss of that version computed logits of 256 MB at a time.
    monkeypatch.setattr(vocabulary, "PIECE", 256 << 20)
    monkeypatch.setattr(vocabulary, "SHARE", 1 << 20)
    (then,) = stages(config_of(raw), Layout())
    assert then.memory.total == pytest.approx(measured, rel=0.01)
    assert now.memory.total == pytest.approx(measured, rel=0.05)
