"""Broken nodes, one row each: doctor names the node, what is wrong, and the remedy, and finds nothing else.

A row lays its fault over a sound node of its kind. Outputs of tools and errors of libraries are from public logs.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clusterctl.checks import doctor, images
from clusterctl.errors import Unreachable
from clusterctl.finding import Finding
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.inventory.container import ContainerOptions
from clusterctl.jobs.job import Job
from clusterctl.transport.fanout import Connections
from tests.clusterctl.checks.test_doctor import PORT, table_of
from tests.support import examined
from tests.support.scripted import ScriptedTransport

said = examined.said
TORCH = "torch 2.13.0 for CUDA 13.0"
GPU = "NVIDIA H100 80GB HBM3"


def gpus(*rows: str, driver: str = "580.95", used: int = 4, errors: str = "0") -> dict[str, Any]:
    """The answer of nvidia-smi; each row is the name of a device."""
    shown = [
        f"{i}, GPU-{i}, {driver}, 81559, {used}, {errors}, {name}"
        for i, name in enumerate(rows or (GPU, GPU))
    ]
    return said("\n".join(shown) + "\n")


def touched(error: str = "", total: str = "", torch: str = TORCH) -> dict[str, Any]:
    return said(json.dumps({"torch": torch, "devices": {"0": error, "1": error}, "sum": total}))


SMI_9 = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
OPEN = {"/dev/nvidia0": True, "/dev/nvidia1": True, "/dev/nvidiactl": True}
DAVINCI = {"/dev/davinci0": True, "/dev/davinci1": True, "/dev/davinci_manager": True}
SOUND: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cuda": {
        "commands": {"smi": gpus(), "busy": said(), "touch": touched()},
        "device_files": OPEN,
        "files": {"peermem": "live"},
    },
    "npu": {
        "commands": {
            "smi": said(table_of("OK", "OK")),
            "touch": touched(torch="torch 2.9.0"),
            "python": examined.python(torch="2.9.0", torch_npu="2.9.0"),
        },
        "device_files": DAVINCI,
        "files": {
            "CANN": "toolkit_installed_version=[8.5.0:8.5.0]",
            "driver": "Version=25.5.0",
            "firmware": "Version=7.8.0.5.216",
            "hccn.conf": "address_0=10.1.0.1\naddress_1=10.1.0.2\n",
        },
    },
}


@dataclass(frozen=True)
class Broken:
    """A fault, and doctor's finding about it."""

    name: str
    kind: str
    check: str
    level: str
    says: str
    remedy: str
    spoiled: dict[str, Any] = field(default_factory=dict)
    """Laid over the answer of the node `b`."""
    table: dict[tuple[str, str], Any] = field(default_factory=dict)
    """Laid over the script of both nodes; a greeting is sent `late` seconds behind this machine's clock."""
    where: str = "b"
    env: dict[str, str] = field(default_factory=dict)


def smi(out: str, code: int = 9) -> dict[str, Any]:
    return {"commands": {"smi": said(out, code)}}


def touch(error: str = "", total: str = "") -> dict[str, Any]:
    return {"commands": {"touch": touched(error, total)}}


def state(question: str, *values: str) -> dict[str, Any]:
    return {"commands": {question: said(f"GPU-0, {', '.join(values)}\n")}}


def npu_python(**packages: Any) -> dict[str, Any]:
    return {"commands": {"python": examined.python(**packages)}}


def of_python(version: str) -> dict[str, Any]:
    return {"commands": {"python": said(json.dumps({"python": version, "packages": examined.PACKAGES}))}}


