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

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.random import RandomState
from torch import Tensor

import native
from trainer.checkpoint.manifest import encode_manifest, read_manifest
from trainer.config.model import ModelConfig
from trainer.corpus.build import Order, build
from trainer.corpus.tokenizer import Tokenizer, train_tokenizer
from trainer.corpus.worker import Recipe
from trainer.errors import CheckpointError, InputError
from trainer.generate import Sampling, draw, fill, generate, load_model
from trainer.model.glm import GLM
from trainer.model.gpt import GPT
from trainer.samples.glm_blanks import blanked, continued
from trainer.samples.glm_windows import GlmTokens

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
    from trainer.checkpoint.store import verify

    model = load_model(verify(checkpoint))
    assert isinstance(model, GPT) and model.config.padded_vocab == 384
    drawn = list(draw(model, [1], Sampling(max_tokens=200, temperature=100.0, top_k=0)))
    assert len(drawn) == 200 and max(drawn) < 300


def test_a_damaged_checkpoint_and_senseless_settings_are_refused(checkpoint: Path) -> None:
    with pytest.raises(InputError) as caught:
        generate(checkpoint, None, "", Sampling(0, -1.0, -1))
    assert len(caught.value.message.splitlines()) == 3
    (checkpoint / "part-00000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="0 bytes"):
        generate(checkpoint, None, "", Sampling())


@pytest.mark.parametrize(
    "changes", [{"layers": 10**9}, {"hidden": 10**6, "heads": 1}, {"heads": 3}, {"ffn": 64, "vocab": 1}]
)
def test_a_config_that_lies_is_refused_before_a_model_is_built(
    checkpoint: Path, changes: dict[str, int]
) -> None:
    manifest = read_manifest(checkpoint)
    manifest["config"]["model"] |= changes
    del manifest["sha256"]
    (checkpoint / "manifest.json").write_bytes(encode_manifest(manifest))
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="step-00000060"):
        generate(checkpoint, None, "one", Sampling())
    assert time.monotonic() - began < 2


class ScriptedGLM(GLM):
    """Writes what it is told, and keeps what it was asked last."""

    def __init__(self, sequence: int, vocab: int, script: list[int]) -> None:
        shape = ModelConfig("glm", layers=1, hidden=8, heads=1, sequence=sequence, vocab=vocab)
        super().__init__(shape, native.choose("cpu", "reference"))
        self.script = iter(script)
        self.asked: list[Any] = []

    def forward(
        self, tokens: Tensor, positions: Tensor, separators: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        self.asked = [tokens[0].tolist(), positions[0].tolist(), separators.tolist()]
        return F.one_hot(torch.tensor([next(self.script)]), self.config.vocab).float().unsqueeze(1)


def filled(
    material: Path, prompt: str, blanks: list[str], sequence: int = 32, most: int = 64
) -> tuple[Any, ScriptedGLM, Tokenizer, GlmTokens]:
    """A prompt whose blanks a scripted model fills, each up to the end of its piece."""
    words = Tokenizer.load(material / "tokenizer.json")
    tokens = GlmTokens.above(words.vocab, words.eod)
    script = [number for blank in blanks for number in (*words.encode(blank), tokens.eop)]
    model = ScriptedGLM(sequence, tokens.vocab, script)
    data = {"eod": None, "tokenizer": "its own"}
    return fill(model, words, data, prompt, Sampling(most, temperature=0)), model, words, tokens


def test_a_glm_fills_in_blanks_as_training_made_them(material: Path) -> None:
    made, model, words, tokens = filled(
        material, "one two [MASK] five [MASK] eight nine.", [" three four", " six seven"]
    )
    assert made["text"] == "one two three four five six seven eight nine." and made["tokens"] == 4
    assert [blank["text"] for blank in made["blanks"]] == [" three four", " six seven"]
    assert {blank["ended"] for blank in made["blanks"]} == {"end of piece"}
    text = np.array([tokens.enc, *words.encode(str(made["text"])), tokens.eos])
    # Of a token each, behind ENC.
    spans = [(3, 5), (6, 8)]
    row = blanked(text, spans, tokens.mask, tokens, RandomState(1), "words", shuffle=False)
    assert model.asked == [row.tokens.tolist(), row.positions.tolist(), [row.separator]]


def test_a_glm_goes_on_with_a_prompt_that_has_no_blank(material: Path) -> None:
    for prompt in ("one two", "one two [gMASK]"):
        made, model, words, tokens = filled(material, prompt, [" three four five"])
        assert made["text"] == "one two three four five" and made["blanks"][0]["mask"] == "[gMASK]"
        row = continued(np.array([tokens.enc, *words.encode("one two three four five x")]), 3, tokens)
        assert model.asked[0] == row.tokens.tolist()[: len(model.asked[0])]
        assert model.asked[1][1] == row.positions[1].tolist()[: len(model.asked[0])]


def test_a_blank_ends_where_the_model_has_no_more_positions(material: Path) -> None:
    for most, ended in ((64, "position"), (3, "max tokens")):
        made, *_ = filled(material, "one [MASK]", [" two" * 40], 8, most)
        assert made["blanks"][0]["ended"] == ended and made["tokens"] == min(8, most)
    with pytest.raises(InputError, match="the prompt makes 9 tokens, and the model was trained on 8 at most"):
        filled(material, "one two three four five six [MASK]", [" seven"], 8)
    with pytest.raises(InputError, match=r"the prompt has \[mask\], \[GMSK\], which is not a mask"):
        filled(material, "one [mask] [GMSK] [MASK] [ok]", [" two"])


def test_a_glms_checkpoint_alone_goes_on_with_what_was_learned(
    tmp_path: Path, material: Path, train_here: Callable[..., Any]
) -> None:
    base = config_for(material, save={"keep": 1}, eval={"batches": 0}, micro_batch=8)
    base["model"] = {"kind": "glm", "layers": 2, "hidden": 32, "heads": 2, "sequence": 32, "vocab": 309}
    base["data"]["infilling"] = {"words": 0.0, "sentences": 0.0}
    train_here(tmp_path / "run", steps=100, **base)
    folder = tmp_path / "run" / "checkpoints" / "step-00000100"
    made: dict[str, Any] = generate(folder, None, "one two three", Sampling(max_tokens=4, temperature=0))
    assert made["text"] == "one two three four five six seven" and made["step"] == 100
    hot = [generate(folder, None, "one", Sampling(20, 5.0, 0, seed))["text"] for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]


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
