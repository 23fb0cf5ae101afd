"""The Triton kernels: run by Triton's interpreter in a process of their own, and compiled for GPUs without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import native
from native.cuda import blocks, language

ROOT = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(
    not hasattr(language.triton, "knobs"),
    reason="Triton 3.4 or newer is not installed (pip install triton); the kernels also run on 3.2 and 3.3, but the "
    "interpreter of these cannot take NumPy 2.4, and their compiler has other arguments",
)


@needs_triton
@pytest.mark.timeout(600)
def test_the_kernels_compute_the_meaning_of_every_case_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/native/cuda"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@needs_triton
@pytest.mark.parametrize("capability", ["few", 80, 86, 89, 90, 100, 120])
def test_every_launch_compiles_to_machine_code_with_few_spilled_registers(
    capability: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.native.cuda.launches import calls
    from tests.support.gpu_compiler import compiled, recorded

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # The kernels of the smallest width alone.
    few = capability == "few"
    target = 90 if few else int(capability)
    key = ".".join(map(str, divmod(target, 10)))
    monkeypatch.setattr(blocks, "key_of", lambda x: key)
    launches = recorded(lambda: calls((torch.bfloat16,), (768,)) if few else calls())
    assert len({launch.name for launch in launches}) >= (12 if few else 13)
    for launch in launches:
        needed = compiled(launch, target, tmp_path)
        # The widest rows that a program holds; else 8 bytes a thread in `_derive`, and 16 to 24 in fp32's `_stretch`.
        most = 64 if ("WIDTH", 16384) in launch.constants else 24
        assert needed.stack <= most and needed.shared <= 99 << 10 and needed.registers <= 255, (
            launch,
            needed,
        )


def test_without_triton_every_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "triton", None)
    statuses = {status.op: status for status in native.survey("cuda") if status.backend == "cuda"}
    assert statuses.pop("attention").reason == "torch sees no CUDA device"
    assert {status.reason for status in statuses.values()} == {
        "Triton is not installed; install the package triton"
    }
    assert {chosen.backend for chosen in native.choose("cuda").report()} == {"reference"}


@pytest.mark.parametrize(
    ("version", "capability", "reason"),
    [
        ("3.1.0", (9, 0), "Triton 3.1.0 is too old; 3.2 or newer is needed"),
        ("3.9.0+git12", (7, 0), "Tesla V100 has compute capability 7.0; Triton needs 8.0 or newer"),
        ("3.9.0", None, "torch sees no CUDA device"),
        ("3.10.0", (9, 0), ""),
    ],
)
def test_it_says_why_the_kernels_cannot_run(
    monkeypatch: pytest.MonkeyPatch, version: str, capability: tuple[int, int] | None, reason: str
) -> None:
    class Triton:
        __version__ = version

    monkeypatch.setattr(language, "triton", Triton)
    monkeypatch.setattr(language, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    assert language.why_not() == reason


@needs_triton
def test_versions_without_knobs_are_asked_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(language.triton, "knobs")
    assert not language.interpreted()
    assert language.why_not() in ("", "torch sees no CUDA device")


def test_a_device_that_is_not_for_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "interpreted", lambda: False)
    monkeypatch.setattr(language, "triton", type("Triton", (), {"__version__": "3.9.0"}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm 6.4" in language.why_not()
