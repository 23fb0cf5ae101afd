"""Accelerators by name: memory, number types, peak rates and links, each figure with its public source.

`sources` names the document of each figure; the entry "" is the document of all others. A peak is dense, without
sparsity. `efficiency` is the part of the peak that a training reaches: for V100, A100 and 910 it is derived from the
rates that other trainers published (docs/guide/planning.md compares them one by one); well-tuned trainers reach more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from native.npu import facts
from native.npu.facts import ALL
from trainer.errors import Fault


@dataclass(frozen=True)
class Chip:
    """One device and its links, as described by its manufacturer."""

    name: str
    kind: str
    """cpu, cuda or npu."""
    title: str
    memory: float
    """GB (10^9 bytes); 0 if the device uses the node's memory."""
    half: float
    """Peak in bf16 or fp16, 10^12 operations a second."""
    full: float
    """Peak in fp32."""
    efficiency: float
    node_gbytes: float
    """GB/s that a device sends within its node."""
    net_gbytes: float
    """GB/s that a device sends to another node."""
    memory_gbytes: float
    """GB/s between the device and its memory, which limit the optimizer's step."""
    host_gbytes: float
    """GB/s between the device and the node's memory."""
    latency: float
    """Seconds of the smallest exchange."""
    types: tuple[str, ...]
    """Precisions that it computes with."""
    kernels: tuple[str, ...]
    """Precisions in which it has an attention kernel that keeps no scores."""
    reported: str = ""
    """Expression of the names under which npu-smi, nvidia-smi and torch report it, without spaces and maker."""
    sources: Mapping[str, str] = field(default_factory=dict)

    def source(self, figure: str) -> str:
        """Return the public source of a figure."""
        return self.sources.get(figure, self.sources.get("", ""))


WITHOUT_BF16 = ("fp32", "fp16")
_PUBLISHED = "rates published for recipes of this project's sources"
_910A = {
    "": "Huawei, Atlas 800 training server (model 9000), technical white paper",
    "half": "Huawei, Ascend 910 (Hot Chips 31, 2019): 256 TFLOP/s in fp16",
    "full": "assumed: a sixteenth of the rate in fp16",
    "types": "CANN operator documents: the Atlas training series has no bfloat16",
    "efficiency": _PUBLISHED,
    "latency": "assumed",
}
_910B = {
    "": "Huawei, Atlas 800T A2 training server, technical specifications",
    "half": "half of a 910C, which is two such dies: arXiv:2506.12708, table 1",
    "full": "assumed: a quarter of the rate in bf16; 87 TFLOP/s were measured by the project limulidae",
    "memory_gbytes": "arXiv:2506.12708: 1.6 TB/s a die",
    "efficiency": _PUBLISHED,
    "latency": "assumed",
}
_910B4 = {
    **_910B,
    "memory": "Huawei, Atlas 800I A2 inference server: 32 GB",
    "half": "Huawei, Atlas 800I A2 inference server: 280 TFLOP/s in fp16",
    "memory_gbytes": "Huawei, Atlas 800I A2 inference server: 800 GB/s with 32 GB",
}
_910C = {
    "": "Huawei, CloudMatrix384: arXiv:2506.12708, of one die of two",
    "full": "assumed: a quarter of the rate in bf16",
    "efficiency": "assumed as the 910B's",
    "host_gbytes": "assumed as the 910B's",
    "latency": "assumed",
}
_950 = {
    "": "Huawei, Ascend 950 (Huawei Connect, September 2025): memory, interconnect, 1 PFLOP/s in fp8",
    "half": "assumed: half of the rate in fp8",
    "full": "assumed: a quarter of the rate in bf16",
    "efficiency": "assumed as the 910B's",
    "node_gbytes": "Huawei, Ascend 950: 2 TB/s in both directions together",
    "net_gbytes": "assumed: 400 Gbit/s a device",
    "host_gbytes": "assumed: PCIe 5.0",
    "latency": "assumed",
}
_CPU = {"": "measured on one Zen 4 core: 219 GFLOP/s in bf16, 95 in fp32; gloo sums 64 MiB in 45 ms"}
_WIDENS = "as fp32, in which such a processor multiplies bf16"
_CPU_AVX512 = {**_CPU, "half": _WIDENS}
_CPU_AVX2 = {
    **_CPU_AVX512,
    "full": "measured on one Zen 3 core with AVX2, squares of 2,048: 73 GFLOP/s, in bf16 71",
}


def _gpu(
    name: str,
    title: str,
    memory: float,
    rates: tuple[float, float],
    links: tuple[float, float, float, float],
    reported: str,
    sheet: str = "",
) -> Chip:
    """Return an NVIDIA chip: peak rates in 16 bits and fp32; GB/s in the node, to others, of memory, to the host."""
    sources = {
        "": f"NVIDIA, {sheet or name} datasheet",
        "efficiency": _PUBLISHED if name.startswith(("A100", "V100")) else "assumed as the A100's",
        "net_gbytes": f"assumed: {8 * links[1]:g} Gbit/s a device to other nodes",
        "latency": "assumed",
    }
    types = WITHOUT_BF16 if name.startswith(("V100", "T4")) else ALL
    efficiency = 0.3 if name.startswith("V100") else 0.28
    return Chip(
        name, "cuda", title, memory, *rates, efficiency, *links, 2e-5, types, types, reported, sources
    )


