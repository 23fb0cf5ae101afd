"""Wrong inputs: each ends with 2, says where it is wrong and what to try, and changes nothing."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli.commands import TABLE, built
from clusterctl.cli.main import _machine_error
from clusterctl.cli.models.generate import DrawingOptions
from clusterctl.cli.options import WRONG_WORDS
from clusterctl.cli.runs.logs import LogOptions
from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.inventory import nodeset
from clusterctl.wire.requests import READ_FORMATS, WRITTEN_FORMATS
from tests.clusterctl.conftest import Run
from trainer.command_line import read as read_words

CLUSTER = "nodes:\n  node[1-2]: {host: '10.0.0.{n}', devices: 2}\ngroups: {left: node1}\n"
COMMAND = "command: [python, p.py]\n"

# A job file, and the place that the error names. The first line is the command.
JOBS = [
    ("setup: set_env.sh", "job.yaml:2 setup"),
    ("setup: ''", "job.yaml:2 setup"),
    ("setup: []", "job.yaml:2 setup"),
    ("setup: 7", "job.yaml:2 setup"),
    ("setup: {sorce: /a}", "job.yaml:2 setup.sorce"),
    ("setup: {venv: venv}", "job.yaml:2 setup"),
    ("setup: {modules: [cann/8, 'a b']}", "job.yaml:2 setup"),
    ("setup: {run: [{a: 1}]}", "job.yaml:2 setup.run"),
    ("setup: {source: [/a.sh, 3]}", "job.yaml:2 setup.source"),
    ("rank_table: allways", "job.yaml:2 rank_table"),
    ("rank_table: nosuch.json", "job.yaml:2 rank_table"),
    ("rank_table: [auto]", "job.yaml:2 rank_table"),
    ("rank_table: ./cluster.yaml", "job.yaml:2 rank_table"),
    ("processes: rank", "job.yaml:2 processes"),
    ("env_style: pytorch", "job.yaml:2 env_style"),
    ("env: {1A: b}", "job.yaml:2 env.1A"),
    ("env: {A: '{nodes}'}", "job.yaml:2 env.A"),
    ("env: [A=1]", "job.yaml:2 env"),
    ("env: {HF_TOKEN: abc}", "job.yaml:2 env.HF_TOKEN"),
    ("env: {proxy: 'http://me:abc@proxy:3128'}", "job.yaml:2 env.proxy"),
    ("env: {A: '{data}'}", "job.yaml:2 env.A"),
    ("nodes: node9", "node9"),
    ("nodes: '@right'", "right"),
    ("nodes: 'node[1-'", "node[1-"),
    ("devices: '[0,2]'", "job.yaml:2 devices"),
    ("devices: [0, 0]", "job.yaml:2 devices"),
    ("devices: 7", "job.yaml:2 devices"),
    ("devices: two", "job.yaml:2 devices"),
    ("code: ./nosuch", "job.yaml:2 code"),
    ("data: ./nosuch", "job.yaml:2 data"),
    ("data_there: wiki", "job.yaml:2 data_there"),
    ("master_port: 70000", "job.yaml:2 master_port"),
    ("grace: soon", "job.yaml:2 grace"),
    ("collect: [logs]", "job.yaml:2 collect"),
    ("hang_after: never", "job.yaml:2 hang_after"),
    ("progress: '('", "job.yaml:2 progress"),
    ("progress: 'loss (?P<loss>.*)'", "job.yaml:2 progress"),
    ("restart: {max: -1}", "job.yaml:2 restart.max"),
    ("restart: {backof: 1}", "job.yaml:2 restart.backof"),
    ("restart: {node_lost_after: 1s}", "job.yaml:2 restart.node_lost_after"),
    ("restart: often", "job.yaml:2 restart"),
    ("notify: ./nosuch.sh", "job.yaml:2 notify: ./nosuch.sh: no such file"),
    ("notify: nosuch-program --now", "job.yaml:2 notify: no program 'nosuch-program'"),
    ("nodes: node9\nnotify: nosuch-program", "node9"),
    ("share_devices: maybe", "job.yaml:2 share_devices"),
    ("forward: TOKEN", "job.yaml:2 forward"),
    ("name: 'a b'", "job.yaml:2 name"),
    ("comand: [a]", "job.yaml:2 comand"),
    ("train: {model: gpt-tiny}", "job.yaml"),
    ("code: .\ncode: .", "job.yaml:3"),
    ("notify: 5", "job.yaml:2 notify"),
    ("notify: 'ftp://files/x'", "job.yaml:2 notify"),
    ("env_style: mindspore", "job.yaml:2 env_style"),
    ("env: {A: b", "job.yaml"),
    ("env: {A: null}", "job.yaml:2 env.A: has no value"),
    ("env: {A: }", "job.yaml:2 env.A: has no value"),
]
# Command lines, and the place that the error names.
LINES = [
    (("plan", "nosuch.yaml"), "clusterctl init --job nosuch"),
    (("launch", "job.yaml", "--sweep", "env.A"), "--sweep env.A"),
    (("launch", "job.yaml", "--sweep", "env.A=1,1"), "--sweep env.A"),
    (("launch", "job.yaml", "--sweep", "env.A=1", "--sweep", "env.A=2"), "--sweep: env.A"),
    (("launch", "job.yaml", "--sweep", "env.A=1,2", "--each", "ranks=1"), "--each ranks=1"),
    (("launch", "job.yaml", "--sweep", "env.A=1,2", "--each", "nodes=3"), "--each nodes=3"),
    (("launch", "job.yaml", "--each", "nodes=1"), "--each"),
    (("launch", "--sweep", "env.A=1", "--", "true"), "--sweep"),
    (("launch", "job.yaml", "--sweep", "master_port=1,x"), "--set master_port"),
    (("launch", "job.yaml", "--sweep", "env.A=1,2", "--detach"), "--detach"),
    (("resume", "sweep-nosuch"), "/runs"),
    (("plan", "--env", "API_KEY=abc", "--no-code", "--", "true"), "API_KEY looks like a credential"),
    (("plan", "job.yaml", "--set", "env.API_KEY=abc"), "--set env.API_KEY"),
    (("nodes", "list", "--kind", "tpu"), "tpu"),
    (("init", "--ask"), "--ask"),
    (("exec", "--setup", "all", "--", "true"), "--setup"),
    (("report", "nosuch", "--wandb", "out"), "/runs"),
    (("compare", "nosuch", "other"), "/runs"),
    (("top", "nosuch"), "/runs"),
    (("exec", "", "--", "true"), "the node set is empty"),
    (("exec", "all", "--timeout", "nan", "--", "true"), "--timeout: nan"),
    (("launch", "--notify", "https://", "--", "true"), "--notify: 'https://' is not"),
    (("hostfile", "convert", "cluster.yaml", "--to", "3.0"), "--to: unknown format"),
    (("sandbox", "up", "--mode", "vm"), "--mode: unknown mode 'vm'"),
    (("exec", "all", "--ssh", "telnet", "--", "true"), "--ssh or $CLUSTERCTL_SSH"),
    (("nodes", "list", "--kind", "abacus"), "--kind: unknown kind"),
    (("version", "extra"), "'extra' is one argument too many"),
    (("serve", "last", "--port", "70000"), "--port: 70000 is out of range\n  try: use 0 to 65535"),
    (("exec", "all", "--fanout", "0", "--", "true"), "--fanout: 0 is out of range\n  try: use 1 or more"),
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
    (("launch", "job.yaml", "--notify", "nosuch-program"), "--notify: no program 'nosuch-program' is on"),
    (("plan", "job.yaml", "--set", "notify=./nosuch"), "--set notify: ./nosuch: no such file"),
    (("launch", "job.yaml", "--notify", ""), "--notify is empty"),
    (("exec", "all", "--", ""), "the command is empty"),
    (("logs", "tail", "last", "-n", "-3"), "-n: -3 is out of range"),
    (("init", "--job", "cluster"), "exists\n  try: --force overwrites it; or choose another name"),
    (("launch", "--no-code", "--", ""), "the command is empty"),
    (("push", "empty", ""), "the path on the nodes is empty"),
    (("pull", "", "out"), "the path on the nodes is empty"),
    (("init", "--job", "x", "--hosts", "n1"), "--job writes a job; --hosts describes nodes"),
    (("init", "--job", "x", "-o", "y.yaml"), "-o y.yaml is unused"),
    (
        ("help", "nodes", "list", "more"),
        "'more' is one argument too many: `clusterctl nodes list` has no commands",
    ),
    (
        ("plan", "job.yaml", "-c", ""),
        "-c: is empty\n  try: name a file or folder; is a variable of the shell unset?",
    ),
    (("checkpoint", "export", "empty", "--to", "hf", "-o", ""), "-o: is empty"),
    (("checkpoint", "import", "", "--output", "x"), "SRC: is empty"),
    (("ranktable", "merge", "", "a.json"), "FILE...: is empty"),
    (("hostfile", "convert", "cluster.yaml", "--to", "slurm", "--slots", "99999999"), "use 1 to 4096"),
    (("hostfile", "check", "cluster.yaml", "--include", ""), "--include: is empty"),
    (("plan", "job.yaml", "--include", ""), "--include: is empty"),
    (
        ("hostfile", "check", "cluster.yaml", "--exclude", "node1@node2"),
        "--exclude: the filter leaves no slot",
    ),
    (("hostfile", "build", "-o", "job.yaml/x"), "job.yaml/x: job.yaml is a file, not a folder"),
    (("hostfile", "build", "-o", "empty"), "empty: is a folder\n  try: name a file"),
    (("plan", "job.yaml", "--what-if", ""), "--what-if is empty"),
    (("launch", "--code", ".", "--no-code", "--", "true"), "--code and --no-code contradict each other"),
    (("generate", "--threads", "99999999"), "--threads: 99999999 is out of range\n  try: use 0 to 1024"),
    (("serve", "--drain", "1e300"), "use 0.1 to 1000000"),
    (
        ("ranktable", "check", "a.json", "--for", "a9"),
        "--for: unknown value 'a9'\n  try: use one of 910a, a2, a3, a5",
    ),
    (
        ("ranktable", "merge", "x.json", "--sort", "nope"),
        "--sort: unknown value 'nope'\n  try: use one of given",
    ),
    (("data", "scatter", "x", "--to", ""), "--to: the path on the nodes is empty"),
    (("ranktable", "push", "x.json", "--to", " "), "--to: the path on the nodes is empty"),
    (
        ("data", "build", "--on", "node1", "--output", "o/"),
        "--output: o/ is a folder\n  try: add the name of the pair",
    ),
    (("data", "build", "--on", "node1", "--output", ""), "--output: is empty"),
    (("push", "empty", "node1:/tmp/x"), "node1:/tmp/x: give the path alone; options choose the nodes"),
    (("pull", "node[1-2]:~/x", "out"), "clusterctl pull '~/x' out -n 'node[1-2]'"),
    (("launch", "-n", "", "--no-code", "--", "true"), "-n: is empty"),
    (("launch", "job.yaml", "-x", " "), "-x: is empty"),
    (("launch", "-n", "", "-n", "node1", "--no-code", "--", "true"), "-n: is empty"),
    (
        ("launch", "job"),
        "job: job.yaml is a job file; which of them is meant?\n  try: clusterctl launch job.yaml",
    ),
    (("plan", "job", "--lr", "1"), "job: job.yaml is a job file"),
    (
        ("exec", "-R", "ssh", "-a", "--", "true"),
        "such option: -R\n  try: choose the SSH client: --ssh openssh",
    ),
    (
        ("exec", "-X", "web", "-n", "all", "--", "true"),
        "such option: -X\n  try: leave out a group: -x @GROUP\n",
    ),
    (("launch", "--nnodes", "2", "--", "true"), "such option: --nnodes\n  try: name the nodes: -n"),
    (("plan", "--nproc_per_node", "2", "--", "true"), "such option: --nproc_per_node\n  try: --devices"),
    (("logs", "tail", "-w", "node1"), "such option: -w\n  try: --node SET"),
    (("pdsh", "-w", "all", "uname"), "no such command 'pdsh'. Did you mean 'exec'"),
    (("plan", "-"), "-: a job is not read from standard input\n  try: write it to a file"),
    (("chat",), "no such command 'chat'. Did you mean 'generate'"),
    (("exec", "--user", "a b", "all", "--", "true"), "--user 'a b' can't be a login name"),
    (("plan", "-n", "node1", "-n", "all!node2", "job.yaml"), "-n: is given 2 times, and all!node2 has an"),
    (("exec", "-w", "node1", "-n", "all!node2", "--", "true"), "-n: is given 2 times, and all!node2 has an"),
    (("exec", "-w", "", "--", "true"), "-n: is empty"),
    (("plan", "job.yaml", "--set", "env.A=1", "--set", "env.A=2"), "--set: env.A is given twice"),
    (("plan", "--env", "A=1", "--env", "A", "--no-code", "--", "true"), "--env: A is given twice: A=1, A\n"),
    (("data", "build", "--output", "a", "--output", "b"), "--output: is given twice: a, b"),
]


# A node, and the place that the error names.
NODES = [
    ("{host: ''}", "cluster.yaml:2 nodes.a.host"),
    ("{workdir: scratch/x}", "cluster.yaml:2 nodes.a.workdir"),
    ("{host: 10.0.0.1, gateway: 10.0.0.1}", "cluster.yaml:2 nodes.a.gateway: '10.0.0.1' is a itself"),
    ("{host: 10.0.0.1, gateway: 'me@10.0.0.1:22'}", "cluster.yaml:2 nodes.a.gateway"),
    ("{host: FE80:0::2, gateway: '[fe80::2]'}", "cluster.yaml:2 nodes.a.gateway"),
    ("{gateway: 'bastion,A'}", "cluster.yaml:2 nodes.a.gateway: 'A' is a itself"),
    ("{env: {A: null}}", "cluster.yaml:2 nodes.a.env.A: has no value"),
]


def assert_place_and_remedy(code: int, err: str, place: str, folder: Path) -> None:
    assert code == 2, err
    first = err[err.index("error: ") :]
    assert place in first and "  try: " in first, err
    assert not (folder / "runs").exists() or not list((folder / "runs").iterdir())


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


@pytest.mark.parametrize(("words", "place"), LINES, ids=[" ".join(words) for words, _ in LINES])
def test_a_wrong_command_line_names_the_word_and_a_remedy(
    folder: Path, command_line: Run, words: tuple[str, ...], place: str
) -> None:
    code, _, err = command_line(*words)
    assert_place_and_remedy(code, err, place, folder)


@pytest.mark.parametrize(("text", "place"), NODES, ids=[text for text, _ in NODES])
def test_a_wrong_node_names_its_line_and_a_remedy(
    folder: Path, command_line: Run, text: str, place: str
) -> None:
    (folder / "cluster.yaml").write_text(f"nodes:\n  a: {text}\n")
    code, _, err = command_line("nodes", "list")
    assert_place_and_remedy(code, err, place, folder)


@pytest.mark.parametrize("gateway", ["''", "bastion", "'10.0.0.1:2222'", "'me@gate,bastion:22'"])
def test_other_gateways_stay_valid(folder: Path, command_line: Run, gateway: str) -> None:
    (folder / "cluster.yaml").write_text(f"nodes:\n  a: {{host: 10.0.0.1, gateway: {gateway}}}\n")
    assert command_line("nodes", "list")[0] == 0


@pytest.mark.parametrize("key", [key for key in TABLE if not TABLE[key].forwards])
def test_no_value_of_an_option_that_is_given_twice_is_lost(key: str) -> None:
    command: Any = built(key)
    ctx = command.context_class(command, info_name=key)
    for param in command.params:
        if param.param_type_name != "option" or param.is_flag:
            continue
        name = param.opts[0]
        has_keys = (param.metavar or "").startswith(("KEY=", "NAME="))
        values = ["A=1", "A=2"] if has_keys else ["1", "2"]
        given, _, _ = command.make_parser(ctx).parse_args([name, values[0], name, values[1]])
        try:
            found, _ = param.handle_parse_result(ctx, given, [])
        except WRONG_WORDS as error:
            assert "given 2 times: 1, 2" in str(error) or "A is given twice: A=1, A=2" in str(error), name
        else:
            assert found == "1,2" or list(map(str, found)) == values, name


@pytest.mark.parametrize(
    "words",
    [
        ("data-build", "--output", "a", "b"),
        ("data-build", "--workers", "1", "2"),
        ("data-split", "--output", "a", "b"),
        ("tokenizer-train", "--vocab-size", "300", "400"),
        ("checkpoint-export", "--dtype", "fp32", "bf16"),
    ],
)
def test_the_trainer_loses_no_value_of_an_option(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    verb, option, first, second = words
    with pytest.raises(SystemExit, match="2"):
        read_words([verb, option, first, option, second])
    assert f"{option}: is given twice: {first}, {second}\n" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        read_words([verb, option, first, option, first])
    assert "is given twice" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (("-n", "node1", "-n", "node2"), "node[1-2]"),
        (("--nodes=node2", "-nnode1"), "node[1-2]"),
        (("-n", "all!node1", "--nodes", "node1"), "node[1-2]"),
        (("-x", "node1", "-x", "node1"), "node2"),
    ],
)
def test_node_sets_that_are_given_twice_are_united(
    folder: Path, command_line: Run, words: tuple[str, ...], nodes: str
) -> None:
    code, out, err = command_line("plan", "job.yaml", "--json", *words)
    assert code == 0, err
    assert nodeset.fold(node["node"] for node in json.loads(out)["nodes"]) == nodes
    if words[0] != "-x":
        code, out, err = command_line("exec", *words, "--dry-run", "--", "true")
        assert (code, out) == (0, f"{nodes}: true\n"), err


def test_a_command_after_two_dashes_may_have_the_name_of_a_job(folder: Path, command_line: Run) -> None:
    assert command_line("plan", "--no-code", "--", "job")[0] == 0


def test_every_wrong_number_of_a_sampling_is_named(folder: Path, command_line: Run) -> None:
    code, _, err = command_line("generate", "x", "--temperature", "-1", "--top-p", "0", "--max-tokens", "0")
    assert code == 2
    for option in ("--temperature: -1.0", "--top-p: 0.0", "--max-tokens: 0"):
        assert f"error: {option} is out of range\n  try: use " in err


def test_every_wrong_value_of_a_command_line_is_named(folder: Path, command_line: Run) -> None:
    code, _, err = command_line("exec", "--fanout", "0", "--timeout", "x", "--connect-timeout", "-1")
    assert code == 2 and err.splitlines() == [
        "error: missing argument 'SET'",
        "  try: clusterctl exec -h",
        "error: missing argument '-- CMD...'",
        "  try: clusterctl exec -h",
        "error: --timeout: 'x' is not a number",
        "  try: clusterctl exec -h",
        "error: --fanout: 0 is out of range",
        "  try: use 1 or more",
        "error: --connect-timeout: -1.0 is out of range",
        "  try: use 0.01 or more",
    ]
    code, _, err = command_line("checkpoint", "diff")
    assert code == 2 and err.count("error: ") == 1
    code, _, err = command_line("generate", "--temperature", "nan", "--top-p", "inf")
    assert code == 2 and "--temperature: nan is not" in err and "--top-p: inf is out of range" in err


@pytest.mark.slow
def test_the_limits_of_samplings_are_the_trainers() -> None:
    from trainer.generate.sampling import Sampling

    options = {param.name: param.type for param in built("generate").params}
    defaults = DrawingOptions()
    limited = {name for name, kind in options.items() if hasattr(kind, "min")} - {"max_tokens"}
    names = limited & {field.name for field in fields(Sampling)}
    assert len(names) == 11
    for name in names:
        limits = options[name]
        assert not Sampling(**{name: getattr(defaults, name)}).faults()
        kind = type(getattr(defaults, name) or 0)
        most = [] if limits.max is None else [limits.max, limits.max + 1]
        for value in {limits.min, limits.min - 0.5, *most}:
            asked = kind(value // 1) if kind is int else value
            accepted = True
            try:
                limits.convert(str(asked), None, None)
            except WRONG_WORDS:
                accepted = False
            assert bool(Sampling(**{name: asked}).faults()) != accepted, (name, asked)


def test_every_unknown_option_of_a_command_line_is_named(folder: Path, command_line: Run) -> None:
    code, _, err = command_line(
        "generate", "--temprature", "1", "--tpk=3", "-z", "--samples", "0", "--top-p", "nan"
    )
    assert code == 2 and err.splitlines() == [
        "error: no such option: --temprature (Possible options: --temperature, --truncate)",
        "  try: clusterctl generate -h",
        "error: no such option: --tpk (Possible options: --stop, --top-k, --top-p)",
        "  try: clusterctl generate -h",
        "error: no such option: -z",
        "  try: clusterctl generate -h",
        "error: --top-p: nan is not a number that can be used",
        "  try: use a finite number",
        "error: --samples: 0 is out of range",
        "  try: use 1 to 1000",
    ]
    # The argument that an option lacks may follow an unknown option.
    code, _, err = command_line("checkpoint", "export", "--ot", "hf")
    assert (
        code == 2 and err.count("error: ") == 1 and "--ot (Possible options: --json, --output, --to)" in err
    )
    code, _, err = command_line("--nope", "-z", "nodes")
    assert code == 2 and err.count("error: ") == 2
    code, out, err = command_line("generate", "--help", "--nope")
    assert code == 2 and out == "" and "no such option: --nope" in err


def test_unknown_options_before_a_command_of_the_user_are_ours(folder: Path, command_line: Run) -> None:
    for verb in ("exec", "launch", "plan", "ssh"):
        code, _, err = command_line(verb, "--nope")
        assert code == 2 and "error: no such option: --nope" in err, err
    code, _, err = command_line("launch", "job.yaml", "--devics", "1", "--restart", "2")
    assert (
        code == 2
        and err.count("error: no such option: --") == 2
        and "--devices" in err
        and "--restarts" in err
    )
    code, _, err = command_line("exec", "all", "--fanot", "1", "ls")
    assert code == 2 and "no such option: --fanot (Possible options: --against, --fanout, --out)" in err


def test_unknown_options_of_a_command_of_the_user_are_named_together(folder: Path, command_line: Run) -> None:
    code, _, err = command_line("exec", "all", "ls", "-la", "--color", "--si")
    assert code == 2 and err.splitlines() == [
        "error: -l, --color and --si are not options of `clusterctl exec`",
        "  try: if they belong to your command, write -- before the command: "
        "clusterctl exec all -- ls -la --color --si",
    ]
    code, _, err = command_line("exec", "all", "--fanout", "2", "ls", "-l")
    assert code == 2 and "clusterctl exec all --fanout 2 -- ls -l" in err


def test_every_wrong_number_of_a_model_is_named(folder: Path, command_line: Run) -> None:
    code, _, err = command_line(
        "generate", "--temperature", "nan", "--top-k", "-1", "--top-p", "0", "--threads", "x"
    )
    assert code == 2 and err.splitlines() == [
        "error: --threads: 'x' is not a whole number",
        "  try: clusterctl generate -h",
        "error: --temperature: nan is not a number that can be used",
        "  try: use a finite number",
        "error: --top-k: -1 is out of range",
        "  try: use 0 or more",
        "error: --top-p: 0.0 is out of range",
        "  try: use above 0, at most 1",
    ]
    code, _, err = command_line(
        "serve", "--drain", "nan", "--batch", "0", "--request-timeout", "inf", "--tensor", "-1"
    )
    assert code == 2 and err.count("error: ") == 4
    code, _, err = command_line("eval", "--stride", "0", "--limit", "-1", "--pattern", "1.5")
    assert code == 2 and err.count("error: ") == 3


@pytest.mark.parametrize(
    ("line", "places"),
    [
        (
            "generate --device tpu --weights fp64 --top-k -1",
            ["--device: unknown value 'tpu'", "--weights", "--top-k"],
        ),
        (
            "serve --device tpu --weights fp64 --port -1",
            ["--device", "--weights: unknown value 'fp64'", "--port"],
        ),
        (
            "eval --weights int8 --split most --stride 0",
            ["--weights: unknown value 'int8'", "--split", "--stride"],
        ),
        (
            "checkpoint export --to x --dtype fp8 --tensor 0 -o x",
            ["--to: unknown value 'x'", "--dtype", "--tensor"],
        ),
        ("checkpoint import x --from x --heads -1 -o x", ["--from: unknown value 'x'", "--heads: -1"]),
        (
            "ranktable build --for a9 --devices x",
            ["--for: unknown value 'a9'", "--devices: 'x' is not a choice"],
        ),
        (
            "launch job.yaml --hang-after x --notify= --devices x",
            ["--hang-after x", "--notify is empty", "--devices"],
        ),
        (
            "launch --devices x --env-style y",
            ["--devices", "--env-style y", "no job file and no command given"],
        ),
        ("launch job.yaml more --devices x", ["--devices", "'more' is one word too many"]),
        ("plan --what-if devices=-1,kind=tpu,a=3", ["devices=-1", "kind 'tpu'", "'a=3'", "nodes is missing"]),
    ],
)
def test_wrong_choices_are_named_together(
    folder: Path, command_line: Run, line: str, places: list[str]
) -> None:
    code, _, err = command_line(*line.split())
    assert code == 2 and err.count("error: ") == len(places), err
    assert all(place in err for place in places), err


def test_a_negative_number_after_an_unknown_option_is_its_value(folder: Path, command_line: Run) -> None:
    code, _, err = command_line("checkpoint", "prune", "last", "--keep", "-1")
    assert code == 2 and err.count("error: ") == 1 and "no such option: --keep " in err


@pytest.mark.slow
def test_formats_of_weights_are_the_trainers() -> None:
    from trainer.weights.convert import readable, writable

    assert {*READ_FORMATS} == {*readable(), "peft"}
    assert {*WRITTEN_FORMATS} == {*writable(), "peft"}


def test_a_fault_of_an_inventory_keeps_its_place_if_it_names_the_nodes_of_the_job(
    folder: Path, command_line: Run
) -> None:
    device = {"device_id": "0", "device_ip": "10.1.0.1", "rank_id": "0"}
    server = {"server_id": "node1", "device": [device]}
    table = {"version": "1.0", "status": "completed", "server_count": "2", "server_list": [server, server]}
    (folder / "table.json").write_text(json.dumps(table))
    (folder / "job.yaml").write_text(COMMAND + "nodes: node1\n")
    code, _, err = command_line("plan", "job.yaml", "-c", "table.json")
    assert code == 2 and "table.json /server_list/1/server_id: the server 'node1' is also at" in err, err
    assert "job.yaml" not in err


def test_a_file_without_permission_is_a_wrong_input(
    folder: Path, command_line: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, kind in (
        (errno.EACCES, UsageError),
        (errno.EROFS, UsageError),
        (errno.ENOSPC, ClusterctlError),
    ):
        assert type(_machine_error(OSError(number, os.strerror(number), "x"))) is kind
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    code, _, err = command_line("ranktable", "check", "job.yaml")
    assert code == 2
    assert err == "error: FILE...: job.yaml is not readable\n  try: check its owner and permissions\n"


def test_the_option_that_was_typed_is_named(folder: Path, command_line: Run) -> None:
    for words, name in (
        (("build", "--format", "slrum"), "--format"),
        (("build", "--to=slrum"), "--to"),
        (("check", "cluster.yaml", "--for", "slrum"), "--for"),
    ):
        code, _, err = command_line("hostfile", *words)
        assert code == 2 and err == f"error: {name}: unknown format 'slrum'\n  try: did you mean 'slurm'?\n"
    code, _, err = command_line("hostfile", "convert", "cluster.yaml", "--to", "nope", "--kind", "tpu")
    assert (
        code == 2
        and "error: --to: unknown format 'nope'" in err
        and "error: --kind: unknown kind 'tpu'" in err
    )
    code, _, err = command_line("logs", "tail", "last", "--lines=-3")
    assert code == 2 and "error: --lines: -3 is out of range" in err


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["--version", "--help", "nodes expand node[1-4]", "schema", "data build -h"]
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_a_full_disk_rejects_is_one_clear_error(words: str, unbuffered: str) -> None:
    variables = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    argv = [sys.executable, "-m", "clusterctl", *words.split()]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, env=variables)
    first, second = done.stderr.splitlines()
    assert (done.returncode, first) == (1, "error: cannot write the output: No space left on device")
    assert second.startswith("  try: free some space")


def test_log_lines_since_a_later_time_than_until_are_refused() -> None:
    assert LogOptions(since="2h", until="1h").span().since is not None
    with pytest.raises(UsageError, match="--since 1h is after --until 2h"):
        LogOptions(since="1h", until="2h").span()
