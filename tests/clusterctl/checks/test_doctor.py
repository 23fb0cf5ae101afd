"""`doctor`'s findings, out of scripted nodes: what is bad, what is odd, and the remedy of each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from clusterctl.checks import doctor, query
from clusterctl.checks.node import CheckpointNeed, checkpoint_room
from clusterctl.errors import FindingsError, Unreachable
from clusterctl.finding import Finding
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.job import Job
from clusterctl.jobs.parts.interconnect import NetworkOptions
from clusterctl.transport.fanout import Connections
from tests.support import examined
from tests.support.scripted import ScriptedTransport

NPU: dict[str, Any] = {"kind": "npu", "devices": (0, 1)}


def asked(table: dict[tuple[str, str], Any], *names: str, port: int = 0, **more: Any) -> list[Finding]:
    cluster = Cluster("lab", tuple(Node(name, name, name, **more) for name in names))
    with Connections(ScriptedTransport(table)) as connections:
        return doctor.nodes(cluster, connections, port)


def odd(findings: list[Finding], check: str) -> Finding:
    """Return the only finding that is not `ok`; it must have a remedy."""
    found = [one for one in findings if one.check == check and not one.is_sound]
    assert len(found) == 1, findings
    assert found[0].remedy
    return found[0]


def test_sound_nodes_have_nothing_but_good_findings() -> None:
    findings = asked(examined.script(), "a", "b")
    assert {one.level for one in findings} == {"ok"}
    assert {one.where for one in findings} == {"a", "b", "all nodes"}
    assert all(one.check for one in findings)


def test_a_node_that_is_gone_is_one_finding_and_the_others_are_asked_all_the_same() -> None:
    table = {**examined.script(), ("b", "connect"): Unreachable("b", "no answer", "look")}
    findings = asked(table, "a", "b")
    bad = [one for one in findings if one.level == "bad"]
    assert [(one.where, one.what, one.remedy, one.check) for one in bad] == [
        ("b", "no answer", "look", "ssh")
    ]
    assert any(one.where == "a" and one.level == "ok" for one in findings)


def test_all_of_a_node_is_asked_in_two_round_trips_and_its_reach_in_one_more() -> None:
    script = ScriptedTransport(examined.script())
    with Connections(script) as connections:
        doctor.nodes(Cluster("lab", (Node("a", "a", "a"), Node("b", "b", "b"))), connections)
    assert [what for node, what, _ in script.asked if node == "b"] == ["hello", "examine", "knock"]


def test_this_machine_without_an_address_is_told_which_one_is_enough() -> None:
    place = {"ip": None, "own": False, "interface": None, "reason": "unknown"}
    knock = {"reached": False, "seconds": 0.0, "reason": "unknown"}
    table = {**examined.script(a=examined.node(place=place)), ("a", "knock"): knock}
    for host, remedy in (("local", "address: 127.0.0.1"), ("a", "/etc/hosts")):
        with Connections(ScriptedTransport(table)) as connections:
            findings = doctor.nodes(Cluster("lab", (Node("a", host, "a"),)), connections)
        for check in ("address", "master-port"):
            assert remedy in odd(findings, check).remedy


PORT = {"name": "mlx5_0:1", "state": "ACTIVE", "rate": "100 Gb/sec", "link": "InfiniBand"}


def test_a_clock_is_set_against_ours_by_the_round_trip() -> None:
    table = {**examined.script(), ("a", "hello"): examined.hello(wall=time.time() - 600)}
    found = odd(asked(table, "a", "b"), "clock")
    assert (found.where, found.level) == ("a", "warning") and "its clock is -600" in found.what


def test_two_clocks_that_are_each_near_ours_may_be_far_from_each_other() -> None:
    table = examined.script()
    table["a", "hello"] = examined.hello(wall=time.time() - 1.5)
    table["b", "hello"] = examined.hello(wall=time.time() + 1.5)
    assert "a and b are 3.0 s apart" in odd(asked(table, "a", "b"), "clock").what


@pytest.mark.parametrize(
    ("check", "level", "spoiled", "says"),
    [
        ("disk", "bad", {"disks": {"/w": examined.disk(free=10)}}, "10 B free for /w"),
        ("inodes", "bad", {"disks": {"/w": examined.disk(inodes_free=3)}}, "3 files"),
        ("disk", "warning", {"disks": {"/tmp": examined.disk(free=0, device=9)}}, "/tmp"),
        ("disk", "bad", {"disks": {"/w/runs": examined.disk(free=10, device=9)}}, "10 B free for /w/runs"),
        ("inodes", "bad", {"disks": {"/w/store": examined.disk(inodes_free=3, device=9)}}, "3 files"),
        ("disk", "bad", {"disks": {"/w/runs": examined.disk(read_only=True)}}, "/w/runs cannot be written"),
        ("memory", "warning", {"memory": {"available": 1 << 20}}, "1.05 MB of memory"),
        ("shm", "warning", {"disks": {"/dev/shm": examined.disk(free=64 << 20, device=2)}}, "bus error"),
        ("shm", "warning", {"disks": {"/dev/shm": None}}, "no /dev/shm"),
        (
            "nofile",
            "warning",
            {"limits": {"NOFILE": [256, 1024]}},
            "1024 open files (ulimit -n; hard limit 1024)",
        ),
        ("nproc", "warning", {"limits": {"NPROC": [512, -1]}}, "hard limit none"),
        ("memlock", "warning", {"rdma": [PORT]}, "65536 bytes of locked memory"),
        (
            "address",
            "bad",
            {"place": {"ip": None, "own": False, "interface": None, "reason": "unknown"}},
            "unknown",
        ),
        (
            "address",
            "warning",
            {"place": {"ip": "1.2.3.4", "own": False, "interface": None, "reason": ""}},
            "bound",
        ),
        ("python", "bad", {"commands": {"python": None}}, "python3 does not run: no such program"),
        (
            "python",
            "bad",
            {"commands": {"python": examined.said("", 127, "not found")}},
            "does not run: not found",
        ),
        ("python", "bad", {"commands": {"python": examined.said(timed_out=True)}}, "no answer in time"),
        ("libraries", "warning", {"commands": {"python": examined.python(torch=None)}}, "no torch"),
        ("stale-agents", "warning", {"stale_agents": [4711]}, "4711"),
    ],
)
def test_one_thing_that_is_wrong_is_one_finding(
    check: str, level: str, spoiled: dict[str, Any], says: str
) -> None:
    answer = examined.node(**spoiled)
    answer["disks"] = {path: one for path, one in answer["disks"].items() if one}
    findings = asked(examined.script(a=answer), "a")
    found = odd(findings, check)
    assert (found.where, found.level) == ("a", level) and says in found.what
    assert [one for one in findings if not one.is_sound] == [found]


def test_an_interface_that_is_not_there_is_down_or_is_another_one_is_named() -> None:
    assert "it has lo, eth0" in odd(asked(examined.script(), "a", interface="ib0"), "interface").what
    down = examined.node(interfaces={"eth0": {"up": False, "addresses": []}})
    assert "is down" in odd(asked(examined.script(a=down), "a", interface="eth0"), "interface").what
    assert (
        "is on eth0, and `interface` says lo"
        in odd(asked(examined.script(), "a", interface="lo"), "interface").what
    )


def test_interfaces_of_several_names_must_be_told_and_then_are_sound() -> None:
    table = examined.script(
        b=examined.node(place={"ip": "10.0.0.2", "own": True, "interface": "ens5", "reason": ""})
    )
    assert "a: eth0; b: ens5" in odd(asked(table, "a", "b"), "interface").what


def test_a_left_over_run_is_told_from_one_that_is_looked_after() -> None:
    one = {"run": "demo-1", "attempt": "1", "node": "a", "run_dir": "/w/runs/demo-1", "pids": [11, 12]}
    left = odd(asked(examined.script(a=examined.node(runs=[{**one, "supervised": False}])), "a"), "left-over")
    assert left.what == "2 processes left of demo-1, whose supervisor is gone: 11, 12"
    assert "clusterctl stop demo-1" in left.remedy and left.fix == "kill 11 12"
    kept = asked(examined.script(a=examined.node(runs=[{**one, "supervised": True}])), "a")
    assert all(one.is_sound for one in kept) and any("demo-1 runs there" in one.what for one in kept)


def test_versions_that_differ_between_nodes_are_said_with_their_nodes() -> None:
    older = examined.node(commands={"python": examined.python(torch="2.12.0")})
    found = odd(asked(examined.script(c=older), "a", "b", "c"), "versions")
    assert found.where == "all nodes" and "a b: 2.13.0" in found.what.replace("[a-b]", "a b").replace(
        ",", " "
    )
    assert "c: 2.12.0" in found.what


# ---- ports


def test_a_master_port_that_is_taken_names_its_holder() -> None:
    holder = {"port": 29500, "user": 0, "pid": 99, "name": "python3"}
    table = {**examined.script(), ("a", "listen"): {"port": None, "reason": "in use", "holders": [holder]}}
    found = odd(asked(table, "a", "b", port=29500), "master-port")
    assert found.where == "a" and "29500 can't be had there: in use by python3 (pid 99)" in found.what


def test_a_master_that_some_nodes_do_not_reach_is_said_once_with_all_of_them() -> None:
    refused = {"reached": False, "reason": "no answer within 3 s", "seconds": 3.0}
    table = {**examined.script(), ("n2", "knock"): refused, ("n3", "knock"): refused}
    found = odd(asked(table, "n1", "n2", "n3"), "master-port")
    assert (found.where, found.level) == ("n[2-3]", "bad") and "n1 at n1, port 40000" in found.what


def test_hccls_ports_must_be_free_and_the_systems_own_choice_must_leave_them_alone() -> None:
    holder = {"port": 60003, "user": 0, "pid": 7, "name": "vllm"}
    smi = {"smi": examined.said(table_of("OK", "OK"))}
    answer = examined.node(ports=[holder], commands=smi)
    answer["commands"]["python"] = examined.python(torch_npu="2.13.0")
    assert (
        "port 60003, which HCCL listens on, is taken by vllm (pid 7)"
        in odd(asked(examined.script(a=answer), "a", **NPU), "hccl-ports").what
    )
    loose = {**answer, "ports": [], "reserved_ports": "60000-60014"}
    found = odd(asked(examined.script(a=loose), "a", **NPU), "hccl-ports")
    assert found.level == "warning" and found.fix.endswith("ip_local_reserved_ports=60000-60015")
    elsewhere = asked(examined.script(a=loose), "a", env={"HCCL_IF_BASE_PORT": "30000"}, **NPU)
    assert not [one for one in elsewhere if one.check == "hccl-ports"]


# ---- devices

HEAD = """\
| npu-smi 25.2.1                   Version: 25.2.1                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""
PROCESSES = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
"""


def table_of(*health: str, processes: str = "") -> str:
    """`npu-smi info` of an A2 node, a chip a card."""
    rows = [
        f"| {n}     910B3               | {one:<13} | 93.4        36                0    / 0             |\n"
        f"| 0                         | 0000:C{n}:00.0  | 0           0    / 0          3415 / 65536         |\n"
        for n, one in enumerate(health)
    ]
    return HEAD + "".join(rows) + PROCESSES + (processes or "| No running processes found in NPU 0 |\n")


def npu(text: str, **files: str) -> dict[str, Any]:
    commands = {"python": examined.python(torch_npu="2.13.0.post1"), "smi": examined.said(text)}
    return examined.node(commands=commands, files=files)


def test_an_ill_a_busy_and_a_missing_device_are_told_apart() -> None:
    busy = "| 0       0                 | 632268        | python3.1          | 197                   | NA |\n"
    table = examined.script(a=npu(table_of("OK", "Alarm", processes=busy)))
    findings = asked(table, "a", kind="npu", devices=(0, 1, 2))
    assert "device 0 is in use: python3.1 (pid 632268)" in odd(findings, "devices-busy").what
    said = [one.what for one in findings if one.check == "devices"]
    assert said == ["no device [2,3): npu-smi shows [0,2)", "device 1: health is Alarm"]


@pytest.mark.parametrize(
    ("processor", "says", "remedy"),
    [
        ({"instructions": examined.WIDE}, "AVX-512 on b", "CLUSTERCTL_NATIVE_LEVEL: AVX2"),
        ({"instructions": [*examined.WIDE, "avx512_bf16"]}, "AVX-512 with bf16 on b", "LEVEL: AVX2"),
        ({"instructions": examined.WIDE, "maker": "AMD"}, "AMD's AVX-512 on b", "LEVEL: AVX2"),
        ({"instructions": []}, "baseline on b", "CLUSTERCTL_NATIVE_LEVEL: baseline"),
        ({"machine": "aarch64", "instructions": []}, "aarch64 on b", "equal processors"),
    ],
)
def test_processors_that_round_differently_are_named(
    processor: dict[str, Any], says: str, remedy: str
) -> None:
    table = examined.script(b=examined.node(processor=processor))
    found = odd(asked(table, "a", "b"), "instructions")
    assert found.level == "warning" and remedy in found.remedy
    assert f"AVX2 on a, {says}; losses differ in the last digits" in found.what
    # On nodes with accelerators the ops run there.
    notes = [one for one in asked(table, "a", "b", **NPU) if one.check == "instructions"]
    assert [one.level for one in notes] == ["note"]


def test_the_instructions_of_this_machine_are_read_as_the_kernel_names_them() -> None:
    from clusterctl.agent import examine

    flags = "flags\t\t: fpu avx2 fma avx512f avx512_bf16 xsavec\n"
    cpu = f"vendor_id\t: AuthenticAMD\nmodel name\t: x: y\n{flags}\n"
    found = examine._processor(cpu + cpu)
    assert found["instructions"] == ["avx2", "fma", "avx512f", "avx512_bf16"]
    assert found["maker"] == "AMD"
    empty = examine._processor("")
    assert (empty["instructions"], empty["maker"]) == ([], "")


def test_two_makers_of_the_same_instructions_are_told_apart() -> None:
    makers = {
        name: examined.node(processor={"instructions": examined.WIDE, "maker": maker})
        for name, maker in (("a", "Intel"), ("b", "AMD"))
    }
    found = odd(asked(examined.script(**makers), "a", "b"), "instructions")
    assert "Intel's AVX-512 on a, AMD's AVX-512 on b" in found.what


def test_the_two_chips_of_an_a3_card_are_two_devices() -> None:
    text = """\
