"""The rows of bench/train that compare numbers, not speed: losses of 200 steps, and gradients of layer norms.

All runs have the same first weights, batches and optimizer. How much an autocast run may differ from fp32 is estimated
from several autocast runs whose first weights differ by a millionth: the trainer's run must be within the range of
their differences.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.field import ROOT
from bench.train.field import (
    MODEL_KEYS,
    Field,
    Subject,
    Work,
    write_batches,
)
from clusterctl.sandbox import demo
from clusterctl.wire.contract import CHECKPOINT_DIR
from trainer.plan.resolve import read_config

STEPS, EVERY, BATCH = 200, 50, 4
MODEL = {"layers": 4, "hidden": 256, "heads": 4, "sequence": 128, "vocab": demo.VOCABULARY}
OPTIMIZER = {"lr": 1e-3, "min_lr": 1e-3, "schedule": "constant"}
# A difference is averaged over this many steps.
WINDOW = 10
# The number of autocast runs.
BAND = 3


@dataclass(frozen=True)
class Run:
    """One training run: its program, its precision, and how much its first weights were perturbed."""

    name: str
    kind: str
    precision: str
    nudge: int = 0


REFERENCE = Run("eager, fp32", "eager", "fp32")
AUTOCASTS = tuple(Run(f"eager, autocast bf16, {n}", "eager", "bf16", n) for n in range(BAND))
OURS = Run("clusterctl, bf16", "ours", "bf16")
OTHERS = (Run("eager, fp32, 1", "eager", "fp32", 1), Run("clusterctl, fp32", "ours", "fp32"), OURS)


def losses_row(folder: Path, log: Any) -> dict[str, Any]:
    """Return the losses of every run, and the errors of layer norm gradients during the trainer's run."""
    corpus = make_texts(folder)
    losses = {}
    for run in (REFERENCE, *AUTOCASTS, *OTHERS):
        log(f"{run.name}: {STEPS} steps")
        losses[run.name] = train(folder, corpus, run)
    errors = {}
    for step in range(EVERY, STEPS + 1, EVERY):
        log(f"layer norms after {step} steps")
        errors[step] = norm_errors(folder, corpus, step)
    return {"row": "losses", "losses": losses, "layer_norms": errors}


def make_texts(folder: Path) -> Path:
    """Write the language reference that comes with Python as tokens, on which losses fall; return the prefix."""
    demo.write_corpus(folder / "corpus.jsonl")
    demo.train_tokenizer(folder / "corpus.jsonl", folder / "tokenizer.json")
    demo.build_data(folder / "corpus.jsonl", folder / "tokenizer.json", folder / "text")
    return folder / "text"


def field_of(folder: Path, corpus: Path, run: Run, **more: Any) -> Field:
    work = Work(MODEL, BATCH, run.precision)
    return Field(
        folder / run.name.replace(" ", "-").replace(",", ""), work, corpus=corpus, more={**TRAIN, **more}
    )


TRAIN: Mapping[str, Any] = {"steps": STEPS, "optimizer": OPTIMIZER, "save": {"every": EVERY, "keep": STEPS}}


def train(folder: Path, corpus: Path, run: Run) -> list[float]:
    """Return the losses of all steps."""
    field = field_of(folder, corpus, run)
    subject = Subject("run", run.kind, tuned=True)
    try:
        first = field.start(subject, nudge=run.nudge)
        found = [first.loss or 0.0] + [subject.step().loss or 0.0 for _ in range(STEPS - 1)]
        if run.kind == "ours":
            subject.finish()
        return found
    finally:
        subject.end()


def norm_errors(folder: Path, corpus: Path, step: int) -> dict[str, float]:
    """Return the relative errors of all layer norm gradients after step `step` of the trainer's bf16 run, against fp64.

    The trainer's gradients are computed from the change of the optimizer's averages in one further step.
    """
    before = folder / "clusterctl-bf16" / "run-run" / CHECKPOINT_DIR / f"step-{step:08d}"
    train_part = {
        "steps": step + 1,
        "optimizer": {**OPTIMIZER, "clip": 0.0},
        "save": {"every": 0},
        "resume": str(before),
    }
    field = field_of(folder / f"after-{step}", corpus, OURS, **train_part)
    file = field.folder / "train.json"
    file.write_text(json.dumps(field.raw))
    argv = [sys.executable, "-m", "trainer", "train", str(file), "--run-dir", str(field.folder)]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    after = field.folder / CHECKPOINT_DIR / f"step-{step + 1:08d}"
    argv = [sys.executable, "-m", "bench.train.losses", str(before), str(after), str(file)]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    errors: dict[str, float] = json.loads(done.stdout)
    return errors


