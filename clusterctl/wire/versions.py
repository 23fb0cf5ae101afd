"""Versions that go together: CANN, torch_npu, torch, Python, CUDA, drivers and firmware.

Each table stands here alone and has its public document in `SOURCES`. Doctor, the images' check, the wheelhouse and the
tests read it.
"""

from __future__ import annotations

import re

# The oldest Python and torch of the embedded trainer; pyproject.toml says the same.
TRAINER_PYTHON, TRAINER_TORCH = (3, 10), (2, 6)
# CANN -> the releases of torch_npu for it; a release's first three numbers are those of its torch.
TORCH_NPU = {
    "8.0": ("2.1.0.post10", "2.3.1.post4", "2.4.0.post2"),
    "8.1": ("2.1.0.post12", "2.3.1.post6", "2.4.0.post4", "2.5.1"),
    "8.2": ("2.1.0.post13", "2.5.1.post1", "2.6.0"),
    "8.3": ("2.1.0.post17", "2.6.0.post3", "2.7.1", "2.8.0"),
    "8.5": ("2.6.0.post5", "2.7.1.post2", "2.8.0.post2", "2.9.0"),
    "9.0": ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2", "2.10.0"),
    "9.1": ("2.7.1.post8", "2.9.0.post6", "2.10.0.post4", "2.11.0", "2.12.0"),
}
# The CANNs each of which also runs the torch_npu of the others.
MIXED = ("8.5", "9.0", "9.1")
# torch -> the oldest and the newest Python that torch_npu is built for.
NPU_PYTHON = {
    "2.1": ("3.8", "3.11"), "2.3": ("3.8", "3.11"), "2.4": ("3.8", "3.11"), "2.5": ("3.9", "3.11"),
    "2.6": ("3.9", "3.11"), "2.7": ("3.9", "3.13"), "2.8": ("3.9", "3.13"), "2.9": ("3.10", "3.13"),
    "2.10": ("3.10", "3.13"), "2.11": ("3.10", "3.14"), "2.12": ("3.10", "3.14"), "2.13": ("3.10", "3.14"),
}  # fmt: skip
# The beginning of an Ascend driver's version -> the first two numbers of its firmware.
FIRMWARE = {"23.0": "7.1", "24.1.0": "7.5", "25.0": "7.7", "25.2": "7.7", "25.3": "7.8", "25.5": "7.8"}
# torch -> the CUDAs that it is built for.
CUDA = {
    "2.6": ("11.8", "12.4", "12.6"), "2.7": ("11.8", "12.6", "12.8"), "2.8": ("12.6", "12.8", "12.9"),
    "2.9": ("12.6", "12.8", "13.0"), "2.10": ("12.6", "12.8", "13.0"), "2.11": ("12.6", "12.8", "13.0"),
    "2.12": ("12.6", "13.0", "13.2"), "2.13": ("12.6", "13.0", "13.2"),
}  # fmt: skip
# CUDA, by its first number -> the oldest driver.
DRIVERS = {"11": 450, "12": 525, "13": 580}
SOURCES = {
    "TORCH_NPU": "Ascend/pytorch, COMPATIBILITY.md and docs/zh/release_notes.md (commit 9e73e70)",
    "MIXED": "Ascend/pytorch, docs/zh/release_notes.md: compatibility of TorchNPU 26.1.0",
    "NPU_PYTHON": "Ascend/pytorch, COMPATIBILITY.md: PyTorch and Python versions",
    "FIRMWARE": "the packages of one Ascend HDK: 23.0.3 has firmware 7.1.0.5, 24.1.0 7.5.0.3, 25.0.RC1 7.7.0.1,"
    " 25.2.0 7.7.0.6, 25.3.RC1 7.8.0.2, 25.5.0 7.8.0.5 (hiascend.com, firmware and drivers)",
    "CUDA": "pytorch/pytorch, RELEASE.md: release compatibility matrix",
    "DRIVERS": "NVIDIA, CUDA Compatibility: minor version compatibility",
}


