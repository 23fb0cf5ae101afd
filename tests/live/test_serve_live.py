from __future__ import annotations

import http.client
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.live.conftest import Shell
from tests.support import weights
from trainer.corpus.tokenizer import train_tokenizer

pytestmark = [pytest.mark.live, pytest.mark.slow]


def small_checkpoint(folder: Path) -> Path:
    """Write a small model with its tokenizer."""
    model = replace(weights.GPT, sequence=64)
    weights.checkpoint(folder, model, weights.random_state(model))
    train_tokenizer(iter(["one two three " * 50] * 5), 300, folder / "tokenizer.json")
    return folder


def port_of(shell: Shell, run: str, name: str) -> int:
    """Return the port of a server that runs as a run."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        lines = shell("logs", "show", run).stdout
        found = re.search(rf"serving {name} at http://127\.0\.0\.1:(\d+)", lines)
        if found:
            return int(found[1])
    raise AssertionError(lines)


def completion(port: int, **body: object) -> tuple[int, Any]:
    """Return the status and the answer of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_a_server_is_a_run(shell: Shell) -> None:
    pytest.importorskip("aiohttp")
    folder = small_checkpoint(shell.folder / "small")
    made = shell("serve", f"{folder}/", "--on", "node2", "--detach", "--port", "0", "--json")
    assert made.returncode == 0, made.stderr
    run = json.loads(made.stdout)["run"]
    try:
        _, answer = completion(port_of(shell, run, "small"), prompt="one", max_tokens=3)
        assert answer["model"] == "small" and answer["usage"]["completion_tokens"] <= 3
        assert json.loads(shell("status", run, "--json").stdout)["run"] == run
    finally:
        stopped = shell("stop", run)
    assert stopped.returncode == 0, stopped.stderr
    assert "running requests are finished first" in shell("logs", "show", run).stdout


@pytest.mark.parametrize("cut", ["--pipeline", "--tensor"])
def test_nodes_that_divide_a_model_serve_what_one_process_generates(shell: Shell, cut: str) -> None:
    pytest.importorskip("aiohttp")
    folder = small_checkpoint(shell.folder / "shared")
    asked = ("--temperature", "0", "--max-tokens", "8", "--ignore-end", "--json")
    here = shell("generate", f"{folder}/", "--prompt", "one two", "--prompt", "three", *asked)
    assert here.returncode == 0, here.stderr
    expected = [json.loads(line)["text"] for line in here.stdout.splitlines()]
    made = shell("serve", f"{folder}/", "--on", "node[1-2]", cut, "2", "--detach", "--port", "0", "--json")
    assert made.returncode == 0, made.stderr
    run = json.loads(made.stdout)["run"]
    try:
        port = port_of(shell, run, "shared")
        body = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "echo": True}
        status, answer = completion(port, prompt=["one two", "three"], **body)
        assert status == 200 and [choice["text"] for choice in answer["choices"]] == expected
        # A refused request leaves the other rank where it is.
        assert completion(port, prompt="one " * 100, **body)[0] == 400
        assert completion(port, prompt="three", **body)[1]["choices"][0]["text"] == expected[1]
        ranks = json.loads(shell("status", run, "--json").stdout)["ranks"]
        assert [rank["node"] for rank in ranks] == ["node1", "node2"]
    finally:
        stopped = shell("stop", run)
    assert stopped.returncode == 0, stopped.stderr
    # Both ranks have ended by themselves, without a failure.
    state = json.loads(shell("status", run, "--json").stdout)
    assert state["phase"] == "stopped" and not state.get("failure")


def test_wrong_places_are_refused(shell: Shell, tmp_path: Path) -> None:
    wrong = shell("serve", "nowhere", "--on", "node[1-2]")
    assert wrong.returncode == 2
    folder = tmp_path / "empty"
    folder.mkdir()
    refused = shell("generate", f"{folder}/")
    assert refused.returncode == 2 and "not a checkpoint" in refused.stderr


def test_nodes_that_divide_a_model_generate_and_evaluate_what_one_process_does(shell: Shell) -> None:
    pytest.importorskip("aiohttp")
    folder = small_checkpoint(shell.folder / "divided")
    prompts = shell.folder / "prompts.txt"
    prompts.write_text("one {data} two\nthree\n")
    asked = (f"{folder}/", "--prompts", str(prompts), "--temperature", "0", "--max-tokens", "8", "--json")
    here, there = shell("generate", *asked), shell("generate", *asked, "--on", "node[1-2]")
    assert here.returncode == there.returncode == 0, there.stderr
    texts = [[json.loads(line)["text"] for line in done.stdout.splitlines()] for done in (here, there)]
    assert texts[0] == texts[1] and texts[0][0].startswith("one {data} two")

    data = shell.folder / "lambada.jsonl"
    data.write_text("".join(json.dumps({"text": f"one two {word}"}) + "\n" for word in ("three", "one") * 4))
    tokenizer = ("--tokenizer", str(folder / "tokenizer.json"))
    asked = (f"{folder}/", "--task", f"lambada={data}", *tokenizer, "--json", "--output")
    here = shell("eval", *asked, str(shell.folder / "here"))
    there = shell("eval", *asked, str(shell.folder / "there"), "--on", "node[1-2]")
    assert here.returncode == there.returncode == 0, there.stderr
    results = [json.loads(done.stdout)[0] for done in (here, there)]
    assert results[0]["metrics"] == results[1]["metrics"] and results[1]["data"] == str(data)
    assert [json.loads(file.read_text()) for file in (shell.folder / "there").glob("*.json")] == [results[1]]
