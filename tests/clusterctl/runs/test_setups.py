"""`setup`: read strictly, run once on a node, its changes passed to ranks and to exec, its failure reported."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.checks import doctor
from clusterctl.errors import FindingsError, InputFaults, WorkFailed
from clusterctl.exec.command import Command, Everywhere
from clusterctl.inventory import cluster as clusters
from clusterctl.inventory.cluster import Cluster
from clusterctl.inventory.setup import Setup, rank_python, request_for
from clusterctl.jobs import job as jobs
from clusterctl.runs import start as runs
from clusterctl.runs.prepare.stage import code_hash, push_code
from clusterctl.transport.fanout import Connections
from clusterctl.transport.link import RequestFailed
from clusterctl.transport.local import LocalTransport
from clusterctl.transport.setups import SetupResult, ask_setup
from tests.clusterctl.runs.test_run import connections as connections
from tests.clusterctl.runs.test_run import lab, program, to_the_end

PRINT = "import os; print(os.environ.get('TOOLKIT'), os.environ.get('PYTHONPATH'), os.environ.get('GONE'))"


def with_setup(tmp_path: Path, setup: Setup | None) -> Cluster:
    cluster = lab(tmp_path)
    return replace(cluster, nodes=tuple(replace(node, setup=setup) for node in cluster.nodes))


def asked(connections: Connections, cluster: Cluster) -> SetupResult:
    node = cluster.nodes[0]
    return ask_setup(node, connections.of(node), request_for(node.setup) or {})


@pytest.mark.parametrize(
    ("text", "setup"),
    [
        ("/opt/set_env.sh", Setup(source=("/opt/set_env.sh",))),
        ("module load cann", Setup(run=("module load cann",))),
        ("[source ~/a.sh, export B=1]", Setup(run=("source ~/a.sh", "export B=1"))),
        ("{source: ~/a b.sh, modules: [cann/8], venv: ~/v, run: x y}",
         Setup(source=("~/a b.sh",), modules=("cann/8",), venv="~/v", run=("x y",))),
    ],
)  # fmt: skip
def test_a_setup_has_short_forms(tmp_path: Path, text: str, setup: Setup) -> None:
    cluster = clusters.parse(f"nodes: {{a: {{setup: {text}}}, b: }}", tmp_path / "cluster.yaml")
    assert [node.setup for node in cluster.nodes] == [setup, None]
    assert rank_python("python3", setup) == ("~/v/bin/python" if setup.venv else "python3")


@pytest.mark.parametrize(
    "text",
    [
        "set_env.sh",
        "''",
        "[]",
        "{}",
        "5",
        "{sourc: /a}",
        "{venv: v}",
        "{modules: ['a b']}",
        "{run: [1]}",
        "{source: ''}",
    ],
)
def test_a_wrong_setup_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputFaults) as raised:
        clusters.parse(f"nodes:\n  a:\n    setup: {text}\n", tmp_path / "cluster.yaml")
    fault = raised.value.faults[0]
    assert "cluster.yaml:3" in fault.where and fault.remedy


def test_a_relative_file_is_one_of_the_pushed_code(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "job.yaml").write_text("command: [true]\nsetup: env.sh\n")
    with pytest.raises(InputFaults, match="not an absolute path"):
        jobs.load(tmp_path / "job.yaml")
    (tmp_path / "job.yaml").write_text("command: [true]\ncode: code\nsetup: env.sh\n")
    with pytest.raises(InputFaults, match=r"has no file env\.sh"):
        jobs.load(tmp_path / "job.yaml")
    (tmp_path / "code" / "env.sh").write_text("export A=1\n")
    assert jobs.load(tmp_path / "job.yaml").setup == Setup(source=("env.sh",))


def test_ranks_get_what_the_setups_of_node_and_job_change(
    tmp_path: Path, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "env.sh").write_text('export TOOLKIT="$TOOLKIT-job" HERE=$PWD\nunset GONE\n')
    cluster = with_setup(
        tmp_path, Setup(run=("export TOOLKIT=node", "export PYTHONPATH=/cann", "export GONE=1"))
    )
    job = program(PRINT, code=code, setup=Setup(source=("env.sh",)))
    said: list[str] = []
    run = runs.launch(
        cluster, job, connections, tmp_path / "runs", lambda phase, text: said.append(f"{phase}: {text}")
    )
    to_the_end(run, connections)
    work = run.read_record().work_dirs
    for node, rank in (("node1", 0), ("node2", 3)):
        assert run.log(node, rank, "out").read_text() == f"node-job {work[node]}:/cann None\n"
    setup = next(text for text in said if text.startswith("setup: "))
    assert "TOOLKIT" in setup and "took up to" in setup and "on 2 nodes" in setup
    # The values are known to the nodes only.
    recorded = run.plan.read_text() + run.record.read_text()
    assert "node-job" not in recorded
    said.clear()
    again = runs.launch(
        cluster, job, connections, tmp_path / "runs", lambda *words: said.append(": ".join(words))
    )
    to_the_end(again, connections)
    assert any(text.startswith("setup: ") and "known" in text for text in said)


def test_a_setup_runs_again_only_when_its_text_or_a_file_changed(
    tmp_path: Path, connections: Connections
) -> None:
    counter, file = tmp_path / "count", tmp_path / "env.sh"
    file.write_text(f"echo x >> {counter}\nexport A=1\n")
    cluster = with_setup(tmp_path, Setup(source=(str(file),)))
    assert [asked(connections, cluster).kept for _ in range(3)] == [False, True, True]
    assert counter.read_text() == "x\n"
    file.write_text(f"echo x >> {counter}\nexport A=2 B=/x/lib\n")
    again = asked(connections, cluster)
    assert not again.kept and again.set == {"A": 0, "B": 1}
    assert again.text() == "B +1, A"
    changed = with_setup(tmp_path, Setup(source=(str(file),), run=("export C=1",)))
    assert not asked(connections, changed).kept and counter.read_text() == "x\nx\nx\n"
    kept = sorted((tmp_path / "n1" / "cache" / "setups").iterdir())
    assert len(kept) == 3 and all(path.stat().st_mode & 0o777 == 0o600 for path in kept)
    # A damaged result is made again.
    for path in kept:
        path.write_text(json.dumps({"set": [], "unset": {}}))
    assert not asked(connections, changed).kept


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (Setup(source=("/no/such.sh",)), ["source /no/such.sh", "No such file"]),
        (Setup(run=("export A=1", "echo about; echo why >&2; false")), ["exit code 1: why"]),
        (Setup(run=("echo bye; exit 0",)), ["it ended the shell: bye"]),
        (Setup(run=("echo 'open", "true")), ["echo 'open"]),
        (Setup(modules=("nothing",)), ["module load nothing"]),
        (Setup(venv="/no/venv"), ["venv /no/venv"]),
    ],
)
def test_a_failure_names_the_step_and_its_last_line(
    tmp_path: Path, connections: Connections, setup: Setup, words: list[str]
) -> None:
    with pytest.raises(WorkFailed) as raised:
        asked(connections, with_setup(tmp_path, setup))
    for word in ["node1: setup: ", *words]:
        assert word in str(raised.value)
    assert "clusterctl ssh node1" in raised.value.hint


def test_nothing_starts_if_the_setup_of_one_node_fails(tmp_path: Path, connections: Connections) -> None:
    cluster = lab(tmp_path)
    broken = replace(cluster.nodes[1], setup=Setup(run=("false",)))
    with pytest.raises(WorkFailed, match="node2: setup: false: exit code 1"):
        runs.launch(
            replace(cluster, nodes=(cluster.nodes[0], broken)),
            program("open('started', 'w')"),
            connections,
            tmp_path / "runs",
            lambda phase, text: None,
        )
    assert not list(tmp_path.rglob("started"))


def test_a_setup_that_leaves_a_process_behind_does_not_hold_the_start(
    tmp_path: Path, connections: Connections
) -> None:
    began = time.monotonic()
    result = asked(connections, with_setup(tmp_path, Setup(run=("sleep 3 & export PID=$!",))))
    assert time.monotonic() - began < 2.5
    assert set(result.set) == {"PID"}


def test_exec_and_doctor_use_the_setup(tmp_path: Path, connections: Connections) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "tool-of-the-setup").write_text("#!/bin/sh\necho found\n")
    (folder / "tool-of-the-setup").chmod(0o755)
    cluster = with_setup(tmp_path, Setup(run=(f"export PATH={folder}:$PATH",)))
    node = cluster.nodes[0]

    def output(wanted: bool) -> bytes:
        found: list[bytes] = []
        everywhere = Everywhere(
            Command(("tool-of-the-setup",), setup=wanted), cluster.nodes, connections, None
        )
        everywhere.run(node, lambda stream, data: found.append(data))
        return b"".join(found)

    outputs = {wanted: output(wanted) for wanted in (True, False)}
    assert outputs[True] == b"found\n" and b"No such file" in outputs[False]
    findings = [entry for entry in doctor.nodes(cluster, connections) if entry.check == "setup"]
    assert [entry.what for entry in findings] == ["its setup changes PATH +1"] * 2
    broken = with_setup(tmp_path, Setup(run=("echo no licence; false",)))
    findings = [entry for entry in doctor.nodes(broken, connections) if entry.check == "setup"]
    assert [entry.level for entry in findings] == ["bad", "bad"]
    assert "exit code 1: no licence" in findings[0].what and findings[0].remedy


def test_a_changed_login_environment_makes_a_kept_result_useless(tmp_path: Path) -> None:
    cluster = with_setup(tmp_path, Setup(run=("export HOME=$HOME/b",)))
    kept = []
    for name in ("a", "a", "z"):
        (tmp_path / name).mkdir(exist_ok=True)
        with Connections(LocalTransport(home=tmp_path / name)) as connections:
            kept.append(asked(connections, cluster).kept)
    assert kept == [False, True, False]


def test_exec_and_doctor_use_the_setup_of_a_job(tmp_path: Path, connections: Connections) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "env.sh").write_text("export OF_JOB=$OF_NODE/$(basename $PWD)\n")
    cluster = with_setup(tmp_path, Setup(run=("export OF_NODE=/node",)))
    job = program(PRINT, code=code, setup=Setup(source=("env.sh",)))

    def findings(job: jobs.Job) -> list[tuple[str, str]]:
        checked = doctor.CheckedJob(job, code=code_hash(job, None))
        found = doctor.nodes(cluster, connections, checked=checked)
        texts = [(entry.level, entry.what) for entry in found if entry.check == "setup"]
        assert texts[: len(texts) // 2] == texts[len(texts) // 2 :]
        return list(dict.fromkeys(texts))

    # The code is not there yet: doctor changes nothing.
    assert any("it uses the code, which is not here yet" in what for _, what in findings(job))
    pushed = push_code(cluster, job, connections, lambda phase, text: None)
    assert findings(job) == [
        ("ok", "its setup changes OF_NODE +1"),
        ("ok", "with the job's setup, ranks get OF_JOB +1, OF_NODE +1"),
    ]
    broken = replace(job, setup=Setup(run=("echo no licence; false",)))
    assert ("bad", "the job's setup: echo no licence; false: exit code 1: no licence") in findings(broken)
    command = Command(("sh", "-c", "echo $OF_JOB"), setup=True, of_job=job.setup, code=pushed)
    output: list[bytes] = []
    everywhere = Everywhere(command, cluster.nodes, connections, None)
    everywhere.run(cluster.nodes[0], lambda stream, data: output.append(data))
    assert b"".join(output).decode() == f"/node/{Path(pushed['node1']).name}\n"
    with pytest.raises(RequestFailed, match="no licence") as raised:
        Everywhere(replace(command, of_job=broken.setup), cluster.nodes, connections, None).run(
            cluster.nodes[0], lambda stream, data: None
        )
    assert "|| true" in raised.value.hint


def test_the_checks_before_a_launch_ask_the_python_of_the_jobs_environment(
    tmp_path: Path, connections: Connections
) -> None:
    job = program(PRINT, setup=Setup(venv=str(tmp_path / "no-venv")))
    with pytest.raises(FindingsError, match=r"no-venv/bin/python does not run"):
        doctor.before_launch(lab(tmp_path), job, connections, lambda phase, text: None)
