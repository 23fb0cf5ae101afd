"""The other engine: its layouts give the losses of one process, and its checkpoints move to and from torch's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.engine.test_layouts import MODELS, PART, STEPS, alike, changes_of, losses  # noqa: F401
from trainer.plan.summary import check

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

Make = Callable[..., dict[str, Any]]
Ranks = Callable[..., Any]
Read = Callable[..., list[dict[str, Any]]]

SHARED = {"tensor": 2, "sequence": True}
LAYOUTS = [
    pytest.param("newer-gpt", 2, {"zero": 3, "recompute": "full"}, id="newer-gpt-data2-zero3"),
    pytest.param(
        "glm", 2, {"zero": 3, "recompute": "selective", "offload": True}, id="glm-data2-zero3-offload"
    ),
    pytest.param("gpt", 4, {"zero": 2, "parallel": SHARED}, id="gpt-2x2-sequence-zero2"),
    pytest.param("gpt", 2, {"zero": 1, "offload": True}, id="gpt-data2-zero1-offload"),
]


@pytest.mark.parametrize(("model", "ranks", "changes"), LAYOUTS)
def test_a_layout_gives_the_losses_of_one_process(
    model: str,
    ranks: int,
    changes: dict[str, Any],
    alike: Callable[..., Path],  # noqa: F811
) -> None:
    alike(model, ranks, engine="deepspeed", **changes)


STAGES = [
    pytest.param(
        "gpt",
        3,
        {"parallel": {"pipeline": 3, "layers": [1, 2, 1]}, "recompute": "full"},
        id="gpt-pipeline3-uneven",
    ),
    pytest.param("newer-gpt", 4, {"parallel": {"pipeline": 2}, "zero": 1}, id="newer-gpt-2x2-zero1"),
    pytest.param("glm", 4, {"parallel": {"pipeline": 2, **SHARED}, "zero": 1}, id="glm-2x2-sequence-zero1"),
]


@pytest.mark.parametrize(("model", "ranks", "changes"), STAGES)
def test_its_pipeline_gives_the_losses_of_one_process(
    model: str,
    ranks: int,
    changes: dict[str, Any],
    alike: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MODELS, model, {**MODELS[model], "layers": 4})
    alike(model, ranks, engine="deepspeed", micro_batch=2, **changes)


JOURNEYS = [
    pytest.param(
        "gpt",
        [
            (4, {"engine": "deepspeed", "zero": 3, "parallel": SHARED}),
            (2, {"engine": "torch", "parallel": {"tensor": 2}}),
            (2, {"engine": "deepspeed", "zero": 1, "parallel": {"pipeline": 2}}),
            (2, {"engine": "deepspeed", "zero": 3}),
        ],
        id="gpt-zero3-torch-pipeline-zero3",
    ),
]


@pytest.mark.parametrize(("model", "journey"), JOURNEYS)
def test_a_checkpoint_goes_from_one_engine_and_layout_to_any_other(
    model: str,
    journey: list[tuple[int, dict[str, Any]]],
    tmp_path: Path,
    prefix: Path,
    raw_config: Make,
    run_ranks: Ranks,
    metrics: Read,
    train_here: Callable[..., Any],
) -> None:
    train_here(tmp_path / "one", **changes_of(model, prefix))
    for part, (ranks, changes) in enumerate(journey):
        config = raw_config(**changes_of(model, prefix, save={"every": PART, "keep": 9}, **changes))
        last = part == len(journey) - 1
        fault = {} if last else {"CLUSTERCTL_FAULT": f"rank{ranks - 1}:step{PART * (part + 1) + 2}:exit7"}
        done = run_ranks(ranks, config, tmp_path / "parts", **fault)
        assert done[-1].returncode == (0 if last else 7), done[-1].stderr
    starts = [start["step"] for start in metrics(tmp_path / "parts", "start")]
    assert starts == [PART * part for part in range(len(journey))]
    one, parts = (losses(metrics(tmp_path / name, "step")) for name in ("one", "parts"))
    assert one.keys() == parts.keys() and len(one) == STEPS
    for step, (loss, norm) in one.items():
        assert parts[step] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4)), step


RESUMED = [
    pytest.param(2, {"zero": 3, "precision": "bf16"}, id="zero3-bf16"),
    pytest.param(2, {"zero": 0, "precision": "fp16"}, id="zero0-fp16"),
    pytest.param(2, {"zero": 2, "offload": True, "model": {"dropout": 0.1}}, id="zero2-offload-dropout"),
    pytest.param(
        4, {"zero": 1, "parallel": {"pipeline": 2}, "model": {"dropout": 0.1}}, id="pipeline-zero1-dropout"
    ),
]


@pytest.mark.parametrize(("ranks", "changes"), RESUMED)
def test_a_death_changes_no_bit(
    ranks: int, changes: dict[str, Any], tmp_path: Path, raw_config: Make, run_ranks: Ranks, metrics: Read
) -> None:
    config = raw_config(engine="deepspeed", **changes)
    config["model"] = {
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "sequence": 16,
        "vocab": 60,
        **changes.get("model", {}),
    }
    whole = run_ranks(ranks, config, tmp_path / "whole")
    assert [done.returncode for done in whole] == [0] * ranks, whole[0].stderr
    assert (
        run_ranks(ranks, config, tmp_path / "parts", CLUSTERCTL_FAULT="rank1:step6:exit7")[1].returncode == 7
    )
    assert run_ranks(ranks, config, tmp_path / "parts")[0].returncode == 0
    assert metrics(tmp_path / "parts", "start")[1]["step"] == 4
    assert losses(metrics(tmp_path / "parts", "step")) == losses(metrics(tmp_path / "whole", "step"))


@pytest.mark.parametrize(("zero", "stages"), [(0, 1), (3, 1), (0, 2), (1, 2)])
def test_a_gradient_that_is_not_finite_changes_nothing(
    zero: int, stages: int, tmp_path: Path, raw_config: Make, run_ranks: Ranks, metrics: Read
) -> None:
    config = raw_config(
        engine="deepspeed",
        zero=zero,
        parallel={"pipeline": stages},
        steps=60,
        optimizer={"lr": 1e30},
        save={"every": 0},
        nan={"stop_after": 3},
    )
    done = run_ranks(2, config, tmp_path)
    assert [rank.returncode for rank in done] == [1, 1] and "no finite loss or gradient in 3 steps" in done[
        0
    ].stderr
    assert [line["skipped"] for line in metrics(tmp_path, "step")][-3:] == [True] * 3


@pytest.mark.parametrize("changes", [{"zero": 2}, {"parallel": {"pipeline": 2}}], ids=["zero2", "pipeline"])
def test_batches_may_grow(
    changes: dict[str, Any],
    tmp_path: Path,
    raw_config: Make,
    run_ranks: Ranks,
    metrics: Read,
    train_here: Callable[..., Any],
) -> None:
    ramp = {"micro_batch": 1, "batch_ramp": {"start": 2, "increment": 2, "samples": 12}}
    train_here(tmp_path / "one", **ramp)
    done = run_ranks(2, raw_config(engine="deepspeed", **ramp, **changes), tmp_path / "two")
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
    one, two = (losses(metrics(tmp_path / name, "step")) for name in ("one", "two"))
    assert len({line["samples"] for line in metrics(tmp_path / "two", "step")}) == 4
    for step, (loss, norm) in one.items():
        assert two[step] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4)), step


def test_parameters_off_the_device_a_communication_log_and_a_profile_change_no_loss(
    tmp_path: Path,
    prefix: Path,
    raw_config: Make,
    run_ranks: Ranks,
    metrics: Read,
    train_here: Callable[..., Any],
) -> None:
    settings = {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
        "comms_logger": {"enabled": True, "prof_all": True},
        "flops_profiler": {"enabled": True, "profile_step": 2},
    }
    short = {"steps": 4, "save": {"every": 2}, "native": "reference"}
    train_here(tmp_path / "one", **changes_of("gpt", prefix, **short))
    config = raw_config(**changes_of("gpt", prefix, engine={"deepspeed": settings}, **short))
    done = run_ranks(2, config, tmp_path / "two")
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
    one, two = (losses(metrics(tmp_path / name, "step")) for name in ("one", "two"))
    assert len(two) == 4
    for step, (loss, norm) in one.items():
        assert two[step] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4)), step
    for said in (
        "DeepSpeed Flops Profiler",
        "fwd flops per GPU",
        "reduce_scatter_tensor",
        "all_gather_into_tensor",
    ):
        assert said in done[0].stdout, done[0].stdout[-2000:]


# Only rows and parameters of at least 1 MiB per rank are moved to files; this model also has smaller ones.
ON_DISK = {"layers": 1, "hidden": 384, "heads": 4, "sequence": 16, "vocab": 60}
MOMENTS = {"device": "nvme"}
WEIGHTS = {"device": "nvme", "max_in_cpu": 0, "buffer_size": 1_000_000}
DISKS = [
    pytest.param({"offload_optimizer": MOMENTS}, id="moments"),
    pytest.param({"offload_param": WEIGHTS}, id="weights"),
    pytest.param(
        {"offload_optimizer": MOMENTS, "offload_param": WEIGHTS, "sub_group_size": 400_000}, id="both-in-rows"
    ),
    pytest.param(
        {
            "offload_optimizer": {
                **MOMENTS,
                "pipeline_read": True,
                "pipeline_write": True,
                "buffer_count": 12,
            },
            "sub_group_size": 400_000,
        },
        id="moments-ahead",
    ),
]


@pytest.mark.skipif(
    not os.environ.get("LONG_TESTS"), reason="DeepSpeed compiles for minutes: set LONG_TESTS=1"
)
@pytest.mark.parametrize("disk", DISKS)
def test_offload_to_a_disk_gives_the_losses_of_memory_and_its_checkpoints_need_no_disk(
    disk: dict[str, Any], tmp_path: Path, raw_config: Make, run_ranks: Ranks, metrics: Read
) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("libaio is not installed: apt-get install libaio-dev")
    compiled = {key: os.environ[key] for key in ("TORCH_EXTENSIONS_DIR",) if key in os.environ}
    folder = {"nvme_path": str(tmp_path / "nvme")}
    zero = {key: {**value, **folder} if isinstance(value, dict) else value for key, value in disk.items()}

    def train(name: str, zero: dict[str, Any], **variables: str) -> None:
        settings = {"zero_optimization": {"stage": 3, **zero}}
        short = {"model": ON_DISK, "steps": 6, "save": {"every": 2}, "eval": {"every": 3, "batches": 1}}
        config = raw_config(engine={"deepspeed": settings}, **short)
        done = run_ranks(2, config, tmp_path / name, CLUSTERCTL_RUN_ID=name, **compiled, **variables)
        code = 7 if "CLUSTERCTL_FAULT" in variables else 0
        assert done[1].returncode == code, done[1].stderr

    def of(name: str) -> dict[int, tuple[float, float]]:
        return losses(metrics(tmp_path / name, "step"))

    train("memory", {"offload_optimizer": {"device": "cpu"}})
    train("parts", zero, CLUSTERCTL_FAULT="rank1:step6:exit7")
    left = sum(file.stat().st_size for file in (tmp_path / "nvme" / "parts").rglob("*.swp"))
    engine = {"deepspeed": {"zero_optimization": {"stage": 3, **zero}}}
    planned = check({"train": raw_config(engine=engine, model=ON_DISK), "world_size": 2})
    assert 0.5 < left / planned["summary"]["offload_disk_bytes"] < 1.01
    train("whole", zero)
    assert not (tmp_path / "nvme" / "parts").exists(), "the next start removes what a failed run left"
    shutil.copytree(tmp_path / "parts", tmp_path / "moved")
    train("parts", zero)
    train("moved", {})
    assert not list((tmp_path / "nvme").iterdir())
    for name in ("parts", "moved"):
        assert [start["step"] for start in metrics(tmp_path / name, "start")] == [0, 4]
    assert len(of("whole")) == 6 and of("parts") == of("whole")
    for step, (loss, norm) in of("memory").items():
        for name in ("whole", "moved"):
            assert of(name)[step] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4)), name
