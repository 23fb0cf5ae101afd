"""The fields of a rank table that HCCL reads: name, type, range, whether required, and HCCL's error code.

One table for all versions. Rules that compare several entries (unique ids, contiguous ranks, equal counts)
are in the other modules of this folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partial

MAX_PORT = 65535
# HCCL keeps numbers in 32 bits without a sign.
MAX_NUMBER = 2**32 - 1
# The local id of a backup device in version 2.0.
BACKUP_LOCAL_ID = 64


class Kind(Enum):
    """The JSON type of a field, and how HCCL reads it."""

    TEXT = "a string"
    DIGITS = "a decimal number in a string"
    ADDRESS = "an IP address"
    NUMBER = "a number"
    CHOICE = "one of a few words"
    TEXTS = "a list of strings"
    OBJECTS = "a list of objects"
    OBJECT = "an object"
    BOOLEAN = "true or false"


@dataclass(frozen=True)
class Field:
    """One field of one kind of object (`section`) in a rank table."""

    section: str
    name: str
    kind: Kind
    required: bool = True
    least: int = 0
    """The smallest number, text length in bytes, or list length."""
    most: int = MAX_NUMBER
    """The largest number, text length in bytes, or list length."""
    code: str = ""
    """The code of our finding about a value outside of the range."""
    hccl: str = ""
    """HCCL's error code for a wrong value; empty when HCCL writes only a log line."""
    hccl_missing: str = ""
    """HCCL's error code for a missing field; empty when HCCL writes only a log line."""
    read_with: str = ""
    """HCCL reads this field only when this other field is present."""
    choices: tuple[str, ...] = ()
    remedy: str = ""


# String fields of versions 1.x: HCCL reports EI0017 when one is missing or not a string.
_text = partial(Field, kind=Kind.TEXT, hccl_missing="EI0017")
_digits = partial(Field, kind=Kind.DIGITS, hccl_missing="EI0017")
_port = partial(
    Field, kind=Kind.DIGITS, required=False, least=1, most=MAX_PORT, code="port",
    remedy="1 to 65535; leave it out for the default (16666, or 16667 for a backup address)",
)  # fmt: skip
_server_id = partial(
    _text, name="server_id", code="server-id", least=1, most=64,
    remedy="1 to 64 bytes, such as the address of the node",
)  # fmt: skip
_DEVICE_ID = "the physical id, as npu-smi shows it"
_ADDRESS_TYPES = ("EID", "IPV4", "IPV6")
_NET_TYPES = ("1DMESH", "2DMESH", "A3_SERVER", "A2_AX_SERVER", "TOPO_FILE_DESC", "CLOS")