| 0     Ascend910           | OK            | 178.5       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3416 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | Warning       | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3195 / 65536         |
+===========================+===============+====================================================+
| 0       1                 | 77            | python                   | 197                     |
"""
    findings = asked(examined.script(a=npu(text)), "a", **NPU)
    assert "device 1 is in use: python (pid 77)" in odd(findings, "devices-busy").what
    assert [one.what for one in findings if one.check == "devices" and one.is_sound] == [
        "devices [0,1) are healthy and free"
    ]


@pytest.mark.parametrize(
    ("done", "says"),
    [
        (None, "is not there"),
        (examined.said(timed_out=True), "the driver hangs"),
        (examined.said("", 255, "dcmi module initialize failed. ret is -8005"), "-8005"),
    ],
)
def test_a_driver_that_says_nothing_is_bad(done: Any, says: str) -> None:
    answer = npu("")
    answer["commands"]["smi"] = done
    assert says in odd(asked(examined.script(a=answer), "a", **NPU), "devices").what


def test_nvidias_devices_are_read_with_their_errors_and_processes() -> None:
    rows = "0, GPU-a, 570.1, 143771, 4, 0\n1, GPU-b, 570.1, 143771, 4, 3\n2, GPU-c, 570.1, 143771, 4, [N/A]\n"
    busy = "GPU-c, 4711, /usr/bin/python3\n"
    commands = {"smi": examined.said(rows), "busy": examined.said(busy)}
    findings = asked(examined.script(a=examined.node(commands=commands)), "a", kind="cuda", devices=(0, 1, 2))
    assert "device 1: health is 3 uncorrected memory errors" in odd(findings, "devices").what
    assert "device 2 is in use: python3 (pid 4711)" in odd(findings, "devices-busy").what


def test_the_toolkit_and_the_driver_count_among_the_versions() -> None:
    cann = "# version: 1.0\ntoolkit_installed_version=[8.0.RC3:8.0.RC3]\n"
    one = npu(table_of("OK", "OK"), CANN=cann, driver="Version=24.1.rc3\npackage_version=24.1\n")
    other = npu(table_of("OK", "OK"), CANN=cann, driver="Version=24.1.0\n")
    found = odd(asked(examined.script(a=one, b=other), "a", "b", **NPU), "versions")
    assert "driver is not the same everywhere: a: 24.1.rc3; b: 24.1.0" in found.what


def test_a_torch_npu_that_goes_with_another_torch_is_bad() -> None:
    answer = npu(table_of("OK", "OK"))
    answer["commands"]["python"] = examined.python(torch_npu="2.1.0.post10")
    found = odd(asked(examined.script(a=answer), "a", **NPU), "torch-npu")
    assert found.level == "bad" and "install torch 2.1.0" in found.remedy


def test_devices_ping_those_of_the_next_node_and_a_lost_packet_is_named() -> None:
    conf = "address_0=192.168.10.{0}\naddress_1=192.168.20.{0}\n"
    table = examined.script(
        a=npu(table_of("OK", "OK"), **{"hccn.conf": conf.format(1)}),
        b=npu(table_of("OK", "OK"), **{"hccn.conf": conf.format(2)}),
    )
    well = examined.said("3 packets transmitted, 3 received, 0.00% packet loss")
    ill = examined.said("3 packets transmitted, 0 received, 100.00% packet loss")

    class Pinged(ScriptedTransport):
        def answer(self, node: str, what: str, op: str) -> Any:
            if op == "examine" and "hccn_tool" in str(self.asked[-1][2].get("commands", {}).get("1")):
                return {"commands": {"0": well, "1": ill if node == "b" else well}}
            return super().answer(node, what, op)

    script = Pinged(table)
    cluster = Cluster("lab", tuple(Node(name, name, name, **NPU) for name in ("a", "b")))
    with Connections(script, fanout=1) as connections:
        findings = doctor.nodes(cluster, connections)
    found = odd(findings, "device-ping")
    assert found.where == "b" and "device 1 can't reach device 1 of a (192.168.20.1): 100.00 %" in found.what


@pytest.mark.slow
def test_this_machine_says_which_backend_serves_each_op_and_why() -> None:
    said = {one.what.split(":")[0] for one in doctor.here() if one.what.startswith("op ")}
    assert {"op layer_norm", "op gelu", "op cross_entropy", "op attention"} <= said


def test_checkpoints_must_fit_the_disk_of_each_node_or_the_shared_one() -> None:
    free = examined.disk()["free"]
    table = examined.script(b=examined.node(disks={"/shared": examined.disk()}))

    def found(need: CheckpointNeed) -> list[Finding]:
        cluster = Cluster("lab", (Node("a", "a", "a"), Node("b", "b", "b")))
        with Connections(ScriptedTransport(table)) as connections:
            outcomes = connections.on_each(cluster.nodes, query.query_node)
        return [finding for outcome in outcomes for finding in checkpoint_room(outcome.get(), need)]

    assert not found(CheckpointNeed(free, 3))
    first, second = found(CheckpointNeed(free + 1, 3))
    assert (first.where, second.where) == ("a", "b")
    assert first.level == "bad"
    assert "3 checkpoints, the one in progress included, need" in first.what
    (shared,) = found(CheckpointNeed(free + 1, 3, "/shared"))
    assert (shared.where, "/shared has" in shared.what) == ("b", True)


def launched_on(*reported: str, memory: int = 65536) -> str:
    """What a launch of a bf16 training says before it starts, on nodes whose devices have these names and MiB."""
    names = tuple("abc"[: len(reported)])
    tables = {
        name: npu(table_of("OK", "OK").replace("910B3", chip).replace("65536", str(memory)))
        for name, chip in zip(names, reported, strict=True)
    }
    train = {
        "model": {"layers": 2, "hidden": 64, "heads": 2, "sequence": 64, "vocab": 512},
        "data": {"prefix": "x", "tokenizer": "gpt2"}, "steps": 10, "micro_batch": 1, "global_batch": 4,
        "precision": "bf16",
    }  # fmt: skip
    nodes = tuple(Node(name, name, name, kind="npu", devices=(0, 1)) for name in names)
    told: list[str] = []
    with Connections(ScriptedTransport(examined.script(**tables))) as connections:
        try:
            doctor.before_launch(
                Cluster("lab", nodes),
                Job("t", train=train),
                connections,
                lambda kind, text: told.append(text),
            )
        except FindingsError as found:
            told.append(str(found))
    return "\n".join(told)


def test_a_launch_asks_the_nodes_for_their_chip() -> None:
    assert "its devices are" not in launched_on("910B3")
    refused = launched_on("910A")
    assert "nothing was started" in refused and "its devices are 910A: train.precision" in refused
    assert "their devices differ: 910B3 on a, 910B1 on b" in launched_on("910B3", "910B1")
    assert "does not fit their memory" in launched_on("910B3", memory=2)
    assert "does not fit their memory" in launched_on("910Z", memory=2)


def used(kind: str, printed: str, smi: str = "", **how: Any) -> list[tuple[str, str, str]]:
    """What doctor says after the first use of a node's two devices printed this."""
    commands = {"touch": examined.said(printed, **how), "smi": examined.said(smi)}
    findings = asked(examined.script(a=examined.node(commands=commands)), "a", kind=kind, devices=(0, 1))
    return [(one.level, one.what, one.remedy) for one in findings if one.check == "devices-use"]


