"""Fine-tuning a GLM on cloze questions: the loss, the accuracy, epochs, the best checkpoint, and ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import native
from clusterctl.wire.metrics import Ended
from trainer.checkpoint.manifest import read_manifest
from trainer.config.tune import TuneConfig
from trainer.corpus.tokenizer import Tokenizer, add_glm_tokens, train_tokenizer
from trainer.env import Env
from trainer.errors import DataError
from trainer.plan.memory import stages
from trainer.plan.resolve import plan_config, read_config
from trainer.plan.summary import check
from trainer.samples.glm_batches import tokens_of
from trainer.train.assemble import run_training
from trainer.tune.cloze import Cloze, ClozeSamples, TuneData
from trainer.tune.examples import UNCOUNTED
from trainer.tune.model import ClozeModel
from trainer.tune.progress import EarlyStop

THINGS = ("cat", "dog", "cup", "sun", "hat", "box")
RIGHT, WRONG = "It was wet.", "It was dry."


def questions(first: int, count: int) -> str:
    """Return COPA records that one word decides: what is wet is the answer, wherever it stands."""
    rows = []
    for number in range(first, first + count):
        label = number * 7 % 3 % 2
        choices = (RIGHT, WRONG) if label == 0 else (WRONG, RIGHT)
        premise = f"The {THINGS[number % 6]} and the {THINGS[number * 5 % 6]} fell."
        asks = ("cause", "effect")[number % 2]
        rows.append(
            {
                "premise": premise,
                "choice1": choices[0],
                "choice2": choices[1],
                "question": asks,
                "label": label,
            }
        )
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("copa")
    text = questions(0, 60).replace("{", " ").replace('"', " ")
    train_tokenizer(iter([text, 'or because, so? . " the']), 300, folder / "plain.json")
    add_glm_tokens(folder / "plain.json", folder / "tokenizer.json")
    (folder / "train.jsonl").write_text(questions(0, 24))
    (folder / "valid.jsonl").write_text(questions(100, 13))
    return folder


def config_for(material: Path, **changes: Any) -> dict[str, Any]:
    vocab = Tokenizer.load(material / "tokenizer.json").vocab
    tune = {"task": "copa", "train": str(material / "train.jsonl"), "valid": str(material / "valid.jsonl")}
    return {
        "model": {"kind": "glm", "layers": 2, "hidden": 48, "heads": 2, "sequence": 96, "vocab": vocab},
        "data": {"tokenizer": str(material / "tokenizer.json")},
        "tune": {**tune, **changes.pop("tune", {})},
        "optimizer": {"lr": 3e-3},
        "micro_batch": 4,
        "global_batch": 8,
        **changes,
    }


def test_steps_and_evaluations_follow_from_the_examples(material: Path) -> None:
    config = read_config(config_for(material, tune={"epochs": 3}))
    # 24 questions and their mirrors in batches of 8.
    assert (config.steps, config.eval.every, config.eval.batches) == (18, 6, 2)
    assert config.save.every == 6 and config.save.keep.best == 1
    plain = read_config(config_for(material, tune={"epochs": 3, "mirror": False}, save={"every": 2}))
    assert (plain.steps, plain.save.every, plain.save.keep.best) == (9, 2, 0)
    assert read_config(config_for(material, steps=5)).steps == 5


def test_the_plan_counts_a_row_for_each_answer(material: Path) -> None:
    config = read_config(config_for(material, steps=4))
    plain = replace(config, tune=TuneConfig(), micro_batch=8)
    counted = [stages(each, each.layout(1))[0].memory.activations for each in (config, plain)]
    assert config.micro_batch == 4 and counted[0] == counted[1]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": "gpt-tiny"}, "train.tune.task"),
        ({"data": {}}, "train.data.tokenizer"),
        ({"tune": {"train": "nowhere.jsonl"}}, "train.tune.train"),
        ({"tune": {"train": ""}}, "train.tune.train"),
        ({"tune": {"pattern": 2}}, "train.tune.pattern"),
        ({"tune": {"task": "copy"}}, "train.tune.task"),
        ({"tune": {"valid": "", "patience": 2}}, "train.tune.patience"),
    ],
)
def test_a_task_that_cannot_be_learned_is_refused(material: Path, changes: dict[str, Any], key: str) -> None:
    faults = plan_config(config_for(material, **changes), 1).faults
    assert key in [fault.key for fault in faults], faults


@pytest.mark.parametrize("tune", [{"task": "chatt"}, {"task": 7}, {"train": "a.jsonl"}])
def test_a_missing_or_unknown_task_is_the_only_error(tune: dict[str, Any]) -> None:
    raw = {"model": "gpt-tiny", "tune": {"lora": {"rank": 4}, **tune}}
    (fault,) = plan_config(raw, 1).faults
    assert fault.key == "train.tune.task"
    told = {"chatt": "did you mean 'chat'?", None: "copa, choice, chat, dpo"}
    assert told.get(tune.get("task"), "") in f"{fault.what}{fault.remedy}"
    # What does not depend on the task is reported with it.
    assert len(plan_config({**raw, "micro_batch": "x"}, 1).faults) == 2


def test_the_loss_is_the_cross_entropy_of_the_answers(material: Path) -> None:
    config = read_config(config_for(material))
    data = TuneData(config)
    micro = [torch.from_numpy(part) for part in data.orders()["train"].read(range(5))]
    torch.manual_seed(0)
    model = ClozeModel(config.model, native.choose("cpu", "reference")).eval()
    loss = model(*model.arguments(micro))
    tokens, targets, positions, separators, labels = micro
    scores = torch.zeros(5, 2)
    for question in range(5):
        for answer in range(2):
            logits = super(ClozeModel, model).forward(
                tokens[question, answer][None],
                positions[question, answer][None],
                separators[question, answer][None],
            )
            counted = targets[question, answer] != UNCOUNTED
            likely = logits[0, counted].log_softmax(-1)
            scores[question, answer] = likely.gather(1, targets[question, answer][counted][:, None]).sum()
    assert float(loss.detach()) == pytest.approx(float(F.cross_entropy(scores, labels)), abs=1e-5)
    assert model.take_accuracy() == (int((scores.argmax(1) == labels).sum()), 5)
    assert model.take_accuracy() == (0, 0)


def test_a_question_is_a_source_with_answers_in_place_of_its_mask(material: Path) -> None:
    config = read_config(config_for(material))
    data = TuneData(config)
    first = data.orders()["valid"].questions[0]
    tokenizer, tokens = data.reader.tokenizer, data.tokens
    row = json.loads(questions(100, 1))
    names = [row[key].rstrip(".").replace("It", "it") for key in ("choice1", "choice2")]
    joined = " because" if row["question"] == "cause" else ", so"
    before = f'"{names[0]}" or "{names[1]}"? {row["premise"].rstrip(".")}{joined}'
    assert list(first.source) == [
        tokens.enc,
        *tokenizer.encode(before),
        tokens.mask,
        *tokenizer.encode("."),
        tokens.eos,
    ]
    assert [tokenizer.decode(answer) for answer in first.answers] == [f" {name}" for name in names]
    mirrored = data.orders()["train"].questions[24]
    original = data.orders()["train"].questions[0]
    assert mirrored.answers == original.answers[::-1] and mirrored.label == 1 - original.label


def test_every_question_is_read_once_an_epoch_and_numbers_behind_the_last_do_not_count(
    material: Path,
) -> None:
    tokens = tokens_of(Tokenizer.load(material / "tokenizer.json"), 0)
    made = [Cloze((1, 2, number), 1, ((3,), (4, 5)), number % 2) for number in range(10)]
    shuffled = ClozeSamples(made, tokens, 7)
    epochs = [[int(shuffled.read([n])[0][0, 0, 2]) for n in range(start, start + 10)] for start in (0, 10)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10)) and epochs[0] != epochs[1]
    plain = ClozeSamples(made, tokens, None)
    labels = plain.read([8, 9, 10, 11])[-1].tolist()
    assert labels == [0, 1, UNCOUNTED, UNCOUNTED]


def learn(run_dir: Path, raw: dict[str, Any]) -> Ended:
    """Train on this process alone."""
    environment = Env(device_kind="cpu", threads=1)
    ended, _ = run_training(read_config(raw), environment, run_dir, lambda: False)
    return ended


def test_copa_is_learned_and_the_best_checkpoint_stays(material: Path, tmp_path: Path) -> None:
    ended = learn(tmp_path / "run", config_for(material, tune={"epochs": 12, "patience": 4}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [line["accuracy"] for line in lines if line["event"] == "eval"]
    assert max(measured) >= 0.98 and measured[0] < 0.98, measured
    kept = [read_manifest(path) for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert max(manifest.accuracy or 0.0 for manifest in kept) == max(measured)
    best = measured.index(max(measured))
    if len(measured) - 1 - best >= 4:
        assert ended.stopped


@pytest.mark.parametrize(
    "layout", [{}, {"zero": 2}, {"parallel": {"tensor": 2}}, {"parallel": {"pipeline": 2}}]
)
def test_two_ranks_learn_what_one_learns(
    material: Path, tmp_path: Path, run_ranks: Callable[..., Any], layout: dict[str, Any]
) -> None:
    config = config_for(material, steps=4, save={"every": 4})
    learn(tmp_path / "one", config)
    done = run_ranks(2, {**config, **layout}, tmp_path / "two")
    assert all(rank.returncode == 0 for rank in done), done[0].stderr
    assert losses_of(tmp_path / "one") == pytest.approx(losses_of(tmp_path / "two"), abs=1e-5)


def losses_of(run: Path) -> list[float]:
    """Return the losses of steps and evaluations, and the accuracies."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["event"] in ("step", "eval")]
    return losses + [line["accuracy"] for line in lines if line["event"] == "eval"]


