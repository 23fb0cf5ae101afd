from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterctl.wire.data_requests import BuildRequest, Recipe
from clusterctl.wire.requests import GenerateRequest, PromptOptions
from clusterctl.wire.saved import encode_manifest
from tests.support.building import refused
from trainer.__main__ import main
from trainer.config.model import ModelConfig
from trainer.corpus.build import build
from trainer.corpus.tokenizer import train_tokenizer
from trainer.errors import CheckpointError, InputError
from trainer.generate.command import Prompt, _cache_bytes, _prompts, _texts
from trainer.generate.loading import open_decoder, plan_memory
from trainer.generate.sampling import Sampling

TEXTS = ["one two three four five six seven eight nine ten. " * 12] * 12


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a corpus of counting words."""
    folder: Path = tmp_path_factory.mktemp("counting")
    train_tokenizer(iter(TEXTS), 300, folder / "tokenizer.json")
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    wanted = (str(folder / "in.jsonl"),)
    recipe, output = Recipe(append_eod=True), folder / "counting"
    build(BuildRequest(input=wanted, tokenizer=folder / "tokenizer.json", output=output, recipe=recipe))
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
    """A copy of a trained checkpoint, which a test may change."""
    trained = material / "run"
    if not trained.exists():
        train_here(trained, steps=60, **config_for(material, save={"keep": 1}, eval={"batches": 0}))
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run" / "checkpoints" / "step-00000060"


def generated(folder: Path, prompt: str, tokenizer: Path | None = None, **values: Any) -> dict[str, Any]:
    """The document of one prompt."""
    decoder = open_decoder(folder, tokenizer)
    request = GenerateRequest(checkpoint=folder)
    (line,) = _texts(decoder, iter([Prompt("--prompt", prompt)]), Sampling(**values), request)
    return line


def test_a_folder_alone_goes_on_with_what_was_learned(checkpoint: Path, tmp_path: Path) -> None:
    moved = checkpoint.rename(tmp_path / "elsewhere")
    made = generated(moved, "one two three", max_tokens=8, temperature=0)
    assert str(made["text"]).startswith("one two three four five six")
    assert made["step"] == 60


def test_a_seed_fixes_the_text_and_another_changes_it(checkpoint: Path) -> None:
    hot = [generated(checkpoint, "", max_tokens=14, temperature=3.0, seed=seed)["text"] for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]


def test_a_damaged_checkpoint_and_senseless_settings_are_refused(checkpoint: Path) -> None:
    with pytest.raises(InputError) as caught:
        Sampling(max_tokens=-1, temperature=-1.0, top_k=-1).check()
    assert len(caught.value.message.splitlines()) == 3
    (checkpoint / "part-00000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="part-00000"):
        open_decoder(checkpoint)


def test_a_model_that_does_not_fit_is_refused_with_what_is_missing(checkpoint: Path) -> None:
    config = ModelConfig(layers=2, hidden=32, heads=2, sequence=16, vocab=300)
    for kind, bytes_each in (("fp32", 4), ("bf16", 2)):
        memory = plan_memory(config, kind, 10**6)
        assert memory.weights >= config.parameters() * bytes_each
        with pytest.raises(InputError, match=r"and 1.0 MiB are free: 2\d\d.\d MiB are missing"):
            memory.pages(None)
    with pytest.raises(InputError, match=r"--cache: 1.00 GiB do not fit"):
        plan_memory(config, "fp32", 10**9).pages(2**30)
    assert plan_memory(config, "fp32", 10**9).pages(None) == 16


@pytest.mark.parametrize(
    "changes", [{"layers": 10**9}, {"hidden": 10**6, "heads": 1}, {"heads": 3}, {"ffn": 64, "vocab": 1}]
)
def test_a_config_that_lies_is_refused_before_a_model_is_built(
    checkpoint: Path, changes: dict[str, int]
) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["config"]["model"] |= changes
    del manifest["sha256"]
    (checkpoint / "manifest.json").write_bytes(encode_manifest(manifest))
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="step-00000060"):
        open_decoder(checkpoint)
    assert time.monotonic() - began < 2


def test_a_glms_checkpoint_alone_goes_on_with_what_was_learned(
    tmp_path: Path, material: Path, train_here: Callable[..., Any]
) -> None:
    base = config_for(material, save={"keep": 1}, eval={"batches": 0}, micro_batch=8)
    base["model"] = {"kind": "glm", "layers": 2, "hidden": 32, "heads": 2, "sequence": 32, "vocab": 309}
    base["data"]["infilling"] = {"words": 0.0, "sentences": 0.0}
    train_here(tmp_path / "run", steps=100, **base)
    folder = tmp_path / "run" / "checkpoints" / "step-00000100"
    made = generated(folder, "one two three", max_tokens=4, temperature=0)
    assert made["text"] == "one two three four five six seven" and made["step"] == 100
    hot = [generated(folder, "one", max_tokens=20, temperature=5.0, seed=seed)["text"] for seed in (1, 1, 2)]
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
    # Also without a terminal, one text is a text.
    plain = verb("generate", "--checkpoint", str(checkpoint), "--prompt", "one two", "--max-tokens", "3")
    assert plain.stdout == json.loads(made.stdout)["text"] + "\n"
    assert json.loads(verb("checkpoint-verify", str(checkpoint)).stdout)["ok"]
    assert json.loads(verb("data-info", str(material / "counting"), "--json").stdout)["documents"] == 12
    (material / "prompts.jsonl").write_text('{"prompt": "one"}\n\n{"prompt": "five six"}\n')
    lines = verb(
        "generate",
        "--checkpoint",
        str(checkpoint),
        "--prompts",
        str(material / "prompts.jsonl"),
        "--temperature",
        "0",
        "--samples",
        "2",
        "--max-tokens",
        "5",
    ).stdout.splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["one"] * 2 + [""] * 2 + ["five six"] * 2
    long = verb("generate", "--checkpoint", str(checkpoint), "--prompt", "one two" * 30)
    assert (
        long.returncode == 2
        and "but the model's context is 16" in long.stderr
        and "--truncate" in long.stderr
    )
    assert refused("data-info", str(material / "none")).startswith("error: ")


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


def test_all_wrong_lines_of_a_file_are_named_before_anything_is_generated(
    checkpoint: Path, material: Path
) -> None:
    (material / "wrong.jsonl").write_text('{"prompt": "one"}\n{"prompt": 5}\n{"text": "two"}\n')
    told = refused("generate", "--checkpoint", str(checkpoint), "--prompts", str(material / "wrong.jsonl"))
    assert 'wrong.jsonl:2: "prompt" is missing' in told and "wrong.jsonl:3:" in told
    (material / "empty.txt").write_text("")
    told = refused("generate", "--checkpoint", str(checkpoint), "--prompts", str(material / "empty.txt"))
    assert "empty.txt: has no prompts" in told


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair, \\ud800"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_line_that_no_tokenizer_takes_is_named(
    checkpoint: Path, material: Path, line: bytes, problem: str
) -> None:
    (material / "lines.jsonl").write_bytes(b"one\n" + line + b"\n")
    told = refused("generate", "--checkpoint", str(checkpoint), "--prompts", str(material / "lines.jsonl"))
    assert f"lines.jsonl:2: {problem}" in told


def test_a_line_that_is_too_deep_for_json_is_text(checkpoint: Path, material: Path) -> None:
    (material / "lines.jsonl").write_bytes(b"one\n" + b'{"prompt": ' + b"[" * 100_000 + b"\n")
    done = verb("generate", "--checkpoint", str(checkpoint), "--prompts", str(material / "lines.jsonl"))
    assert done.returncode == 2 and "lines.jsonl:2: the prompt has " in done.stderr
    assert "Traceback" not in done.stderr


def test_bytes_of_the_command_line_that_are_not_utf_8_are_refused(checkpoint: Path) -> None:
    words = ("--prompt", "one", "--prompt", os.fsdecode(b"\xff"))
    told = refused("generate", "--checkpoint", str(checkpoint), *words)
    assert "--prompt 2: byte 0xff is not UTF-8" in told
    told = refused("generate", "--checkpoint", str(checkpoint), "--prompt-line", os.fsdecode(b"\xff"))
    assert "line 1: not UTF-8" in told


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--prompts", ""), "--prompts: is empty"),
        (("--prompts", "nosuch"), "nosuch: no such file"),
        (("--cache", "0GBs"), "--cache is '0GBs'"),
        (("--cache", "nan"), "--cache is 'nan'"),
        (("--threads", "1025"), "--threads: 1025 is too large (0 to 1,024)"),
        (("--tokenizer", ""), "--tokenizer: is empty"),
    ],
)
def test_wrong_options_are_refused_before_a_checkpoint_is_read(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str
) -> None:
    try:
        code = main(["generate", "--checkpoint", "none", *words])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2 and f"error: {problem}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("2", 2 * 10**9), (".5", 5 * 10**8), ("1GiB", 2**30), ("3 MB", 3 * 10**6)]
)
def test_the_cache_is_a_size_or_a_number_of_gigabytes(text: str, size: int) -> None:
    assert _cache_bytes(text) == size


def test_prompts_of_a_pipe_are_read_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = subprocess.Popen(["sh", "-c", f"printf 'one\\ntwo\\n' > {tmp_path}/pipe"])
    asked = GenerateRequest(checkpoint=tmp_path, given=PromptOptions(prompts=str(tmp_path / "pipe")))
    assert [prompt.text for prompt in _prompts(asked)] == ["one", "two"]
    assert writer.wait() == 0


def test_a_kind_of_device_that_does_not_exist_is_refused_with_the_kinds(checkpoint: Path) -> None:
    told = refused("generate", "--checkpoint", str(checkpoint), "--device", "tpu")
    assert "--device: unknown 'tpu'" in told and "one of cpu, cuda, npu" in told


def test_a_prompt_that_is_too_long_is_refused_with_its_line_or_keeps_its_end(
    checkpoint: Path, material: Path
) -> None:
    (material / "long.txt").write_text("one\n" + "one two " * 400 + "\n")
    arguments = ("--checkpoint", str(checkpoint), "--prompts", str(material / "long.txt"))
    done = verb("generate", *arguments, "--max-tokens", "1")
    assert done.returncode == 2 and "long.txt:2: the prompt has " in done.stderr
    assert "--truncate" in done.stderr
    done = verb("generate", *arguments, "--max-tokens", "1", "--truncate")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2, done.stderr
