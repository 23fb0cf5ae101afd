"""Check a node's devices, from the output of its driver's tool: present, healthy, free, linked."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from clusterctl.checks.answers import CommandResult, FirstUse, NodeAnswers
from clusterctl.checks.remedies import remedy_for
from clusterctl.finding import Finding
from clusterctl.text import device_text
from clusterctl.wire import versions
from clusterctl.wire.typed_json import BadValue, decode, parse

SHOW = {"npu-smi": "npu-smi info", "nvidia-smi": "nvidia-smi"}
UNSEEN = ("", "NA", "N/A", "[N/A]", "[Not Supported]")
# The part of a device's memory above which something uses it; drivers take up to a tenth.
IN_USE = 0.25
# By which a device may be slower than the others of its node.
SLOW = 1.3
# Answers of nvidia-smi that mean trouble: question and column, words, level, what is wrong, remedy, command.
STATES = (
    ("state", 1, "Enabled", "warning", "is divided by MIG: a rank would get a part of it, or nothing",
     "turn MIG off, or use other devices", "sudo nvidia-smi -i {device} -mig 0"),
    ("state", 2, "Prohibited", "bad", "allows no process (compute mode)", "allow processes",
     "sudo nvidia-smi -i {device} -c DEFAULT"),
    ("state", 3, "Disabled", "note", "persistence mode is off: each first use waits for the driver", "turn it on",
     "sudo nvidia-smi -i {device} -pm 1"),
    ("clocks", 1, "Active", "warning", "is slowed down by heat or power", "check cooling and power supply",
     "nvidia-smi -i {device} -q -d PERFORMANCE"),
    ("rows", 1, "Yes|1", "warning", "has memory rows that are remapped at its next reset", "reset it",
     "sudo nvidia-smi -i {device} --gpu-reset"),
    ("rows", 2, "Yes|1", "bad", "has no spare memory rows left", "replace it; until then leave it out with `devices`",
     "nvidia-smi -i {device} -q -d ROW_REMAPPER"),
    ("fabric", 1, "In Progress|Not Started", "bad", "has not joined the NVLink fabric",
     *remedy_for("Error 802", "", "")),
)  # fmt: skip
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
    used: int = field(default=0, compare=False)
    """MiB that are taken."""
    uuid: str = field(default="", compare=False)

    @property
    def is_taken(self) -> bool:
        """Return whether its memory is in use, although no process is shown."""
        return not self.busy and self.used > IN_USE * self.memory > 0


def findings(reply: NodeAnswers) -> Iterator[Finding]:
    """Yield devices that are missing, unhealthy, in use, or without a link; simulated devices have no findings."""
    if reply.node.kind in ("npu", "cuda") and reply.node.devices:
        yield from _by_tool(reply)
        yield from _touched(reply)


def _by_tool(reply: NodeAnswers) -> Iterator[Finding]:
    node = reply.node
    tool = "npu-smi" if node.kind == "npu" else "nvidia-smi"
    show = SHOW[tool]
    yield from _files(reply)
    done = reply.command("smi")
    if done is None or done.timed_out or not done.succeeded:
        trouble = _trouble(done)
        remedy, fix = remedy_for(trouble, "install or repair the driver on the node", show)
        yield Finding("bad", node.name, f"{tool} {trouble}{_no_files(reply)}", remedy, "devices", fix)
        return
    seen = npus(done.out) if node.kind == "npu" else gpus(done.out, reply.command("busy"))
    if not seen:
        text = f"{tool} printed something unexpected: {done.out.strip()[:80]!r}"
        yield Finding("warning", node.name, text, "check the output by hand", "devices", show)
        return
    yield from _each(reply, seen, tool)
    yield from _states(reply, seen)
    yield from _logged(reply)
    if node.kind == "npu":
        yield from _links(reply)


def _files(reply: NodeAnswers) -> Iterator[Finding]:
    """Yield device files that this login may not open, and an adapter for RDMA that reads no GPU memory."""
    files, name = reply.found.device_files, reply.node.name
    # Those of other devices do not matter; a container's runtime opens them for it.
    others = re.compile(f"/dev/(davinci|nvidia)(?!({'|'.join(map(str, reply.node.devices))})$)[0-9]+")
    denied = [path for path, allowed in files.items() if not allowed and not others.fullmatch(path)]
    if denied:
        text = f"this login may not open {', '.join(denied[:4])}{' and more' if len(denied) > 4 else ''}"
        remedy, fix = remedy_for("Permission denied", "", "")
        yield Finding("warning", name, text, remedy, "devices-access", fix)
    if reply.found.rdma and reply.found.files.get("peermem", "") is None:
        text = "nvidia_peermem is not loaded: RDMA copies through the node's memory, unless the kernel has dma-buf"
        yield Finding("note", name, text, "load it", "rdma", "sudo modprobe nvidia_peermem")


def _no_files(reply: NodeAnswers) -> str:
    """Return that the node has no device file of its kind, where it was asked for them."""
    pattern = "/dev/davinci" if reply.node.kind == "npu" else "/dev/nvidia"
    found = any(path.startswith(pattern) for path in reply.found.device_files)
    return "" if found else f"; there is no {pattern}*"


def _touched(reply: NodeAnswers) -> Iterator[Finding]:
    """Yield what torch could not do with the devices, in the library's own words; nothing without torch there."""
    done = reply.command("touch")
    if done is None or (done.succeeded and done.out.strip() == "{}"):
        return
    show = f"clusterctl exec {reply.node.name} -- {SHOW['npu-smi' if reply.node.kind == 'npu' else 'nvidia-smi']}"
    answer, versions_there = _answer_of(done), driver_versions(reply)
    driver = versions_there.get("driver", "")

    def failed(text: str, error: str, other: str) -> Finding:
        remedy, fix = remedy_for(error, other, show)
        if "not compiled with CUDA" in error:
            remedy += versions.torch_for(answer.torch if answer else "", driver, ": ")
        beside = f" (driver {driver})" if driver and answer else ""
        return Finding("bad", reply.node.name, f"{text}{error}{beside}", remedy, "devices-use", fix)

    together = versions.goes_with(versions_there.get("CANN", ""))
    if answer is None:
        yield failed("a first use of its devices by torch ", _trouble(done), together)
        return
    name, errors = answer.torch or "torch", dict[str, list[int]]()
    for device, error in answer.devices.items():
        if error:
            errors.setdefault(error, []).append(int(device))
    for error, devices in errors.items():
        old = versions.needed_driver(answer.torch, driver)
        yield failed(f"{name} cannot use device {device_text(devices)}: ", error, old or together)
    yield from _slow(reply.node.name, answer.seconds)
    if answer.sum:
        needs = "NCCL and HCCL need shared memory, and access among the devices"
        yield failed(f"{name} cannot add over its devices: ", answer.sum, needs)
    if not errors and not answer.sum:
        yield Finding(
            "ok", reply.node.name, f"{name} multiplies and adds on all devices", check="devices-use"
        )