OLD = "The NVIDIA driver on your system is too old (found version 12020)."
# fmt: off
ROWS = (
    # ---- the driver
    Broken("an old driver", "cuda", "devices-use", "bad", f"{TORCH} cannot use device [0,2): {OLD} (driver 535.104.05)",
           "CUDA 13 needs driver 580 or newer: update it, or install a torch that is built for CUDA 12.6",
           {"commands": {"smi": gpus(driver="535.104.05"), "touch": touched(OLD)}}),
    Broken("a driver without its module", "cuda", "devices", "bad", SMI_9, "load the driver's module", smi(SMI_9)),
    Broken("driver and library of two versions", "cuda", "devices", "bad", "Driver/library version mismatch",
           "restart the node", smi("Failed to initialize NVML: Driver/library version mismatch", 18)),
    Broken("no permission for the driver", "cuda", "devices", "bad", "Insufficient Permissions",
           "give the user access to the device files", smi("Failed to initialize NVML: Insufficient Permissions", 4)),
    Broken("no driver at all", "cuda", "devices", "bad", "nvidia-smi is not there", "install or repair the driver",
           {"commands": {"smi": None}}),
    Broken("a driver that hangs", "npu", "devices", "bad", "the driver hangs", "install or repair the driver",
           {"commands": {"smi": said(timed_out=True)}}),
    Broken("no device files of GPUs", "cuda", "devices", "bad", "there is no /dev/nvidia*", "pass the GPUs",
           {**smi("No devices were found", 6), "device_files": {}}),
    Broken("no device files of NPUs", "npu", "devices", "bad",
           "dcmi module initialize failed. ret is -8005; there is no /dev/davinci*", "/dev/davinci_manager",
           {**smi("dcmi module initialize failed. ret is -8005", 255), "device_files": {}}),
    Broken("NPUs of another container", "npu", "devices", "bad", "-8020", "another container has its NPUs",
           smi("dcmi model initialized failed, because the device is used. ret is -8020", 255)),
    Broken("a device file that is closed", "cuda", "devices-access", "warning", "this login may not open /dev/nvidia1",
           "give the user access to the device files", {"device_files": {**OPEN, "/dev/nvidia1": False}}),
    Broken("an NPU's file that is closed", "npu", "devices-access", "warning", "may not open /dev/davinci_manager",
           "HwHiAiUser", {"device_files": {**DAVINCI, "/dev/davinci_manager": False}}),
    Broken("no permission for InfiniBand", "cuda", "devices-access", "warning", "may not open /dev/infiniband/uverbs0",
           "mode 0666", {"device_files": {**OPEN, "/dev/infiniband/uverbs0": False}}),
    # ---- the cards
    Broken("MIG", "cuda", "devices-state", "warning", "device [0,1) is divided by MIG", "turn MIG off",
           state("state", "Enabled", "Default", "Enabled", "16", "16")),
    Broken("no process allowed", "cuda", "devices-state", "bad", "allows no process", "allow processes",
           state("state", "Disabled", "Prohibited", "Enabled", "16", "16")),
    Broken("heat", "cuda", "devices-state", "warning", "slowed down by heat or power", "cooling",
           state("clocks", "Active")),
    Broken("memory rows to remap", "cuda", "devices-state", "warning", "remapped at its next reset", "reset it",
           state("rows", "Yes", "No")),
    Broken("no memory rows left", "cuda", "devices-state", "bad", "has no spare memory rows left", "replace it",
           state("rows", "0", "1")),
    Broken("a fabric that is not ready", "cuda", "devices-state", "bad", "has not joined the NVLink fabric",
           "start the fabric manager", state("fabric", "In Progress")),
    Broken("no fabric manager", "cuda", "devices-use", "bad", "Error 802: system not yet initialized",
           "start the fabric manager",
           touch("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized")),
    Broken("a card off the bus", "cuda", "devices", "bad", "GPU is lost", "the card is broken",
           smi("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system", 15)),
    Broken("a dead card among others", "cuda", "devices", "bad", "device 1: health is lost", "leave it out",
           {"commands": {"smi": said(f"{gpus(GPU)['out']}1, GPU-1, 580.95, [GPU is lost], 4, 0, {GPU}\n")}}),
    Broken("a card that is missing", "cuda", "devices", "bad", "no device [1,2): nvidia-smi shows [0,1)",
           "correct `devices`", {"commands": {"smi": gpus(GPU)}}),
    Broken("memory errors", "cuda", "devices", "bad", "device 0: health is 3 uncorrected memory errors", "reset it",
           {"commands": {"smi": said(gpus(GPU, errors="3")["out"] + f"1, GPU-1, 580.95, 81559, 4, 0, {GPU}\n")}}),
    Broken("an alarm of an NPU", "npu", "devices", "bad", "device 1: health is Alarm", "leave it out",
           {"commands": {"smi": said(table_of("OK", "Alarm"))}}),
    Broken("a slow card", "cuda", "devices-speed", "warning", "takes 1.6 times as long", "every step waits",
           {"commands": {"touch": said(json.dumps({"torch": TORCH, "devices": {"0": "", "1": "", "2": ""}, "sum": "",
                                                   "seconds": {"0": 0.01, "1": 0.016, "2": 0.01}}))}}),
    Broken("an error of a card in the kernel's log", "cuda", "devices-log", "warning", "an error of the bus", "restart",
           {"commands": {"xid": said("kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.\n"
                                     "kernel: NVRM: Xid (PCI:0000:3b:00): 13, pid=99, Graphics Exception\n")}}),
    Broken("an NVLink that is down", "cuda", "devices-log", "warning", "1 of 2 NVLinks of GPU 1: NVIDIA H100",
           "reset it",
           {"commands": {"nvlink": said("GPU 0: NVIDIA H100 (UUID: GPU-0)\n\t Link 0: 26.562 GB/s\n"
                                        "GPU 1: NVIDIA H100 (UUID: GPU-1)\n\t Link 0: <inactive>\n"
                                        "\t Link 1: 26.562 GB/s\n")}}),
    Broken("a card in use", "cuda", "devices-busy", "bad", "device 0 is in use: python3 (pid 4711)", "wait for it",
           {"commands": {"busy": said("GPU-0, 4711, /usr/bin/python3\n")}}),
    Broken("memory that nobody seems to use", "npu", "devices-busy", "warning",
           "device 1: 60000 of 65536 MiB are in use, by no process that is shown here", "other containers",
           {"commands": {"smi": said("60000".join(table_of("OK", "OK").rsplit("3415", 1)))}}),
    Broken("unequal cards", "cuda", "chip", "warning", f"their devices differ: {GPU} on a,b, NVIDIA A10 on b",
           "equal devices", {"commands": {"smi": gpus(GPU, "NVIDIA A10")}}, where="all nodes"),
    # ---- torch and what it needs
    Broken("a torch for CPUs", "cuda", "devices-use", "bad", "Torch not compiled with CUDA enabled",
           "this torch is for CPUs: install a torch that is built for CUDA 13.2",
           {"commands": {"touch": touched("Torch not compiled with CUDA enabled", torch="torch 2.13.0")}}),
    Broken("a torch that is older than the card", "cuda", "devices-use", "bad", "no kernel image is available",
           "install a newer one", touch("CUDA error: no kernel image is available for execution on the device")),
    Broken("an exclusive process", "cuda", "devices-use", "bad", "busy or unavailable", "another process has it alone",
           touch("CUDA error: CUDA-capable device(s) is/are busy or unavailable")),
    Broken("cuda-compat in the way", "cuda", "devices-use", "bad", "Error 804", "cuda-compat",
           touch("Error 804: forward compatibility was attempted on non supported HW")),
    Broken("no libgomp", "cuda", "devices-use", "bad", "libgomp.so.1: cannot open", "libraries",
           touch("libgomp.so.1: cannot open shared object file: No such file or directory")),
    Broken("a system that is too old", "cuda", "devices-use", "bad", "GLIBC_2.28", "newer system",
           touch("/lib64/libc.so.6: version `GLIBC_2.28' not found")),
    Broken("little shared memory for NCCL", "cuda", "devices-use", "bad", "cannot add over its devices", "/dev/shm",
           touch(total="NCCL error: Error while creating shared memory segment: No space left on device")),
    Broken("CANN that was not sourced", "npu", "devices-use", "bad", "libascendcl.so: cannot open", "set_env.sh",
           touch("libascendcl.so: cannot open shared object file: No such file or directory")),
    Broken("operators of another chip", "npu", "devices-use", "bad", "E30006", "cann-kernels",
           touch("SetDevice, error code is 507033 E30006: Failed to verify the OPP")),
    Broken("an unknown error of an NPU", "npu", "devices-use", "bad", "error code is 107001",
           "must go together: CANN 8.5 with torch 2.9.0 and torch_npu 2.9.0", 
           {"commands": {"touch": touched("SetDevice, error code is 107001", torch="torch 2.9.0")}}),
    Broken("CANN without torch_npu", "npu", "torch-npu", "warning", "no torch_npu for its NPUs",
           "for CANN 8.5: torch 2.9.0 and torch_npu 2.9.0", npu_python(torch="2.9.0")),
    Broken("torch_npu of another torch", "npu", "torch-npu", "bad", "torch_npu 2.9.0 does not go with torch 2.8.0",
           "install torch 2.9.0", npu_python(torch="2.8.0", torch_npu="2.9.0")),
    Broken("torch_npu of another CANN", "npu", "torch-npu", "warning", "torch_npu 2.6.0 was made for CANN 8.2",
           "torch 2.9.0 with torch_npu 2.9.0, or CANN 8.2", npu_python(torch="2.6.0", torch_npu="2.6.0")),
    Broken("firmware of another driver", "npu", "firmware", "warning",
           "its NPUs have firmware 7.1.0.5.220, and driver 25.5.0 goes with 7.8", "of the same Ascend HDK",
           {"files": {"firmware": "Version=7.1.0.5.220"}}),
    Broken("an old Python", "cpu", "libraries", "warning", "python3 is Python 3.8.10, older than 3.10",
           "name a Python 3.10", of_python("3.8.10")),
    Broken("no torch", "cpu", "libraries", "warning", "no torch", "install them", npu_python(torch=None)),
    Broken("devices chosen in the inventory's env", "cuda", "devices", "warning", "sets CUDA_VISIBLE_DEVICES",
           "`devices` names the devices", env={"CUDA_VISIBLE_DEVICES": "0"}),
    # ---- the node
    Broken("a full disk", "cpu", "disk", "bad", "10 B free for /w", "free some space",
           {"disks": {"/w": examined.disk(free=10)}}),
    Broken("a tiny /dev/shm", "cpu", "shm", "warning", "/dev/shm has 67.1 MB free", "--shm-size",
           {"disks": {"/dev/shm": examined.disk(free=64 << 20, device=2)}}),
    Broken("few open files", "cpu", "nofile", "warning", "a login may have 1024 open files", "limits.d",
           {"limits": {"NOFILE": [256, 1024]}}),
    Broken("little locked memory for RDMA", "cuda", "memlock", "warning", "65536 bytes of locked memory", "memlock",
           {"rdma": [PORT]}),
    Broken("an RDMA port that is down", "cuda", "rdma", "warning", "mlx5_0:1 is DOWN", "connect or enable it",
           {"rdma": [{**PORT, "state": "DOWN"}], "limits": {"MEMLOCK": [-1, -1]}}),
    Broken("a clock that is off", "cpu", "clock", "warning", "from this machine's", "NTP",
           table={("b", "hello"): {"late": 600}}),
    Broken("a name that does not resolve", "cpu", "address", "bad", "does not know its own address b", "/etc/hosts",
           {"place": {"ip": None, "own": False, "interface": None, "reason": "Name or service not known"}}),
    Broken("a node that is gone", "cpu", "ssh", "bad", "No route to host", "ping it",
           table={("b", "connect"): Unreachable("b", "No route to host", "ping it")}),
    Broken("a firewall", "cpu", "master-port", "bad", "can't reach a at a", "firewalls",
           table={("b", "knock"): {"reached": False, "reason": "no answer within 3 s", "seconds": 3.0}}),
    Broken("two names of one machine", "cuda", "machine", "warning", "each of its devices would get 2 ranks",
           "keep one of the names", table={("*", "hello"): {"boot_id": "5f1c"}}, where="a,b"),
    # ---- the network of NPUs
    Broken("no hccn.conf", "npu", "device-address", "warning", "device [0,2) has no address", "device_ips",
           {"files": {"hccn.conf": None}}),
    Broken("an NPU without an address", "npu", "device-address", "warning", "device [1,2) has no address",
           "device_ips", {"files": {"hccn.conf": "address_0=10.1.0.1\n"}}),
    Broken("a link that is down", "npu", "device-link", "bad", "device 0: its network link is DOWN", "cable",
           {"commands": {"link 0": said("link status: DOWN\n")}}),
    Broken("a network that is ill", "npu", "device-link", "bad", "the health of its network is Receive timeout",
           "gateway", {"commands": {"net_health 1": said("net health status: Receive timeout\n")}}),
    Broken("a port of HCCL that is taken", "npu", "hccl-ports", "bad", "taken by vllm (pid 7)", "HCCL_IF_BASE_PORT",
           {"ports": [{"port": 60003, "user": 0, "pid": 7, "name": "vllm"}]}),
)
# fmt: on


