"""torch.compile keeps every op of a CPU in one graph, and torch's own check of custom ops passes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from native.compiled.library import NAMESPACE
from native.registry import BACKENDS
from tests.support import op_cases as cases

pytestmark = pytest.mark.usefixtures("our_products")
# One case of each op.
NAMES = {
    "gelu": "tanh",
    "bias_gelu": "tanh",
    "swiglu": "small",
    "attention": "dropout, documents, groups",
    **dict.fromkeys(("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"), "small"),
}
FIRST = {
    case.op: case
    for case in reversed(list(cases.cases()))
    if case.dtype == torch.bfloat16 and case.name == NAMES.get(case.op, case.name)
}
SMALL = list(FIRST.values())
# Ranks exchange numbers in the middle of this one: it is two nodes, and autograd is around them.
EXCHANGING = "vocabulary_cross_entropy"


def of_cpu(case: cases.Case) -> Any:
    cpu = next(backend for backend in BACKENDS if backend.name == "cpu")
    return getattr(importlib.import_module(cpu.modules[case.op]), case.op)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("case", [case for case in SMALL if case.op != EXCHANGING], ids=str)
def test_a_compiled_model_has_one_graph_and_the_same_bits(case: cases.Case) -> None:
    op, inputs = of_cpu(case), case.inputs()
    expected = cases.run(case, op, inputs)
    found = cases.run(case, torch.compile(op, fullgraph=True, backend="aot_eager"), inputs)
    pairs = zip((found.value, *found.gradients), (expected.value, *expected.gradients), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


class Recorder(TorchDispatchMode):
    """Records the calls of ops of this library, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if op.namespace == NAMESPACE:
            copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in arguments]
            self.calls.setdefault(op, tuple(copies))
        return op(*arguments, **(named or {}))


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_every_op_of_forward_and_backward_passes_torchs_check(case: cases.Case) -> None:
    with Recorder() as recorder:
        cases.run(case, of_cpu(case), case.inputs())
    assert recorder.calls
    for op, arguments in recorder.calls.items():
        torch.library.opcheck(op, arguments)
        is_forward = "backward" not in op.name() and not op._schema.is_mutable
        if is_forward:
            wanted = [
                x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
                for x in arguments
            ]
            torch.library.opcheck(op, tuple(wanted), test_utils="test_aot_dispatch_dynamic")