GPUS = """\
0, GPU-a, 535.104.05, 81559, 0, 0, NVIDIA H100 80GB HBM3
1, GPU-b, 535.104.05, 81559, 0, 0, NVIDIA H100 80GB HBM3
"""


def test_doctor_uses_each_device_and_shows_the_librarys_own_error() -> None:
    newest = "torch 2.13.0 for CUDA 13.0"
    printed = json.dumps({"torch": newest, "devices": {"0": "", "1": ""}, "sum": ""})
    assert used("cuda", printed, GPUS) == [("ok", f"{newest} multiplies and adds on all devices", "")]
    old = "The NVIDIA driver on your system is too old (found version 12020)."
    printed = json.dumps({"torch": newest, "devices": {"0": old, "1": old}, "sum": ""})
    assert used("cuda", printed, GPUS) == [
        (
            "bad",
            f"{newest} cannot use device [0,2): {old} (driver 535.104.05)",
            "CUDA 13 needs driver 580 or newer: update it, or install a torch that is built for CUDA 12.6",
        )
    ]
    printed = json.dumps({"torch": "torch 2.9.0 for CUDA 12.8", "devices": {"0": "", "1": "ECC"}, "sum": ""})
    ((_, text, remedy),) = used("cuda", printed, GPUS)
    assert text == "torch 2.9.0 for CUDA 12.8 cannot use device [1,2): ECC (driver 535.104.05)"
    assert remedy == "driver, CUDA or CANN, and torch must go together"
    printed = json.dumps({"torch": newest, "devices": {"0": "", "1": ""}, "sum": "NCCL error"})
    assert "cannot add over its devices: NCCL error" in used("cuda", printed, GPUS)[0][1]
    # Without torch the ranks' Python says nothing of the devices; a driver that hangs does not answer.
    assert used("cuda", "{}\n", GPUS) == []
    assert "does not answer" in used("cuda", "", GPUS, exit_code=None, timed_out=True)[0][1]
    assert "ended with 1: No space left" in used("cuda", "", GPUS, exit_code=1, err="No space left\n")[0][1]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_first_use_of_devices_runs_for_real(kind: str) -> None:
    torch = pytest.importorskip("torch")
    if kind == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    words = [sys.executable, "-c", query.touch_text(), kind, "3", "5"]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert found["torch"].startswith(f"torch {torch.__version__}") and found["sum"] == ""
    assert list(found["devices"]) == ["3", "5"]
    expected = {""} if kind == "cpu" else {"Torch not compiled with CUDA enabled"}
    assert set(found["devices"].values()) == expected or torch.version.cuda