def _npu(
    name: str,
    title: str,
    memory: float,
    rates: tuple[float, float],
    links: tuple[float, float, float, float],
    chips: str,
    reported: str,
    sources: Mapping[str, str],
) -> Chip:
    """Return an Ascend chip of a generation, whose types and attention kernel native/npu/facts.py has."""
    types, kernels = facts.GENERATIONS[chips], facts.types("npu_fusion_attention", chips)
    return Chip(name, "npu", title, memory, *rates, 0.24, *links, 3e-5, types, kernels, reported, sources)


# fmt: off
# In the order in which a kind's default is chosen: the first that computes with the job's precision; of names that two
# expressions match, the first counts.
CHIPS = (
    Chip("cpu", "cpu", "one core of a server", 0, 0.073, 0.073, 0.8, 1.5, 1.0, 15, 15, 3e-4, ALL, ("fp32", "bf16"), "",
         _CPU_AVX2),
    Chip("cpu-avx512", "cpu", "one core of a server with AVX-512", 0, 0.095, 0.095, 0.8, 1.5, 1.0, 15, 15, 3e-4, ALL,
         ("fp32", "bf16"), "", _CPU_AVX512),
    Chip("cpu-avx512-bf16", "cpu", "one core of a server with AVX-512 and its bf16 products", 0, 0.219, 0.095, 0.8,
         1.5, 1.0, 15, 15, 3e-4, ALL, ("fp32", "bf16"), "", _CPU),
    _gpu("A100-80", "an A100 of 80 GB", 80, (312, 19.5), (300, 25, 2039, 32), "A100.*80GB.*", "A100 (SXM)"),
    _gpu("A100-40", "an A100 of 40 GB", 40, (312, 19.5), (300, 25, 1555, 32), "A100.*40GB.*", "A100 (SXM)"),
    _gpu("A800-80", "an A800 of 80 GB", 80, (312, 19.5), (200, 25, 2039, 32), "A800.*", "A800 (SXM)"),
    _gpu("H100-PCIe", "an H100 PCIe of 80 GB", 80, (756, 51), (300, 50, 2000, 64), "H100PCIe.*", "H100 PCIe"),
    _gpu("H100-NVL", "an H100 NVL of 94 GB", 94, (835, 60), (300, 50, 3900, 64), "H100NVL.*", "H100 NVL"),
    _gpu("H100", "an H100 (SXM) of 80 GB", 80, (989, 67), (450, 50, 3350, 64), "H100.*", "H100 (SXM)"),
    _gpu("H800", "an H800 (SXM) of 80 GB", 80, (989, 67), (200, 50, 3350, 64), "H800.*", "H800 (SXM)"),
    _gpu("H200", "an H200 (SXM) of 141 GB", 141, (989, 67), (450, 50, 4800, 64), "H200.*", "H200 (SXM)"),
    _gpu("H20-141", "an H20-3e (SXM) of 141 GB", 141, (148, 44), (450, 50, 4800, 64), "H20-3e.*", "H20-3e (SXM)"),
    _gpu("H20", "an H20 (SXM) of 96 GB", 96, (148, 44), (450, 50, 4000, 64), "H20(-96GB)?", "H20 (SXM)"),
    _gpu("GH200", "a GH200 of 96 GB", 96, (989, 67), (450, 50, 4000, 450), "GH200(480GB)?"),
    _gpu("GB200", "one GPU of a GB200 (NVL72), 186 GB", 186, (2500, 80), (900, 50, 8000, 450), "GB200.*"),
    _gpu("B200", "a B200 (HGX) of 180 GB", 180, (2250, 75), (900, 50, 7700, 64), "B200.*", "HGX B200"),
    _gpu("GB300", "one GPU of a GB300 (NVL72), 288 GB", 288, (2500, 80), (900, 100, 8000, 450), "GB300.*"),
    _gpu("B300", "a B300 (HGX) of 288 GB", 288, (2250, 75), (900, 100, 8000, 64), "B300.*", "HGX B300"),
    _gpu("L4", "an L4 of 24 GB", 24, (121, 30.3), (32, 12.5, 300, 32), "L4"),
    _gpu("L40", "an L40 of 48 GB", 48, (181, 90.5), (32, 25, 864, 32), "L40"),
    _gpu("L40S", "an L40S of 48 GB", 48, (362, 91.6), (32, 25, 864, 32), "L40S"),
    _gpu("A30", "an A30 of 24 GB", 24, (165, 10.3), (100, 12.5, 933, 32), "A30"),
    _gpu("A10", "an A10 of 24 GB", 24, (125, 31.2), (32, 12.5, 600, 32), "A10"),
    _gpu("A40", "an A40 of 48 GB", 48, (150, 37.4), (32, 25, 696, 32), "A40"),
    _gpu("T4", "a T4 of 16 GB", 16, (65, 8.1), (16, 12.5, 320, 16), "T4"),
    _gpu("RTX3090", "an RTX 3090 of 24 GB", 24, (71, 35.6), (32, 12.5, 936, 32), "RTX3090"),
    _gpu("RTXA6000", "an RTX A6000 of 48 GB", 48, (155, 38.7), (32, 12.5, 768, 32), "RTXA6000"),
    _gpu("RTX6000Ada", "an RTX 6000 Ada of 48 GB", 48, (182, 91.1), (32, 12.5, 960, 32), "RTX6000Ada.*"),
    _gpu("RTX5090", "an RTX 5090 of 32 GB", 32, (209, 104.8), (64, 12.5, 1792, 64), "RTX5090"),
    _gpu("RTX4090", "an RTX 4090 of 24 GB", 24, (165, 82.6), (32, 12.5, 1008, 32), "RTX4090"),
    _gpu("V100-32", "a V100 of 32 GB", 32, (125, 15.7), (150, 12.5, 900, 16), "V100-.*32GB.*", "Tesla V100 (SXM2)"),
    _gpu("V100-16", "a V100 of 16 GB", 16, (125, 15.7), (150, 12.5, 900, 16), "V100-.*16GB.*", "Tesla V100 (SXM2)"),
    # CANN calls a chip of the first generation Ascend910B too, without a digit behind it.
    _npu("910A", "an Ascend 910A of 32 GB", 32, (256, 16), (30, 12.5, 1200, 32), "910", "|".join(facts.FIRST), _910A),
    _npu("910B", "an Ascend 910B (Atlas A2) of 64 GB", 64, (376, 94), (196, 25, 1600, 32), "A2", "910B([123].*|4-1)",
         _910B),
    _npu("910B4", "an Ascend 910B4 (Atlas A2) of 32 GB", 32, (280, 70), (196, 25, 800, 32), "A2", "910B4", _910B4),
    # npu-smi calls it Ascend910, torch_npu by one of several numbers.
    _npu("910C", "one die of an Ascend 910C (Atlas A3), 64 GB", 64, (376, 94), (196, 25, 1600, 32), "A3",
         "910(_93.*|C.*)?", _910C),
    _npu("950PR", "an Ascend 950PR (Atlas A5) of 128 GB", 128, (500, 125), (1000, 50, 1600, 64), "950", "950PR.*",
         _950),
    _npu("950DT", "an Ascend 950DT (Atlas A5) of 144 GB", 144, (500, 125), (1000, 50, 4000, 64), "950", "950DT.*",
         _950),
)
# fmt: on
NAMED = {chip.name: chip for chip in CHIPS}
NAMES = tuple(NAMED)


