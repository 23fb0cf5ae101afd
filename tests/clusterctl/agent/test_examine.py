"""What a real agent reports about its node: disk space, ports and their holders, left-over processes, commands."""

from __future__ import annotations

import ipaddress
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.agent import network as agent_network
from clusterctl.agent.processes import state_letter
from clusterctl.checks import doctor, network
from clusterctl.checks.answers import CommandResult, Knock
from clusterctl.checks.query import NODE_PYTHON, PACKAGES
from clusterctl.errors import FindingsError
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.job import Job
from clusterctl.transport.agent_code import agent_argv
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import Connections
from clusterctl.transport.link import RequestFailed
from clusterctl.transport.local import LocalTransport
from clusterctl.wire.typed_json import decode
from tests.support.nodes import connect, local_node, oldest_python, wait_for

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        yield door


def test_a_node_tells_its_room_limits_and_addresses(link: Connection, tmp_path: Path) -> None:
    found = link.call("examine", {"address": "127.0.0.1"})
    room = found["disks"][str(tmp_path / "work")]
    assert 0 < room["free"] <= room["total"] and room["inodes_free"] >= 0
    assert 0 < found["memory"]["available"] <= found["memory"]["total"]
    assert all(len(found["limits"][name]) == 2 for name in ("NOFILE", "NPROC", "MEMLOCK"))
    assert "127.0.0.1/8" in found["interfaces"]["lo"]["addresses"]
    assert found["place"] == {"ip": "127.0.0.1", "own": True, "interface": "lo", "reason": ""}
    assert found["runs"] == [] and found["commands"] == {} and found["files"] == {}


def test_the_oldest_python_answers_too(tmp_path: Path) -> None:
    python = oldest_python()
    if python is None:
        pytest.skip("no Python 3.8 on this machine")
    connection = connect(tmp_path, python=python)
    try:
        asked = {"address": "127.0.0.2", "ports": [1], "commands": {"a": {"argv": [["echo", "hi"]]}}}
        found = connection.call("examine", asked)
        assert found["commands"]["a"]["out"] == "hi\n" and found["place"]["own"]
        token = "t" * 8
        reply = connection.open("listen", {"port": 0, "token": token})
        frame = next(iter(reply))
        where = {"address": "127.0.0.1", "port": frame.fields["port"], "token": token}
        assert connection.call("knock", where)["reached"]
        reply.cancel()
    finally:
        connection.close()


def test_an_address_of_another_node_is_not_its_own(link: Connection) -> None:
    assert link.call("examine", {"address": "192.0.2.1"})["place"] == {
        "ip": "192.0.2.1",
        "own": False,
        "interface": None,
        "reason": "",
    }
    nowhere = link.call("examine", {"address": "no-such-name.invalid"})["place"]
    assert nowhere["ip"] is None and nowhere["reason"]


