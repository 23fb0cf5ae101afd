"""A build of data spread over real nodes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from clusterctl.sandbox import demo
from tests.live.conftest import Shell

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
WORDS = ["clear", "water", "of", "the", "river", "ran", "north", "naïve", "中文", "end."]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    some = random.Random(2)
    texts = [" ".join(some.choices(WORDS, k=some.randrange(90))) for _ in range(600)]
    texts += texts[:50]
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    demo.train_tokenizer(folder / "in.jsonl", folder / "tokenizer.json", 300)
    return folder


def build(shell: Shell, corpus: Path, output: str, *more: str) -> dict[str, object]:
    argv = [
        "--input",
        str(corpus / "in.jsonl"),
        "--tokenizer",
        str(corpus / "tokenizer.json"),
        "--append-eod",
    ]
    done = shell("data", "build", *argv, "--output", output, "--json", *more, timeout=200)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_nodes_together_make_the_bytes_that_one_machine_makes(shell: Shell, corpus: Path) -> None:
    build(shell, corpus, "one", "--dedup")
    build(shell, corpus, "many", "--dedup", "--on", "node[1-2]")
    for ending in ("bin", "idx"):
        assert (shell.folder / f"many.{ending}").read_bytes() == (shell.folder / f"one.{ending}").read_bytes()
    assert shell("data", "verify", "many").returncode == 0
    assert {path.name for path in shell.folder.iterdir()} == {
        f"{name}.{ending}" for name in ("one", "many") for ending in ("bin", "idx", "manifest.json")
    }
    left = shell("exec", "all", "--", "ls", "-A", ".clusterctl/tmp/data/many")
    assert "00000-of" not in left.stdout and "00001-of" not in left.stdout


def test_parts_can_stay_and_are_not_built_twice(shell: Shell, corpus: Path) -> None:
    first = build(shell, corpus, "stay", "--on", "node[1-2]", "--leave")
    assert [one["node"] for one in first["shards"]] == ["node1", "node2"]  # type: ignore[attr-defined]
    assert json.loads((shell.folder / "stay.shards.json").read_text())["tokens"] == first["tokens"]
    argv = [
        "--input",
        str(corpus / "in.jsonl"),
        "--tokenizer",
        str(corpus / "tokenizer.json"),
        "--append-eod",
    ]
    again = shell("data", "build", *argv, "--output", "stay", "--on", "node[1-2]", "--leave")
    assert again.returncode == 0 and "2 of them built before" in again.stderr
    assert not (shell.folder / "stay.bin").exists()


def test_what_goes_wrong_on_a_node_is_told_with_its_name(shell: Shell, corpus: Path) -> None:
    lines = (corpus / "in.jsonl").read_text().splitlines()
    (shell.folder / "bad.jsonl").write_text("\n".join([*lines[:600], "no json", *lines[600:]]) + "\n")
    argv = ["--input", "bad.jsonl", "--tokenizer", str(corpus / "tokenizer.json"), "--output", "c"]
    done = shell("data", "build", *argv, "--on", "node[1-2]")
    assert done.returncode == 4, done.stderr
    assert "node2: bad.jsonl:601: not a line of JSON" in done.stderr and "--max-bad" in done.stderr
    assert {path.name for path in shell.folder.iterdir()} == {"bad.jsonl"}
    for words, says in (
        (["--leave"], "--leave needs --on"),
        (["--on", "node9"], "node9"),
        (["--on", "node1", "--leave", "--dedup"], "leave out --leave or --dedup"),
    ):
        done = shell("data", "build", *argv, *words)
        assert done.returncode == 2 and says in done.stderr


def test_a_launch_sees_that_data_on_the_nodes_is_whole_and_alike(shell: Shell, corpus: Path) -> None:
    build(shell, corpus, "d/c")
    assert shell("push", "d", "~/wiki").returncode == 0
    program = "import os; print(len(os.listdir(os.environ['DATA'])))"
    job = f"data_there: ~/wiki\nenv: {{DATA: '{{data}}'}}\ncommand: [python, -c, \"{program}\"]\n"
    (shell.folder / "job.yaml").write_text(job)
    done = shell("launch", "job.yaml", timeout=200)
    assert done.returncode == 0 and "whole and alike on 2 nodes" in done.stderr, done.stderr
    shell("exec", "node2", "--", "sh", "-c", "truncate -s -4 ~/wiki/c.bin")
    done = shell("launch", "job.yaml")
    assert done.returncode == 4, done.stderr
    for part in (
        "nothing was started",
        "node2: ~/wiki/c.bin: has",
        "but its index ends at",
        "clusterctl push",
    ):
        assert part in done.stderr
    assert "node1: " not in done.stderr
