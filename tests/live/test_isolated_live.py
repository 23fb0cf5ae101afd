"""Models of runs whose nodes share no path with this machine: evaluate, generate, serve files, check, export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.sandbox import cluster, demo, namespaces
from tests.live.conftest import Shell, clean_environment

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
JOB = """
name: apart
data: ./data
collect: [checkpoints]
train:
  model: {name: gpt-tiny, vocab: 300}
  data: {prefix: "{data}/corpus", tokenizer: "{data}/tokenizer.json", split: "60,20,20"}
  steps: 2
  micro_batch: 1
  global_batch: 2
  save: {every: 2}
"""


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A shell next to two isolated nodes, with the data of a training that has run on them."""
    if why := namespaces.why_not():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("apart")
    made = cluster.up(folder / "sandbox", nodes=2, devices=1, isolated=True)
    demo.write_corpus(folder / "corpus.jsonl")
    demo.train_tokenizer(folder / "corpus.jsonl", folder / "data" / "tokenizer.json", 300)
    demo.build_data(folder / "corpus.jsonl", folder / "data" / "tokenizer.json", folder / "data" / "corpus")
    (folder / "job.yaml").write_text(JOB)
    shell = Shell(folder, {**clean_environment(), "CLUSTERCTL_CLUSTER": str(made.cluster_file)})
    done = shell("launch", "job.yaml", timeout=200)
    assert done.returncode == 0, done.stderr
    yield shell
    cluster.down(folder / "sandbox")


def answer(shell: Shell, *words: str) -> Any:
    done = shell(*words, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_path_of_one_exists_on_the_other(apart: Shell) -> None:
    seen = apart("exec", "node1", "--", "sh", "-c", f"echo $HOME; ls {apart.folder}/job.yaml; touch ~/mine")
    home = Path(seen.stdout.split()[1])
    assert not home.exists() and "No such file" in seen.stdout + seen.stderr
    assert apart("exec", "node2", "--", "ls", f"{home}/mine").returncode == 2
    with pytest.raises(UsageError, match="--isolated: in mode loopback"):
        cluster.up(apart.folder / "other", mode="loopback", isolated=True)


def test_the_parts_of_a_runs_own_corpus_are_evaluated(apart: Shell) -> None:
    words = ["eval", "last", "--task", "ppl", "--split", "test", "--limit", "5", "--json"]
    (own,) = answer(apart, *words)
    (named,) = answer(apart, *words, "--data", "data/corpus")
    assert own["metrics"] == named["metrics"]
    assert own["data"] == str(apart.folder / "data" / "corpus")
    (there,) = answer(apart, *words, "--on", "node2")
    assert there["metrics"]["loss"]["value"] == pytest.approx(own["metrics"]["loss"]["value"], rel=1e-5)
    (apart.folder / "data").rename(apart.folder / "away")
    lost = apart(*words)
    (apart.folder / "away").rename(apart.folder / "data")
    assert lost.returncode == 2 and "data/corpus: the corpus of apart-" in lost.stderr
    assert "--on NODE" in lost.stderr


def test_checkpoints_are_read_here_and_there(apart: Shell) -> None:
    # Runs of generate and eval are not the last one.
    assert answer(apart, "generate", "last", "-p", "a", "--max-tokens", "2", "--json")["tokens"] == 2
    words = ("generate", "last", "-p", "a", "--max-tokens", "2", "--temperature", "0")
    made = answer(apart, *words, "--on", "node1", "--json")
    assert made["tokens"] == 2
    # Without --json both print the text.
    assert apart(*words, "--on", "node1").stdout == apart(*words).stdout == made["text"] + "\n"
    rows = answer(apart, "checkpoint", "list", "last", "--json")["checkpoints"]
    assert [(row["step"], row["health"]) for row in rows] == [(2, "complete")]
    assert apart("checkpoint", "verify", "last").returncode == 0
    assert apart("checkpoint", "pull", "last", "-o", "pulled").returncode == 0
    assert apart("checkpoint", "export", "pulled", "--to", "hf", "-o", "hf").returncode == 0
