"""The type that a model's matrices are stored in: what a device computes with, and what it is by default."""

from __future__ import annotations

from native.decode.matrix import TYPES
from native.decode.packed import KINDS
from trainer.config.chips import reported_chip
from trainer.device import Device
from trainer.errors import InputError

CHOICES = (*KINDS, "fp16")
"""Names of all types, of which a CPU has some and a device has others."""
# The first CUDA devices that multiply in bf16.
AMPERE = (8, 0)


def weight_type(wanted: str, device: Device) -> str:
    """Return the type of matrices on a device: `wanted` if it has that, for "" the usual one.

    The usual one is fp32 on a CPU; on a device bf16, or fp16 where the chip does not compute in bf16.
    """
    if device.kind == "cpu":
        return _on_cpu(wanted)
    if wanted not in ("", *CHOICES):
        raise InputError(f"--weights: {wanted!r} is not a type", f"use {', '.join(TYPES)}")
    if wanted in ("fp32", "fp16"):
        return wanted
    narrow = "bf16" if has_bf16(device) else "fp16"
    if wanted == "bf16" and narrow != wanted:
        raise InputError(
            f"--weights bf16: {device.described()} does not compute in bf16", "use --weights fp16"
        )
    if wanted not in ("", *TYPES):
        raise InputError(
            f"--weights {wanted}: only a CPU multiplies with weights in 8 bits here, and the device is {device.name}",
            f"use --weights {narrow}, or --device cpu",
        )
    return narrow


def _on_cpu(wanted: str) -> str:
    if wanted == "fp16":
        raise InputError("--weights fp16: a CPU has no kernels for fp16", "use --weights bf16")
    if wanted and wanted not in KINDS:
        raise InputError(f"--weights: {wanted!r} is not a type", f"use {', '.join(KINDS)}")
    return wanted or "fp32"


def has_bf16(device: Device) -> bool:
    """Return whether a CUDA device or an NPU computes in bf16, by its name or its compute capability."""
    chip = reported_chip(device.described())
    if chip is not None:
        return "bf16" in chip.types
    return device.kind == "npu" or device.capability() >= AMPERE
