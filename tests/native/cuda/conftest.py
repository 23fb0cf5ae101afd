"""Run these tests on a GPU; without one only in Triton's interpreter, in the process that test_cuda.py starts."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from native.cuda import language
from tests.support.on_device import tensors_on

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
collect_ignore_glob = ["test_*.py"] if language.why_not() else []

if INTERPRETED:
    from tests.support import triton_rounding

    triton_rounding.install()


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    """Make the tensors of a test where its kernels run. On a CPU the reference's products are too small for threads."""
    import torch

    torch.set_num_threads(1)
    with tensors_on(DEVICE):
        yield
