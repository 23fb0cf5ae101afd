"""Wrong files and values: each ends with 2, says where it is wrong and what to try, and changes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusterctl.cli.test_wrong_inputs import CLUSTER, COMMAND, assert_place_and_remedy
from tests.clusterctl.conftest import Run
from tests.support.run_folders import restarted_run

TRAIN = "train:\n  model: gpt-tiny\n  steps: 10\n  data: {prefix: x}\n"
FILES = {
    "cluster.yaml": CLUSTER,
    "job.yaml": COMMAND,
    "other.yaml": COMMAND,
    "p.py": "",
    "notes": "",
    "nul.yaml": COMMAND + "name: a\0b\n",
    "tagged.yaml": "command: !!python/tuple [a]\n",
    "deep.yaml": COMMAND + "env: " + "[" * 5000 + "]" * 5000 + "\n",
    "bomb.yaml": "a: &a [x,x]\n" + "".join(f"a{n}: &a [{'*a,' * 30}]\n" for n in range(5)) + "command: *a\n",
    "keep.yaml": TRAIN + "  save: {keep: [3]}\n",
    "negative.yaml": TRAIN.replace("10", "-10"),
    "part.yaml": TRAIN.replace("10", "10.5"),
    "huge.yaml": TRAIN.replace("10", "1" * 400),
    "empty.yaml": TRAIN.replace(" 10", ""),
    "many.yaml": "nodes: node9\ngrace: -3\nrestart: {spare_nodes: zz}\nrank_table: none.json\n"
    "train:\n  model: {layers: 0}\n  steps: ten\n  data: {prefix: x}\n",
    "away.yaml": "nodes: node9\ntrain:\n  model: gpt-tiny\n  steps: ten\n  data: {prefix: x}\n",
    "split.yaml": TRAIN.replace("x}", "x, split: [949, 50]}"),
}
# Command lines, and the place that the error names.
LINES = [
    (("plan", "nul.yaml"), "nul.yaml:2"),
    (("plan", "tagged.yaml"), "tagged.yaml:1"),
    (("plan", "deep.yaml"), "deep.yaml"),
    (("plan", "bomb.yaml"), "bomb.yaml:"),
    (("plan", "keep.yaml"), "keep.yaml:5 train.save.keep"),
    (("plan", "negative.yaml"), "negative.yaml:3 train.steps"),
    (("plan", "part.yaml"), "part.yaml:3 train.steps"),
    (("plan", "huge.yaml"), "huge.yaml:3 train.steps"),
    (("plan", "empty.yaml"), "empty.yaml:3 train.steps"),
    (("plan", "split.yaml"), "split.yaml:4 train.data.split"),
    (("plan", "keep.yaml", "--set", "train.steps.x=5"), "--set train.steps.x=5"),
    (("plan", "job.yaml", "other.yaml"), "'other.yaml'"),
    (("plan", "job.yaml", "--", "python", "p.py"), "'python'"),
    (("plan", "."), ". is a folder"),
    (("plan", "p.py"), "p.py"),
    (("plan", "--", "./p.py"), "./p.py"),
    (("plan", "--", "./notes"), "./notes"),
    (("launch", "--no-code", "/tmp"), "/tmp is a folder"),
    (("launch", "--no-code", "torchrun"), "torchrun is given no program"),
    (("nodes", "-c", "x" * 300), "xxx...: the name is too long"),
    (("plan", "job.yaml", "--what-if", "nodes=2,nodes=3"), "nodes is given twice\n  try: keep one"),
    (("pull", "/x", "/proc/x"), "/proc/x: "),
    (("container",), "'container'"),
    (("ps",), "Did you mean 'runs'?"),
    (("launch", "--restarts", "many", "--", "true"), "'many' is not a whole number"),
    (("status", "--every", "x"), "'x' is not a number"),
    (("stop", "last", "--grace", "-1"), "--grace"),
    (("logs", "show", "tiny", "--rank", "\uff10-\uff13"), "--rank"),
    (("sandbox", "down", "--dir", "notes"), "notes is not a folder"),
    (("demo", "--dir", "notes"), "notes: is a file, not a folder"),
    (("selftest", "--dir", "notes"), "notes: File exists"),
]
# Of the trainer, which the command starts.
TRAINER = [
    (("data-info", "."), ".: a folder"),
    (("tokenizer-train", "--input", "p.py", "--vocab-size", "9" * 30, "--output", "t.json"), "9" * 30),
    (("tensorboard", "runs/tiny-1122-100000-abcd", "--output", "notes"), "--output notes"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


# Command lines with several errors, and the places that must be named together.
TOGETHER = [
    (("launch", "-n", "node9", "-x", "[", "--", "true"), ("node set 'node9'", "node set '['")),
    (("exec", "node9", "-x", "node[1", "--", "true"), ("node set 'node9'", "node set 'node[1'")),
    (
        ("launch", "--no-code", "--devices", "[", "--env", "=x", "--env", "1A=2", "--", "true"),
        ("--devices: '['", "--env =x:", "--env 1A:"),
    ),
    (("launch", "job.yaml", "--env-style", "x", "--devices", "x"), ("--env-style x", "--devices: 'x'")),
    (("launch", "job.yaml", "--env", "A=1", "--set", "=3"), ("--env is for a command", "--set =3")),
    (("nodes", "expand", "node[4-1]", "x["), ("node set 'node[4-1]'", "node set 'x['")),
    (("nodes", "fold", "a b", "["), ("node set 'a b'", "node set '['")),
    (("ranktable", "check", "nosuch.json", "other.json"), ("nosuch.json", "other.json")),
    (("ranktable", "diff", "notes", "nosuch.json"), ("notes", "nosuch.json")),
    (
        ("plan", "many.yaml"),
        (
            "many.yaml:1 nodes",
            "many.yaml:2 grace: -3",
            "many.yaml:3 restart.spare_nodes",
            "many.yaml:4 rank_table",
            "many.yaml:6 train.model",
            "many.yaml:7 train.steps",
        ),
    ),
    (("plan", "away.yaml"), ("away.yaml:1 nodes", "away.yaml:4 train.steps")),
]


@pytest.mark.parametrize(("words", "places"), TOGETHER, ids=[" ".join(words) for words, _ in TOGETHER])
def test_all_errors_of_a_command_line_come_together(
    folder: Path, command_line: Run, words: tuple[str, ...], places: tuple[str, ...]
) -> None:
    code, _, err = command_line(*words)
    assert code == 2, err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    for place in places:
        assert sum(place in line for line in errors) == 1, err
    assert err.count("  try: ") >= len(errors), err


@pytest.mark.parametrize(("words", "place"), LINES, ids=[" ".join(words) for words, _ in LINES])
def test_it_names_the_place_and_a_remedy(
    folder: Path, command_line: Run, words: tuple[str, ...], place: str
) -> None:
    if "tiny" in words:
        restarted_run(folder / "runs")
    code, _, err = command_line(*words)
    assert code == 2, err
    first = err[err.index("error: ") :]
    assert place in first and "  try: " in first and "control" not in err, err


@pytest.mark.parametrize(("key", "value"), [("FANOUT", "0"), ("CONNECT_TIMEOUT", "-1"), ("FANOUT", "9e9")])
def test_a_wrong_setting_is_refused(
    folder: Path, command_line: Run, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    monkeypatch.setenv(f"CLUSTERCTL_{key}", value)
    assert_place_and_remedy(*command_line("exec", "all", "--", "true")[::2], f"$CLUSTERCTL_{key}", folder)
    monkeypatch.delenv(f"CLUSTERCTL_{key}")
    (folder / "clusterctl.yaml").write_text(f"{key.lower()}: {value}\n")
    code, _, err = command_line("exec", "all", "--", "true")
    assert_place_and_remedy(code, err, f"clusterctl.yaml:1 {key.lower()}", folder)


@pytest.mark.slow
def test_the_trainer_names_the_word_and_a_remedy(folder: Path) -> None:
    restarted_run(folder / "runs")
    for words, place in TRAINER:
        done = subprocess.run(
            [sys.executable, "-m", "trainer", "--called", "clusterctl NAME", *words],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and place in done.stderr and "  try: " in done.stderr, done.stderr
