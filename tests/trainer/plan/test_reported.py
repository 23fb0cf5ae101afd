"""The chip that nodes report: it fills the job's, and a contradiction is a fault."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config.chips import with_reported
from trainer.plan.summary import check

TRAIN: dict[str, Any] = {
    "model": {"layers": 2, "hidden": 64, "heads": 2, "sequence": 64, "vocab": 512},
    "data": {"prefix": "x", "tokenizer": "gpt2"},
    "steps": 10,
    "micro_batch": 1,
    "global_batch": 4,
    "precision": "bf16",
    "hardware": {"kind": "npu"},
}


def on(reported: str | None, **hardware: str) -> list[dict[str, str]]:
    train = {**TRAIN, "hardware": {**TRAIN["hardware"], **hardware}}
    faults: list[dict[str, str]] = check({"train": train, "world_size": 4, "reported": reported})["faults"]
    return faults


def test_a_reported_chip_takes_the_place_of_the_assumed_one() -> None:
    assert on(None) == [] and on("910B3") == []
    (fault,) = on("910A")
    assert "bf16" in fault["what"]


@pytest.mark.parametrize("name", ["Ascend910B3", "910B3"])
def test_a_job_for_another_chip_is_refused_with_both(name: str) -> None:
    (fault,) = [fault for fault in on(name, chip="910C") if fault["key"] == "train.hardware.chip"]
    assert fault["what"].startswith(f"is 910C, but the nodes report {name}")
    assert on(name, chip="910B") == []


@pytest.mark.parametrize("name", ["Ascend 310P", "a device that nobody knows", None, 7])
def test_a_name_that_is_not_in_the_table_changes_nothing(name: object) -> None:
    assert with_reported(TRAIN, name) == (TRAIN, [])
    assert with_reported({"hardware": 3}, "910B3") == ({"hardware": 3}, [])


@pytest.mark.parametrize(
    ("name", "mebibytes", "expected"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, 102.642),
        ("NVIDIA H100 80GB HBM3", 81559, None),
        # A part of a card (MIG).
        ("NVIDIA H100 80GB HBM3", 40448, 42.413),
        ("Ascend 310P", 0, None),
    ],
)
def test_the_memory_of_an_unknown_or_smaller_device_is_what_its_tool_shows(
    name: str, mebibytes: int, expected: float | None
) -> None:
    train = {**TRAIN, "hardware": {"kind": "cuda"}}
    found: Any = with_reported(train, name, mebibytes)[0]
    assert found["hardware"].get("memory") == expected
    named = {**train, "hardware": {"kind": "cuda", "memory": 30}}
    assert with_reported(named, name, mebibytes)[0]["hardware"]["memory"] == 30  # type: ignore[index]
