"""The CPU's attention under autocast, and where it hands over to the reference."""

from __future__ import annotations

import pytest
import torch

from native import cases, reference
from native.cpu import attention as cpu


def test_under_autocast_it_is_what_the_reference_is() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 200, 8, generator=generator).requires_grad_() for _ in range(3))
    found = []
    for op in (cpu.attention, reference.attention):
        q.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = op(q, k, v)
        out.float().square().sum().backward()
        found.append((out.detach(), q.grad))
    assert found[0][0].dtype == found[1][0].dtype == torch.bfloat16
    assert cases.error(found[0][0], found[1][0]) < 2e-2
    assert cases.error(found[0][1], found[1][1]) < 3e-2


def test_queries_that_see_no_key_are_as_the_reference_has_them() -> None:
    q, k = torch.randn(1, 1, 140, 4), torch.randn(1, 1, 130, 4)
    assert cases.error(cpu.attention(q, k, k), reference.attention(q, k, k)) == 0


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    q = torch.randn(1, 1, 130, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(cpu.attention(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
