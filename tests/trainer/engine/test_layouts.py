"""Every layout gives the losses of one process, and resumes from the checkpoint of any other layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.checkpoint.store import verify

Ranks = Callable[..., Any]
Make = Callable[..., dict[str, Any]]
Read = Callable[..., list[dict[str, Any]]]
TrainHere = Callable[..., Any]

GPT = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocab": 60}
NEWER_GPT = {**GPT, "query_groups": 2, "rotary": True, "swiglu": True, "ffn": 64}
GLM = {"kind": "glm", "layers": 2, "hidden": 32, "heads": 4, "sequence": 48, "vocab": 69}
LLAMA = {**NEWER_GPT, "norm": "rms", "bias": "none", "tied": False}
QWEN_3 = {**LLAMA, "qk_norm": True, "head_dim": 16}
NEOX = {**GPT, "rotary": True, "rope": {"part": 0.5}, "parallel_residual": True, "tied": False}
# With a small eps, norms of small results would amplify rounding over the steps.
GLM_4 = {
    **LLAMA,
    "rope": {"part": 0.5, "interleaved": True},
    "bias": "qkv",
    "sandwich_norms": True,
    "eps": 1e-2,
}
STARCODER = {
    **GPT,
    "query_groups": 2,
    "rotary": True,
    "window": 5,
    "label_smoothing": 0.1,
    "vocab_multiple": 7,
}
MOE = {**LLAMA, "query_groups": 0, "experts": 4, "ffn": 48, "shared_ffn": 16, "aux_loss": 0.1}
GLM_MOE = {
    **MOE,
    "layers": 3,
    "experts": 8,
    "aux_loss": 0.0,
    "scoring": "sigmoid",
    "router_bias": True,
    "expert_groups": 4,
    "top_groups": 2,
    "routed_scale": 1.5,
    "dense_layers": 1,
    "dense_ffn": 96,
}
OSS = {
    **MOE,
    "bias": "all",
    "shared_ffn": 0,
    "sinks": True,
    "expert_bias": True,
    "gate": "clamped",
    "window": 5,
    "windowed": [1, 0],
}
LATENT = {
    **GLM_MOE,
    "kv_rank": 12,
    "q_rank": 20,
    "rope_dim": 4,
    "value_dim": 6,
    "rope": {"interleaved": True},
}
TIGHT_MOE = {**MOE, "capacity": 0.75}
OLMO_3 = {
    **LLAMA,
    "qk_norm": True,
    "qk_norm_whole": True,
    "sandwich_norms": True,
    "input_norms": False,
    "window": 5,
    "windowed": [1, 0],
    "window_base": 500.0,
    "rotated": [0, 1],
    "eps": 1e-2,
}
GEMMA = {
    **LLAMA,
    "tied": True,
    "norm": "rms_offset",
    "qk_norm": True,
    "sandwich_norms": True,
    "gate": "gelu_tanh",
    "scaled_embeddings": True,
    "attention_scale": 0.2,
    "attention_cap": 3.0,
    "logit_cap": 5.0,
    "label_smoothing": 0.1,
    "eps": 1e-2,
}
MODELS = {
    "olmo3": OLMO_3,
    "gemma": GEMMA,
    "moe": MOE,
    "glm-moe": GLM_MOE,
    "oss": OSS,
    "latent": LATENT,
    "tight-moe": TIGHT_MOE,
    "gpt": GPT,
    "newer-gpt": NEWER_GPT,
    "glm": GLM,
    "llama": LLAMA,
    "qwen3": QWEN_3,
    "neox": NEOX,
    "glm4": GLM_4,
    "starcoder": STARCODER,
}
# Of a comparison with one process.
ALIKE = 8
STEPS = 12
# Of a journey from layout to layout: each part dies two steps after its checkpoint.
PART = 3


def changes_of(model: str, prefix: Path, steps: int = STEPS, **changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"prefix": str(prefix), "split": "80,20,0"}
    if model == "glm":
        data["eod"] = 3
    schedule = {"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 2}
    half = steps // 2
    rest = {"eval": {"every": half, "batches": 2}, "save": {"every": half}, "optimizer": schedule}
    return {"model": MODELS[model], "data": data, "steps": steps, **rest, **changes}


def losses(lines: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


@pytest.fixture
def alike(
    tmp_path: Path, prefix: Path, raw_config: Make, run_ranks: Ranks, metrics: Read, train_here: TrainHere
) -> Callable[..., Path]:
    """Train with so many ranks and with one; both must give the same losses, norms and evaluations."""

    def run(model: str, ranks: int, **changes: Any) -> Path:
        if changes.get("engine") == "deepspeed":
            pytest.importorskip("deepspeed")
        train_here(tmp_path / "one", **changes_of(model, prefix, ALIKE))
        done = run_ranks(ranks, raw_config(**changes_of(model, prefix, ALIKE, **changes)), tmp_path / "many")
        assert [rank.returncode for rank in done] == [0] * ranks, done[0].stderr
        one, many = (losses(metrics(tmp_path / name, "step")) for name in ("one", "many"))
        assert len(one) == ALIKE and one.keys() == many.keys()
        for step, (loss, norm) in one.items():
            assert many[step] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4)), step
        evals = [[line["loss"] for line in metrics(tmp_path / name, "eval")] for name in ("one", "many")]
        assert evals[1] == pytest.approx(evals[0], rel=1e-5)
        assert one[ALIKE][0] < one[1][0] - 0.2
        return tmp_path / "many"

    return run


LAYOUTS = [
    pytest.param("gpt", 2, {"parallel": {"tensor": 2}}, id="gpt-tensor2"),
    pytest.param("gpt", 4, {"parallel": {"tensor": 4}}, id="gpt-tensor4"),
    pytest.param(
        "gpt",
        4,
        {"parallel": {"tensor": 4, "sequence": True}},
        id="gpt-tensor4-sequence",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "newer-gpt", 4, {"parallel": {"tensor": 2, "sequence": True}, "zero": 1}, id="newer-gpt-2x2-zero1"
    ),
    pytest.param("glm", 2, {"zero": 1}, id="glm-data2-zero1"),
    pytest.param("qwen3", 2, {"parallel": {"tensor": 2}}, id="qwen3-tensor2"),
    pytest.param(
        "qwen3", 4, {"parallel": {"tensor": 2, "sequence": True}, "zero": 3}, id="qwen3-2x2-sequence-zero3"
    ),
    pytest.param("moe", 2, {"parallel": {"tensor": 2}, "recompute": "full"}, id="moe-tensor2-recompute"),
    pytest.param(
        "moe",
        4,
        {"parallel": {"tensor": 4, "sequence": True}},
        id="moe-tensor4-all-to-all",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "tight-moe",
        4,
        {"parallel": {"tensor": 2, "sequence": True}, "zero": 3},
        id="tight-moe-2x2-all-to-all-zero3",
    ),
    pytest.param("neox", 2, {"zero": 3}, id="neox-data2-zero3"),
    pytest.param("olmo3", 2, {"parallel": {"tensor": 2}}, id="olmo3-tensor2"),
    pytest.param(
        "olmo3", 4, {"parallel": {"tensor": 2, "sequence": True}, "zero": 1}, id="olmo3-2x2-sequence-zero1"
    ),
    pytest.param("gemma", 2, {"parallel": {"tensor": 2}}, id="gemma-tensor2"),
    pytest.param("glm-moe", 2, {"parallel": {"tensor": 2}}, id="glm-moe-tensor2"),
    pytest.param("oss", 2, {"parallel": {"tensor": 2}}, id="oss-tensor2"),
    pytest.param("latent", 2, {"parallel": {"tensor": 2}}, id="latent-tensor2"),
    pytest.param("latent", 2, {"parallel": {"tensor": 2, "sequence": True}}, id="latent-tensor2-sequence"),
    pytest.param("glm-moe", 2, {"parallel": {"tensor": 2, "sequence": True}}, id="glm-moe-tensor2-sequence"),
    pytest.param("gemma", 2, {"parallel": {"tensor": 2, "sequence": True}}, id="gemma-tensor2-sequence"),
    pytest.param(
        "glm4",
        4,
        {"parallel": {"tensor": 2, "sequence": True}, "zero": 1, "recompute": "selective"},
        id="glm4-2x2-sequence-zero1-recompute",
    ),
    pytest.param("starcoder", 2, {"parallel": {"tensor": 2}, "recompute": "full"}, id="starcoder-tensor2"),
    pytest.param(
        "qwen3",
        4,
        {"parallel": {"tensor": 2}, "zero": 3, "engine": "deepspeed"},
        id="qwen3-2x2-deepspeed-zero3",
        marks=pytest.mark.slow,
    ),
    pytest.param("gpt", 4, {"zero": 3, "micro_batch": 1, "offload": True}, id="gpt-data4-zero3"),
    pytest.param(
        "glm", 4, {"parallel": {"tensor": 2, "sequence": True}, "zero": 2}, id="glm-2x2-sequence-zero2"
    ),
    pytest.param(
        "newer-gpt",
        4,
        {"parallel": {"tensor": 2}, "zero": 3, "recompute": {"mode": "full", "every": 2}},
        id="newer-gpt-2x2-zero3-recompute",
    ),
    pytest.param(
        "gpt",
        4,
        {"parallel": {"tensor": 2}, "zero": 1, "engine": "deepspeed"},
        id="gpt-2x2-deepspeed-zero1",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "glm",
        2,
        {"parallel": {"tensor": 2}, "zero": 1, "engine": "deepspeed"},
        id="glm-tensor2-deepspeed-zero1",
        marks=pytest.mark.slow,
    ),
    pytest.param("glm", 4, {"parallel": {"tensor": 2}}, id="glm-2x2"),
    pytest.param("glm", 2, {"parallel": {"tensor": 2, "sequence": True}}, id="glm-tensor2-sequence"),
    pytest.param(
        "gpt",
        8,
        {"parallel": {"tensor": 2}, "micro_batch": 2},
        id="gpt-tensor2-data4",
        marks=pytest.mark.slow,
    ),
]


CONTEXTS = [
    pytest.param("gpt", 4, {"parallel": {"context": 4}, "micro_batch": 8}, id="gpt-context4"),
    pytest.param(
        "qwen3",
        4,
        {"parallel": {"context": 2, "tensor": 2, "sequence": True}, "zero": 1, "recompute": "full"},
        id="qwen3-context2-tensor2-sequence-zero1-recompute",
    ),
    pytest.param(
        "llama",
        4,
        {"parallel": {"context": 2, "pipeline": 2}, "micro_batch": 2, "zero": 3},
        id="llama-context2-pipeline2-zero3",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "newer-gpt", 4, {"parallel": {"context": 2}, "zero": 3}, id="newer-gpt-context2-data2-zero3"
    ),
]


@pytest.mark.parametrize(("model", "ranks", "changes"), CONTEXTS)
def test_ranks_that_share_samples_give_the_losses_of_one_process(
    model: str, ranks: int, changes: dict[str, Any], alike: Callable[..., Path]
) -> None:
    alike(model, ranks, **changes)


PIPELINES = [
    pytest.param(
        "gpt", 2, {"parallel": {"pipeline": 2}, "micro_batch": 8}, id="gpt-pipeline2-one-micro-batch"
    ),
    pytest.param(
        "gpt",
        2,
        {"parallel": {"pipeline": 2, "interleave": 2, "layers": [1, 2, 1, 0]}, "micro_batch": 2},
        id="gpt-pipeline2-interleaved-uneven",
    ),
    pytest.param(
        "newer-gpt",
        8,
        {"parallel": {"pipeline": 2, "tensor": 2, "sequence": True}, "micro_batch": 2, "zero": 1},
        id="newer-gpt-2x2x2-sequence-zero1",
    ),
    pytest.param("glm", 4, {"parallel": {"pipeline": 4}, "recompute": "full"}, id="glm-pipeline4"),
    pytest.param("llama", 2, {"parallel": {"pipeline": 2}, "micro_batch": 2}, id="llama-pipeline2"),
    pytest.param("moe", 2, {"parallel": {"pipeline": 2}, "micro_batch": 2}, id="moe-pipeline2"),
    pytest.param("olmo3", 2, {"parallel": {"pipeline": 2}, "micro_batch": 2}, id="olmo3-pipeline2"),
    pytest.param("glm-moe", 2, {"parallel": {"pipeline": 2}, "micro_batch": 2}, id="glm-moe-pipeline2"),
    pytest.param("oss", 2, {"parallel": {"pipeline": 2}, "micro_batch": 2}, id="oss-pipeline2"),
    pytest.param("latent", 2, {"parallel": {"pipeline": 2}, "micro_batch": 2}, id="latent-pipeline2"),
    pytest.param("gemma", 2, {"parallel": {"pipeline": 2}, "micro_batch": 2}, id="gemma-pipeline2"),
    pytest.param(
        "qwen3",
        8,
        {"parallel": {"pipeline": 2, "tensor": 2, "sequence": True}, "micro_batch": 2, "zero": 3},
        id="qwen3-2x2x2-sequence-zero3",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "llama",
        2,
        {"parallel": {"pipeline": 2}, "micro_batch": 2, "engine": "deepspeed"},
        id="llama-pipeline2-deepspeed",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "newer-gpt",
        4,
        {"parallel": {"pipeline": 2, "interleave": 2, "layers": [0, 2, 0, 2]}, "micro_batch": 1, "zero": 3},
        id="newer-gpt-pipeline2-interleaved-data2-zero3-embedding-alone",
    ),
]


@pytest.mark.parametrize(("model", "ranks", "changes"), PIPELINES)
def test_a_pipeline_gives_the_losses_of_one_process(
    model: str,
    ranks: int,
    changes: dict[str, Any],
    alike: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MODELS, model, {**MODELS[model], "layers": 4})
    alike(model, ranks, **changes)


@pytest.mark.parametrize(("model", "ranks", "changes"), LAYOUTS)
def test_a_layout_gives_the_losses_of_one_process(
    model: str, ranks: int, changes: dict[str, Any], alike: Callable[..., Path]
) -> None:
    alike(model, ranks, **changes)


JOURNEYS = [
    pytest.param("gpt", [(2, {"tensor": 2}, 0), (1, {}, 1), (4, {"tensor": 4}, 1)], id="gpt-2-1-4"),
    pytest.param(
        "newer-gpt", [(4, {"tensor": 2}, 0), (2, {"tensor": 2, "sequence": True}, 1)], id="newer-gpt-2x2-2"
    ),
    pytest.param("glm", [(1, {}, 0), (4, {"tensor": 2}, 1), (2, {}, 1)], id="glm-1-2x2-data2"),
    pytest.param("gpt", [(4, {"tensor": 2}, 3), (1, {}, 0), (2, {}, 2)], id="gpt-zero3-1-zero2"),
    pytest.param(
        "gpt",
        [(2, {"pipeline": 2}, 0), (1, {}, 0), (8, {"pipeline": 2, "tensor": 2, "sequence": True}, 1)],
        id="gpt-pipeline2-1-2x2x2",
    ),
    pytest.param("glm", [(4, {"tensor": 2}, 2), (4, {"pipeline": 2}, 2)], id="glm-2x2-pipeline2"),
    pytest.param("glm-moe", [(2, {"tensor": 2}, 1), (2, {"pipeline": 2}, 0)], id="glm-moe-tensor2-pipeline2"),
    pytest.param("latent", [(2, {"tensor": 2}, 1), (2, {"pipeline": 2}, 0)], id="latent-tensor2-pipeline2"),
    pytest.param("oss", [(2, {"tensor": 2}, 1), (2, {"pipeline": 2}, 0)], id="oss-tensor2-pipeline2"),
    pytest.param("gemma", [(2, {"tensor": 2}, 0), (2, {"pipeline": 2}, 0)], id="gemma-tensor2-pipeline2"),
    pytest.param("olmo3", [(2, {"tensor": 2}, 0), (2, {"pipeline": 2}, 0)], id="olmo3-tensor2-pipeline2"),
]


@pytest.mark.parametrize(("model", "journey"), JOURNEYS)
def test_a_checkpoint_of_one_layout_goes_on_in_any_other(
    model: str,
    journey: list[tuple[int, dict[str, Any], int]],
    tmp_path: Path,
    prefix: Path,
    raw_config: Make,
    run_ranks: Ranks,
    metrics: Read,
    train_here: TrainHere,
) -> None:
    train_here(tmp_path / "one", **changes_of(model, prefix))
    for part, (ranks, parallel, zero) in enumerate(journey):
        changes = changes_of(model, prefix, parallel=parallel, zero=zero, save={"every": PART, "keep": 9})
        last = part == len(journey) - 1
        fault = {} if last else {"CLUSTERCTL_FAULT": f"rank{ranks - 1}:step{PART * (part + 1) + 2}:exit7"}
        done = run_ranks(ranks, raw_config(**changes), tmp_path / "parts", **fault)
        assert done[-1].returncode == (0 if last else 7), done[-1].stderr
    starts = metrics(tmp_path / "parts", "start")
    assert [start["step"] for start in starts] == [PART * part for part in range(len(journey))]
    one, parts = (losses(metrics(tmp_path / name, "step")) for name in ("one", "parts"))
    assert one.keys() == parts.keys()
    for step, (loss, norm) in one.items():
        assert parts[step] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4)), step
    found = [verify(folder) for folder in sorted((tmp_path / "parts" / "checkpoints").glob("step-*"))]
    assert len(found) == 4 and all(checkpoint.table == found[0].table for checkpoint in found)
    assert found[0].table["tokens.weight"][0] == MODELS[model]["vocab"]
