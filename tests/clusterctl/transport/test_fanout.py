from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from clusterctl.errors import ClusterctlError, LinkLost, NodesFailed, Unreachable, WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.transport.connection import Completed
from clusterctl.transport.failures import fold_failures
from clusterctl.transport.fanout import Connections, Outcome, Stream, on_each, raise_failures
from clusterctl.transport.link import RequestFailed
from clusterctl.transport.local import LocalTransport
from tests.support.nodes import local_node
from tests.support.scripted import ScriptedTransport

NODES = [Node(name=f"node{number}", host="local", address="127.0.0.1") for number in range(1, 9)]


def test_an_unreachable_node_hides_no_other_nodes_failure() -> None:
    full = RequestFailed("node1", "os", "no space left", "make room")
    outcomes: list[Outcome[None]] = [Outcome(NODES[0], error=full), Outcome(NODES[1])]
    with pytest.raises(RequestFailed, match="node1: no space left"):
        raise_failures(outcomes)
    outcomes.append(Outcome(NODES[2], error=Unreachable("node3", "down", "start it")))
    with pytest.raises(NodesFailed) as raised:
        raise_failures(outcomes)
    said = raised.value
    assert (said.message, said.hint) == ("node3: down\nnode1: no space left", "start it\nmake room")
    assert (said.exit_code, said.node) == (3, "node3")


def test_the_same_failure_of_many_nodes_is_one_message() -> None:
    outcomes: list[Outcome[None]] = [
        Outcome(node, error=RequestFailed(node.name, "not-found", "no /x", "look")) for node in NODES[:5]
    ]
    outcomes.append(Outcome(NODES[6], error=RequestFailed("node7", "os", "no space left")))
    with pytest.raises(WorkFailed) as raised:
        raise_failures(outcomes)
    assert raised.value.message == "node[1-5]: no /x (5 nodes)\nnode7: no space left"
    assert raised.value.hint == "look"


def test_failures_that_differ_only_in_the_node_are_one_message_with_its_addresses() -> None:
    def refused(name: str, host: str, port: int = 22) -> tuple[Node, ClusterctlError]:
        text = f"nothing listens at {host} port {port}"
        return Node(name=name, host=host, address=host), Unreachable(name, text, f"ask {host}")

    def message(*failures: tuple[Node, ClusterctlError]) -> list[tuple[str, str]]:
        return [(error.message, error.hint) for error in fold_failures(failures)]

    same = [refused(f"node{number}", f"10.0.0.{number}") for number in range(1, 101)]
    text = "nothing listens at 10.0.0.[1-100] port 22"
    assert message(*same) == [(f"node[1-100]: {text} (100 nodes)", "ask 10.0.0.[1-100]")]
    # A number of the text that is no address is not taken for one.
    ports = message(refused("a1", "22", 22), refused("a2", "7", 22))
    assert ports == [
        ("a1: nothing listens at 22 port 22", "ask 22"),
        ("a2: nothing listens at 7 port 22", "ask 7"),
    ]
    named = message(refused("n1", "n1"), refused("n2", "n2"), refused("n3", "n3", 23))
    assert [text for text, _ in named] == [
        "n[1-2]: nothing listens at n[1-2] port 22 (2 nodes)",
        "n3: nothing listens at n3 port 23",
    ]
    # Many unlike addresses, and words that are no node names.
    spread = [refused(f"n{number}", f"10.{number}.{number * 37 % 251}.{number}") for number in range(9)]
    assert "at 10.0.0.0, ... port 22 (9 nodes)" in message(*spread)[0][0]
    assert "at [a]1, ... port" in message(refused("n1", "[a]1"), refused("n2", "[a]2"))[0][0]
    lines = [(node, RequestFailed(node.name, "setup", "exit 1:\n  oh")) for node in NODES[:2]]
    assert message(*lines) == [("node[1-2]: exit 1: (2 nodes)\n  oh", "")]


def test_outcomes_come_in_the_order_of_the_nodes_and_one_failure_hides_nothing() -> None:
    def work(node: Node) -> str:
        time.sleep(0.02 if node.name == "node1" else 0)
        if node.name == "node3":
            raise Unreachable(node.name, "down")
        return node.name

    seen: list[Outcome[str]] = []
    outcomes = on_each(NODES, work, fanout=3, on_outcome=seen.append)
    assert [one.node.name for one in outcomes] == [node.name for node in NODES]
    assert [one.ok for one in outcomes] == [True, True, False, True, True, True, True, True]
    assert isinstance(outcomes[2].error, Unreachable) and len(seen) == 8
    with pytest.raises(Unreachable, match="node3: down"):
        outcomes[2].get()


def test_no_more_than_fanout_nodes_are_worked_on_at_once() -> None:
    busy, most, change = 0, 0, threading.Lock()

    def work(node: Node) -> None:
        nonlocal busy, most
        with change:
            busy += 1
            most = max(most, busy)
        time.sleep(0.01)
        with change:
            busy -= 1

    on_each(NODES, work, fanout=2)
    assert most == 2


