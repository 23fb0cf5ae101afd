"""Small files of conversations, and trainings on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.corpus.tokenizer import Tokenizer, train_tokenizer
from trainer.env import Env
from trainer.plan.resolve import read_config
from trainer.train.assemble import run_training

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = ("red", "blue", "green", "cat", "dog", "sun")


def conversation(number: int) -> dict[str, Any]:
    """Return a conversation of one to three questions, each of which repeats a word."""
    messages = [{"role": "system", "content": "Repeat."}] if number % 3 == 0 else []
    for turn in range(1 + number % 3):
        word = WORDS[(number * 5 + turn) % 6]
        messages += [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": f"{word}!"}]
    return {"messages": messages}


def completion(number: int) -> dict[str, Any]:
    word = WORDS[number % 6]
    return {"prompt": f"say {word}\n", "completion": f"{word}!"}


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def config_for(material: Path, **changes: Any) -> dict[str, Any]:
    vocab = Tokenizer.load(material / "tokenizer.json").vocab
    tune = {"task": "chat", "train": str(material / "train.jsonl"), "valid": str(material / "valid.jsonl")}
    model = {
        "layers": 2,
        "hidden": 32,
        "heads": 2,
        "sequence": 256,
        "vocab": vocab,
        **changes.pop("model", {}),
    }
    return {
        "model": model,
        "data": {"tokenizer": str(material / "tokenizer.json")},
        "tune": {**tune, **changes.pop("tune", {})},
        "optimizer": {"lr": 3e-3},
        "micro_batch": 2,
        "global_batch": 4,
        **changes,
    }


def write_files(folder: Path) -> Path:
    text = " ".join(["<|im_start|>user assistant system<|im_end|> say Repeat.", *WORDS]) + "!\n"
    train_tokenizer(iter([text] * 20), 300, folder / "tokenizer.json")
    config = {"eos_token": "<|endoftext|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "train.jsonl").write_text(lines([*map(conversation, range(14)), *map(completion, range(6))]))
    (folder / "valid.jsonl").write_text(lines([*map(conversation, range(20, 27))]))
    return folder


def learn(run_dir: Path, raw: dict[str, Any]) -> None:
    run_training(read_config(raw), Env(device_kind="cpu", threads=1), run_dir, lambda: False)


def losses_of(run: Path) -> list[float]:
    """Return the losses of steps and evaluations, and the accuracies."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] in ("step", "eval")]
    return losses + [event["accuracy"] for event in events if event["event"] == "eval"]
