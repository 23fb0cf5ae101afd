"""Names of devices as npu-smi, nvidia-smi and torch print them in public logs, and the chip of the plan for each."""

from __future__ import annotations

import pytest

from native.npu import facts
from trainer.config.chips import CHIPS, reported_chip

KNOWN = {
    "Ascend910A": "910A", "Ascend910B": "910A", "910ProA": "910A", "Ascend910ProB": "910A", "910PremiumA": "910A",
    "910B1": "910B", "Ascend910B2": "910B", "910B2C": "910B", "Ascend 910B3": "910B", "910B3": "910B",
    "910B4": "910B4", "910B4-1": "910B", "Ascend910": "910C", "Ascend910_9362": "910C", "Ascend910_9372": "910C",
    "Ascend910_9381": "910C", "Ascend910_9382": "910C", "Ascend910_9391": "910C", "Ascend910_9392": "910C",
    "Ascend950PR_9599": "950PR", "Ascend950DT_95A1": "950DT",
    "NVIDIA A100-SXM4-80GB": "A100-80", "NVIDIA A100 80GB PCIe": "A100-80", "NVIDIA A100-SXM4-40GB": "A100-40",
    "A100-PCIE-40GB": "A100-40", "NVIDIA A800-SXM4-80GB": "A800-80", "NVIDIA A800 80GB PCIe": "A800-80",
    "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100-PCIe", "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H800": "H800", "NVIDIA H200": "H200", "NVIDIA H200 NVL": "H200", "NVIDIA H20": "H20",
    "NVIDIA H20-3e": "H20-141", "NVIDIA GH200 480GB": "GH200", "NVIDIA B200": "B200", "NVIDIA GB200": "GB200",
    "NVIDIA B300 SXM6 AC": "B300", "NVIDIA GB300": "GB300", "NVIDIA L4": "L4", "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S", "NVIDIA A40": "A40", "NVIDIA A30": "A30", "NVIDIA A10": "A10", "Tesla T4": "T4",
    "Tesla V100-SXM2-16GB": "V100-16", "Tesla V100-SXM2-32GB": "V100-32", "Tesla V100-PCIE-16GB": "V100-16",
    "Tesla V100-SXM3-32GB": "V100-32", "Tesla V100-DGXS-32GB": "V100-32", "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GeForce RTX 3090": "RTX3090", "NVIDIA GeForce RTX 5090": "RTX5090", "NVIDIA RTX A6000": "RTXA6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX6000Ada",
}  # fmt: skip
# Their memory is what their tool shows; their rates are not known. Some begin with the name of another chip.
UNKNOWN = (
    "NVIDIA A10G",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GH200 144G HBM3e",
    "Ascend310P3",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "Tesla P100-PCIE-16GB",
)


@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_sixty_names_of_devices(name: str) -> None:
    chip = reported_chip(name)
    assert (chip.name if chip else None) == KNOWN.get(name)
    # The ops and the plan see the same generation in a name.
    if chip is not None and chip.kind == "npu" and facts.generation(name.replace(" ", "")):
        assert chip.types == facts.GENERATIONS[facts.generation(name.replace(" ", ""))]


def test_the_list_has_sixty_names_and_each_chip_with_a_name_is_in_it() -> None:
    assert len(KNOWN) + len(UNKNOWN) >= 60
    assert set(KNOWN.values()) == {chip.name for chip in CHIPS if chip.reported}


def test_every_figure_of_a_chip_has_a_source() -> None:
    figures = ("memory", "half", "full", "efficiency", "node_gbytes", "net_gbytes", "memory_gbytes", "types")
    assert not [(chip.name, figure) for chip in CHIPS for figure in figures if not chip.source(figure)]