def overlaid(*layers: dict[str, Any]) -> dict[str, Any]:
    """Return layers of an answer, with their commands and files laid over each other one by one."""
    found: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            merges = key in ("commands", "files") and key in found
            found[key] = {**found[key], **value} if merges else value
    return found


def findings(broken: Broken) -> list[Finding]:
    devices = () if broken.kind == "cpu" else (0, 1)
    nodes = tuple(
        Node(name, name, name, kind=broken.kind, devices=devices, env=broken.env if name == "b" else {})
        for name in ("a", "b")
    )
    answers = {
        name: examined.node(**overlaid(SOUND[broken.kind], broken.spoiled if name == "b" else {}))
        for name in ("a", "b")
    }
    pinged = {"commands": {"0": said(), "1": said()}}

    class Scripted(ScriptedTransport):
        def answer(self, node: str, command: str, op: str) -> Any:
            # The second question to a node asks for pings only.
            pings = command == "examine" and "address" not in self.asked[-1][2]
            return pinged if pings else super().answer(node, command, op)

    greetings = {
        key: examined.hello(wall=time.time() - value.get("late", 0), boot_id=value.get("boot_id", ""))
        for key, value in broken.table.items()
        if key[1] == "hello"
    }
    table = {**examined.script(**answers), **broken.table, **greetings}
    with Connections(Scripted(table)) as connections:
        return doctor.nodes(Cluster("lab", nodes), connections)


