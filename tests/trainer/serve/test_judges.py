"""The server, judged by the `openai` client and by lm-eval where they are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.evaluate.test_evaluate_judge import PREPARED, QUESTIONS, SAME, TASKS
from tests.trainer.serve.conftest import MODEL, Server

CLI = """
import json, sys, urllib.request
# As Megatron's text_generation_cli.py does.
url = "http://" + sys.argv[1] + "/api"
data = json.dumps({"prompts": ["one two"], "tokens_to_generate": 5}).encode()
request = urllib.request.Request(url, data, {"Content-Type": "application/json; charset=UTF-8"}, method="PUT")
print("Megatron Response: " + json.load(urllib.request.urlopen(request))["text"][0])
"""


def test_the_openai_client_works(server: Server) -> None:
    openai = pytest.importorskip("openai", reason="the openai client is not installed")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["small"]
    fields: dict[str, Any] = {"model": "small", "max_tokens": 20, "seed": 4}
    whole = client.completions.create(prompt="one two", **fields)
    pieces = [
        chunk.choices[0].text for chunk in client.completions.create(prompt="one two", stream=True, **fields)
    ]
    assert "".join(pieces) == whole.choices[0].text and len(pieces) > 1
    messages = [{"role": "user", "content": "one two"}]
    chat = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=1, **fields)
    assert chat.choices[0].message.role == "assistant" and chat.choices[0].logprobs.content
    stream = client.chat.completions.create(messages=messages, stream=True, **fields)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == chat.choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="one")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="small", prompt="one", temperature=-1)


def test_a_client_like_megatrons_works(server: Server) -> None:
    words = [sys.executable, "-c", CLI, f"127.0.0.1:{server.port}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("Megatron Response: one two"), done.stderr


def write_lines(file: Path, texts: list[str], key: str) -> Path:
    file.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return file


@pytest.mark.slow
@pytest.mark.skipif(
    not (find_spec("lm_eval") and find_spec("tenacity")), reason="lm-eval[api] is not installed"
)
@pytest.mark.timeout(400)
def test_lm_eval_gets_the_figures_of_our_own_evaluation(server: Server, model: Path, tmp_path: Path) -> None:
    # Pages that fit one window: of longer ones lm-eval makes windows that are one token shorter for a server.
    data = {
        "LAMBADA": write_lines(
            tmp_path / "lambada.jsonl", ["one two three four", "five six seven. eight"] * 4, "text"
        ),
        "WIKITEXT": write_lines(
            tmp_path / "wikitext.jsonl", ["one two three four five " * 30, "six seven"], "page"
        ),
        "COPA": tmp_path / "copa.jsonl",
    }
    data["COPA"].write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "prepared.py").write_text(PREPARED)
    for name, text in TASKS.items():
        for key, file in data.items():
            text = text.replace(key, str(file))
        (tasks / f"{name}.yaml").write_text(text)
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "bos_token": "<|endoftext|>",
    }
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(facts))
    words = ["trainer", "evaluate", "--checkpoint", str(model), "--tokenizer", str(model), "--json"]
    words += [
        "--output",
        str(tmp_path / "out"),
        *(f"--task={name.lower()}={file}" for name, file in data.items()),
    ]
    ours = run(words, tmp_path)
    figures = {result["task"]: result["metrics"] for result in json.loads(ours)}
    url = f"http://127.0.0.1:{server.port}/v1/completions"
    settings = f"model=small,base_url={url},tokenizer={tmp_path / 'tokenizer'},max_retries=1"
    settings += f",max_length={MODEL.sequence + 1},num_concurrent=2"
    run(["lm_eval", "run", "--model", "local-completions", "--model_args", settings, "--tasks", ",".join(TASKS),
         "--include_path", str(tasks), "--output_path", str(tmp_path / "lm_eval")], tmp_path)  # fmt: skip
    (result,) = (tmp_path / "lm_eval").rglob("results_*.json")
    theirs = json.loads(result.read_text())["results"]
    for (task, name), (their_task, their_name) in SAME.items():
        expected = figures[task][name]["value"]
        assert theirs[their_task][their_name] == pytest.approx(expected, rel=1e-4), (task, name)


def run(words: list[str], home: Path) -> str:
    """Run a module and return its output."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home / "home")}
    environment = {**os.environ, **offline, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