def test_a_bug_in_the_work_is_raised_where_it_was_asked_for() -> None:
    with pytest.raises(ZeroDivisionError, match="by zero"):
        on_each(NODES, lambda node: 1 // 0)


def test_one_connection_a_node_serves_a_whole_command(tmp_path: Path) -> None:
    nodes = [local_node(tmp_path, f"node{number}") for number in (1, 2)]
    with Connections(LocalTransport(home=tmp_path)) as connections:
        first = connections.on_each(nodes, lambda node, link: link.hello().pid)
        again = connections.on_each(nodes, lambda node, link: link.call("hello")["pid"])
        assert [one.get() for one in first] == [one.get() for one in again]
        kept = connections.of(nodes[0])
    with pytest.raises(LinkLost, match="the link was closed"):
        kept.call("hello")


def test_a_dropped_connection_is_opened_anew(tmp_path: Path) -> None:
    node = local_node(tmp_path)
    with Connections(LocalTransport(home=tmp_path)) as connections:
        before = connections.of(node).hello().pid
        connections.drop(node)
        assert connections.of(node).hello().pid != before


def test_the_environment_of_the_launcher_does_not_reach_a_local_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_LAUNCHER", "x")
    with Connections(LocalTransport(home=tmp_path)) as connections:
        done = connections.of(local_node(tmp_path)).run(["env"], env={"MINE": "1"})
    assert (
        "SECRET_OF_THE_LAUNCHER" not in done.text
        and "MINE=1" in done.text
        and f"HOME={tmp_path}" in done.text
    )


def test_a_scripted_transport_answers_from_its_table_and_remembers_what_was_asked() -> None:
    script = ScriptedTransport(
        {
            ("node1", "hccn_tool -i 0 -ip -g"): Completed(0, stdout=b"ipaddr:192.168.1.1\n"),
            ("*", "hello"): {"cpus": 4},
            ("node1", "get"): [({}, b"ab"), ({}, b"c"), {"size": 3}],
            ("node2", "connect"): Unreachable("node2", "down"),
            ("node1", "stop"): LinkLost("node1", "cut"),
        }
    )
    link = script.connect(NODES[0])
    assert link.run(["hccn_tool", "-i", "0", "-ip", "-g"]).text == "ipaddr:192.168.1.1\n"
    assert link.hello().cpus == 4 and link.get("/f") == b"abc"
    with pytest.raises(LinkLost, match="node1: cut"):
        link.call("stop")
    with pytest.raises(RequestFailed, match="no answer"):
        link.run(["rm", "-rf", "/"])
    with pytest.raises(Unreachable, match="node2: down"):
        script.connect(NODES[1])
    assert ("node1", "rm -rf /") in [(node, what) for node, what, _ in script.asked]


def drained(stream: Stream) -> dict[str, bytes]:
    said = {"stdout": b"", "stderr": b""}
    while True:
        name, data = stream.read(65536, 30.0)
        if not name:
            return said
        said[name] += data


def test_a_program_without_an_agent_has_its_streams_apart_and_ends_as_it_ended(tmp_path: Path) -> None:
    transport = LocalTransport(home=tmp_path)
    stream = transport.start(local_node(tmp_path), "wc -c; echo problem >&2; pwd; exit 7")
    stream.send(b"in" * 100_000)
    stream.finish()
    said = drained(stream)
    assert said == {"stdout": f"200000\n{tmp_path}\n".encode(), "stderr": b"problem\n"}
    assert stream.ended() == (7, None) and stream.exited()
    stream.close()
    killed = transport.start(local_node(tmp_path), "kill -KILL $$")
    assert drained(killed)["stdout"] == b"" and killed.ended() == (None, 9)
    killed.close()


def test_a_started_program_that_is_silent_says_so_and_one_that_was_closed_is_gone(tmp_path: Path) -> None:
    stream = LocalTransport(home=tmp_path).start(local_node(tmp_path), "cat")
    with pytest.raises(TimeoutError):
        stream.read(1, 0.05)
    assert not stream.exited()
    stream.close()
    with pytest.raises(LinkLost, match="the connection was closed"):
        stream.read(1, 0.05)
    with pytest.raises(LinkLost, match="no longer reads its input"):
        stream.send(b"x")


def test_a_scripted_program_says_what_was_written_for_it_and_keeps_what_it_was_sent() -> None:
    script = ScriptedTransport({("*", "hostname"): Completed(3, stdout=b"n1\n", stderr=b"oh\n")})
    stream = script.start(NODES[0], "hostname")
    stream.send(b"input")
    assert drained(stream) == {"stdout": b"n1\n", "stderr": b"oh\n"} and stream.ended() == (3, None)
    assert script.asked == [("node1", "hostname", {"stdin": b"input"})]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"entries": []}, "missing is missing"),
        ({"missing": "no", "entries": []}, "missing: 'no' is not of type bool"),
        ({"missing": False, "entries": [{"name": "a"}]}, r"entries\[0\].kind is missing"),
    ],
)
def test_an_answer_that_no_agent_sends_names_the_node_and_the_wrong_part(
    answer: dict[str, object], problem: str
) -> None:
    link = ScriptedTransport({("*", "list"): answer}).connect(NODES[0])
    with pytest.raises(RequestFailed, match=f"^node1: its answer to 'list' is invalid: {problem}"):
        link.directory("/")