def compare_norms(before: Path, after: Path, train_file: Path) -> dict[str, float]:
    """Return the relative errors of all layer norm gradients in the step that led from one checkpoint to the other."""
    import numpy as np
    import torch

    from bench.train.peers import Eager
    from trainer.checkpoint.store import open_checkpoint

    earlier, later = open_checkpoint(before), open_checkpoint(after)
    weights = earlier.read(list(earlier.weights))
    config = read_config(json.loads(train_file.read_text()), 1)
    batch = torch.from_numpy(np.load(write_batches(config, train_file.parent))[-1].astype(np.int64))
    beta = config.optimizer.betas[0]
    old, new = (saved.read(list(saved.table)) for saved in (earlier, later))

    def gradients(kind: torch.dtype, autocast: bool) -> dict[str, torch.Tensor]:
        model = Eager({key: getattr(config.model, key) for key in MODEL_KEYS}).to(kind)
        model.load_state_dict({name: weight.to(kind) for name, weight in weights.items()})
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch)
        loss.backward()
        return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}

    exact = gradients(torch.float64, False)
    norms = [name for name in exact if "norm" in name]
    whole = flat([exact[name] for name in norms])
    ours = [
        (new[f"exp_avg.{name}"].double() - beta * old[f"exp_avg.{name}"].double()) / (1 - beta)
        for name in norms
    ]
    others = {
        "eager, fp32": gradients(torch.float32, False),
        "eager, autocast bf16": gradients(torch.float32, True),
        "eager, all of it in bf16": gradients(torch.bfloat16, False),
    }
    found = {"clusterctl, bf16": flat(ours)}
    found |= {name: flat([gradients[norm] for norm in norms]) for name, gradients in others.items()}
    return {name: float((gradient - whole).norm() / whole.norm()) for name, gradient in found.items()}


def flat(tensors: Sequence[Any]) -> Any:
    import torch

    return torch.cat([tensor.flatten() for tensor in tensors])


def smooth(values: Sequence[float]) -> list[float]:
    """Return moving averages over WINDOW steps."""
    return [sum(values[at : at + WINDOW]) / WINDOW for at in range(0, len(values) - WINDOW + 1, WINDOW)]


def differences(losses: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return for each other run its smoothed loss minus the reference's."""
    plain = losses[REFERENCE.name]
    return {
        name: smooth([a - b for a, b in zip(values, plain, strict=True)])
        for name, values in losses.items()
        if name != REFERENCE.name
    }


def losses_table(found: Mapping[str, Any]) -> str:
    """Return a table of differences from the reference, the band, and the layer norms."""
    losses, gaps = found["losses"], differences(found["losses"])
    lines = [
        f"losses: {STEPS} steps; differences from {REFERENCE.name}, means of {WINDOW} steps, in thousandths"
    ]
    last = len(losses[REFERENCE.name]) // WINDOW - 1
    at = sorted({0, last // 8, last // 4, last // 2, 3 * last // 4, last})
    lines.append(f"  {'up to step':<26}" + "".join(f"{(i + 1) * WINDOW:>8}" for i in at) + f"{'largest':>9}")
    plain = smooth(losses[REFERENCE.name])
    lines.append(f"  {REFERENCE.name:<26}" + "".join(f"{plain[i]:>8.3f}" for i in at))
    for name, difference in gaps.items():
        text = "".join(f"{1000 * difference[i]:>+8.2f}" for i in at)
        lines.append(f"  {name:<26}{text}{1000 * max(map(abs, difference)):>9.2f}")
    band = max(max(map(abs, gaps[run.name])) for run in AUTOCASTS)
    own = max(map(abs, gaps[OURS.name]))
    lines.append(f"  ours in bf16 {'lies in' if own <= band else 'LEAVES'} the band of the autocast runs")
    errors = found["layer_norms"]
    lines.append("  error of layer norms' gradients, relative to fp64, at our weights")
    lines.append(f"  {'after step':<26}" + "".join(f"{step:>10}" for step in errors))
    for name in next(iter(errors.values())):
        lines.append(f"  {name:<26}" + "".join(f"{error_row[name]:>10.1e}" for error_row in errors.values()))
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(compare_norms(*map(Path, sys.argv[1:4]))))