def test_a_process_that_ends_during_the_sum_is_reported() -> None:
    pytest.importorskip("torch")
    text = query.touch_text().replace("dist.all_reduce(ones)", "os._exit(3)")
    words = [sys.executable, "-c", text, "cpu", "0", "1"]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert found["devices"] == {"0": "", "1": ""} and found["sum"] == "a process ended in it"


def test_a_torch_npu_for_another_cann_is_named() -> None:
    def said(cann: str, plugin: str) -> list[tuple[str, str]]:
        python = examined.python(torch=".".join(plugin.split(".")[:3]), torch_npu=plugin)
        files = {"CANN": f"toolkit_installed_version=[{cann}:{cann}]\n"}
        answer = examined.node(commands={"python": python}, files=files)
        findings = asked(examined.script(a=answer), "a", kind="npu", devices=())
        return [(one.what, one.remedy) for one in findings if one.check == "torch-npu"]

    assert said("8.2.RC1", "2.6.0") == [] and said("8.5.0", "2.9.0") == [] and said("7.0.0", "2.6.0") == []
    assert said("8.2.RC1", "2.8.0") == [
        (
            "torch_npu 2.8.0 was made for CANN 8.3, and the node has 8.2.RC1",
            "torch 2.6.0 with torch_npu 2.6.0, or CANN 8.3",
        )
    ]