def _slow(node: str, seconds: Mapping[str, float]) -> Iterator[Finding]:
    """Yield the devices that need more time for the same products than the others."""
    usual = median(seconds.values()) if seconds else 0.0
    slow = {int(device): taken / usual for device, taken in seconds.items() if usual and taken > SLOW * usual}
    if slow:
        factor = max(slow.values())
        text = f"device {device_text(list(slow))} takes {factor:.1f} times as long for products as the others"
        remedy = "look for another user, its clocks and its temperature: every step waits for it"
        yield Finding("warning", node, text, remedy, "devices-speed", "nvidia-smi -q -d PERFORMANCE,CLOCK")


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
        if entry.is_taken:
            text = f"device {device}: {entry.used} of {entry.memory} MiB are in use, by no process that is shown here"
            remedy = "look in other containers and at other users' processes, or choose other devices"
            yield Finding("warning", node.name, text, remedy, "devices-busy", show)
        if entry == DeviceSample() and not entry.is_taken:
            sound.append(device)
    if sound:
        yield Finding("ok", node.name, f"devices {device_text(sound)} are healthy and free", check="devices")


def _states(reply: NodeAnswers, seen: Mapping[int, DeviceSample]) -> Iterator[Finding]:
    """Yield the rows of STATES that nvidia-smi reports, each with all its devices."""
    done = {question: reply.command(question) for question in dict.fromkeys(row[0] for row in STATES)}
    rows = {(name, row[0]): row for name, entry in done.items() if entry for row in _rows(entry.out) if row}
    own = [device for device in reply.node.devices if device in seen]
    for question, column, words, level, problem, remedy, fix in STATES:
        odd = [
            device
            for device in own
            if re.fullmatch(words, "".join(rows.get((question, seen[device].uuid), [])[column : column + 1]))
        ]
        if odd:
            text, command = f"device {device_text(odd)} {problem}", fix.format(device=",".join(map(str, odd)))
            yield Finding(level, reply.node.name, text, remedy, "devices-state", command)
    for device in own:
        width = rows.get(("state", seen[device].uuid), [])[4:6]
        if len(set(width)) == 2 and all(map(str.isdecimal, width)):
            text = f"device {device} uses {width[0]} of {width[1]} PCIe lanes"
            remedy = "seat the card again, or use another slot; some cards use fewer lanes while idle"
            yield Finding("note", reply.node.name, text, remedy, "devices-state", "nvidia-smi topo -m")


