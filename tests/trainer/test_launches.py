"""What the host starts on a GPU, and where it waits: a change that adds a launch or a wait must be meant."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("triton.runtime.jit", reason="Triton is not installed")

import torch

# It lists torch's functions when it is imported, so none of them may be replaced then.
import torch._dynamo

import native
from bench.host import config_of, step_calls, token_calls
from tests.support.suppressed import without_launches
from trainer.model.attention.sight import Sight
from trainer.model.gpt import GPT
from trainer.model.norm import Norm
from trainer.model.rotary import turns

# One more layer of a step of 1 and of 2 micro-batches, and what the passes do beside layers, op by op.
PASSES = {"GPT": (30, 84, 29), "GPT, dropout": (36, 96, 33), "Llama": (28, 68, 32)}
# The end of a step of 1 and of 2 micro-batches: norm, clip factor, update, report.
ENDS = {"GPT": (26, 24), "GPT, dropout": (26, 24), "Llama": (24, 22)}
# The passes of a step of 1 and of 2 micro-batches as captured graphs, for any number of layers.
GRAPHS = {"GPT": (6, 11), "GPT, dropout": (7, 13), "Llama": (6, 11)}
# One more layer of a token op by op, what a token takes beside layers, and all of it as a captured graph.
TOKENS = {"GPT": (11, 18, 3), "Llama": (12, 23, 3)}
ONE_WAIT = Counter({"_to_copy": 1})


@pytest.mark.parametrize("shape", PASSES)
def test_a_step_starts_so_many_launches_and_waits_once_at_its_end(shape: str) -> None:
    layer, two, rest = PASSES[shape]
    found = [step_calls(config_of(shape, layers), micros) for micros in (1, 2) for layers in (1, 2)]
    few, more, both, others = (passes for passes, _ in found)
    assert not any(passes.waits for passes, _ in found)
    assert (more.launches - few.launches).total() == layer, more.launches - few.launches
    assert (others.launches - both.launches).total() == two, others.launches - both.launches
    assert few.launches.total() == layer + rest, few.launches
    # For any number of layers.
    one, several = ENDS[shape]
    for (_, end), expected in zip(found, (one, one, several, several), strict=True):
        assert end.launches.total() == expected and end.waits == ONE_WAIT, end


@pytest.mark.parametrize("shape", GRAPHS)
def test_a_captured_pass_is_one_launch_and_the_copies_of_its_inputs(shape: str) -> None:
    for micros, layers, expected in zip((1, 2), (2, 1), GRAPHS[shape], strict=True):
        passes, end = step_calls(config_of(shape, layers, "graph"), micros)
        assert passes.launches["graph"] == micros and passes.launches.total() == expected, passes
        assert not passes.waits and end.waits == ONE_WAIT


@pytest.mark.parametrize("shape", TOKENS)
def test_a_token_waits_once_and_starts_so_many_launches_for_any_number_of_texts(shape: str) -> None:
    layer, rest, graph = TOKENS[shape]
    for texts in (1, 3):
        few, more = (token_calls(config_of(shape, layers).model, texts, False) for layers in (1, 2))
        assert (more.launches - few.launches).total() == layer, more.launches - few.launches
        assert few.launches.total() == layer + rest, few.launches
        captured = token_calls(config_of(shape, 1).model, texts, True)
        assert captured.launches.total() == graph and captured.launches["graph"] == 1, captured
        assert few.waits.total() == captured.waits.total() == 1


@pytest.mark.parametrize("capacity", [0.0, 1.25])
def test_a_captured_token_of_a_model_with_experts_is_one_launch(capacity: float) -> None:
    config = replace(config_of("Llama", 1).model, experts=4, top_k=2, capacity=capacity)
    found = token_calls(config, 3, True)
    assert found.launches.total() == 3 and found.launches["graph"] == 1 and found.waits == ONE_WAIT, found


@pytest.mark.parametrize("shape", PASSES)
def test_a_block_with_the_ops_of_a_gpu_is_one_graph_of_the_compiler(shape: str) -> None:
    config = config_of(shape, 1).model
    with without_launches("cpu"):
        model = GPT(config, native.choose("cuda"), seed=1).bfloat16()
        for module in model.modules():
            if isinstance(module, Norm):
                module.float()
        x = torch.ones(1, 4, config.hidden, dtype=torch.bfloat16, requires_grad=True)
        sight = Sight(turns=turns(torch.arange(4), config, 4) if config.rotary else None)
        try:
            compiled = torch.compile(
                model.blocks["0"], fullgraph=True, backend="aot_eager_default_partitioner"
            )
            compiled(x, sight).sum().backward()
        finally:
            torch.compiler.reset()
    assert x.grad is not None