def test_a_taken_port_is_told_with_its_holder(link: Connection, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    found = link.call("examine", {"address": "127.0.0.1", "ports": [port]})["ports"]
    comm = Path(f"/proc/{os.getpid()}/comm").read_text().strip()
    assert found == [{"port": port, "user": os.getuid(), "pid": os.getpid(), "name": comm}]
    assert link.call("examine", {"address": "127.0.0.2", "ports": [port]})["ports"] == [], (
        "at another address"
    )


def test_the_first_program_that_is_there_is_run_and_none_is_told_too(link: Connection) -> None:
    commands = {
        "second": {"argv": [["/no/such/program"], ["sh", "-c", "echo out; echo err >&2; exit 3"]]},
        "none": {"argv": [["/no/such/program"]]},
        "loud": {"argv": [["sh", "-c", "head -c 1000000 /dev/zero | tr '\\0' x"]]},
    }
    found = link.call(
        "examine", {"commands": commands, "files": {"host": ["/no/such", "/proc/sys/kernel/ostype"]}}
    )
    assert found["commands"]["second"] == {"exit_code": 3, "out": "out\n", "err": "err\n", "timed_out": False}
    assert found["commands"]["none"] is None
    assert len(found["commands"]["loud"]["out"]) == 64 << 10
    assert found["files"] == {"host": "Linux\n"}


def test_a_hung_program_is_ended_with_all_that_it_started_and_holds_up_no_other(link: Connection) -> None:
    hung = {"argv": [["sh", "-c", "setsid sleep 7123.25 & sleep 7123.25"]], "timeout": 0.5}
    began = time.monotonic()
    found = link.call("examine", {"commands": {"hung": hung, "well": {"argv": [["echo", "1"]]}}})["commands"]
    assert found["hung"]["timed_out"] and found["well"]["out"] == "1\n"
    assert time.monotonic() - began < 60
    wait_for(lambda: not _running("7123.25"))


def _running(word: str) -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and word.encode() in Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0"):
                found.append(entry)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("wrong", [{"a": []}, {"a": {"argv": ["ls"]}}, {"a": {"argv": [[]]}}])
def test_a_command_that_is_no_list_of_words_is_refused(link: Connection, wrong: object) -> None:
    with pytest.raises(RequestFailed, match="a command is"):
        link.call("examine", {"commands": wrong})


def test_what_is_left_of_a_run_is_found_below_this_work_folder_only(link: Connection, tmp_path: Path) -> None:
    run_dir = tmp_path / "work" / "runs" / "demo-1" / "node1"
    run_dir.mkdir(parents=True)
    marks = {"CLUSTERCTL_RUN_ID": "demo-1", "CLUSTERCTL_ATTEMPT": "1", "CLUSTERCTL_NODE": "node1"}
    mine = subprocess.Popen(SLEEP, env={**os.environ, **marks, "CLUSTERCTL_RUN_DIR": str(run_dir)})
    other = subprocess.Popen(SLEEP, env={**os.environ, **marks, "CLUSTERCTL_RUN_DIR": str(tmp_path / "else")})
    try:
        wait_for(lambda: link.call("examine", {})["runs"])
        found = link.call("examine", {})["runs"]
        assert [(one["run"], one["pids"], one["supervised"]) for one in found] == [
            ("demo-1", [mine.pid], False)
        ]
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()
    assert link.call("examine", {})["runs"] == []


def test_a_supervisor_is_no_agent_without_a_launcher_but_an_agent_that_stands_is_one(
    link: Connection, tmp_path: Path
) -> None:
    """A supervisor is a fork of an agent: `doctor` told people to kill it."""
    rank = {"rank": 0, "argv": ["sleep", "600"], "env": {}, "cwd": "/"}
    spec = {"run_id": "demo-2", "attempt": 1, "node": "node1", "ranks": [rank]}
    where = {"run_dir": str(tmp_path / "work" / "runs" / "demo-2" / "node1")}
    supervisor = link.call("start", {**where, "spec": spec})["pid"]
    agent = subprocess.Popen(
        agent_argv(sys.executable), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        for pid in (supervisor, agent.pid):
            os.kill(pid, signal.SIGSTOP)
            wait_for(lambda pid=pid: state_letter(pid) == "T")
        found = link.call("examine", {})["stale_agents"]
        assert agent.pid in found and supervisor not in found
    finally:
        os.kill(supervisor, signal.SIGCONT)
        agent.kill()
        agent.communicate()
        assert link.call("stop", {**where, "attempt": 1, "grace": 0.0})["left"] == 0


# ---- the ranks' Python


def said(link: Connection, program: str, *words: str, python: str = sys.executable) -> CommandResult:
    asked = {"commands": {"python": {"argv": [[python, "-c", program, *words]]}}}
    return decode(CommandResult, link.call("examine", asked)["commands"]["python"])


def test_the_nodes_python_tells_what_it_has(link: Connection) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [*PACKAGES, "pytest", "no-such-package"]
    alone = subprocess.run(
        [sys.executable, "-c", NODE_PYTHON, *words], capture_output=True, text=True, env=environ, cwd="/"
    )
    assert alone.stdout.count('"pytest"') == 1
    assert said(link, NODE_PYTHON, *words) == CommandResult(0, alone.stdout)


# ---- reach


ADDRESSES = ["10.1.2.3/24", "10.1.2.3/32", "172.16.0.9/12", "192.0.2.1/31", "fd00::5/64", "fe80::1/10"]


@pytest.mark.parametrize(
    "ip", ["10.1.2.3", "10.1.2.200", "172.31.1.1", "192.0.2.0", "192.0.2.2", "fd00::9", "fe80::1"]
)
def test_an_address_is_found_on_the_interface_with_it_or_else_on_that_of_its_network(ip: str) -> None:
    for chosen in itertools.permutations(ADDRESSES, 2):
        present = {f"eth{n}": {"up": True, "addresses": [text]} for n, text in enumerate(chosen)}
        entries = {f"eth{n}": ipaddress.ip_interface(text) for n, text in enumerate(chosen)}
        wanted = ipaddress.ip_address(ip)
        same = [name for name, entry in entries.items() if entry.ip == wanted]
        near = [name for name, entry in entries.items() if wanted in entry.network]
        assert agent_network._interface_of(ip, present) == next(iter([*same, *near]), None), chosen


def cluster(tmp_path: Path, count: int = 2, **more: object) -> Cluster:
    nodes = []
    for n in range(1, count + 1):
        one = local_node(tmp_path / f"n{n}", f"node{n}")
        nodes.append(Node(**{**vars(one), "address": f"127.0.0.{n}", "devices": (0,), **more}))
    return Cluster("lab", tuple(nodes))


def test_every_node_comes_to_the_masters_port_and_nothing_stays_open(tmp_path: Path) -> None:
    chosen = cluster(tmp_path)
    with Connections(LocalTransport()) as connections:
        found = network.master_port(chosen.nodes, connections)
        assert [(one.level, one.where) for one in found] == [("ok", "all nodes")], found
        with socket.create_server(("127.0.0.1", 0)) as door:
            port = door.getsockname()[1]
        again = network.master_port(chosen.nodes, connections, port)
        assert again[0].level == "ok"
        wait_for(lambda: not connections.of(chosen.nodes[0]).call("examine", {"ports": [port]})["ports"])


def test_a_node_without_an_answer_tries_once_more_where_others_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[float]()
    ask = Connection.ask

    def busy_at_first(link: Connection, kind: type, op: str, params: dict[str, object]) -> object:
        if op == "knock":
            asked.append(float(str(params["timeout"])))
            if len(asked) == 1:
                return Knock(False, "no answer within 5 s")
        return ask(link, kind, op, params)

    monkeypatch.setattr(Connection, "ask", busy_at_first)
    with Connections(LocalTransport()) as connections:
        found = network.master_port(cluster(tmp_path).nodes, connections)
    assert [(finding.level, finding.where) for finding in found] == [("ok", "all nodes")], found
    assert len(asked) == 3 and asked[-1] > asked[0]


def test_a_port_that_somebody_has_is_bad_with_the_holders_name(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as door, Connections(LocalTransport()) as connections:
        port = door.getsockname()[1]
        found = network.master_port(cluster(tmp_path).nodes, connections, port)
    assert [one.level for one in found] == ["bad"]
    assert f"the master port {port} can't be had" in found[0].what and f"(pid {os.getpid()})" in found[0].what


def test_somebody_else_behind_the_address_is_no_master(link: Connection, listener: socket.socket) -> None:
    where = {"address": "127.0.0.1", "port": listener.getsockname()[1], "token": "x", "timeout": 0.5}
    assert link.call("knock", where)["reason"] == "no answer within 0 s"
    closed = listener.getsockname()[1]
    listener.close()
    assert "refused" in link.call("knock", {**where, "port": closed})["reason"].lower()


# ---- the quick part


def job(**more: object) -> Job:
    return Job(name="job", command=("true",), source="job.yaml", **more)  # type: ignore[arg-type]


def test_sound_nodes_pass_the_quick_checks_with_one_line(tmp_path: Path) -> None:
    said: list[tuple[str, str]] = []
    with Connections(LocalTransport()) as connections:
        doctor.before_launch(cluster(tmp_path, 3), job(), connections, lambda *one: said.append(one))
    fit = ("check", "3 nodes ready")
    assert fit in said or (said and all("; try: " in text for _, text in said)), (
        "sound, or warned of with a remedy"
    )


def test_a_taken_master_port_refuses_the_launch_and_says_how_to_insist(tmp_path: Path) -> None:
    chosen = cluster(tmp_path)
    with socket.create_server(("", 0)) as door, Connections(LocalTransport()) as connections:
        asked = job(master_port=door.getsockname()[1])
        with pytest.raises(FindingsError, match="can't be had") as refused:
            doctor.before_launch(chosen, asked, connections, lambda *one: None)
    assert "nothing was started" in refused.value.message and "--no-checks" in refused.value.hint


def test_devices_that_the_job_does_not_use_are_no_matter(tmp_path: Path) -> None:
    chosen = cluster(tmp_path, kind="npu", devices=(0, 1))
    with Connections(LocalTransport()) as connections:
        with pytest.raises(FindingsError, match="npu-smi is not there"):
            doctor.before_launch(chosen, job(), connections, lambda *one: None)
        none = job(devices=(5,))
        doctor.before_launch(chosen, none, connections, lambda *one: None)


def test_folded_findings_name_their_nodes_as_a_set() -> None:
    from clusterctl.finding import Finding

    several = [Finding("bad", f"node{n}", "same") for n in (1, 2, 4)] + [Finding("bad", "node3", "other")]
    said = [(one.where, one.what) for one in doctor.folded(several)]
    assert said == [("node[1-2,4]", "same"), ("node3", "other")]