# Errors of the kernel's log that are the card's and not a program's: NVIDIA, XID errors.
XID = {
    48: "memory", 64: "memory", 74: "NVLink", 79: "the bus", 92: "memory", 94: "memory", 95: "memory", 119: "the GSP",
    120: "the GSP", 140: "memory",
}  # fmt: skip


def _logged(reply: NodeAnswers) -> Iterator[Finding]:
    """Yield errors of cards in the kernel's log since its start, and GPUs of whose NVLinks some are inactive."""
    name, logged, links = reply.node.name, reply.command("xid"), reply.command("nvlink")
    for line in (logged.out if logged else "").splitlines()[-20:]:
        match = re.search(r"NVRM: (Xid \(PCI:[0-9a-fA-F:.]+\): ([0-9]+).*)", line)
        if match and (part := XID.get(int(match[2]))):
            text = f"the kernel reported an error of {part} since its start: {match[1][:120]}"
            remedy = "restart the node; if it comes back, the card is broken: leave it out with `devices`"
            yield Finding("warning", name, text, remedy, "devices-log", "sudo dmesg | grep Xid")
            break
    for part in re.split(r"(?m)^(?=GPU [0-9]+:)", links.out if links and links.succeeded else ""):
        states = re.findall(r"Link [0-9]+: (.*)", part)
        inactive = sum("inactive" in state for state in states)
        if 0 < inactive < len(states):
            text = f"{inactive} of {len(states)} NVLinks of {part.partition(' (')[0]} are inactive"
            yield Finding(
                "warning", name, text, "reset it; check its board", "devices-log", "nvidia-smi nvlink -s"
            )


# Questions to hccn_tool, the words before its answer, sound answers, what is wrong, and the remedy.
LINKS = (
    ("link", r"link status:\s*(\S+)", ("UP",), "its network link is", "check the cable and the switch's port"),
    ("net_health", r"net health status:\s*(\S[^\n]*)", ("SUCCESS", "INIT"), "the health of its network is",
     "check its address, gateway and detect address: hccn_tool -netdetect"),
)  # fmt: skip


def _links(reply: NodeAnswers) -> Iterator[Finding]:
    """Yield what hccn_tool reports of the links; where it cannot report this, `ranktable verify` checks addresses."""
    for device in reply.node.devices:
        for question, words, sound, problem, remedy in LINKS:
            done = reply.command(f"{question} {device}")
            match = re.search(words, done.out) if done is not None and done.succeeded else None
            if match and match[1].strip().upper() not in sound:
                show = f"hccn_tool -i {device} -{question} -g"
                text = f"device {device}: {problem} {match[1].strip()}"
                yield Finding("bad", reply.node.name, text, remedy, "device-link", show)


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
    found: dict[int, DeviceSample] = {}
    row: tuple[int, str, str] | None = None
    for line in text.splitlines():
        cells = [cell.split() for cell in line.strip().strip("|").split("|")]
        first = cells[0]
        if len(cells) < 3 or not first or not first[0].isdecimal():
            continue
        of_device = len(first) > 1 and first[1].isdecimal()
        if len(cells) >= 4 and len(first) == 2 and of_device and cells[1] and cells[1][0].isdecimal():
            device = chips.get((int(first[0]), int(first[1])), int(first[0]))
            if device in found:
                user = f"{' '.join(cells[2])} (pid {cells[1][0]})"
                found[device] = replace(found[device], busy=(*found[device].busy, user))
        elif row is None and len(first) > 1 and not of_device:
            row = int(first[0]), " ".join(cells[1]), first[1]
        elif row is not None:
            card, state, name = row
            device = chips[card, int(first[0])] = int(first[1]) if of_device else card
            # The last two numbers are the used and the whole memory.
            numbers = re.search(r"([0-9]+) */ *([0-9]+)$", " ".join(cells[-1]))
            used, memory = map(int, numbers.groups()) if numbers else (0, 0)
            found[device], row = DeviceSample(state, (), name, memory, used), None
    return found


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
            memory, used = (int(cell) if cell.isdecimal() else 0 for cell in row[3:5])
            users = tuple(on.get(row[1], ()))
            result[int(row[0])] = DeviceSample(_gpu_health(row[:6]), users, name, memory, used, row[1])
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
        "firmware": r"(?im)^\s*Version\s*=\s*(\S+)",
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