def rdma(level: str, *states: str) -> list[str]:
    """What doctor says of a node with GPUs whose RDMA ports have these states."""
    ports = [{**PORT, "name": f"mlx5_{i}:1", "state": state} for i, state in enumerate(states)]
    findings = asked(examined.script(a=examined.node(rdma=ports)), "a", kind="cuda", devices=(0,))
    return [entry.what for entry in findings if entry.check == "rdma" and entry.level == level]


def test_rdma_ports_are_named_with_their_state_and_rate() -> None:
    assert rdma("ok", "ACTIVE", "DOWN") == ["RDMA by 1 port: mlx5_0:1 100 Gb/sec (InfiniBand)"]
    assert rdma("note", "ACTIVE", "DOWN") == ["RDMA: mlx5_1:1 is DOWN"]
    assert rdma("warning", "DOWN") == ["RDMA: mlx5_0:1 is DOWN"]
    assert rdma("note") == ["no RDMA adapter: NCCL uses TCP between nodes"]


def test_a_job_that_asks_for_rdma_does_not_start_without_an_active_port() -> None:
    cluster = Cluster("lab", (Node("a", "a", "a", kind="cuda", devices=(0,)),))
    wants = Job("x", command=("true",), network=NetworkOptions("on"))
    for state, starts in (("ACTIVE", True), ("INIT", False)):
        table = examined.script(a=examined.node(rdma=[{**PORT, "state": state}]))
        with Connections(ScriptedTransport(table)) as connections:
            said = ""
            try:
                doctor.before_launch(cluster, wants, connections, lambda *one: None)
            except FindingsError as error:
                said = error.message
        assert ("mlx5_0:1 INIT" in said) != starts, said
