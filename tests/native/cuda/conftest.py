"""Collect these tests only where Triton's interpreter runs the kernels: in the process that test_cuda.py starts."""

from __future__ import annotations

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]

if INTERPRETED:
    from tests.support import triton_rounding

    triton_rounding.install()


@pytest.fixture(autouse=True)
def one_thread_of_torch() -> None:
    """Keep the reference on one thread: its products are too small to share."""
    import torch

    torch.set_num_threads(1)
