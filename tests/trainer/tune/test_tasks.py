"""Preference pairs and labels: the losses, what the reference is, faults of rows, and ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import native
from tests.support.tuning import WORDS, config_for, learn, lines, losses_of
from trainer.checkpoint.store import found, open_checkpoint
from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import DataError
from trainer.model.gpt import GPT
from trainer.plan.resolve import plan_config, read_config
from trainer.tune.classify import LabelledData
from trainer.tune.classify_model import LabelGPT, add_classifier
from trainer.tune.dpo_model import PreferenceModel
from trainer.tune.examples import UNCOUNTED
from trainer.tune.pairs import PairData


def pair(number: int) -> dict[str, Any]:
    word, other = WORDS[number % 6], WORDS[(number + 1 + number % 5) % 6]
    prompt = f"say {word}\n"
    if number % 2:
        return {"prompt": prompt, "chosen": f"{word}!", "rejected": f"{other}!"}
    asked = [{"role": "user", "content": prompt}]
    answers = [[{"role": "assistant", "content": f"{each}!"}] for each in (word, other)]
    if number % 4:
        return {"prompt": asked, "chosen": answers[0], "rejected": answers[1]}
    return {"chosen": asked + answers[0], "rejected": asked + answers[1]}


def labelled(number: int) -> dict[str, Any]:
    first, second = WORDS[number % 6], WORDS[number * 5 % 6]
    return {"premise": f"say {first}", "hypothesis": second, "label": bool(number % 6 < 3)}


def task_config(material: Path, folder: Path, task: str, **changes: Any) -> dict[str, Any]:
    make, more = (pair, {}) if task == "dpo" else (labelled, {"fields": ["premise", "hypothesis"]})
    more |= {"labels": ["false", "true"]} if task == "classify" else {}
    (folder / "train.jsonl").write_text(lines([make(number) for number in range(14)]))
    (folder / "valid.jsonl").write_text(lines([make(number) for number in range(20, 27)]))
    files = {name: str(folder / f"{name}.jsonl") for name in ("train", "valid")}
    return config_for(material, tune={"task": task, **files, **more, **changes.pop("tune", {})}, **changes)


def micro_of(order: Any, numbers: range) -> list[torch.Tensor]:
    return [torch.from_numpy(part) for part in order.read(numbers)]


def test_the_loss_of_pairs_is_that_of_dpo(material: Path, tmp_path: Path) -> None:
    config = read_config(task_config(material, tmp_path, "dpo"))
    order = PairData(config).orders()["valid"]
    order.reference = np.random.RandomState(0).normal(-20, 3, (7, 2)).astype(np.float32)
    model = PreferenceModel(config.model, native.choose("cpu", "reference")).eval()
    micro = micro_of(order, range(4))
    loss = float(model(*model.arguments(micro)).detach())
    margins = []
    for number in range(4):
        sums = []
        for side in (0, 1):
            tokens, targets = (torch.from_numpy(part) for part in order.examples.row(2 * number + side))
            likely = GPT.forward(model, tokens[None]).log_softmax(-1)[0]
            chosen = targets != UNCOUNTED
            sums.append(likely[chosen].gather(1, targets[chosen][:, None]).sum().detach())
        better, worse = (sums[side] - float(order.reference[number, side]) for side in (0, 1))
        margins.append(0.1 * (better - worse))
    assert loss == pytest.approx(float(-F.logsigmoid(torch.stack(margins)).mean()), abs=1e-5)
    assert model.take_accuracy() == (sum(bool(each > 0) for each in margins), 4)
    # Behind the last pair nothing counts.
    assert model.counted(micro_of(order, range(5, 9))) == 2


def test_preferences_are_learned_against_the_model_at_the_beginning(material: Path, tmp_path: Path) -> None:
    raw = task_config(material, tmp_path, "dpo", steps=6, optimizer={"lr": 3e-3, "schedule": "constant"})
    raw["save"] = {"every": 3, "keep": 3}
    learn(tmp_path / "run", raw)
    lost = losses_of(tmp_path / "run")
    # Before the first step the model is its own reference.
    assert lost[0] == pytest.approx(float(np.log(2)), abs=1e-5) and lost[1] == pytest.approx(
        lost[0], abs=1e-5
    )
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [event["loss"] for event in events if event["event"] == "eval"]
    assert evaluated[-1] < 0.67 < evaluated[0]
    # A resume measures against the same reference, whether it is kept or computed again.
    for kept in (True, False):
        for path in found(tmp_path / "run" / "checkpoints"):
            if path.name.endswith("6"):
                path.rename(tmp_path / f"before-{kept}")
        for file in () if kept else (tmp_path / "run").glob("reference-*.npy"):
            file.unlink()
        learn(tmp_path / "run", raw)
        again = open_checkpoint(found(tmp_path / "run" / "checkpoints")[0])
        before = open_checkpoint(tmp_path / f"before-{kept}")
        assert again.step == before.step == 6
        for name, tensor in again.read(list(again.weights)).items():
            assert torch.equal(tensor, before.read([name])[name]), name


@pytest.mark.parametrize("kind", ["gpt", "glm"])
def test_labels_are_learned(material: Path, tmp_path: Path, kind: str) -> None:
    vocab = Tokenizer.load(material / "tokenizer.json").vocab + 9
    raw = task_config(material, tmp_path, "classify", model={"kind": kind, "vocab": vocab}, steps=120)
    learn(tmp_path / "run", {**raw, "optimizer": {"lr": 1e-2}, "eval": {"every": 120}})
    assert losses_of(tmp_path / "run")[-1] > 0.8
    table = open_checkpoint(found(tmp_path / "run" / "checkpoints")[0]).weights
    assert table["classifier.out.weight"] == (2, 32) and ("classifier.dense.weight" in table) == (
        kind == "glm"
    )


def test_the_label_is_read_from_the_last_token(material: Path, tmp_path: Path) -> None:
    config = read_config(task_config(material, tmp_path, "classify"))
    order = LabelledData(config).orders()["valid"]
    model = LabelGPT(config.model, native.choose("cpu", "reference"))
    add_classifier(model, config.model, 2, 0)
    model.eval()
    micro = micro_of(order, range(4))
    scores = torch.cat(
        [model.classifier(model.hidden(micro_of(order, range(n, n + 1))[0])[:, -1]) for n in range(4)]
    )
    wanted = F.cross_entropy(scores, micro[3])
    assert float(model(*model.arguments(micro)).detach()) == pytest.approx(float(wanted.detach()), abs=1e-5)


FAULTS = {
    "dpo": [
        ('{"prompt": "x", "chosen": "y"}', "has no answer 'rejected'"),
        ('{"prompt": "x", "chosen": "y", "rejected": "y"}', "both answers are the same"),
        ('{"chosen": "x", "rejected": "y"}', "has no prompt, and its answers are not conversations"),
    ],
    "classify": [
        ('{"premise": "x", "hypothesis": "y"}', "has no field 'label'"),
        (
            '{"premise": "x", "hypothesis": "y", "label": "maybe"}',
            "field 'label' is 'maybe', which is not one of",
        ),
        ('{"premise": "x", "label": true}', "field 'hypothesis' is not a text"),
    ],
}


@pytest.mark.parametrize("task", ["dpo", "classify"])
def test_faults_of_rows_are_named_together(material: Path, tmp_path: Path, task: str) -> None:
    config = read_config(task_config(material, tmp_path, task))
    file = tmp_path / "bad.jsonl"
    file.write_text("\n".join(row for row, _ in FAULTS[task]) + "\n")
    data = (PairData if task == "dpo" else LabelledData)(config)
    with pytest.raises(DataError) as caught:
        data.examples(str(file))
    for number, (line, (_, problem)) in enumerate(
        zip(caught.value.message.splitlines(), FAULTS[task], strict=True), 1
    ):
        assert line.startswith(f"{file}:{number}: {problem}")


@pytest.mark.parametrize(
    ("task", "changes", "key"),
    [
        ("dpo", {"model": {"kind": "glm"}}, "train.tune.task"),
        ("dpo", {"tune": {"labels": ["a", "b"]}}, "train.tune.labels"),
        ("dpo", {"tune": {"too_long": "leave_out"}}, "train.tune.too_long"),
        ("classify", {"tune": {"labels": ["a"]}}, "train.tune.labels"),
        ("classify", {"parallel": {"tensor": 2, "sequence": True}}, "train.parallel.sequence"),
    ],
)
def test_what_does_not_fit_is_refused(
    material: Path, tmp_path: Path, task: str, changes: dict[str, Any], key: str
) -> None:
    faults = plan_config(task_config(material, tmp_path, task, **changes), 2).faults
    assert key in [fault.key for fault in faults], faults


@pytest.mark.parametrize(
    ("task", "layout"),
    [
        ("dpo", {"parallel": {"tensor": 2}}),
        ("dpo", {"parallel": {"pipeline": 2}}),
        ("dpo", {"engine": "deepspeed", "zero": 0}),
        ("dpo", {"engine": "deepspeed", "zero": 1}),
        ("dpo", {"engine": "deepspeed", "zero": 2}),
        ("dpo", {"engine": "deepspeed", "zero": 3}),
        ("dpo", {"engine": "deepspeed", "parallel": {"pipeline": 2}}),
        ("classify", {"zero": 2}),
        ("classify", {"parallel": {"tensor": 2}}),
        ("classify", {"parallel": {"pipeline": 2}}),
    ],
)
def test_two_ranks_learn_what_one_learns(
    material: Path, tmp_path: Path, run_ranks: Callable[..., Any], task: str, layout: dict[str, Any]
) -> None:
    config = task_config(material, tmp_path, task, steps=3, save={"every": 3})
    learn(tmp_path / "one", config)
    done = run_ranks(2, {**config, **layout}, tmp_path / "two")
    assert all(rank.returncode == 0 for rank in done), done[0].stderr
    assert losses_of(tmp_path / "one") == pytest.approx(losses_of(tmp_path / "two"), abs=1e-5)
