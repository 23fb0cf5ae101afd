"""What each node is asked before a run: everything that needs no other node, in two round trips.

The first is a greeting, whose clock is set against ours by its round trip; the second carries all the rest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clusterctl.ranktable.devices import VENDOR_CONF, VENDOR_SMI, VENDOR_TOOL

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.transport.fanout import Connection

# That HCCL takes on each node, from its base on.
HCCL_PORTS = 16
HCCL_BASE = 60000
PACKAGES = ("torch", "torch_npu", "deepspeed", "numpy", "safetensors", "tokenizers")
# Seconds for one command on a node; npu-smi of sixteen devices takes up to 6.
TIMEOUT = 20.0

# The names of installed packages are those of folders: importing importlib.metadata would take longer than all else.
NODE_PYTHON = """
import json, os, re, sys
found = {}
for folder in sys.path:
    for name in os.listdir(folder or ".") if os.path.isdir(folder or ".") else ():
        match = re.match(r"([A-Za-z0-9_.]+)-([^-]+)(-py[0-9.]+)?\\.(dist|egg)-info$", name)
        if match:
            found.setdefault(match[1].lower().replace(".", "_"), match[2])
wanted = json.loads(sys.argv[1])
print(json.dumps({"python": sys.version.split()[0], "packages": {n: found[n] for n in wanted if n in found}}))
"""

NVIDIA_FIELDS = "index,uuid,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"


@dataclass(frozen=True)
class Said:
    """What one node answered."""

    node: Node
    hello: Mapping[str, Any] = field(hash=False)
    offset: float
    """Seconds that its clock is ahead of ours."""
    delay: float
    """Seconds of the round trip, all of which may be the offset's error."""
    found: Mapping[str, Any] = field(hash=False)

    def command(self, name: str) -> Mapping[str, Any] | None:
        """How a command ended; None where the node has no such program, or was not asked."""
        answer: Mapping[str, Any] | None = self.found["commands"].get(name)
        return answer


def ask(node: Node, link: Connection, quick: bool = False) -> Said:
    """Everything that a node can say alone; `quick` leaves out what only a person who looks wants to know."""
    before = time.time()
    hello = link.call("hello")
    delay = time.time() - before
    found = link.call("examine", questions(node, quick))
    return Said(node, hello, hello["wall"] - (before + delay / 2), delay, found)


def questions(node: Node, quick: bool = False) -> dict[str, Any]:
    """The parameters of the one request."""
    asked: dict[str, Any] = {"address": node.address, "ports": [], "commands": {}, "files": {}}
    script = [node.python, "-c", NODE_PYTHON, _json_list(PACKAGES)]
    asked["commands"]["python"] = {"argv": [script], "timeout": TIMEOUT}
    if node.kind == "npu":
        _npu(node, asked, quick)
    elif node.kind == "cuda":
        _cuda(asked)
    return asked


def _npu(node: Node, asked: dict[str, Any], quick: bool) -> None:
    base = hccl_base(node)
    asked["ports"] = list(range(base, base + HCCL_PORTS))
    home = node.env.get("ASCEND_TOOLKIT_HOME") or node.env.get("ASCEND_HOME_PATH")
    toolkits = [home] if home else []
    toolkits += [
        "/usr/local/Ascend/ascend-toolkit/latest",
        "/usr/local/Ascend/cann/latest",
        "/usr/local/Ascend/cann",
    ]
    asked["files"]["CANN"] = [f"{one}/version.cfg" for one in toolkits]
    asked["files"]["driver"] = ["/usr/local/Ascend/driver/version.info"]
    smi = [[tool, "info"] for tool in beside(node, "npu-smi", VENDOR_SMI)]
    asked["commands"]["smi"] = {"argv": smi, "timeout": TIMEOUT}
    if quick:
        return
    tools = [node.hccn_tool] if node.hccn_tool else ["hccn_tool", VENDOR_TOOL]
    asked["files"]["hccn.conf"] = [node.hccn_conf or VENDOR_CONF]
    for device in node.devices:
        argv = [[tool, "-i", str(device), "-link", "-g"] for tool in tools]
        asked["commands"][f"link {device}"] = {"argv": argv, "timeout": TIMEOUT}


def _cuda(asked: dict[str, Any]) -> None:
    asked["files"]["CUDA"] = ["/usr/local/cuda/version.json", "/usr/local/cuda/version.txt"]
    ways = {"smi": f"--query-gpu={NVIDIA_FIELDS}", "busy": "--query-compute-apps=gpu_uuid,pid,process_name"}
    for name, question in ways.items():
        argv = ["nvidia-smi", question, "--format=csv,noheader,nounits"]
        asked["commands"][name] = {"argv": [argv], "timeout": TIMEOUT}


def beside(node: Node, tool: str, vendor: str) -> list[str]:
    """Where a driver's tool may be: beside the inventory's hccn_tool, on the path, where the vendor puts it."""
    known = (
        [f"{node.hccn_tool.rpartition('/')[0]}/{tool}"] if node.hccn_tool and "/" in node.hccn_tool else []
    )
    return [*known, tool, vendor]


def hccl_base(node: Node) -> int:
    """The first of the ports that HCCL listens on there."""
    text = node.env.get("HCCL_IF_BASE_PORT", "")
    return int(text) if text.isdecimal() and text.isascii() and 0 < int(text) <= 65520 else HCCL_BASE


def _json_list(names: tuple[str, ...]) -> str:
    import json

    return json.dumps(names)
