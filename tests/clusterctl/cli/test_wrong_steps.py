"""Wrong inputs of submit, setup, bundle, fab, sweep, migration, models and stores: as test_wrong_inputs.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusterctl.cli.test_wrong_inputs import CLUSTER, COMMAND, assert_place_and_remedy
from tests.clusterctl.conftest import Run

FILES = {
    "cluster.yaml": CLUSTER,
    "job.yaml": COMMAND,
    "slurm.yaml": COMMAND + "slurm: {nodes: 0, time: soon}\n",
    "zero.yaml": COMMAND + "slurm: {gres: 'npu:0'}\n",
    "twice.yaml": COMMAND + "slurm: {extra: [--mem=0, --nodes=9]}\n",
    "own.yaml": COMMAND + "slurm: {extra: [-o out]}\n",
    "forward.yaml": COMMAND + "forward: [CLUSTERCTL_TEST_UNSET]\n",
    "k8s.yaml": COMMAND + "kubernetes: {nodes: 2}\n",
    "store.yaml": COMMAND + "data: s3:/bucket/x\n",
    "corpus.yaml": "train: {model: gpt-tiny, steps: 10, data: {prefix: 's3://b/x', split: '9,1,0'}}\n",
    "tune.yaml": "train:\n  model: gpt-tiny\n  steps: 10\n  tune: {task: chatt}\n",
    "adapters.yaml": "train:\n  model: gpt-tiny\n  steps: 10\n  tune: {task: chat, lora: {rank: -1}}\n",
    "fabfile.py": "from fabric import task\n@task\ndef up(c):\n    c.run('true')\n",
    "ends.py": "raise SystemExit('no more')\n",
    "bad.tar": "not an archive\n",
    "x.json": '{"a": 1}\n',
    "box.yaml": COMMAND
    + "container: {image: i, options: ['--env=HF_TOKEN=abc', '-e=PAD_TOKEN=0', '--env=A=1']}\n",
    "ds.yaml": "train: {model: gpt-tiny, steps: 1, data: {prefix: x}, engine: {deepspeed: ds.json}}\n",
    "ds.json": '{\n "train_batch_size": "many",\n "zero_optimization": {"stage": 9}\n}\n',
    "torn.yaml": "train: {model: gpt-tiny, steps: 1, data: {prefix: x}, engine: {deepspeed: torn.json}}\n",
    "torn.json": "{not json",
    "tasks.py": "x = 1\n",
    "loose.lock": "torch\n",
    "bad.lock": "numpy==1.0 --hash=sha256:00\n",
    "ckpt/manifest.json": "{}\n",
    "wheels/readme": "",
    "empty/readme": "",
}
# Command lines, and the place that the error names.
LINES = [
    (("submit", "slurm", "slurm.yaml", "--print"), "slurm.yaml:2 slurm.nodes"),
    (("submit", "slurm", "job.yaml", "--set", "slurm.partitoin=a", "--print"), "--set slurm.partitoin"),
    (("submit", "slurm", "zero.yaml", "--print"), "zero.yaml:2 slurm.gres: 'npu:0' asks for no device"),
    (("submit", "slurm", "twice.yaml", "--print"), "twice.yaml:2 slurm.extra: '--nodes=9' is a key"),
    (("submit", "slurm", "own.yaml", "--print"), "own.yaml:2 slurm.extra: '-o out'"),
    (("submit", "slurm", "forward.yaml"), "forward: CLUSTERCTL_TEST_UNSET is not set here"),
    (("launch", "forward.yaml"), "forward: CLUSTERCTL_TEST_UNSET is not set here"),
    (("submit", "k8s", "k8s.yaml", "--print"), "k8s.yaml:2 kubernetes.image"),
    (("submit", "k8s", "k8s.yaml", "--image", "a b", "--print"), "k8s.yaml:2 kubernetes.image: 'a b'"),
    (("submit", "k8s", "k8s.yaml", "--image", "i", "--name", "A_b", "--print"), "'A_b'"),
    (("submit", "k8s", "job.yaml", "--kind", "pod", "--print"), "--kind pod"),
    (("submit", "k8s", "k8s.yaml", "--follow", "--delete"), "--follow and --delete"),
    (("submit", "modelarts", "job.yaml"), "job.yaml:1"),
    (("nodes", "setup"), "no wheels are named"),
    (("nodes", "setup", "--wheelhouse", "nosuch"), "--wheelhouse nosuch"),
    (("nodes", "setup", "--wheelhouse", "wheels", "--lock", "loose.lock", "--env", "~/v"), "loose.lock:1"),
    (("nodes", "setup", "--wheelhouse", "wheels", "--lock", "bad.lock", "--env", "~/v"), "bad.lock:1"),
    (("nodes", "setup", "--bundle", "bad.tar", "--env", "~/v"), "bad.tar"),
    (("nodes", "setup", "--bundle", "bad.tar", "--env", "here"), "--env here: not an absolute path"),
    (("nodes", "setup", "--bundle", "bad.tar", "--wheelhouse", "wheels"), "--bundle"),
    (("nodes", "wheelhouse", "nosuch.txt"), "nosuch.txt: no such file"),
    (("bundle",), "nothing to pack"),
    (("bundle", "--wheelhouse", "wheels", "--lock", "bad.lock"), "wheels"),
    (("bundle", "--code", "nosuch"), "nosuch"),
    (("bundle", "--tokenizer", "nosuch.json"), "--tokenizer nosuch.json"),
    (("bundle", "--unpack", "bad.tar", "-o", "site"), "bad.tar"),
    (("bundle", "--unpack", "bad.tar", "--code", "."), "--unpack"),
    (("fab", "nosuch.py", "up"), "nosuch.py"),
    (("fab", "x.json", "up"), "x.json"),
    (("fab", "ends.py", "up"), "ends.py:1: SystemExit: no more"),
    (("bundle", "--code", "empty", "-o", "nosuch/x.tar"), "nosuch/x.tar: No such file"),
    (("fab", "fabfile.py", "down"), "'down'"),
    (("fab", "fabfile.py", "up", "--against", "node9"), "--against 'node9'"),
    (("plan", "store.yaml"), "store.yaml:2 data"),
    (("plan", "corpus.yaml"), "corpus.yaml:1 train.data.prefix"),
    (("plan", "tune.yaml"), "tune.yaml:4 train.tune.task"),
    (("plan", "adapters.yaml"), "adapters.yaml:4 train.tune.lora.rank"),
    (("launch", "job.yaml", "--sweep", "=1"), "--sweep"),
    (("launch", "job.yaml", "--sweep", "nosuch=1,2"), "nosuch"),
    (("init", "--from", "nosuch.py"), "nosuch.py"),
    (("init", "--from", "x.json"), "--from x.json"),
    (("init", "--from", "bash mine.sh --a 1"), "start where mine.sh is, or name it alone"),
    (("init", "--from", "pretrain_gpt.py --num-layers x"), "--num-layers"),
    (("eval", "ckpt/"), "--task"),
    (("eval", "ckpt/", "--task", "lambada=x.json", "--stride", "0"), "--stride"),
    (("eval", "ckpt/", "--task", "lambada=x.json", "--on", "node9"), "node9"),
    (("serve", "ckpt/", "--port", "99999"), "--port"),
    (("serve", "ckpt/", "--on", "node9"), "node9"),
    (("generate", "ckpt/", "--temperature", "-1"), "--temperature"),
    (("generate", "ckpt/", "--prompts", "nosuch.txt"), "nosuch.txt"),
    (("checkpoint", "mirror", "last"), "'mirror'"),
    (("checkpoint", "export", "nosuch", "--to", "hf", "-o", "out"), "/runs"),
    (("exec",), "'SET'"),
    (("plan", "box.yaml"), "box.yaml:2 container.options: HF_TOKEN looks like a credential"),
    (("plan", "ds.yaml"), "ds.json:2 train_batch_size: must be a whole number, not 'many'"),
    (("plan", "ds.yaml"), "ds.json:3 zero_optimization.stage: unknown 9"),
    (("plan", "torn.yaml"), "torn.json:1:10: not valid JSON"),
    (("fab", "tasks.py", "--list"), "tasks.py: contains no tasks"),
    (("fab", "wheels", "up"), "wheels is a folder"),
    (("nodes", "wheelhouse", "--python-version", "99", "six"), "--python-version 99"),
    (("nodes", "wheelhouse", "--platform", "x", "six"), "--platform x"),
    (("nodes", "wheelhouse", "--cann", "5.1"), "--cann 5.1: no torch_npu is known for it"),
    (("nodes", "wheelhouse", "--cann", "8.1", "--extra", "train"), "needs torch 2.6: use a newer CANN"),
    (
        ("nodes", "wheelhouse", "--cann", "8.2", "--python-version", "3.13"),
        "--cann 8.2: no torch_npu is known for it and Python 3.13",
    ),
    (("nodes", "wheelhouse", "--find-links", "nosuch", "six"), "--find-links nosuch"),
    (("nodes", "wheelhouse", ""), "'' is not a requirement"),
    (("nodes", "wheelhouse", "six", "-o", "x.json"), "x.json: File exists"),
    (("data", "fetch", "gpt2-vocab", "--proxy", "nonsense"), "--proxy is not an http or https URL"),
    (
        ("push", "--image", "bad.tar", "-n", "node1"),
        "bad.tar is not an archive of an image: it is no tar file",
    ),
]
# Of the trainer, which the command starts.
TRAINER = [
    (("serve", "--checkpoint", "ckpt", "--weights", "int4"), "--weights"),
    (("serve", "--checkpoint", "ckpt", "--cache", "lots"), "--cache"),
    (("serve", "--checkpoint", "ckpt", "--api-key-file", "nosuch"), "--api-key-file nosuch"),
    (("generate", "--checkpoint", "ckpt", "--top-p", "2"), "--top-p"),
    (("checkpoint-export", "ckpt", "--to", "hf", "--output", "out"), "ckpt/manifest.json"),
    (("checkpoint-export", "ckpt", "--to", "keras", "--output", "out"), "--to: unknown 'keras'"),
    (("checkpoint-import", "empty", "--from", "nosuch", "--output", "out"), "--from: unknown 'nosuch'"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


# `generate` starts the trainer before it reads the prompts.
@pytest.mark.parametrize(
    ("words", "place"),
    [
        pytest.param(words, place, id=" ".join(words), marks=[pytest.mark.slow] * ("--prompts" in words))
        for words, place in LINES
    ],
)
def test_a_wrong_command_line_names_the_word_and_a_remedy(
    folder: Path, command_line: Run, words: tuple[str, ...], place: str
) -> None:
    code, _, err = command_line(*words)
    assert_place_and_remedy(code, err, place, folder)


def test_every_wrong_word_of_a_data_build_is_named(folder: Path, command_line: Run) -> None:
    words = ("data", "build", "--tokenizer", "nosuch", "--output", "job.yaml/x")
    for wrong, lines in (
        (
            ("--workers", "z", "--min-confidence", "y", "--input", "a", "--nope"),
            [
                "--workers: 'z' is not a whole number",
                "--min-confidence: 'y' is not a number",
                "unrecognized arguments: --nope",
            ],
        ),
        (
            ("--input", "hollow", "--input", "gone", "--workers", "-1"),
            [
                "--output job.yaml/x: job.yaml is a file, not a folder",
                "--workers: -1 is too small (0 or more)",
                "hollow: a folder without files",
                "gone: no such file",
                "nosuch: no such tokenizer",
            ],
        ),
    ):
        (folder / "hollow").mkdir(exist_ok=True)
        code, _, err = command_line(*words, *wrong)
        shown = err.splitlines()
        assert code == 2 and [line for line in shown if line[0] != " "] == [
            f"error: {line}" for line in lines
        ]
        assert "clusterctl data build --help" in err


def test_every_wrong_word_of_a_wheelhouse_is_named(folder: Path, command_line: Run) -> None:
    wrong = ("--extra nosuch", "--python-version 2.7", "--platform x", "--platform y", "--find-links nosuch")
    code, _, err = command_line("nodes", "wheelhouse", "a.txt", "b.txt", "", *" ".join(wrong).split())
    assert code == 2
    places = ("no extra is called 'nosuch'", "a.txt: no such file", "b.txt: no such file", "''", *wrong[1:])
    for place in places:
        assert f"error: {place}" in err
    assert err.count("error: ") == err.count("  try: ") == len(places)
    code, _, err = command_line("nodes", "wheelhouse", "--platform", "x")
    assert code == 2 and "error: no requirement is named" in err and "error: --platform x" in err


@pytest.mark.slow
def test_the_trainer_names_the_word_and_a_remedy(folder: Path) -> None:
    for words, place in TRAINER:
        done = subprocess.run(
            [sys.executable, "-m", "trainer", "--called", "clusterctl NAME", *words],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert_place_and_remedy(done.returncode, done.stderr, place, folder)
        assert "usage:" not in done.stderr