def chip_name(raw: object) -> str:
    """Return the chip that a text names in large or small letters; raise ValueError if it names several."""
    text = str(raw)
    begun = [name for name in NAMES if name.casefold().startswith(text.casefold())] if text else []
    exact = next((name for name in begun if len(name) == len(text)), "")
    if len(begun) > 1 and not exact:
        raise ValueError(f"is {text!r}; there are {' and '.join(begun)}")
    return exact or text


def reported_chip(name: str) -> Chip | None:
    """Return the chip that a tool reports under `name` (`Ascend910B3`, `NVIDIA A100-SXM4-80GB`), or None."""
    plain = re.sub("^(NVIDIA|Tesla|GeForce|Ascend)+", "", name.replace(" ", ""))
    return next((chip for chip in CHIPS if chip.reported and re.fullmatch(chip.reported, plain)), None)


# Drivers keep up to this part of a device's memory for themselves; less is a part of a chip, or another one.
WHOLE = 0.9


def with_reported(train: object, name: object, memory: int = 0) -> tuple[object, list[Fault]]:
    """Return the train part with the chip that the nodes report as `name` (`Ascend910B3`), unless the job names a chip.

    `memory`: the MiB of a device; the plan takes them if the chip is unknown or has more, unless the job names its own.
    If the job's chip contradicts the nodes, it is a fault.
    """
    hardware: Any = (train.get("hardware") or {}) if isinstance(train, Mapping) else None
    if not isinstance(train, Mapping) or not isinstance(hardware, Mapping):
        return train, []
    chip = reported_chip(name) if isinstance(name, str) else None
    gigabytes = memory * 2**20 / 1e9
    if memory and not hardware.get("memory") and (chip is None or gigabytes < WHOLE * chip.memory):
        hardware = {**hardware, "memory": round(gigabytes, 3)}
    given = hardware.get("chip")
    if chip is None or given == chip.name:
        return {**train, "hardware": hardware}, []
    if not given:
        return {**train, "hardware": {**hardware, "chip": chip.name}}, []
    problem = f"is {given}, but the nodes report {name}, which is {chip.title}"
    return train, [Fault("train.hardware.chip", problem, f"hardware.chip: {chip.name}, or remove this key")]


def default_chip(kind: str, precision: str) -> Chip:
    """Return the chip that a plan assumes where the job names none: the first of `kind` that has `precision`."""
    return next(chip for chip in CHIPS if chip.kind == kind and precision in chip.types)