def short(version: str) -> str:
    """Return the first two numbers of a version: `8.2` of `8.2.RC1`; "" if it has none."""
    found = re.match(r"[0-9]+\.[0-9]+", version)
    return found[0] if found else ""


def torch_of(plugin: str) -> str:
    """Return the torch that a release of torch_npu belongs to: its first three numbers."""
    return ".".join(re.findall(r"[0-9]+", plugin.partition("+")[0])[:3])


def newest_for(cann: str, python: str = "") -> str:
    """Return the newest torch_npu for a CANN such as `8.2.RC1`, and for a Python; "" if none is known."""
    fitting = (entry for entry in reversed(TORCH_NPU.get(short(cann), ())) if builds_for(entry, python))
    return next(fitting, "")


def builds_for(plugin: str, python: str) -> bool:
    """Return whether a torch_npu is built for a Python, "" for any."""
    oldest, newest = NPU_PYTHON.get(short(plugin), ("0.0", "99.0"))
    return not python or _numbers(oldest) <= _numbers(python) <= _numbers(newest)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"[0-9]+", version)[:2])


def fits_trainer(version: str, oldest: tuple[int, int] = TRAINER_TORCH) -> bool:
    """Return whether the embedded trainer runs with a torch, or another program of which `oldest` is the oldest."""
    return _numbers(version) >= oldest


def wrong_torch_npu(cann: str, plugin: str) -> tuple[str, str] | None:
    """Return what is wrong with a torch_npu next to a CANN, and its remedy; None if nothing is known to be."""
    known, newest = short(cann), newest_for(cann)
    others = [other for other, releases in TORCH_NPU.items() if plugin in releases]
    if not newest or not others or known in others or {known, others[-1]} <= set(MIXED):
        return None
    remedy = f"torch {torch_of(newest)} with torch_npu {newest}, or CANN {others[-1]}"
    return (
        f"torch_npu {plugin} was made for CANN {others[-1]}, and the node has {cann.partition(':')[0]}",
        remedy,
    )


def goes_with(cann: str) -> str:
    """Return what goes with a CANN, in a sentence; "" for an unknown one: driver, CANN or CUDA, and torch."""
    newest = newest_for(cann)
    beside = f": CANN {short(cann)} with torch {torch_of(newest)} and torch_npu {newest}" if newest else ""
    return f"driver, CUDA or CANN, and torch must go together{beside}"


def wrong_firmware(driver: str, firmware: str) -> tuple[str, str] | None:
    """Return what is wrong with an NPU's firmware next to its driver, and the remedy; None if nothing is known."""
    expected = next((entry for begin, entry in FIRMWARE.items() if driver.startswith(begin)), "")
    if not expected or not firmware or short(firmware) == expected:
        return None
    remedy = f"install the firmware {expected} of the same Ascend HDK as the driver, and restart the node"
    return f"its NPUs have firmware {firmware}, and driver {driver} goes with {expected}", remedy


def needed_driver(torch: str, driver: str) -> str:
    """Return what to do if a torch (`torch 2.13.0 for CUDA 13.0`) needs a newer driver; "" if it does not."""
    built = re.search(r" for CUDA ([0-9]+)", torch)
    has, needs = driver.partition(".")[0], DRIVERS.get(built[1], 0) if built else 0
    if built is None or not has.isdecimal() or int(has) >= needs:
        return ""
    return f"CUDA {built[1]} needs driver {needs} or newer: update it{torch_for(torch, driver, ', or ')}"


def torch_for(torch: str, driver: str, before: str = "") -> str:
    """Return which build of a torch (`torch 2.13.0`) a driver runs, after `before`; "" if none is known."""
    has, release = driver.partition(".")[0], re.search(r"torch ([0-9]+\.[0-9]+)", torch)
    fitting = [cuda for cuda, least in DRIVERS.items() if has.isdecimal() and least <= int(has)]
    built = [
        cuda for cuda in CUDA.get(release[1] if release else "", ()) if cuda.partition(".")[0] in fitting
    ]
    newest = built[-1] if built else fitting[-1] if fitting else ""
    return f"{before}install a torch that is built for CUDA {newest}" if newest else ""
