"""What the host starts on a GPU, and where it waits: a change that adds a launch or a wait must be meant."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("triton.runtime.jit", reason="Triton is not installed")

from bench.host import config_of, step_calls, token_calls

# One more layer of a step of 1 and of 2 micro-batches, and what the passes do beside layers, op by op.
PASSES = {"GPT": (30, 84, 29), "GPT, dropout": (36, 96, 33), "Llama": (28, 68, 32)}
# The end of a step of 1 and of 2 micro-batches: norm, clip factor, update, report.
ENDS = {"GPT": (27, 25), "GPT, dropout": (27, 25), "Llama": (25, 23)}
# The passes of a step of 1 and of 2 micro-batches as captured graphs, for any number of layers.
GRAPHS = {"GPT": (5, 9), "GPT, dropout": (6, 11), "Llama": (5, 9)}
# One more layer of a token op by op, what a token takes beside layers, and all of it as a captured graph.
TOKENS = {"GPT": (13, 23, 8), "Llama": (14, 28, 8)}
ONE_WAIT = Counter({"_to_copy": 1})


@pytest.mark.parametrize("shape", PASSES)
def test_passes_of_a_step_start_so_many_launches_and_wait_for_nothing(shape: str) -> None:
    layer, two, rest = PASSES[shape]
    few, more, both, others = (
        step_calls(config_of(shape, layers), micros)[0] for layers, micros in ((1, 1), (2, 1), (1, 2), (2, 2))
    )
    assert not few.waits and not both.waits
    assert (more.launches - few.launches).total() == layer, more.launches - few.launches
    assert (others.launches - both.launches).total() == two, others.launches - both.launches
    assert few.launches.total() == layer + rest, few.launches


@pytest.mark.parametrize("shape", ENDS)
def test_a_step_ends_with_one_wait_and_so_many_launches_for_any_number_of_layers(shape: str) -> None:
    for micros, layers, expected in zip((1, 2), (2, 1), ENDS[shape], strict=True):
        _, end = step_calls(config_of(shape, layers), micros)
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
