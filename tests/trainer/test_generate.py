from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.data_build import Order, build
from trainer.data_part import Recipe
from trainer.errors import CheckpointError, InputError
from trainer.generate import Sampling, draw, generate, load_model
from trainer.tokenizer import train_tokenizer

TEXTS = ["one two three four five six seven eight nine ten. " * 12] * 12


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a corpus of counting words."""
    folder: Path = tmp_path_factory.mktemp("counting")
    train_tokenizer(iter(TEXTS), 300, folder / "tokenizer.json")
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    wanted = (str(folder / "in.jsonl"),)
    build(Order(wanted, folder / "tokenizer.json", folder / "counting", Recipe(append_eod=True)))
    return folder


def config_for(material: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": {"layers": 2, "hidden": 32, "heads": 2, "sequence": 16, "vocab": 300},
        "data": {
            "prefix": str(material / "counting"),
            "split": "80,20,0",
            "tokenizer": str(material / "tokenizer.json"),
        },
        "optimizer": {"lr": 1e-2},
        "global_batch": 8,
        **changes,
    }


@pytest.fixture
def checkpoint(tmp_path: Path, material: Path, train_here: Callable[..., Any]) -> Path:
    train_here(tmp_path / "run", steps=60, **config_for(material, save={"keep": 1}, eval={"batches": 0}))
    return tmp_path / "run" / "checkpoints" / "step-00000060"


def test_a_folder_alone_goes_on_with_what_was_learned(checkpoint: Path, tmp_path: Path) -> None:
    moved = checkpoint.rename(tmp_path / "elsewhere")
    made = generate(moved, None, "one two three", Sampling(max_tokens=8, temperature=0))
    assert str(made["text"]).startswith("one two three four five six")
    assert made["step"] == 60


def test_a_seed_fixes_the_text_and_another_changes_it(checkpoint: Path) -> None:
    hot = [generate(checkpoint, None, "", Sampling(40, 3.0, 0, seed))["text"] for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]


def test_padded_ids_are_never_drawn(checkpoint: Path) -> None:
    from trainer.checkpoint import verify

    model = load_model(verify(checkpoint))
    assert model.config.padded_vocab == 384
    drawn = list(draw(model, [1], Sampling(max_tokens=200, temperature=100.0, top_k=0)))
    assert len(drawn) == 200 and max(drawn) < 300


def test_a_damaged_checkpoint_and_senseless_settings_are_refused(checkpoint: Path) -> None:
    with pytest.raises(InputError) as caught:
        generate(checkpoint, None, "", Sampling(0, -1.0, -1))
    assert len(caught.value.message.splitlines()) == 3
    (checkpoint / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="0 bytes"):
        generate(checkpoint, None, "", Sampling())


# Two threads on busy cores wait for each other by spinning: 8 steps were seen to take a minute.
ALONE = {**os.environ, "OMP_NUM_THREADS": "1"}


def verb(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "trainer", *argv], capture_output=True, text=True, env=ALONE)


def test_the_verbs_speak_json_and_mistakes_take_a_line(checkpoint: Path, material: Path) -> None:
    made = verb(
        "generate", "--checkpoint", str(checkpoint), "--prompt", "one two", "--max-tokens", "3", "--json"
    )
    assert json.loads(made.stdout)["tokens"] <= 3
    assert json.loads(verb("checkpoint-verify", str(checkpoint)).stdout)["ok"]
    assert json.loads(verb("data-info", str(material / "counting"), "--json").stdout)["documents"] == 12
    missing = verb("data-info", str(material / "none"))
    assert (missing.returncode, missing.stdout) == (2, "") and missing.stderr.startswith("error: ")


def test_sigterm_finishes_the_step_saves_and_ends_well(tmp_path: Path, material: Path) -> None:
    config = config_for(material, steps=100_000, log_every=1, eval={"batches": 0})
    (tmp_path / "train.json").write_text(json.dumps(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", "train", str(tmp_path / "train.json")],
        stdout=subprocess.PIPE,
        text=True,
        env=ALONE,
    )
    try:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("step"):
            pass
        time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert process.wait(30) == 0 and "stopped at step" in rest
    finally:
        process.kill()
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "stopped"
    assert (tmp_path / "checkpoints" / f"step-{last['step']:08d}" / "manifest.json").exists()
