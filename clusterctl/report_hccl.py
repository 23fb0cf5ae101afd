"""What HCCL's error codes mean, and what to do about each; in the words of a person who runs a training."""

from __future__ import annotations

import re
from dataclasses import dataclass

CODE = re.compile(r"\b(E[A-Z][0-9]{4})\b")
TABLE = "the rank table is wrong: `clusterctl ranktable check`, and `ranktable verify` against the nodes"
LINKS = "look at the links between these devices: `clusterctl doctor`, `hccn_tool -i N -link -g`"
FIRST = "look for a rank that failed earlier or stands still; if there is none, at the links (`clusterctl doctor`)"


@dataclass(frozen=True)
class Meaning:
    """One code."""

    words: str
    hint: str
    follows: bool = False
    """Whether it mostly says that another rank, or a link, went first."""


MEANINGS = {
    "EI0001": Meaning("an environment variable of HCCL has a wrong value", "the log names it; see the job's `env`"),
    "EI0002": Meaning("waited in a collective until HCCL_EXEC_TIMEOUT for a rank that never came", FIRST, True),
    "EI0003": Meaning("a collective was called with a wrong argument", "see the call in the traceback"),
    "EI0004": Meaning("the rank table can't be read", TABLE),
    "EI0005": Meaning(
        "ranks called a collective with different arguments, or have different rank tables",
        "the same code, data and rank table everywhere: `clusterctl ranktable verify`",
    ),
    "EI0006": Meaning(
        "waited for another rank's socket until HCCL_CONNECT_TIMEOUT",
        f"{FIRST}; ranks that start far apart need a larger HCCL_CONNECT_TIMEOUT (120 s by default)",
        True,
    ),
    "EI0007": Meaning("no memory, stream or notify is left on the device", "fewer groups or streams, less memory"),
    "EI0008": Meaning("CANN is not the same version everywhere", "`clusterctl doctor` lists the versions a node"),
    "EI0009": Meaning("the connection between two devices could not be set up", LINKS),
    "EI0010": Meaning("devices of one node can't reach each other directly", "try HCCL_INTRA_ROCE_ENABLE=1"),
    "EI0011": Meaning(
        "out of memory on the device", "a smaller micro_batch, or a layout that splits the model: `clusterctl plan`"
    ),
    "EI0012": Meaning("a copy between two devices broke off", FIRST, True),
    "EI0013": Meaning("a packet to another device was not answered", FIRST, True),
    "EI0014": Meaning("the rank table names what is not so on this node", TABLE),
    "EI0015": Meaning("not all ranks came together at the start", FIRST, True),
    "EI0016": Meaning("a setting of HCCL has a wrong value", "the log names it"),
    "EI0017": Meaning("the rank table lacks a field", TABLE),
    "EI0018": Meaning("a packet to another device was not answered", FIRST, True),
    "EI0019": Meaning(
        "HCCL's port on the node is taken",
        "another run holds it (`clusterctl runs`); HCCL_IF_BASE_PORT names another",
    ),
    "EI0020": Meaning(
        "HCCL's port on the device is taken", "two processes on one device need HCCL_NPU_SOCKET_PORT_RANGE"
    ),
    "EJ0003": Meaning(
        "a port that the driver needs is taken", "another run holds the device (`clusterctl runs`, `npu-smi info`)"
    ),
}


def code_in(text: str) -> str | None:
    """The first code in a text that has a meaning here: what comes after it followed from it."""
    return next((code for code in CODE.findall(text) if code in MEANINGS), None)
