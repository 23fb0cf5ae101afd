"""Versions that go together: torch_npu and CANN, CUDA and the driver."""

from __future__ import annotations

import re

from clusterctl.errors import UsageError

# CANN -> the releases of torch_npu for it; a release's first three numbers are those of its torch. Huawei, Ascend
# Extension for PyTorch, release notes 6.0.0 to 7.3.0 and 26.0.0, table of matching versions.
TORCH_NPU = {
    "8.0": ("2.1.0.post10", "2.3.1.post4", "2.4.0.post2"),
    "8.1": ("2.1.0.post12", "2.3.1.post6", "2.4.0.post4", "2.5.1"),
    "8.2": ("2.1.0.post13", "2.5.1.post1", "2.6.0"),
    "8.3": ("2.1.0.post17", "2.6.0.post3", "2.7.1", "2.8.0"),
    "8.5": ("2.6.0.post5", "2.7.1.post2", "2.8.0.post2", "2.9.0"),
    "9.0": ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2", "2.10.0"),
}
# CUDA, by its first number -> the oldest driver. NVIDIA, CUDA Compatibility, minor version compatibility.
DRIVERS = {11: 450, 12: 525, 13: 580}


def for_cann(cann: str) -> tuple[str, ...]:
    """Return the releases of torch_npu for a CANN such as `8.2.RC1`; () if they are not known."""
    found = re.match(r"[0-9]+\.[0-9]+", cann)
    return TORCH_NPU.get(found[0], ()) if found else ()


def pins_for(cann: str, least: tuple[int, int] = (0, 0)) -> list[str]:
    """Return the newest torch and torch_npu for a CANN as requirements of pip; raise UsageError without them."""
    fitting = for_cann(cann)
    if not fitting:
        raise UsageError(f"--cann {cann}: no torch_npu is known for it", f"one of {', '.join(TORCH_NPU)}")
    newest = fitting[-1]
    major, minor, patch = newest.split(".")[:3]
    if (int(major), int(minor)) < least:
        problem = f"--cann {cann}: its newest torch is {major}.{minor}.{patch}"
        raise UsageError(problem, f"the embedded trainer needs torch {least[0]}.{least[1]}: use a newer CANN")
    return [f"torch=={major}.{minor}.{patch}", f"torch_npu=={newest}"]


def wrong_torch_npu(cann: str, plugin: str) -> tuple[str, str] | None:
    """Return what is wrong with a torch_npu next to a CANN, and its remedy; None if nothing is known to be."""
    fitting = for_cann(cann)
    others = [other for other, releases in TORCH_NPU.items() if plugin in releases]
    if not fitting or not others or plugin in fitting:
        return None
    newest = fitting[-1]
    torch = ".".join(newest.split(".")[:3])
    remedy = f"torch {torch} with torch_npu {newest}, or CANN {others[-1]}"
    return (
        f"torch_npu {plugin} was made for CANN {others[-1]}, and the node has {cann.partition(':')[0]}",
        remedy,
    )


def needed_driver(torch: str, driver: str) -> str:
    """Return what to do if a torch (`torch 2.13.0 for CUDA 13.0`) needs a newer driver; "" if it does not."""
    built = re.search(r" for CUDA ([0-9]+)", torch)
    has, needs = driver.partition(".")[0], DRIVERS.get(int(built[1]), 0) if built else 0
    if built is None or not has.isdecimal() or int(has) >= needs:
        return ""
    fitting = [cuda for cuda, least in DRIVERS.items() if least <= int(has)]
    other = f", or install a torch that is built for CUDA {fitting[-1]}" if fitting else ""
    return f"CUDA {built[1]} needs driver {needs} or newer: update it{other}"
