"""Read the addresses of a node's devices from the node itself.

Sources, in this order for each device: `hccn_tool -i N -ip -g` (`-vnic` on A3); the hccn.conf on the node, which that
tool writes; `device_ips` of the inventory. For an unconfigured device hccn_tool prints nothing and exits with 0, so
empty output means "no address". A device without any address is an error: a table without it would start a smaller
run than the user wanted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from clusterctl.errors import WorkFailed
from clusterctl.inventory.addresses import is_ip
from clusterctl.inventory.cluster import Node
from clusterctl.ranktable.table import DeviceAddress
from clusterctl.transport.connection import Completed, Connection

VENDOR_TOOL = "/usr/local/Ascend/driver/tools/hccn_tool"
VENDOR_SMI = "/usr/local/bin/npu-smi"
VENDOR_CONF = "/etc/hccn.conf"
# Seconds. A healthy hccn_tool needs less than one; with a hung driver it never ends.
TIMEOUT = 20.0
NOT_FOUND = (126, 127)


def read_addresses(
    connection: Connection,
    node: Node,
    devices: Sequence[int] | None = None,
    hardware: str | None = None,
    skip_incomplete: bool = False,
    smi: Smi | None = None,
    alone: bool = False,
) -> list[DeviceAddress]:
    """Return the address of each device, in the given order (default: the order of the inventory).

    On a3 the address is in the network of the super pod, and each device has its super-device id too. A device
    without an address is an error, or is left out with `skip_incomplete`. `alone`: the only node, where all may be
    without one.
    """
    wanted = node.devices if devices is None else tuple(devices)
    found, complaint = _from_tool(connection, node, wanted, hardware)
    source = dict.fromkeys(found, "")
    # The addresses in hccn.conf are not in the network of the super pod.
    if any(device not in found for device in wanted) and not (hardware == "a3" and found):
        found = {**_from_conf(connection, node), **found}
        source = {**dict.fromkeys(found, "hccn.conf"), **source}
    found = {**dict(zip(node.devices, node.device_ips, strict=False)), **found}
    source = {**dict.fromkeys(found, "the inventory"), **source}
    if alone and not found:
        found, source = dict.fromkeys(wanted, ""), dict.fromkeys(wanted, "")
    absent = [device for device in wanted if device not in found]
    if absent and not skip_incomplete:
        which = f"device{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        problem = f"{node.name}: {which} without an address in hccn_tool, hccn.conf and the inventory"
        remedy = f"on {node.name}: hccn_tool -i {absent[0]} -ip -s address A.B.C.D netmask 255.255.255.0"
        raise WorkFailed(f"{problem}{complaint}", f"{remedy}\nor write `device_ips` in the inventory")
    answers = [
        DeviceAddress(device, found[device], source=source[device]) for device in wanted if device in found
    ]
    if hardware != "a3":
        return answers
    return _in_super_pods(connection, node, answers, smi or find_smi(connection, node))


# The next question is asked only if the one before has no answer for any device.
QUESTIONS = {"a3": (("-vnic",), ("-ip",), ("-ip", "-inet6"))}


def _from_tool(
    connection: Connection, node: Node, devices: Sequence[int], hardware: str | None
) -> tuple[dict[int, str], str]:
    """Return the addresses that hccn_tool shows, and its error message.

    IPv6 is used only if no device has IPv4, since a table must not mix them.
    """
    first, *others = QUESTIONS.get(hardware or "", (("-ip",), ("-ip", "-inet6")))
    for tool in [node.hccn_tool] if node.hccn_tool else ["hccn_tool", VENDOR_TOOL]:
        answers = [_answer(connection, tool, device, *first) for device in devices[:1]]
        if not answers or answers[0].exit_code in NOT_FOUND:
            continue
        answers += [_answer(connection, tool, device, *first) for device in devices[1:]]
        found = _addresses(devices, answers)
        for question in others:
            if not found:
                found = _addresses(
                    devices, [_answer(connection, tool, device, *question) for device in devices]
                )
        return found, _complaint(tool, answers)
    return {}, ""


def _in_super_pods(
    connection: Connection, node: Node, found: Sequence[DeviceAddress], smi: Smi | None
) -> list[DeviceAddress]:
    """Return the devices with their super-device id and super pod, as npu-smi shows them."""
    if smi is None:
        problem = f"{node.name}: npu-smi, which shows the super-device ids of a3, is missing"
        raise WorkFailed(
            problem, "install the driver's tools, or write a plan: clusterctl ranktable build --from"
        )
    complete = []
    for address in found:
        device = address.device_id
        position = in_super_pod(connection, smi, device)
        if position is None:
            problem = f"{node.name}: device {device} has no super-device id in {smi.tool} info "
            problem += "-t spod-info" if device in smi.chips else "-m"
            raise WorkFailed(problem, "is this an A3 node in a super pod? --for a2 needs no such id")
        complete.append(DeviceAddress(device, address.ip, *position, source=address.source))
    return complete


# -- npu-smi


@dataclass(frozen=True)
class Smi:
    """The npu-smi of a node, and its list of chips."""

    tool: str
    chips: dict[int, tuple[int, int]] = field(hash=False)
    """Device id to (card, chip); an A3 card has two chips."""
    text: str
    """The output of `npu-smi info -m`, which names the chips."""


def find_smi(connection: Connection, node: Node) -> Smi | None:
    """Return the npu-smi of a node, or None if it has none."""
    sibling = [str(PurePosixPath(node.hccn_tool).with_name("npu-smi"))] if node.hccn_tool else []
    for tool in [*sibling, "npu-smi", VENDOR_SMI]:
        done = connection.run([tool, "info", "-m"], timeout=TIMEOUT)
        if done.exit_code not in NOT_FOUND:
            return Smi(tool, parse_chips(done.text), done.text)
    return None


def in_super_pod(connection: Connection, smi: Smi, device: int) -> tuple[str, str] | None:
    """Return the super-device id and the super pod that npu-smi shows for a device, or None."""
    if device not in smi.chips:
        return None
    fields = _about_chip(connection, smi, "spod-info", device)
    return (fields["sdid"], fields.get("super pod id", "")) if fields.get("sdid", "").isdigit() else None


def generation(connection: Connection, smi: Smi | None, device: int) -> str | None:
    """Return a2, a3 or a5 from the chip names that npu-smi shows, or None if they do not show it.

    An A3 board is an Ascend910 whose `NPU Name` is 93 and two digits, with two chips on a card. An A2 board has no
    such line, and its chip name has a letter after 910.
    """
    if smi is None:
        return None
    named = _generation_named(smi.text)
    if named or device not in smi.chips:
        return named
    board = _about_chip(connection, smi, "board", device)
    named = _generation_named(f"{board.get('chip name', '')}_{board.get('npu name', '')}")
    paired = any(chip > 0 for _, chip in smi.chips.values())
    return named or ("a3" if paired and re.search(r"\bAscend910\b", smi.text) else None)


def _generation_named(text: str) -> str | None:
    found = re.search(r"910(B)|(910_93)[0-9]{2}|Ascend ?(950)", text)
    return {"B": "a2", "910_93": "a3", "950": "a5"}[str(found[found.lastindex or 0])] if found else None


def _about_chip(connection: Connection, smi: Smi, question: str, device: int) -> dict[str, str]:
    card, chip = smi.chips[device]
    argv = [smi.tool, "info", "-t", question, "-i", str(card), "-c", str(chip)]
    done = connection.run(argv, timeout=TIMEOUT)
    return parse_fields(done.text) if done.ok else {}


# ASCII digits only: str.isdigit also accepts "\u00b2".
_NUMBER = re.compile(r"[0-9]{1,4}")


def parse_chips(text: str) -> dict[int, tuple[int, int]]:
    """Return device id to (card, chip) from `npu-smi info -m`; controllers have `-` as device id and are skipped."""
    rows = [re.split(r"\t+|\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]
    if not rows:
        return {}
    names = [name.lower() for name in rows[0]]
    column = next((names.index(name) for name in ("chip phy-id", "chip logic id") if name in names), None)
    if column is None:
        return {}
    chips = {}
    for row in rows[1:]:
        if len(row) > column and all(_NUMBER.fullmatch(cell) for cell in (row[0], row[1], row[column])):
            chips[int(row[column])] = (int(row[0]), int(row[1]))
    return chips


def parse_fields(text: str) -> dict[str, str]:
    """Return the fields in lines such as `SDID : 37748736`, with keys in lower case."""
    return {
        match[1].strip().lower(): match[2]
        for match in re.finditer(r"^\s*([A-Za-z][A-Za-z _-]*?)\s*:\s*(\S+)\s*$", text, re.MULTILINE)
    }


def _answer(connection: Connection, tool: str, device: int, *question: str) -> Completed:
    return connection.run([tool, "-i", str(device), *question, "-g"], timeout=TIMEOUT)


def _addresses(devices: Sequence[int], answers: Sequence[Completed]) -> dict[int, str]:
    read = {device: parse_address(done.text) for device, done in zip(devices, answers, strict=True)}
    return {device: address for device, address in read.items() if address is not None}


def _complaint(tool: str, answers: Sequence[Completed]) -> str:
    """Return why hccn_tool failed; "" if it did not, since an unconfigured device is no failure of the driver."""
    for done in answers:
        if done.timed_out:
            return f"; {tool} did not end within {TIMEOUT:.0f} s"
        output_lines = (done.error_text or done.text).strip().splitlines()
        if not done.ok:
            return f"; {tool} ended with {done.code}" + (
                f": {output_lines[-1][:200]}" if output_lines else ""
            )
    return ""


def _from_conf(connection: Connection, node: Node) -> dict[int, str]:
    done = connection.run(["cat", node.hccn_conf or VENDOR_CONF], timeout=TIMEOUT)
    return parse_conf(done.text) if done.exit_code == 0 else {}


def parse_address(text: str) -> str | None:
    """Return the address in `ipaddr:192.168.10.1` or `ipv6_address:2001:db8::1`, or None."""
    match = re.search(r"^\s*(?:ipaddr|ipv6_address)\s*:\s*(\S+)\s*$", text, re.MULTILINE)
    return match[1] if match and is_ip(match[1]) else None


def parse_conf(text: str) -> dict[int, str]:
    """Return the addresses in the `address_N=` lines of hccn.conf, by device."""
    found: dict[int, str] = {}
    for match in re.finditer(r"^\s*(?:address|ipv6address)_([0-9]{1,3})\s*=\s*(\S+)\s*$", text, re.MULTILINE):
        if is_ip(match[2]):
            found.setdefault(int(match[1]), match[2])
    return found
