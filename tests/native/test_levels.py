"""Every instruction set that this processor has gives the meaning of every case."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from native import reference
from native.compiled import library
from native.registry import BACKENDS
from tests.support import op_cases as cases

OPS = list(dict.fromkeys(case.op for case in cases.cases()))
LOWER = (0, 1)
NAMES = [library.LEVELS[number] for number in LOWER]
# The number of AVX-512 without its instructions for bf16.
WITHOUT_BF16 = 4
CPU = next(backend for backend in BACKENDS if backend.name == "cpu")


@pytest.fixture
def level(request: pytest.FixtureRequest, compiled: object) -> Iterator[int]:
    """Use a lower level than the processor's for one test."""
    found = library.load()
    own, lower = found.level, int(request.param)
    if own <= (1 if lower == WITHOUT_BF16 else lower):
        pytest.skip(f"this processor's level is {library.LEVELS[own]}: the other tests use it")
    object.__setattr__(found, "level", lower)
    yield lower
    object.__setattr__(found, "level", own)


@pytest.mark.parametrize("level", [*LOWER, WITHOUT_BF16], indirect=True, ids=[*NAMES, "AVX-512 without BF16"])
@pytest.mark.parametrize("op", OPS)
def test_every_level_gives_the_meaning_of_every_case(level: int, op: str, our_products: None) -> None:
    function = getattr(importlib.import_module(CPU.modules[op]), op)
    for case in cases.cases(op):
        inputs = case.inputs()
        expected = cases.meaning(case, getattr(reference, op), inputs)
        actual = cases.run(case, function, inputs)
        assert cases.error(actual.value, expected.value) <= case.value_error, str(case)
        for ours, theirs in zip(actual.gradients, expected.gradients, strict=True):
            assert cases.error(ours, theirs) <= case.gradient_error, str(case)


@pytest.mark.parametrize("level", LOWER, indirect=True, ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_level_writes_in_place(level: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rotary, embedding = (importlib.import_module(CPU.modules[op]) for op in ("rotary", "embedding"))
    q, k = (torch.randn(2, heads, 5, 32, generator=generator).to(dtype) for heads in (4, 2))
    angles = torch.rand(1, 1, 5, 10, generator=generator)
    expected = rotary.rotary(q, k, angles.cos(), angles.sin())
    actual = rotary.rotary_(q, k, angles.cos(), angles.sin())
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
    assert actual[0] is q and actual[1] is k

    weight, ids = torch.randn(40, 300, generator=generator).to(dtype).requires_grad_(), torch.arange(9) % 4
    upstream = torch.randn(9, 300, generator=generator).to(dtype)
    rows, other = embedding.tied_embedding(ids, weight)
    ((rows * upstream).sum() + (other * other.detach()).sum()).backward()
    wanted = weight.detach().double().index_add(0, ids, upstream.double())
    allowed = 1e-6 if dtype == torch.float32 else 2**-8
    assert torch.allclose(weight.grad.double(), wanted, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("level", LOWER, indirect=True, ids=NAMES)
def test_the_update_of_a_lower_level_is_nearly_the_same(level: int) -> None:
    # Sums have the same order at every level; only fused multiplications round differently.
    x = torch.randn(1003, generator=torch.Generator().manual_seed(0))
    square_sum = importlib.import_module("native.cpu.square_sum").square_sum
    assert float(square_sum([x])) == pytest.approx(float(x.double().square().sum()), rel=1e-6)


def test_every_level_chooses_the_same_experts(compiled: object) -> None:
    # The kernel for AVX-512 has a way of its own for up to 64 experts, two rows at a time.
    route, found = importlib.import_module("native.cpu.route").route, library.load()
    generator = torch.Generator().manual_seed(0)
    for experts in (1, 3, 16, 17, 33, 48, 63, 64, 65, 100):
        # Few different logits, so that many are equal; some are infinite or not a number.
        logits = torch.randint(-3, 4, (7, experts), generator=generator).float()
        logits[2, experts // 2], logits[4], logits[5, 0] = float("nan"), float("nan"), float("-inf")
        chosen = {}
        for level in range(found.level + 1):
            own = found.level
            object.__setattr__(found, "level", level)
            try:
                chosen[level] = [route(x, min(8, experts))[2] for x in (logits, logits.bfloat16())]
            finally:
                object.__setattr__(found, "level", own)
        for level, both in chosen.items():
            for ours, plain in zip(both, chosen[0], strict=True):
                assert torch.equal(ours, plain), (experts, level)
        # Rows without a NaN: the reference's choice, the lower number first.
        good = [0, 1, 3, 5, 6]
        order = torch.sort(logits[good], dim=1, descending=True, stable=True).indices[:, : min(8, experts)]
        assert torch.equal(chosen[found.level][0][good], order), experts


def test_a_variable_lowers_the_level_and_a_wrong_name_is_refused(compiled: object) -> None:
    def report(name: str) -> list[dict[str, object]]:
        argv = [sys.executable, "-m", "native", "--json"]
        env = {**os.environ, library.LEVEL_VARIABLE: name}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
        ops: list[dict[str, object]] = json.loads(done.stdout)["ops"]
        return ops

    def reasons(name: str) -> str:
        return json.dumps([op["backends"] for op in report(name) if op["op"] == "gelu"])

    if library.load().level:
        assert "C++, baseline" in reasons("baseline")
    assert "CLUSTERCTL_NATIVE_LEVEL is 'fast'; try: baseline, AVX2, AVX-512" in reasons("fast")
