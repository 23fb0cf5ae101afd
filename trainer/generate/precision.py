"""The type of a model's matrices: which types a device computes with, and its default."""

from __future__ import annotations

from native.decode.matrix import TYPES
from native.decode.packed import KINDS
from trainer.config.chips import reported_chip
from trainer.device import Device
from trainer.errors import InputError

CHOICES = (*KINDS, "fp16")
"""The names of all types; a CPU supports some, and a device others."""
# The first CUDA devices that multiply in bf16.
AMPERE = (8, 0)


def weight_type(wanted: str, device: Device) -> str:
    """Return the type of matrices on a device: `wanted` if the device supports it; for "" the device's default.

    The default is fp32 on a CPU; on a device it is bf16, or fp16 if the chip does not compute in bf16.
    """
    if device.kind == "cpu":
        return _on_cpu(wanted)
    if wanted not in ("", *CHOICES):
        raise InputError(f"--weights: {wanted!r} is not a type", f"use {', '.join(TYPES)}")
    if wanted in ("fp32", "fp16"):
        return wanted
    narrow = "bf16" if has_bf16(device) else "fp16"
    if wanted == "bf16" and narrow != wanted:
        raise InputError(f"--weights bf16: {device.described()} does not support bf16", "use --weights fp16")
    if wanted not in ("", *TYPES):
        raise InputError(
            f"--weights {wanted}: 8-bit weights need a CPU, and the device is {device.name}",
            f"use --weights {narrow}, or --device cpu",
        )
    return narrow


def _on_cpu(wanted: str) -> str:
    if wanted == "fp16":
        raise InputError("--weights fp16: fp16 is not supported on a CPU", "use --weights bf16")
    if wanted and wanted not in KINDS:
        raise InputError(f"--weights: {wanted!r} is not a type", f"use {', '.join(KINDS)}")
    return wanted or "fp32"


def has_bf16(device: Device) -> bool:
    """Return whether a CUDA device or an NPU supports bf16, from its compute capability or its name."""
    chip = reported_chip(device.described())
    if chip is not None:
        return "bf16" in chip.types
    return device.kind == "npu" or device.capability() >= AMPERE
