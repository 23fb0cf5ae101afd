"""Check a node's devices, from the output of its driver's tool: present, healthy, free, linked."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from clusterctl.checks.answers import CommandResult, FirstUse, NodeAnswers
from clusterctl.checks.versions import needed_driver
from clusterctl.finding import Finding
from clusterctl.text import device_text
from clusterctl.wire.typed_json import BadValue, decode, parse

SHOW = {"npu-smi": "npu-smi info", "nvidia-smi": "nvidia-smi"}
UNSEEN = ("", "NA", "N/A", "[N/A]", "[Not Supported]")
LOST = re.compile(r"Unknown Error|GPU is lost|ERR!|\[GPU requires reset\]", re.IGNORECASE)


@dataclass(frozen=True)
class DeviceSample:
    """One device as the driver's tool shows it."""

    health: str = "OK"
    busy: tuple[str, ...] = field(default=())
    """The processes that use it: `python (pid 4711)`."""
    name: str = field(default="", compare=False)
    """The tool's name for the device: `910B3`, `NVIDIA A100-SXM4-80GB`."""
    memory: int = field(default=0, compare=False)
    """MiB; 0 if the tool does not show it."""


def findings(reply: NodeAnswers) -> Iterator[Finding]:
    """Yield devices that are missing, unhealthy, in use, or without a link; simulated devices have no findings."""
    if reply.node.kind in ("npu", "cuda") and reply.node.devices:
        yield from _by_tool(reply)
        yield from _touched(reply)


def _by_tool(reply: NodeAnswers) -> Iterator[Finding]:
    node = reply.node
    tool = "npu-smi" if node.kind == "npu" else "nvidia-smi"
    show = SHOW[tool]
    done = reply.command("smi")
    if done is None or done.timed_out or not done.succeeded:
        yield Finding(
            "bad",
            node.name,
            f"{tool} {_trouble(done)}",
            "install or repair the driver on the node",
            "devices",
            show,
        )
        return
    seen = npus(done.out) if node.kind == "npu" else gpus(done.out, reply.command("busy"))
    if not seen:
        text = f"{tool} printed something unexpected: {done.out.strip()[:80]!r}"
        yield Finding("warning", node.name, text, "check the output by hand", "devices", show)
        return
    yield from _each(reply, seen, tool)
    for device in node.devices:
        yield from _link(reply, device)


def _touched(reply: NodeAnswers) -> Iterator[Finding]:
    """Yield what torch could not do with the devices, in the library's own words; nothing without torch there."""
    done = reply.command("touch")
    if done is None or (done.succeeded and done.out.strip() == "{}"):
        return
    show = f"clusterctl exec {reply.node.name} -- {SHOW['npu-smi' if reply.node.kind == 'npu' else 'nvidia-smi']}"
    answer, driver = _answer_of(done), driver_versions(reply).get("driver", "")
    remedy = (
        needed_driver(answer.torch if answer else "", driver)
        or "driver, CUDA or CANN, and torch must go together"
    )
    if answer is None:
        text = f"a first use of its devices by torch {_trouble(done)}"
        yield Finding("bad", reply.node.name, text, remedy, "devices-use", show)
        return
    name, failed = answer.torch or "torch", dict[str, list[int]]()
    for device, error in answer.devices.items():
        if error:
            failed.setdefault(error, []).append(int(device))
    beside = f" (driver {driver})" if driver else ""
    for error, devices in failed.items():
        text = f"{name} cannot use device {device_text(devices)}: {error}{beside}"
        yield Finding("bad", reply.node.name, text, remedy, "devices-use", show)
    if answer.sum:
        text = f"{name} cannot add over its devices: {answer.sum}{beside}"
        remedy = "NCCL and HCCL need shared memory, and access among the devices"
        yield Finding("bad", reply.node.name, text, remedy, "devices-use", show)
    if not failed and not answer.sum:
        yield Finding(
            "ok", reply.node.name, f"{name} multiplies and adds on all devices", check="devices-use"
        )


def _answer_of(done: CommandResult) -> FirstUse | None:
    """Return the last line that the first use of the devices printed; None if it is no result."""
    try:
        return decode(FirstUse, parse((done.out.strip().splitlines() or [""])[-1]))
    except BadValue:
        return None


def names(reply: NodeAnswers) -> dict[str, int]:
    """Return by name the least MiB of the node's devices, by its driver's tool; empty without such a tool."""
    done = reply.command("smi")
    if done is None or not done.succeeded or reply.node.kind not in ("npu", "cuda"):
        return {}
    seen = npus(done.out) if reply.node.kind == "npu" else gpus(done.out, None)
    found: dict[str, int] = {}
    for entry in (seen[device] for device in reply.node.devices if device in seen):
        if entry.name:
            found[entry.name] = min(entry.memory, found.get(entry.name, entry.memory))
    return found


