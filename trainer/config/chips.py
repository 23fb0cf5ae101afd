"""Accelerators by name: memory, number types, peak rates and links, each figure with its public source.

`sources` names the document of each figure; the entry "" is the document of all others. A peak is dense, without
sparsity. `efficiency` is the part of the peak that a training reaches: for V100, A100 and 910 it is derived from the
rates that other trainers published (docs/guide/planning.md compares them one by one); well-tuned trainers reach more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    reported: tuple[str, ...] = ()
    """Beginnings of the names under which npu-smi, nvidia-smi and torch report it, without spaces."""
    sources: Mapping[str, str] = field(default_factory=dict)

    def source(self, figure: str) -> str:
        """Return the public source of a figure."""
        return self.sources.get(figure, self.sources.get("", ""))


ALL = ("fp32", "bf16", "fp16")
WITHOUT_BF16 = ("fp32", "fp16")
_NET = "assumed: 100 Gbit/s a device to other nodes"
_NET_200 = "assumed: 200 Gbit/s a device to other nodes"
_PUBLISHED = "rates published for recipes of this project's sources"
_AS_A100 = "assumed as the A100's"
_V100 = {
    "": "NVIDIA, Tesla V100 datasheet (SXM2)",
    "efficiency": _PUBLISHED,
    "net_gbytes": _NET,
    "latency": "assumed",
}
_A100 = {
    "": "NVIDIA, A100 datasheet (SXM)",
    "efficiency": _PUBLISHED,
    "net_gbytes": _NET_200,
    "latency": "assumed",
}
_HOPPER = {"efficiency": _AS_A100, "net_gbytes": "assumed: 400 Gbit/s a device", "latency": "assumed"}
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
_CUDA = "cuda"

# fmt: off
# In the order in which a kind's default is chosen: the first that computes with the job's precision.
CHIPS = (
    Chip(
        "cpu", "cpu", "one core of a server", 0, 0.073, 0.073, 0.8, 1.5, 1.0, 15, 15, 3e-4, ALL,
        ("fp32", "bf16"), (), _CPU_AVX2,
    ),
    Chip(
        "cpu-avx512", "cpu", "one core of a server with AVX-512", 0, 0.095, 0.095, 0.8, 1.5, 1.0, 15, 15, 3e-4,
        ALL, ("fp32", "bf16"), (), _CPU_AVX512,
    ),
    Chip(
        "cpu-avx512-bf16", "cpu", "one core of a server with AVX-512 and its bf16 products", 0, 0.219, 0.095, 0.8,
        1.5, 1.0, 15, 15, 3e-4, ALL, ("fp32", "bf16"), (), _CPU,
    ),
    Chip(
        "A100-80", _CUDA, "an A100 of 80 GB", 80, 312, 19.5, 0.28, 300, 25, 2039, 32, 2e-5, ALL, ALL,
        ("NVIDIAA100-SXM4-80GB", "NVIDIAA10080GB", "A100-SXM4-80GB", "NVIDIAA100-PCIE-80GB"), _A100,
    ),
    Chip(
        "A100-40", _CUDA, "an A100 of 40 GB", 40, 312, 19.5, 0.28, 300, 25, 1555, 32, 2e-5, ALL, ALL,
        ("NVIDIAA100-SXM4-40GB", "NVIDIAA100-PCIE-40GB", "A100-SXM4-40GB", "A100-PCIE-40GB"), _A100,
    ),
    Chip(
        "A800-80", _CUDA, "an A800 of 80 GB", 80, 312, 19.5, 0.28, 200, 25, 2039, 32, 2e-5, ALL, ALL,
        ("NVIDIAA800",), {**_A100, "": "NVIDIA, A800 datasheet (SXM)"},
    ),
    Chip(
        "H100", _CUDA, "an H100 (SXM) of 80 GB", 80, 989, 67, 0.28, 450, 50, 3350, 64, 2e-5, ALL, ALL,
        ("NVIDIAH10080GBHBM3",), {**_HOPPER, "": "NVIDIA, H100 datasheet (SXM)"},
    ),
    Chip(
        "H200", _CUDA, "an H200 (SXM) of 141 GB", 141, 989, 67, 0.28, 450, 50, 4800, 64, 2e-5, ALL, ALL,
        ("NVIDIAH200",), {**_HOPPER, "": "NVIDIA, H200 datasheet (SXM)"},
    ),
    Chip(
        "H20", _CUDA, "an H20 (SXM) of 96 GB", 96, 148, 44, 0.28, 450, 50, 4000, 64, 2e-5, ALL, ALL,
        ("NVIDIAH20-96GB", "NVIDIAH20"), {**_HOPPER, "": "NVIDIA, H20 datasheet (SXM)"},
    ),
    Chip(
        "V100-32", _CUDA, "a V100 of 32 GB", 32, 125, 15.7, 0.3, 150, 12.5, 900, 16, 2e-5, WITHOUT_BF16, WITHOUT_BF16,
        ("TeslaV100-SXM2-32GB", "TeslaV100-SXM3-32GB", "TeslaV100-PCIE-32GB"), _V100,
    ),
    Chip(
        "V100-16", _CUDA, "a V100 of 16 GB", 16, 125, 15.7, 0.3, 150, 12.5, 900, 16, 2e-5, WITHOUT_BF16, WITHOUT_BF16,
        ("TeslaV100-SXM2-16GB", "TeslaV100-PCIE-16GB"), _V100,
    ),
    Chip(
        "910A", "npu", "an Ascend 910A of 32 GB", 32, 256, 16, 0.24, 30, 12.5, 1200, 32, 3e-5, WITHOUT_BF16, (),
        ("910A", "910ProA", "910ProB", "910PremiumA"), _910A,
    ),
    Chip(
        "910B", "npu", "an Ascend 910B (Atlas A2) of 64 GB", 64, 376, 94, 0.24, 196, 25, 1600, 32, 3e-5, ALL, ALL,
        ("910B1", "910B2", "910B3"), _910B,
    ),
    Chip(
        "910C", "npu", "one die of an Ascend 910C (Atlas A3), 64 GB", 64, 376, 94, 0.24, 196, 25, 1600, 32, 3e-5,
        ALL, ALL, ("Ascend910_93", "910_93", "910C"), _910C,
    ),
    Chip(
        "950PR", "npu", "an Ascend 950PR (Atlas A5) of 128 GB", 128, 500, 125, 0.24, 1000, 50, 1600, 64, 3e-5,
        ALL, ALL, ("Ascend950PR", "950PR"), _950,
    ),
    Chip(
        "950DT", "npu", "an Ascend 950DT (Atlas A5) of 144 GB", 144, 500, 125, 0.24, 1000, 50, 4000, 64, 3e-5,
        ALL, ALL, ("Ascend950DT", "950DT"), _950,
    ),
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
    plain = name.replace(" ", "")
    names = (plain, plain.removeprefix("Ascend"))
    return next(
        (chip for chip in CHIPS if any(text.startswith(known) for known in chip.reported for text in names)),
        None,
    )


def default_chip(kind: str, precision: str) -> Chip:
    """Return the chip that a plan assumes where the job names none: the first of `kind` that has `precision`."""
    return next(chip for chip in CHIPS if chip.kind == kind and precision in chip.types)
