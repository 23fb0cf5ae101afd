"""bench/train measures one and the same training; its arithmetic."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.train.__main__ import (
    answer,
    flops_a_token,
    table,
    verdicts,
)
from bench.train.contributions import compared, contributions_table
from bench.train.field import (
    Field,
    Gone,
    Subject,
    Work,
    take_turns,
)
from bench.train.losses import (
    AUTOCASTS,
    OURS,
    REFERENCE,
    STEPS,
    losses_table,
)
from bench.train.spec import StepFigures
from trainer.config.model_sizes import sized

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
TINY = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 16, "vocab": 128}
LLAMA = {"rotary": True, "query_groups": 1, "norm": "rms", "bias": "none", "swiglu": True, "ffn": 48}


@pytest.mark.parametrize("form", [{}, LLAMA])
def test_a_peer_trains_as_the_trainer_does(tmp_path: Path, form: dict[str, object]) -> None:
    field = Field(tmp_path, Work({**TINY, **form}, 4, "fp32"), threads=1)
    losses = {}
    for kind in ("ours", "eager"):
        subject = Subject(kind, kind, tuned=True)
        try:
            first = field.start(subject, nudge=0)
            losses[kind] = [first.loss, subject.step().loss, subject.step().loss]
        finally:
            subject.end()
    assert losses["ours"] == pytest.approx(losses["eager"], rel=1e-5)
    assert len(set(losses["ours"])) == 3


def test_a_subject_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    for interpreter, why in (
        ("/bin/false", "ended with 1"),
        ("/no/such/python", "/no/such/python: No such file"),
    ):
        field = Field(tmp_path, Work(TINY, 4, "fp32"), interpreter)
        subject = Subject("a peer", "eager", tuned=False, peer=True)
        with pytest.raises(Gone, match=why):
            field.start(subject)
        subject.end()


def test_one_that_ends_between_steps_is_missing_and_the_others_go_on() -> None:
    ends = 'print(\'{"seconds": 1, "cpu": 1, "base": 1, "peak": 1}\')'
    stays = f"import sys\nfor _ in sys.stdin: {ends[:-1]}, flush=True)"
    subjects = [Subject(name, "eager", tuned=False) for name in ("short", "long")]
    for subject, program in zip(subjects, (ends, stays), strict=True):
        subject.processes.append(subprocess.Popen([sys.executable, "-c", program], text=True, **PIPES))
    try:
        take_turns(subjects, 0.0, 3)
        assert subjects[0].gone == "ended with 0" and len(subjects[0].steps) == 1
        assert not subjects[1].gone and len(subjects[1].steps) == 3
    finally:
        for subject in subjects:
            subject.end()


def test_the_count_of_flops_is_palms() -> None:
    model = sized("gpt2-124M")
    assert flops_a_token(model) == 6 * 124_439_808 + 12 * 12 * 768 * 1024


def test_a_row_tells_rates_shares_and_what_is_missing(tmp_path: Path) -> None:
    field = Field(tmp_path, Work(TINY, 4, "fp32"))
    took = StepFigures(1.0, cpu=1.0, base=10, peak=30)
    subjects = [
        Subject("clusterctl", "ours", True),
        Subject("eager", "eager", False),
        Subject("mp", "megatron", False),
    ]
    subjects[0].steps = [replace(took, seconds=each) for each in (0.5, 0.4, 0.9)]
    subjects[1].steps = [took]
    subjects[2].gone = "no module"
    rates = Subject("products", "products", True, steps=[replace(took, square=4e9, step=2e9, own=3e9)])
    found = answer("tiny", field, [*subjects, rates], "seconds")
    ours, eager, missing = found["subjects"]
    assert ours["tokens_per_second"] == 64 / 0.5 and ours["memory"] == 20 and ours["spread"] == [0.4, 0.9]
    assert eager["flops"] == found["flops_a_token"] * 64
    assert missing == {"subject": "mp", "missing": "no module"}
    text = table(found)
    assert "2.00x" in text and "not measured: no module" in text


def test_an_op_contributes_the_ratio_of_steps_of_the_same_round() -> None:
    took = StepFigures(1.0, cpu=1.0, base=10, peak=30)
    whole, other = Subject("clusterctl", "ours", True), Subject("without gelu", "ours", True)
    whole.steps = [replace(took, seconds=each) for each in (1.0, 2.0, 4.0)]
    other.steps = [replace(took, seconds=each, peak=50) for each in (1.5, 2.2, 8.0)]
    found = compared("gelu", whole, other)
    assert (found.ratio, found.least, found.most) == (1.5, pytest.approx(1.1), 2.0)
    assert (found.memory, found.without_memory) == (20, 40)
    other.gone = "no memory"
    text = contributions_table("row", [found, compared("gelu", whole, other)])
    assert "1.500" in text and "gelu                  not measured: no memory" in text


def test_a_subject_has_the_backends_of_its_ops(tmp_path: Path) -> None:
    field = Field(tmp_path, Work(TINY, 4, "fp32"))
    subject = Subject("without gelu", "ours", tuned=True, native={"gelu": "reference"})
    assert field._spec(subject, None).train["native"] == {"gelu": "reference"}
    assert "native" not in field._spec(Subject("clusterctl", "ours", tuned=True), None).train


def test_a_row_is_held_to_its_target() -> None:
    subjects = [{"subject": "clusterctl", "tokens_per_second": 120.0}, {"subject": "eager", "missing": "why"}]
    subjects.append({"subject": "torch.compile", "tokens_per_second": 100.0})
    found = {"subjects": subjects, "rates": {}, "flops_a_token": 1.0}
    (missed,) = verdicts({**found, "row": "124m-bf16"})
    (reached,) = verdicts({**found, "row": "124m-fp32"})
    assert "1.20, at least 1.40 wanted: MISSED" in missed and reached.endswith("at least 1.15 wanted")
    rates = {"square": 150.0, "step": 130.0, "own": 140.0}
    _, share = verdicts({**found, "row": "6x384-bf16", "rates": rates})
    assert "the step's products: 0.92, at least 0.96 wanted: MISSED" in share


@pytest.mark.parametrize(("beside", "verdict"), [(0.001, "lies in"), (0.01, "LEAVES")])
def test_the_band_is_that_of_the_autocast_runs(beside: float, verdict: str) -> None:
    losses = {REFERENCE.name: [1.0] * STEPS, OURS.name: [1.0 + beside] * STEPS}
    losses |= {run.name: [1.0 - 0.002 * run.nudge] * STEPS for run in AUTOCASTS}
    assert verdict in losses_table({"losses": losses, "layer_norms": {50: {"ours": 1e-3}}})
