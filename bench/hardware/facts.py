"""The step `facts`: what the device and its software are, and the ceilings that other rows are compared with."""

from __future__ import annotations

import importlib
import platform
import subprocess
import sys
import time

import torch

import native
from bench.hardware.step import emit, part
from bench.train.activities import runtime_of, seconds, wait
from trainer.plan.resolve import read_config
from trainer.train.rates import Rates

TABLE = "facts"
# How large the products and copies are.
SIDES = {"cuda": 8192, "npu": 8192, "cpu": 512}
COPIED = {"cuda": 1 << 30, "npu": 1 << 30, "cpu": 1 << 24}


def versions(device: str) -> None:
    runtime = runtime_of(device)
    name = runtime.get_device_name(0) if runtime else platform.processor() or platform.machine()
    emit(TABLE, fact="device", value=name)
    emit(TABLE, fact="Python", value=platform.python_version())
    for module in ("torch", "triton", "numpy", "torch_npu", "liger_kernel", "transformers"):
        try:
            version = getattr(importlib.import_module(module), "__version__", "installed")
        except ImportError:
            version = "not installed"
        emit(TABLE, fact=module, value=version)
    emit(TABLE, fact="CUDA of torch", value=torch.version.cuda)
    if device == "cuda":
        keys = "driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit,mig.mode.current"
        query = ["nvidia-smi", f"--query-gpu={keys}", "--format=csv,noheader"]
        with part(TABLE, fact=keys):
            done = subprocess.run(query, capture_output=True, text=True, timeout=20)
            emit(TABLE, fact=keys, value=done.stdout.strip() or done.stderr.strip())
        free, total = runtime.mem_get_info()
        emit(TABLE, fact="memory free / whole, GB", value=f"{free / 1e9:.1f} / {total / 1e9:.1f}")
    with part(TABLE, fact="peak bf16, TFLOP/s"):
        config = read_config({"model": "gpt2-124M", "steps": 1, "data": {"prefix": "x"}, "precision": "bf16"})
        rates = Rates.of(config, 1, device, name, torch.get_num_threads())
        emit(TABLE, fact="peak bf16, TFLOP/s", value=float(rates.peak), source=rates.source)


def ceilings(device: str) -> None:
    side = SIDES[device]
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        with part(TABLE, fact=f"GEMM {name}, TFLOP/s"):
            a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            rate = 2 * side**3 / seconds(device, lambda a=a, b=b: a @ b, 10) / 1e12  # type: ignore[misc]
            emit(TABLE, fact=f"GEMM {name}, TFLOP/s", value=rate, source=f"{side} x {side}, by torch")
    source = torch.ones(COPIED[device], device=device)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / seconds(device, lambda: target.copy_(source)) / 1e9
    emit(TABLE, fact="copy, GB/s", value=rate, source=f"{source.nbytes / 1e9:.1f} GB, read and written")
    small = torch.ones(1, device=device)
    few = 1000
    wait(device)
    began = time.perf_counter()
    for _ in range(few):
        small.add_(1)
    launch = (time.perf_counter() - began) / few
    both = seconds(device, lambda: (small.add_(1), wait(device)), 200)
    emit(TABLE, fact="launch, us", value=launch * 1e6, source="the host's time of an add of one number")
    emit(TABLE, fact="launch and wait, us", value=both * 1e6, source="until the device has done it")


def main() -> None:
    device = sys.argv[1]
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device")
    versions(device)
    ceilings(device)
    for status in native.survey(device):
        if status.backend != "reference":
            emit(
                "backends", op=status.op, backend=status.backend, works=status.available, reason=status.reason
            )


if __name__ == "__main__":
    main()
