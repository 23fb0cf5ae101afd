from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.models import SIZES
from trainer.plan import check

Make = Callable[..., dict[str, Any]]


def test_a_plan_counts_parameters_tokens_and_epochs(raw_config: Make, prefix: Path) -> None:
    answer = check({"train": raw_config(), "world_size": 2, "check_data": True})
    summary = answer["summary"]
    assert answer["ok"] and summary["layout"] == {"data": 2, "tensor": 1, "pipeline": 1}
    assert (summary["accumulation"], summary["tokens_per_step"], summary["tokens_total"]) == (2, 128, 1024)
    tokens = prefix.with_name(prefix.name + ".bin").stat().st_size // 2
    assert summary["epochs"] == pytest.approx(1024 / (0.8 * tokens))


def test_missing_data_is_a_fault_only_where_it_is_looked_for(raw_config: Make, tmp_path: Path) -> None:
    document = {"train": raw_config(data={"prefix": "nowhere"}), "base_dir": str(tmp_path)}
    assert check(document)["ok"]
    faults = check({**document, "check_data": True})["faults"]
    assert {fault["key"] for fault in faults} == {"train.data.prefix"}
    assert str(tmp_path / "nowhere.bin") in faults[0]["what"]


def test_the_named_sizes_have_the_known_parameter_counts() -> None:
    assert SIZES["gpt2-124M"].parameters() == 124_439_808
    assert SIZES["gpt2-345M"].parameters() == 354_823_168
    assert 0.9e6 < SIZES["gpt-tiny"].parameters() < 1.2e6


def test_sharding_the_optimizer_divides_its_memory(raw_config: Make) -> None:
    needs = [
        check({"train": raw_config(zero=zero), "world_size": 4})["summary"]["memory_per_device_bytes"]
        for zero in (0, 1)
    ]
    assert needs[1]["optimizer"] * 4 == needs[0]["optimizer"] and needs[1]["weights"] == needs[0]["weights"]


@pytest.mark.parametrize("document", [None, [], {"world_size": 0}, {"world_size": "2"}, {}])
def test_a_document_that_makes_no_sense_is_answered_with_faults(document: object) -> None:
    answer = check(document)
    assert not answer["ok"] and answer["faults"]


def test_planning_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, trainer.plan, trainer.env, trainer.layout; print({'torch', 'numpy'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_the_check_verb_reads_and_answers_json(raw_config: Make) -> None:
    ask = json.dumps({"train": raw_config(stepz=1), "world_size": 2})
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "check"], input=ask, capture_output=True, text=True
    )
    answer = json.loads(done.stdout)
    assert done.returncode == 1 and not done.stderr
    assert answer["faults"] == [
        {"key": "train.stepz", "what": "unknown key", "remedy": "did you mean 'steps'?"}
    ]
