"""Query each node before a run, in two round trips, for all facts that involve no other node.

The first is a greeting, whose clock is compared with this machine's; the second carries all other questions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.checks import job_setup, touch
from clusterctl.checks.answers import Examined, NodeAnswers
from clusterctl.checks.job_setup import JobSetup, JobSetupAnswer
from clusterctl.inventory.setup import rank_python, request_for
from clusterctl.ranktable.devices import VENDOR_CONF, VENDOR_SMI, VENDOR_TOOL
from clusterctl.transport import dial
from clusterctl.transport.link import RequestFailed
from clusterctl.transport.setups import SetupResult, ask_setup

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.transport.connection import Connection

# How many ports HCCL uses on each node, from its base on.
HCCL_PORTS = len(dial.HCCL)
HCCL_BASE = dial.HCCL.start
PACKAGES = ("torch", "torch_npu", "deepspeed", "numpy", "safetensors", "tokenizers")
# Seconds for one command on a node; npu-smi of sixteen devices takes up to 6.
TIMEOUT = 20.0
# Seconds for a process per device to load torch, and for HCCL or NCCL to join them.
TOUCH_TIMEOUT = 120.0

# Reads the names of installed packages from folders: importing importlib.metadata would take longer than all the rest,
# and re and json a third of it.
NODE_PYTHON = """
import os, sys
found = {}
for folder in sys.path:
    for name in os.listdir(folder) if folder and os.path.isdir(folder) else ():
        stem, _, kind = name.rpartition(".")
        package, _, version = stem.partition("-")
        version = version.partition("-")[0]
        is_plain = version.isascii() and version.isprintable() and not set(version) & set('"' + chr(92))
        if kind in ("dist-info", "egg-info") and is_plain:
            found.setdefault(package.lower().replace(".", "_"), version)
packages = ", ".join('"%s": "%s"' % (name, found[name]) for name in sys.argv[1:] if name in found)
print('{"python": "%s", "packages": {%s}}' % (sys.version.split()[0], packages))
"""

NVIDIA_FIELDS = (
    "index,uuid,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,name"
)
# More questions to nvidia-smi, a command for each: one with a field that the driver does not know fails as a whole.
NVIDIA_STATE = {
    "state": "--query-gpu=gpu_uuid,mig.mode.current,compute_mode,persistence_mode,pcie.link.width.current,"
    "pcie.link.width.max",
    "clocks": "--query-gpu=gpu_uuid,clocks_event_reasons.hw_slowdown",
    "rows": "--query-remapped-rows=gpu_uuid,remapped_rows.pending,remapped_rows.failure",
    "fabric": "--query-gpu=gpu_uuid,fabric.state",
}
# Device files that a rank opens.
DEVICE_FILES = {
    "npu": ("/dev/davinci[0-9]*", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"),
    "cuda": ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/infiniband/uverbs*"),
}


@dataclass(frozen=True)
class Question:
    """A command of which the first program that exists runs."""

    argv: list[list[str]]
    timeout: float = TIMEOUT


@dataclass
class Questions:
    """The parameters of the second request."""

    address: str
    ports: list[int] = field(default_factory=list)
    commands: dict[str, Question] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    device_files: tuple[str, ...] = ()


def query_node(
    node: Node, link: Connection, quick: bool = False, paths: Sequence[str] = (), job: JobSetup | None = None
) -> NodeAnswers:
    """Return all facts that one node reports about itself; `quick` leaves out those that are only shown.

    `paths` are folders whose disks are reported too. The setup of a `job` is run too, except in a quick check: the
    launch runs it later, in the code that it pushes.
    """
    before = time.time()
    hello = link.hello(fresh=True)
    delay = time.time() - before
    setup, problem = _setup(node, link, quick)
    of_job = JobSetupAnswer(job.setup) if job else None
    if job and not quick and not problem:
        of_job = job_setup.ask(node, link, hello.workdir, job)
    questions = asdict(replace(questions_for(node, quick, of_job), paths=list(paths)))
    if of_job is not None and of_job.request is not None:
        questions["setup"] = of_job.request
    elif setup is not None:
        questions["setup"] = request_for(node.setup)
    result = link.ask(Examined, "examine", questions)
    return NodeAnswers(node, hello, hello.wall - (before + delay / 2), delay, result, setup, problem, of_job)


def _setup(node: Node, link: Connection, quick: bool) -> tuple[SetupResult | None, str]:
    """Return the changes of the node's setup, or why it failed; without `quick` it is run again in any case."""
    request = request_for(node.setup)
    if request is None:
        return None, ""
    try:
        return ask_setup(node, link, request, fresh=not quick), ""
    except RequestFailed as failed:
        return None, failed.reason