FIELDS = (
    # Versions 1.0 and 1.2.
    _text("version", "version", code="version"),
    _text("status", "status", code="status"),
    _digits("table", "server_count", code="server-count", required=False, least=1, hccl="EI0014"),
    Field("table", "server_list", Kind.OBJECTS, least=1),
    Field("table", "super_pod_list", Kind.OBJECTS, required=False, least=1),
    _server_id("server"),
    Field("server", "host_ip", Kind.ADDRESS, required=False, code="host-ip", hccl="EI0014"),
    Field("server", "device", Kind.OBJECTS, least=1),
    _digits("device", "rank_id", code="rank-id", hccl="EI0014"),
    _digits("device", "device_id", code="device-id", remedy=_DEVICE_ID),
    _port("device", "host_port"),
    _port("device", "device_port"),
    _port("device", "device_vnic_port", read_with="device_port"),
    _text("device", "device_ip", required=False),
    _text("device", "net_position", required=False),
    _text("device", "net_protocol", required=False),
    _digits(
        "1.2 device", "super_device_id", code="super-device-id", hccl="EI0014",
        hccl_missing="", remedy="the SDID of `npu-smi info -t spod-info -i CARD -c CHIP`",
    ),
    _text("1.2 device", "backup_device_ip", required=False),
    _port("1.2 device", "backup_device_port", read_with="backup_device_ip"),
    _text("super pod", "super_pod_id", code="super-pod", least=1, most=127, hccl_missing="EI0014"),
    Field("super pod", "server_list", Kind.OBJECTS, least=1),
    _text("super pod server", "server_id", code="super-pod", hccl_missing="EI0014"),
    # The form without a version: a laboratory writes `deploy_mode`, a cloud does not.
    _text("lab table", "para_plane_nic_location"),
    _digits("old table", "group_count", code="server-count", least=1),
    Field("old table", "group_list", Kind.OBJECTS, least=1),
    _text("group", "group_name", code="group-name", most=127),
    _digits("group", "instance_count", code="server-count", least=1),
    Field("group", "instance_list", Kind.OBJECTS, least=1),
    _digits("lab group", "device_num", code="device-count", least=1),
    _digits("lab group", "server_num", code="server-count", least=1),
    _digits("cloud group", "device_count", code="device-count", least=1),
    _server_id("instance"),
    Field("instance", "devices", Kind.OBJECTS, least=1),
    _digits("lab instance", "rank_id", code="rank-id", hccl="EI0014"),
    _text("cloud instance", "pod_name", code="pod-name", most=127),
    _digits("old device", "device_id", code="device-id", remedy=_DEVICE_ID),
    _text("old device", "device_ip", required=False),
    # Version 2.0.
    Field("2.0 table", "rank_count", Kind.NUMBER, least=1, most=65536, code="server-count", hccl="EI0014"),
    Field("2.0 table", "rank_list", Kind.OBJECTS, least=1),
    Field(
        "2.0 table", "detour", Kind.CHOICE, required=False, code="choice", choices=("true", "false", ""),
    ),
    Field("rank", "rank_id", Kind.NUMBER, code="rank-id", hccl="EI0014"),
    Field("rank", "local_id", Kind.NUMBER, most=BACKUP_LOCAL_ID, code="local-id"),
    Field("rank", "device_id", Kind.NUMBER, most=64, code="device-id", remedy=_DEVICE_ID),
    Field("rank", "device_port", Kind.NUMBER, required=False, least=1, most=MAX_PORT, code="port"),
    Field("rank", "host_port", Kind.NUMBER, required=False, least=1, most=MAX_PORT, code="port"),
    Field("rank", "level_list", Kind.OBJECTS, most=8),
    Field("rank", "control_plane", Kind.OBJECT, required=False),
    Field("backup rank", "replaced_local_id", Kind.NUMBER, most=BACKUP_LOCAL_ID - 1, code="local-id"),
    Field("level", "net_layer", Kind.NUMBER, most=7, code="net-layer"),
    Field("level", "net_instance_id", Kind.TEXT, least=1, most=1024, code="net-instance"),
    Field("level", "net_type", Kind.CHOICE, required=False, code="choice", choices=_NET_TYPES),
    Field("level", "net_attr", Kind.TEXT, required=False),
    Field("level", "pcie_fallback", Kind.BOOLEAN, required=False),
    Field("level", "rank_addr_list", Kind.OBJECTS, most=24),
    Field("address", "addr_type", Kind.CHOICE, code="choice", choices=_ADDRESS_TYPES),
    Field("address", "addr", Kind.TEXT, least=1, most=256, code="address", hccl="EI0014"),
    Field("address", "plane_id", Kind.TEXT, required=False, most=1024, code="plane-id"),
    Field("address", "ports", Kind.TEXTS, least=1, most=16, code="port"),
    Field("address", "backup_addr", Kind.TEXTS, required=False, most=16, code="address"),
    Field("ports item", "ports", Kind.TEXT, least=1, most=32, code="port"),
    Field("backup_addr item", "backup_addr", Kind.TEXT, least=1, most=256, code="address"),
    Field("control plane", "addr_type", Kind.CHOICE, code="choice", choices=_ADDRESS_TYPES),
    Field("control plane", "addr", Kind.TEXT, least=1, most=256, code="address", hccl="EI0014"),
    Field("control plane", "listen_port", Kind.NUMBER, least=1, most=MAX_PORT + 1, code="port"),
)  # fmt: skip


def _by_section() -> dict[str, tuple[Field, ...]]:
    names = dict.fromkeys(field.section for field in FIELDS)
    return {name: tuple(field for field in FIELDS if field.section == name) for name in names}


BY_SECTION = _by_section()
BY_NAME = {(field.section, field.name): field for field in FIELDS}