def test_a_multiple_choice_question_needs_one_mask(material: Path, tmp_path: Path) -> None:
    file = tmp_path / "choice.jsonl"
    row = {"context": "The sun is [MASK].", "choices": ["wet", "dry", "a box"], "label": 1}
    file.write_text(json.dumps(row) + "\n")
    changes = {"task": "choice", "train": str(file), "valid": ""}
    config = read_config(config_for(material, tune=changes))
    (question,) = TuneData(config).orders()["train"].questions
    assert len(question.answers) == 3 and question.label == 1
    file.write_text(json.dumps({**row, "context": "no mask"}) + "\n")
    with pytest.raises(DataError, match=r"choice\.jsonl:1: field 'context' contains \[MASK\] 0 times"):
        TuneData(config).orders()


@pytest.mark.parametrize("task", ["copa", "choice"])
def test_a_label_that_is_no_choice_is_refused_by_the_plan_with_its_line(
    material: Path, tmp_path: Path, task: str
) -> None:
    rows: list[dict[str, Any]] = [
        {"context": "The [MASK] fell.", "choices": ["cat", "dog"], "label": label} for label in (0, 5)
    ]
    if task == "copa":
        rows = [{**json.loads(questions(0, 1)), "label": label} for label in (0, 5)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tune = {"task": task, "train": str(file), "valid": str(file)}
    answer = check({"train": config_for(material, tune=tune), "check_data": True})
    for key, fault in zip(("train", "valid"), answer["faults"], strict=True):
        assert fault["key"] == f"train.tune.{key}" and f"{file}:2: " in fault["what"] and fault["remedy"]


def test_early_stop_counts_evaluations_without_a_better_accuracy() -> None:
    class Measured:
        def __init__(self, accuracy: float | None) -> None:
            self.accuracy = accuracy

    stop = EarlyStop(2)
    assert [stop(Measured(value)) for value in (0.5, 0.4, 0.6, 0.6, 0.5)] == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert not EarlyStop(0)(Measured(0.0)) and not EarlyStop(1)(Measured(None))
