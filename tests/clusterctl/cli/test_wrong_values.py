"""More wrong inputs, as in test_wrong_inputs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.cli.models.generate import LIMITS, DrawingOptions
from tests.clusterctl.cli.test_wrong_inputs import CLUSTER, COMMAND, assert_place_and_remedy
from tests.clusterctl.conftest import Run
from trainer.generate.sampling import Sampling

# A job file, and the place that the error names. The first line is the command.
JOBS = [
    ("env: {A: null}", "job.yaml:2 env.A: has no value"),
    ("env: {A: }", "job.yaml:2 env.A: has no value"),
]
# A node, and the place that the error names.
NODES = [
    ("{host: 10.0.0.1, gateway: 10.0.0.1}", "cluster.yaml:2 nodes.a.gateway: '10.0.0.1' is a itself"),
    ("{host: 10.0.0.1, gateway: 'me@10.0.0.1:22'}", "cluster.yaml:2 nodes.a.gateway"),
    ("{host: FE80:0::2, gateway: '[fe80::2]'}", "cluster.yaml:2 nodes.a.gateway"),
    ("{gateway: 'bastion,A'}", "cluster.yaml:2 nodes.a.gateway: 'A' is a itself"),
    ("{env: {A: null}}", "cluster.yaml:2 nodes.a.env.A: has no value"),
]
# Command lines, and the place that the error names.
LINES = [
    (("init", "--from", ""), "--from: the command is empty"),
    (("init", "--from", " "), "--from: the command is empty"),
    (("exec", "all", "--persist", "99y", "--", "true"), "--persist: '99y' is not a duration"),
    (("ranktable", "build", "--devices", "9-1"), "--devices: '9-1' is not"),
    (("launch", "job.yaml", "--devices", "[0,1"), "--devices: '[0,1' is not"),
    (("launch", "--devices", "x", "--", "true"), "--devices: 'x' is not"),
    (("plan", "job.yaml", "--set"), "option '--set' requires an argument\n  try: clusterctl plan -h"),
    (("launch", "job.yaml", "--sweep", "env.A=1", "--each"), "option '--each' requires an argument"),
    (
        ("launch", "--env", "CLUSTERCTL_TEST_UNSET", "--", "true"),
        "--env CLUSTERCTL_TEST_UNSET: it is not set",
    ),
    (("generate", "empty"), "empty: a folder, but not of a run"),
    (("checkpoint", "verify", "empty"), "empty: a folder, but not of a run"),
    (("tensorboard", "empty"), "empty: a folder, but not of a run"),
    (("sandbox", "up", "-n", "0"), "-n 0: so many nodes"),
    (("sandbox", "up", "--devices", "-1"), "--devices -1: so many"),
    (("help", "exec", "more"), "'more' is one argument too many"),
    (("launch", "job.yaml", "--env", "A=1"), "--env is for a command, and job.yaml is a job file"),
    (("plan", "job.yaml", "--no-code"), "--no-code is for a command, and job.yaml is a job file"),
    (("plan", "job.yaml", "--code", "empty"), "--code is for a command, and job.yaml is a job file"),
    (("launch", "job.yaml", "--notify", ""), "--notify is empty"),
    (("exec", "all", "--", ""), "the command is empty"),
    (("logs", "tail", "last", "-n", "-3"), "--lines / -n: -3 is out of range"),
    (("init", "--job", "cluster"), "exists\n  try: --force overwrites it; or choose another name"),
    (("launch", "--no-code", "--", ""), "the command is empty"),
    (("push", "empty", ""), "the path on the nodes is empty"),
    (("pull", "", "out"), "the path on the nodes is empty"),
    (("init", "--job", "x", "--hosts", "n1"), "--job writes a job, and --hosts is about nodes"),
    (("init", "--job", "x", "-o", "y.yaml"), "-o y.yaml is unused"),
    (
        ("help", "nodes", "list", "more"),
        "'more' is one argument too many: `clusterctl nodes list` has no commands",
    ),
    (("push", "empty", "node1:/tmp/x"), "node1:/tmp/x: give the path alone; options choose the nodes"),
    (("pull", "node[1-2]:~/x", "out"), "clusterctl pull '~/x' out -n 'node[1-2]'"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "job.yaml").write_text(COMMAND)
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(("text", "place"), JOBS, ids=[text for text, _ in JOBS])
def test_a_wrong_job_names_its_line_and_a_remedy(
    folder: Path, command_line: Run, text: str, place: str
) -> None:
    (folder / "job.yaml").write_text(COMMAND + text + "\n")
    code, _, err = command_line("plan", "job.yaml")
    assert_place_and_remedy(code, err, place, folder)


@pytest.mark.parametrize(("text", "place"), NODES, ids=[text for text, _ in NODES])
def test_a_wrong_node_names_its_line_and_a_remedy(
    folder: Path, command_line: Run, text: str, place: str
) -> None:
    (folder / "cluster.yaml").write_text(f"nodes:\n  a: {text}\n")
    code, _, err = command_line("nodes", "list")
    assert_place_and_remedy(code, err, place, folder)


@pytest.mark.parametrize(("words", "place"), LINES, ids=[" ".join(words) for words, _ in LINES])
def test_a_wrong_command_line_names_the_word_and_a_remedy(
    folder: Path, command_line: Run, words: tuple[str, ...], place: str
) -> None:
    code, _, err = command_line(*words)
    assert_place_and_remedy(code, err, place, folder)


@pytest.mark.parametrize("gateway", ["''", "bastion", "'10.0.0.1:2222'", "'me@gate,bastion:22'"])
def test_other_gateways_stay_valid(folder: Path, command_line: Run, gateway: str) -> None:
    (folder / "cluster.yaml").write_text(f"nodes:\n  a: {{host: 10.0.0.1, gateway: {gateway}}}\n")
    assert command_line("nodes", "list")[0] == 0


def test_every_wrong_number_of_a_sampling_is_named(folder: Path, command_line: Run) -> None:
    code, _, err = command_line("generate", "x", "--temperature", "-1", "--top-p", "0", "--max-tokens", "0")
    assert code == 2
    for option in ("--temperature: -1.0", "--top-p: 0.0", "--max-tokens: 0"):
        assert f"error: {option} is out of range\n  try: use " in err


def test_the_limits_of_samplings_are_the_trainers() -> None:
    defaults = DrawingOptions()
    checked = LIMITS.keys() - {"samples", "max_tokens"}
    for name in checked:
        assert not Sampling(**{name: getattr(defaults, name)}).faults()
        kind = type(getattr(defaults, name) or 0)
        for value in {LIMITS[name].least, LIMITS[name].least - 0.5, LIMITS[name].most, LIMITS[name].most + 1}:
            if abs(value) < 1e9:
                asked = kind(value // 1) if kind is int else value
                assert bool(Sampling(**{name: asked}).faults()) != LIMITS[name].hold(asked), (name, asked)


def test_a_folder_with_a_sandbox_and_no_inventory_names_the_sandbox(
    tmp_path: Path, command_line: Run
) -> None:
    code, _, err = command_line("launch", "--", "true")
    assert_place_and_remedy(code, err, "cluster.yaml: no such file", tmp_path)
    assert "clusterctl init" in err and "sandbox" not in err
    (tmp_path / ".clusterctl-sandbox").mkdir()
    (tmp_path / ".clusterctl-sandbox" / "cluster.yaml").write_text(CLUSTER)
    code, _, err = command_line("launch", "--", "true")
    assert_place_and_remedy(code, err, "-c .clusterctl-sandbox/cluster.yaml", tmp_path)
    code, _, err = command_line("nodes", "-c", ".clusterctl-sandbox/cluster.yaml")
    assert code == 0, err