@pytest.mark.parametrize("broken", ROWS, ids=[row.name for row in ROWS])
def test_doctor_names_node_fault_and_remedy_and_nothing_else(broken: Broken) -> None:
    found = [entry for entry in findings(broken) if not entry.is_sound and entry.check != "versions"]
    assert [(entry.where, entry.check, entry.level) for entry in found] == [
        (broken.where, broken.check, broken.level)
    ], found
    assert broken.says in found[0].what, found[0]
    assert broken.remedy in found[0].remedy, found[0]


def test_a_closed_file_of_a_device_that_is_not_used_does_not_matter() -> None:
    closed = Broken("", "cuda", "", "", "", "", {"device_files": {**OPEN, "/dev/nvidia10": False}})
    assert not [entry for entry in findings(closed) if not entry.is_sound]


@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_node_of_each_kind_has_no_finding(kind: str) -> None:
    sound = Broken("", kind, "", "", "", "")
    assert not [entry for entry in findings(sound) if not entry.is_sound]


def test_there_are_thirty_broken_nodes_and_more() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) >= 30


@pytest.mark.parametrize(
    ("kind", "option", "error"),
    [
        ("cuda", "--gpus=all", 'could not select device driver "" with capabilities: [[gpu]].'),
        ("npu", "--device=/dev/davinci0", "error gathering device information: /dev/davinci0: no such file"),
    ],
)
def test_an_image_is_tried_with_the_devices_of_its_node(kind: str, option: str, error: str) -> None:
    def run(argv: list[str], **_: object) -> object:
        probes = "run" in argv
        assert not probes or option in argv
        text = f"docker: Error response from daemon: {error}" if probes else ""
        return SimpleNamespace(exit_code=125 if probes else 0, error_text=text, stdout=b"sha256:1")

    job = Job("j", command=("python3", "x.py"), container=ContainerOptions("train:1"))
    answer = images._ask(
        Node("b", "b", "b", kind=kind, devices=(0,)), cast("Any", SimpleNamespace(run=run)), job
    )
    assert error in answer.problem
    assert ("NVIDIA Container Toolkit" if kind == "cuda" else "lacks these devices") in answer.remedy