def questions_for(node: Node, quick: bool = False, of_job: JobSetupAnswer | None = None) -> Questions:
    """Return the questions of the second request to a node."""
    questions = Questions(node.address, device_files=DEVICE_FILES.get(node.kind, ()))
    python = rank_python(node.python, node.setup, of_job.setup if of_job else None)
    questions.commands["python"] = Question([[python, "-c", NODE_PYTHON, *PACKAGES]])
    if node.kind == "npu":
        _npu(node, questions, quick)
    elif node.kind == "cuda":
        _cuda(questions, quick)
    if node.kind != "cpu" and node.devices and not quick:
        words = [touch_text(), node.kind, *map(str, node.devices)]
        questions.commands["touch"] = Question([[python, "-c", *words]], TOUCH_TIMEOUT)
    return questions


def touch_text() -> str:
    """Return the program that uses each device once."""
    return Path(touch.__file__).read_text(encoding="utf-8")


def _npu(node: Node, questions: Questions, quick: bool) -> None:
    base = hccl_base(node)
    questions.ports = list(range(base, base + HCCL_PORTS))
    home = node.env.get("ASCEND_TOOLKIT_HOME") or node.env.get("ASCEND_HOME_PATH")
    toolkits = [home] if home else []
    toolkits += [
        "/usr/local/Ascend/ascend-toolkit/latest",
        "/usr/local/Ascend/cann/latest",
        "/usr/local/Ascend/cann",
    ]
    questions.files["CANN"] = [f"{entry}/version.cfg" for entry in toolkits]
    for part in ("driver", "firmware"):
        questions.files[part] = [f"/usr/local/Ascend/{part}/version.info"]
    smi = [[tool, "info"] for tool in tool_paths(node, "npu-smi", VENDOR_SMI)]
    questions.commands["smi"] = Question(smi)
    if quick:
        return
    tools = [node.hccn_tool] if node.hccn_tool else ["hccn_tool", VENDOR_TOOL]
    questions.files["hccn.conf"] = [node.hccn_conf or VENDOR_CONF]
    for device in node.devices:
        for name in ("link", "net_health", "ip"):
            argv = [[tool, "-i", str(device), f"-{name}", "-g"] for tool in tools]
            questions.commands[f"{name} {device}"] = Question(argv)


def _cuda(questions: Questions, quick: bool) -> None:
    questions.files["CUDA"] = ["/usr/local/cuda/version.json", "/usr/local/cuda/version.txt"]
    questions.files["peermem"] = [
        f"/sys/module/{name}/initstate" for name in ("nvidia_peermem", "nv_peer_mem")
    ]
    queries = {
        "smi": f"--query-gpu={NVIDIA_FIELDS}",
        "busy": "--query-compute-apps=gpu_uuid,pid,process_name",
        **({} if quick else NVIDIA_STATE),
    }
    for name, question in queries.items():
        argv = ["nvidia-smi", question, "--format=csv,noheader,nounits"]
        questions.commands[name] = Question([argv])
    if not quick:
        questions.commands["nvlink"] = Question([["nvidia-smi", "nvlink", "-s"]])
        argv = ["journalctl", "-k", "-b", "-q", "--no-pager", "-n", "20", "-g", "NVRM: Xid"]
        questions.commands["xid"] = Question([argv])


def tool_paths(node: Node, tool: str, vendor: str) -> list[str]:
    """Return where a driver's tool may be.

    Next to the inventory's hccn_tool, on the path, where the vendor puts it.
    """
    known = (
        [f"{node.hccn_tool.rpartition('/')[0]}/{tool}"] if node.hccn_tool and "/" in node.hccn_tool else []
    )
    return [*known, tool, vendor]


def hccl_base(node: Node) -> int:
    """Return the first of the ports on which HCCL listens there."""
    text = node.env.get("HCCL_IF_BASE_PORT", "")
    return int(text) if text.isdecimal() and text.isascii() and 0 < int(text) <= 65520 else HCCL_BASE