def _each(reply: NodeAnswers, seen: Mapping[int, DeviceSample], tool: str) -> Iterator[Finding]:
    node, show = reply.node, SHOW[tool]
    missing = [device for device in node.devices if device not in seen]
    if missing:
        text = f"no device {device_text(missing)}: {tool} shows {device_text(sorted(seen))}"
        remedy = "correct `devices` in the inventory, or reset the device"
        yield Finding("bad", node.name, text, remedy, "devices", show)
    sound = []
    for device in node.devices:
        entry = seen.get(device)
        if entry is None:
            continue
        if entry.health != "OK":
            level = "warning" if entry.health == "Warning" else "bad"
            remedy = "leave it out with `devices`, or reset it; the node's log says more"
            yield Finding(
                level, node.name, f"device {device}: health is {entry.health}", remedy, "devices", show
            )
        if entry.busy:
            text = f"device {device} is in use: {', '.join(entry.busy[:4])}"
            remedy = "wait for it, stop it, or choose other devices"
            yield Finding("bad", node.name, text, remedy, "devices-busy", show)
        if entry == DeviceSample():
            sound.append(device)
    if sound:
        yield Finding("ok", node.name, f"devices {device_text(sound)} are healthy and free", check="devices")


def _link(reply: NodeAnswers, device: int) -> Iterator[Finding]:
    done = reply.command(f"link {device}")
    if done is None or not done.succeeded:
        # The node was not asked, or its hccn_tool cannot report this; `ranktable verify` checks addresses.
        return
    match = re.search(r"link status:\s*(\S+)", done.out)
    if match and match[1].upper() != "UP":
        text = f"device {device}: its network link is {match[1]}"
        remedy = "check the cable and the switch's port"
        yield Finding(
            "bad", reply.node.name, text, remedy, "device-link", f"hccn_tool -i {device} -link_stat -g"
        )


def _trouble(done: CommandResult | None) -> str:
    if done is None:
        return "is not there: the inventory names devices, and no driver tells of them"
    if done.timed_out:
        return "does not answer: the driver hangs"
    output_lines = (done.err or done.out).strip().splitlines()
    return f"ended with {done.exit_code}" + (f": {output_lines[-1][:200]}" if output_lines else "")


# ---- what the tools print


def npus(text: str) -> dict[int, DeviceSample]:
    """Return by device id the device in the output of `npu-smi info`: two rows for each chip (name and health.

    Chip, id and bus), then processes.
    """
    chips: dict[tuple[int, int], int] = {}
    health: dict[int, str] = {}
    busy: dict[int, list[str]] = {}
    names: dict[int, str] = {}
    memory: dict[int, int] = {}
    row: tuple[int, str, str] | None = None
    for line in text.splitlines():
        cells = [cell.split() for cell in line.strip().strip("|").split("|")]
        first = cells[0]
        if len(cells) < 3 or not first or not first[0].isdecimal():
            continue
        if (
            len(cells) >= 4
            and len(first) == 2
            and first[1].isdecimal()
            and cells[1]
            and cells[1][0].isdecimal()
        ):
            device = chips.get((int(first[0]), int(first[1])), int(first[0]))
            busy.setdefault(device, []).append(f"{' '.join(cells[2])} (pid {cells[1][0]})")
        elif row is None and len(first) > 1 and not first[1].isdecimal():
            row = int(first[0]), " ".join(cells[1]), first[1]
        elif row is not None:
            card, state, name = row
            device = int(first[1]) if len(first) > 1 and first[1].isdecimal() else card
            chips[card, int(first[0])] = device
            health[device], names[device], row = state, name, None
            # The last two numbers are the used and the whole memory.
            memory[device] = int(cells[-1][-1]) if cells[-1] and cells[-1][-1].isdecimal() else 0
    return {
        device: DeviceSample(state, tuple(busy.get(device, ())), names[device], memory[device])
        for device, state in health.items()
    }


def gpus(text: str, busy: CommandResult | None) -> dict[int, DeviceSample]:
    """Return by device id the device in the output of nvidia-smi's two queries."""
    on: dict[str, list[str]] = {}
    for row in _rows(busy.out if busy and busy.succeeded else ""):
        if len(row) >= 3 and row[1].isdecimal():
            on.setdefault(row[0], []).append(f"{row[2].rpartition('/')[2]} (pid {row[1]})")
    result = {}
    for row in _rows(text):
        if len(row) >= 6 and row[0].isdecimal():
            name = row[6] if len(row) > 6 else ""
            memory = int(row[3]) if row[3].isdecimal() else 0
            result[int(row[0])] = DeviceSample(_gpu_health(row[:6]), tuple(on.get(row[1], ())), name, memory)
    return result


def _gpu_health(row: list[str]) -> str:
    if any(LOST.search(cell) for cell in row):
        return "lost"
    if row[5] not in UNSEEN and row[5].isdecimal() and int(row[5]):
        return f"{row[5]} uncorrected memory errors since its last reset"
    return "OK"


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text))]


def driver_versions(reply: NodeAnswers) -> dict[str, str]:
    """Return the versions of the toolkit and the driver, from their files and tools."""
    result = {}
    patterns = {
        "CANN": r"(?im)^\s*(?:toolkit_installed_version|toolkit_running_version|version)\s*=\s*\[?([^\]\s]+)",
        "driver": r"(?im)^\s*Version\s*=\s*(\S+)",
        "CUDA": r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"([^"]+)"|CUDA Version ([0-9.]+)',
    }
    for name, pattern in patterns.items():
        match = re.search(pattern, reply.found.files.get(name) or "")
        if match:
            result[name] = next(group for group in match.groups() if group)
    if reply.node.kind == "cuda":
        done = reply.command("smi")
        rows = _rows(done.out) if done and done.succeeded else []
        drivers = sorted({row[2] for row in rows if len(row) >= 6 and row[2] not in UNSEEN})
        result.update({"driver": ", ".join(drivers)} if drivers else {})
    return result
