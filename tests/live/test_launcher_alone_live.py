"""The launcher without numpy, torch and tokenizers: trainings run on nodes that have them; errors have no traceback."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clusterctl.sandbox import demo
from tests.live.conftest import clean_environment
from tests.support.lean_python import lean_python

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
JOB = """
name: small
data: ./data
train:
  model: {name: gpt-tiny, vocab: 300}
  data: {prefix: "{data}/corpus", tokenizer: "{data}/tokenizer.json"}
  steps: 2
  micro_batch: 1
  global_batch: 4
  save: {every: 2}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cluster_file: Path) -> Path:
    """A folder with an environment for the launcher alone, and the job and data of a training."""
    made = tmp_path_factory.mktemp("alone")
    lean_python(made / "venv")
    demo.write_corpus(made / "corpus.jsonl")
    demo.train_tokenizer(made / "corpus.jsonl", made / "data" / "tokenizer.json", 300)
    demo.build_data(made / "corpus.jsonl", made / "data" / "tokenizer.json", made / "data" / "corpus")
    (made / "job.yaml").write_text(JOB)
    (made / "metrics.jsonl").write_text('{"event": "step", "step": 1, "loss": 2.5}\n')
    (made / "weights").mkdir()
    return made


def lean(folder: Path, cluster_file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**clean_environment(), "CLUSTERCTL_CLUSTER": str(cluster_file)}
    argv = [str(folder / "venv" / "bin" / "python"), "-m", "clusterctl", *words]
    return subprocess.run(
        argv, cwd=folder, env=env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )


NEED_PACKAGES = [
    "data info data/corpus",
    "data verify data/corpus",
    "data repair data/corpus",
    "data split data/corpus --parts 2 --output s",
    "data merge data/corpus --output m",
    "data build --input corpus.jsonl --tokenizer data/tokenizer.json --output b",
    "data build --input corpus.jsonl --tokenizer data/tokenizer.json --output b --on node1",
    "data tokenizer train --input corpus.jsonl --vocab-size 300 --output t.json",
    "data tokenizer glm --tokenizer data/tokenizer.json --output g.json",
    "checkpoint import weights -o c",
    "tensorboard . -o tb",
    "plan job.yaml --rehearse",
]


@pytest.mark.parametrize("words", NEED_PACKAGES)
def test_a_verb_names_the_package_it_lacks_and_how_to_install_it(
    folder: Path, cluster_file: Path, words: str
) -> None:
    done = lean(folder, cluster_file, *words.split())
    assert done.returncode == 2, done.stderr
    error, remedy = done.stderr.splitlines()[-2:]
    assert error.startswith("error: ") and error.endswith(" is not installed here")
    assert "/venv/bin/python -m pip install " in remedy and "[train]" in remedy
    assert "Traceback" not in done.stderr


def test_a_training_runs_on_nodes_that_have_the_packages(folder: Path, cluster_file: Path) -> None:
    planned = lean(folder, cluster_file, "plan", "job.yaml")
    assert planned.returncode == 0, planned.stderr
    assert "train.data: not checked here, since" in planned.stderr
    done = lean(folder, cluster_file, "launch", "job.yaml")
    assert done.returncode == 0, done.stderr
    here = lean(folder, cluster_file, "generate", "last", "-p", "a")
    assert here.returncode == 2 and "torch, numpy, tokenizers, safetensors are not installed" in here.stderr
    assert "--on NODE" in here.stderr and "fetched" not in here.stderr
    there = lean(
        folder, cluster_file, "generate", "last", "-p", "a", "--max-tokens", "2", "--on", "node1", "--json"
    )
    assert there.returncode == 0 and '"tokens": 2' in there.stdout, there.stderr
