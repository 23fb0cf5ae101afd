"""Compile every Triton kernel that a call launches for a GPU, on a machine without one.

`recorded` runs calls with the launches replaced: it records what would be compiled, and nothing is computed. `compiled`
then takes Triton's compiler and NVIDIA's assembler, which Triton brings, as far as machine code.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Launch:
    """A kernel with the types of its arguments and the values of its constants."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    """The arguments that 16 divides, as a real launch tells the compiler: pointers and whole numbers."""
    warps: int

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel needs on the GPU; `stack` bytes of each thread are spilled registers."""

    registers: int
    stack: int
    shared: int


def recorded(calls: Callable[[], None]) -> set[Launch]:
    """Return what the calls launch; their results are undefined."""
    launches: set[Launch] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        assert all(0 < size < 2**31 for size in grid)
        warps = named.pop("num_warps", 4)
        named.pop("num_stages", None)
        given = {**dict(zip(self.arg_names, args, strict=False)), **named}
        assert set(given) == set(self.arg_names), self.fn.__name__
        constants = {at.name: given[at.name] for at in self.params if at.is_constexpr}
        signature = {name: _type(value) for name, value in given.items()}
        # As at a real launch, 1 is a constant.
        constants |= {name: 1 for name, value in given.items() if type(value) is int and value == 1}
        signature |= dict.fromkeys(constants, "constexpr")
        names = [name for name in self.arg_names if name not in constants and _is_aligned(given[name])]
        aligned = tuple(map(self.arg_names.index, names))
        launches.add(Launch(self, tuple(signature.items()), tuple(constants.items()), aligned, warps))

    with mock.patch.object(JITFunction, "run", run):
        calls()
    return launches


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _is_aligned(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return type(value) is int and value % 16 == 0


def compiled(launch: Launch, capability: int, folder: Path) -> Resources:
    """Return the resources of the kernel's machine code for `capability`, such as 90 for 9.0."""
    facts = {(index,): [["tt.divisibility", 16]] for index in launch.aligned}
    source = ASTSource(launch.kernel, dict(launch.signature), dict(launch.constants), facts)
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(
        source, target=target, options={"num_warps": launch.warps, "enable_fp_fusion": True}
    )
    path = folder / f"{launch.name}.cubin"
    path.write_bytes(made.asm["cubin"])
    text = subprocess.run([TOOL, "-res-usage", path], capture_output=True, text=True, check=True)
    numbers = dict(re.findall(r"(REG|STACK|SHARED):(\d+)", text.stdout + text.stderr))
    return Resources(int(numbers["REG"]), int(numbers["STACK"]), made.metadata.shared)
