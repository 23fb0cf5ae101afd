"""A rank's start, part by part."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.trainer.conftest import MODEL
from trainer.__main__ import main
from trainer.device import Device
from trainer.plan.resolve import read_config
from trainer.train.assemble import _notes
from trainer.train.startup import Startup, startup_line


def test_the_parts_of_a_start_add_up_to_the_life_of_the_process() -> None:
    startup = Startup(age=2.0)
    startup.done("libraries")
    time.sleep(0.05)
    startup.done("data")
    assert startup.parts["libraries"] >= 2.0
    assert startup.parts["data"] >= 0.05


def test_a_process_knows_how_old_it_is() -> None:
    code = "import time; time.sleep(0.3); from trainer.train.startup import process_age; print(process_age())"
    began = time.monotonic()
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0.28 <= float(said) <= time.monotonic() - began + 0.02


def test_parts_that_took_no_time_are_not_told() -> None:
    said = startup_line({"python": 0.11, "data": 0.004, "resume": 1.0})
    assert said == "started in 1.1 s: python 0.1, resume 1.0"
    assert startup_line({}) == "started in 0.0 s"


def test_a_rank_that_fails_says_all_that_it_had_to_say(
    tmp_path: Path, raw_config: Callable[..., dict[str, Any]]
) -> None:
    """Its process ends without the interpreter's own end, which would have written what was still held."""
    (tmp_path / "train.json").write_text(json.dumps(raw_config(steps=4)))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CLUSTERCTL_FAULT": "rank0:step3:raise"}
    argv = [sys.executable, "-m", "trainer", "train", str(tmp_path / "train.json")]
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert "started in " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("step 2/4")
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1] == "RuntimeError: drill: arranged at step 3"
    start = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert list(start["startup"]) == ["python", "libraries", "data", "group", "model", "checkpoint"]


def test_the_startup_is_measured_before_torch_is_loaded() -> None:
    """What prepares the import of torch runs after it."""
    code = "import sys, trainer.__main__, trainer.train.startup; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_nothing_is_collected_during_the_imports_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[object]()

    class Watched(ModuleType):
        def __getattr__(self, name: str) -> Callable[..., object]:
            if name.startswith("__"):
                raise AttributeError(name)
            seen.append(("imports", gc.isenabled()))
            return lambda *_: (seen.append(("trains", gc.isenabled())), None)

    config = tmp_path / "train.json"
    config.write_text(json.dumps({"model": {"name": "gpt-tiny"}, "data": {"prefix": "x"}, "steps": 1}))
    monkeypatch.setitem(sys.modules, "trainer.train.assemble", Watched("assemble"))
    monkeypatch.setattr("trainer.device.keep_freed_memory", lambda: None)
    monkeypatch.setattr(faulthandler, "register", lambda *_: None)
    monkeypatch.setattr(gc, "freeze", lambda: seen.append("freeze"))
    monkeypatch.setattr("trainer.parallel.group.leave", lambda *_: None)
    assert main(["train", str(config)]) == 0
    assert seen[0] == ("imports", False)
    assert "freeze" in seen
    assert seen[-1] == ("trains", True)


@pytest.mark.parametrize(("kind", "masked"), [("cpu", False), ("npu", False), ("cuda", True)])
def test_a_start_notes_a_mask_only_where_the_op_of_the_device_needs_one(kind: str, masked: bool) -> None:
    config = read_config({"model": {**MODEL, "window": 4}, "data": {"prefix": "unused"}, "steps": 1})
    assert any("train.model.window" in note for note in _notes(config, Device(kind))) is masked
