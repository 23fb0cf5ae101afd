"""`doctor`'s findings, out of scripted nodes: what is bad, what is odd, and the remedy of each."""

from __future__ import annotations

import json
import time

from clusterctl import checks
from clusterctl.errors import Unreachable
from clusterctl.inventory import Cluster, Node
from clusterctl.transport import Completed, Connections, ScriptedTransport

LIBRARIES = dict.fromkeys(("torch", "deepspeed", "torch_npu", "numpy", "safetensors", "tokenizers"), True)


def hello(**more: object) -> dict[str, object]:
    now = {
        "wall": time.time(),
        "cpus": 8,
        "python": "3.9.1",
        "disk_free": 1 << 40,
        "workdir": "/w",
        "home": "/h",
    }
    return {**now, **more}


def python(version: str = "2.13.0", **missing: bool) -> Completed:
    said = {"python": "3.11.7", "torch_version": version, **LIBRARIES, **missing}
    return Completed(0, stdout=json.dumps(said).encode())


def asked(table: dict[tuple[str, str], object], *names: str) -> list[checks.Finding]:
    cluster = Cluster("lab", tuple(Node(name, name, name) for name in names))
    with Connections(ScriptedTransport(table)) as connections:
        return checks.nodes(cluster, connections)


def test_sound_nodes_have_nothing_but_good_findings() -> None:
    findings = asked({("*", "hello"): hello(), ("*", "run"): python()}, "a", "b")
    assert {one.level for one in findings} == {"ok"}
    assert {one.where for one in findings} == {"a", "b"}


def test_a_node_that_is_gone_is_one_finding_and_the_others_are_asked_all_the_same() -> None:
    table = {
        ("*", "hello"): hello(),
        ("*", "run"): python(),
        ("b", "connect"): Unreachable("b", "no answer", "look"),
    }
    findings = asked(table, "a", "b")
    bad = [one for one in findings if one.level == "bad"]
    assert [(one.where, one.what, one.remedy) for one in bad] == [("b", "no answer", "look")]
    assert any(one.where == "a" and one.level == "ok" for one in findings)


def test_a_clock_a_full_disk_and_a_missing_library_are_named_with_a_remedy() -> None:
    table = {
        ("a", "hello"): hello(wall=time.time() - 600),
        ("b", "hello"): hello(disk_free=10),
        ("c", "hello"): hello(),
        ("*", "run"): python(),
        ("c", "run"): python(torch=False),
    }
    findings = {one.where: one for one in asked(table, "a", "b", "c") if one.level != "ok"}
    assert "its clock is -600" in findings["a"].what
    assert findings["b"].level == "bad" and "GB free" in findings["b"].what
    assert "no torch" in findings["c"].what
    assert all(one.remedy for one in findings.values())


def test_a_python_that_does_not_run_is_bad() -> None:
    table = {("*", "hello"): hello(), ("*", "run"): Completed(127, stderr=b"not found")}
    findings = [one for one in asked(table, "a") if one.level == "bad"]
    assert len(findings) == 1 and "does not run" in findings[0].what


def test_versions_that_differ_between_nodes_are_said_with_their_nodes() -> None:
    table = {("*", "hello"): hello(), ("a", "run"): python("2.13.0"), ("b", "run"): python("2.12.0")}
    odd = [one for one in asked(table, "a", "b") if one.where == "all nodes"]
    assert len(odd) == 1
    assert "a: Python 3.11.7, torch 2.13.0" in odd[0].what and "b: Python 3.11.7, torch 2.12.0" in odd[0].what


def test_this_machine_says_which_backend_serves_each_op_and_why() -> None:
    said = {one.what.split(":")[0] for one in checks.here() if one.what.startswith("op ")}
    assert {"op layer_norm", "op gelu", "op cross_entropy", "op attention"} <= said
