"""bench/hardware: its steps are processes with limits, and none stops another."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.field import ROOT
from bench.hardware.__main__ import steps
from bench.hardware.runner import Runner, Step
from bench.hardware.table import tables
from bench.train.activities import spent
from tests.support.on_device import moved, tensors_on

RESULT = "import json\nprint(json.dumps({'table': 'rates', 'op': 'gelu', 'us': 12.5}), flush=True)\n"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that steps may run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_step_that_fails_or_hangs_stops_no_other_and_keeps_its_results(program: Path) -> None:
    (program / "fails.py").write_text(
        RESULT + "print('{\"table\" broken')\nraise ValueError('no such kernel')\n"
    )
    child = (
        "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    )
    (program / "hangs.py").write_text(RESULT + child + "import time\ntime.sleep(600)\n")
    (program / "works.py").write_text("import sys\n" + RESULT + "print('of a library', sys.argv[1])\n")
    runner = Runner(program / "out", 600.0)
    began = time.monotonic()
    runner.run(Step("fails", "fails"), 300.0)
    runner.run(Step("hangs", "hangs"), 8.0)
    runner.run(Step("works", "works", ("words",)), 300.0)
    assert time.monotonic() - began < 300.0
    lines = (program / "out" / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows == runner.rows
    assert [row["step"] for row in rows if row["table"] == "rates"] == ["fails", "hangs", "works"]
    ended = {row["step"]: (row["ended"], row["last words"]) for row in rows if row["table"] == "steps"}
    assert ended["fails"] == ("ended with 1", "ValueError: no such kernel")
    assert ended["hangs"] == ("over its limit of 8 s", "")
    assert ended["works"] == ("ok", "")
    log = (program / "out" / "log.txt").read_text()
    assert "== works\nof a library words" in log and '{"table" broken' in log


def test_what_a_step_does_not_use_is_left_to_the_later_ones(program: Path) -> None:
    now = 100.0
    runner = Runner(program / "out", 400.0, lambda: now)
    limits = []

    def run(step: Step, limit: float) -> None:
        nonlocal now
        limits.append(limit)
        now += 10.0

    runner.run = run  # type: ignore[method-assign]
    runner.run_all([Step("a", "a", share=20), Step("b", "b", share=60), Step("c", "c", share=120)])
    assert limits == [40.0, 130.0, 380.0]


def test_the_table_shows_every_row_and_its_share_of_the_ceilings() -> None:
    rows = [
        {"table": "facts", "step": "facts", "fact": "GEMM bf16, TFLOP/s", "value": 700.0},
        {"table": "facts", "step": "facts", "fact": "peak bf16, TFLOP/s", "value": 1000.0},
        {"table": "facts", "step": "facts", "fact": "copy, GB/s", "value": 4000.0},
        {"table": "steps", "step": "facts", "s": 3.0, "ended": "ok", "last words": ""},
        {"table": "training", "step": "a", "by": "ours", "TFLOP/s": 350.0, "equal": True},
        {"table": "training", "step": "b", "by": "eager|x", "failed": "OutOfMemoryError", "equal": False},
        {"table": "decoding", "step": "c", "texts": 8, "ms a token": 2.0, "GB moved": 2.0},
    ]
    text = tables(rows)
    assert text.startswith("## steps\n\n| step  | s | ended |\n|-------|---|-------|\n| facts | 3 | ok    |")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["step", "by", "TFLOP/s", "equal", "of GEMM", "MFU", "failed"] in lines
    assert ["a", "ours", "350", "yes", "50%", "35%", ""] in lines
    assert ["b", "eager/x", "", "NO", "", "", "OutOfMemoryError"] in lines
    assert ["c", "8", "2", "25.0%"] in lines


def test_its_steps_need_no_other_packages_than_torch_and_numpy() -> None:
    absent = ("tokenizers", "safetensors", "deepspeed", "paramiko", "fabric", "invoke", "aiohttp")
    modules = {step.module for step in steps("cuda")} | {"trainer.train.assemble", "trainer.__main__"}
    code = f"import sys\nfor name in {absent}: sys.modules[name] = None\nimport {', '.join(sorted(modules))}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_on_a_cpu_there_is_time_and_no_activity_of_a_device() -> None:
    host, found = spent("cpu", lambda: time.sleep(0.01), 3)
    assert host >= 0.01 and found.wall >= 0.03 and (found.busy, found.count, found.starts) == (0, 0, 0)


def test_inputs_of_a_case_have_the_same_numbers_on_another_device() -> None:
    torch = pytest.importorskip("torch")
    from native.masks import Mask

    seed = torch.Generator().manual_seed(1)
    with tensors_on("meta"):
        drawn, plain = torch.randn(2, 3, generator=seed), torch.ones(2)
        kept = torch.randn(2, generator=seed, device="cpu")
    assert (drawn.device.type, plain.device.type, kept.device.type) == ("meta", "meta", "cpu")
    mask = Mask(3, torch.zeros(1, 4))
    mask.made["key"] = torch.ones(1)
    found = moved({"mask": mask, "causal": True, "seed": torch.ones(1)}, "meta")
    assert found["mask"].documents.device.type == found["seed"].device.type == "meta"  # type: ignore[attr-defined]
    assert found["causal"] is True and not found["mask"].made  # type: ignore[attr-defined]
