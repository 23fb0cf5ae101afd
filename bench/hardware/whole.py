"""The step `whole`: trainings as `python -m trainer train` runs them: losses next to a CPU's, and resumes.

A training in fp32 on the device and on a CPU; and in bf16, fp16 and with dropout on the device, once in one piece and
once continued from its middle checkpoint, which must give the same bits.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from bench.hardware.step import emit, part
from bench.train.field import draw_corpus
from clusterctl.wire.contract import CHECKPOINT_DIR, DEVICE_KIND, METRICS_FILE

TABLE = "whole trainings"
STEPS = 20
MODEL = {"layers": 4, "hidden": 128, "heads": 4, "sequence": 128, "vocab": 512}
SCHEDULE = {"lr": 1e-3, "min_lr": 1e-3, "warmup_steps": 0, "schedule": "constant"}
LLAMA = {"rotary": True, "swiglu": True, "query_groups": 2, "norm": "rms", "bias": "none", "tied": False}


@dataclass(frozen=True)
class Form:
    """What differs between the trainings."""

    precision: str = "fp32"
    model: Mapping[str, object] = field(default_factory=dict)


AGAINST_CPU = {"GPT": Form(), "Llama": Form(model=LLAMA)}
RESUMED = {
    "bf16": Form("bf16"),
    "fp16": Form("fp16"),
    "fp32": Form(),
    "dropout": Form("bf16", {"dropout": 0.1, "attention_dropout": 0.1}),
}


@dataclass(frozen=True)
class Trainer:
    """Trains below a folder, with one corpus."""

    folder: Path

    def run(self, name: str, device: str, form: Form) -> dict[int, float]:
        """Train and return the loss of each step; what exists in the folder of that name is continued."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        config = {
            "micro_batch": 4,
            "global_batch": 8,
            "precision": form.precision,
            "steps": STEPS,
            "optimizer": SCHEDULE,
            "eval": {"batches": 0},
            "save": {"every": STEPS // 2},
            "data": {"prefix": str(self.folder / "tokens"), "split": "1,0,0"},
            "model": {**MODEL, **form.model},
        }
        (folder / "train.json").write_text(json.dumps(config))
        argv = [
            sys.executable,
            "-m",
            "trainer",
            "train",
            str(folder / "train.json"),
            "--run-dir",
            str(folder),
        ]
        # Trainings run side by side, and threads that wait for each other take the others' cores.
        env = {**os.environ, DEVICE_KIND: device, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(argv, env=env, capture_output=True, text=True)
        print(f"-- {name}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}", file=sys.stderr)
        for line in dict.fromkeys(text for text in done.stderr.splitlines() if "Warning: " in text):
            emit("warnings of whole trainings", training=name, line=line.partition("Warning: ")[2][:200])
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise RuntimeError(f"{name} ended with {done.returncode}: {last}")
        records = map(json.loads, (folder / METRICS_FILE).read_text().splitlines())
        return {record["step"]: record["loss"] for record in records if record["event"] == "step"}

    def resumed(self, name: str, device: str, form: Form) -> dict[int, float]:
        """Continue a copy of a finished training from its middle checkpoint."""
        copy = self.folder / f"{name}, resumed"
        shutil.copytree(self.folder / name / CHECKPOINT_DIR, copy / CHECKPOINT_DIR)
        for path in (copy / CHECKPOINT_DIR).iterdir():
            if str(STEPS) in path.name:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return self.run(copy.name, device, form)


def against_cpu(trainer: Trainer, device: str, name: str) -> None:
    with part(TABLE, training=name, next_to="a CPU"):
        with ThreadPoolExecutor(2) as pool:
            both = [
                pool.submit(trainer.run, f"{name}-{kind}-{number}", kind, AGAINST_CPU[name])
                for number, kind in enumerate((device, "cpu"))
            ]
            own, right = (future.result() for future in both)
        worst = max(abs(own[step] - right[step]) for step in range(1, STEPS + 1))
        emit(TABLE, training=name, next_to="a CPU, fp32", steps=len(own), loss=own[STEPS], difference=worst)


def resumed(trainer: Trainer, device: str, name: str) -> None:
    with part(TABLE, training=name, next_to="its resume"):
        began = time.monotonic()
        whole = trainer.run(name, device, RESUMED[name])
        rest = trainer.resumed(name, device, RESUMED[name])
        half = {step: loss for step, loss in whole.items() if step > STEPS // 2}
        worst = max(abs(half[step] - rest[step]) for step in half.keys() & rest.keys())
        emit(
            TABLE,
            training=name,
            next_to="its resume",
            steps=len(rest),
            loss=whole[STEPS],
            difference=worst,
            equal=half == rest,
            s=time.monotonic() - began,
        )


def main() -> None:
    device = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Path(folder))
        draw_corpus(trainer.folder / "tokens", MODEL["vocab"], 400_000)
        # On a CPU alone this shows that the program works.
        few = 1 if device == "cpu" else None
        # Starts take longer than steps; none of these figures is a time that matters.
        with ThreadPoolExecutor(max(2, min(6, len(os.sched_getaffinity(0)) // 2))) as pool:
            for job in [
                *(pool.submit(against_cpu, trainer, device, name) for name in list(AGAINST_CPU)[:few]),
                *(pool.submit(resumed, trainer, device, name) for name in list(RESUMED)[:few]),
            ]:
                job.result()


if __name__ == "__main__":
    main()
