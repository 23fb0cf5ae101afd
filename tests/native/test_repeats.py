"""Ten runs with a fixed number of threads give identical bytes; the sanitizers run this file to see every thread."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from native.registry import BACKENDS, OPS
from native.update import AdamWStep
from tests.support import op_cases as cases

THREADS = 2
RUNS = 10
CPU = next(backend for backend in BACKENDS if backend.name == "cpu")


def largest(op: str) -> list[cases.Case]:
    """Return the case of each type with the most numbers: large enough to be divided among threads."""
    ordered = sorted(cases.cases(op), key=lambda case: sum(x.numel() for x in case.inputs()))
    return list({case.dtype: case for case in ordered}.values())


LARGEST = [case for op in OPS if op in CPU.modules for case in largest(op)]


@pytest.fixture(autouse=True)
def threads(our_products: None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", LARGEST, ids=str)
def test_ten_runs_give_identical_bytes(case: cases.Case) -> None:
    op = getattr(importlib.import_module(CPU.modules[case.op]), case.op)
    inputs = case.inputs()
    results = [cases.run(case, op, inputs) for _ in range(RUNS)]
    expected = [digest(tensor) for tensor in (results[0].value, *results[0].gradients)]
    for result in results[1:]:
        assert [digest(tensor) for tensor in (result.value, *result.gradients)] == expected


def test_ten_updates_and_sums_give_identical_bytes() -> None:
    adamw = importlib.import_module(CPU.modules["adamw"]).adamw
    square_sum = importlib.import_module(CPU.modules["square_sum"]).square_sum
    seen = set()
    for _ in range(RUNS):
        state = State.random(200_003)
        adamw(state.step())
        seen.add((*map(digest, state.tensors()), digest(square_sum([state.weight, state.average]))))
    assert len(seen) == 1


@dataclass(frozen=True)
class State:
    """One tensor of a model with its gradient and moments."""

    weight: Tensor
    gradient: Tensor
    average: Tensor
    square: Tensor

    @classmethod
    def random(cls, count: int) -> State:
        generator = torch.Generator().manual_seed(2)
        weight, gradient, average = torch.randn(3, count, generator=generator)
        return cls(weight, gradient.bfloat16(), average, average.square() + 0.1)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.weight, self.average, self.square

    def step(self) -> AdamWStep:
        groups = ([self.weight], [self.gradient], [self.average], [self.square], [None], (0.1,))
        return AdamWStep(*groups, step=3, rate=0.01, betas=(0.9, 0.95), eps=1e-8, factor=0.5)


def digest(x: Tensor) -> bytes:
    """Return the bytes of `x`, so that NaNs with equal bits are equal."""
    return x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
