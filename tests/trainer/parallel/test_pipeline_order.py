"""The order of a pipeline's passes: torch's own, without a deadlock, and no more under way than the plan counts."""

from __future__ import annotations

from collections import Counter, deque

import pytest

from trainer.config.layout import Layout
from trainer.config.model import ModelConfig
from trainer.config.parts import ParallelConfig
from trainer.config.train_config import TrainConfig
from trainer.engine.pipeline import UNTAKEN
from trainer.parallel.pipeline import (
    Action,
    forward_only,
    one_forward_one_backward,
    source_of,
    target_of,
)
from trainer.plan.memory import under_way

SHAPES = [(2, 1, 2), (2, 1, 5), (4, 1, 8), (4, 1, 3), (2, 2, 4), (2, 3, 6), (4, 2, 4), (4, 3, 16), (3, 2, 9)]


@pytest.mark.parametrize(("stages", "pieces", "micros"), [shape for shape in SHAPES if shape[1] > 1])
def test_the_interleaved_order_is_torchs(stages: int, pieces: int, micros: int) -> None:
    from torch.distributed.pipelining import schedules

    if not hasattr(schedules, "_get_warmup_ops"):
        pytest.skip("this torch has its order within a class")
    for stage in range(stages):
        warm = schedules._get_warmup_ops(stage, pieces, stages, stages, micros)

        def forward(at: int, stage: int = stage) -> int:
            return at // stages % pieces * stages + stage

        def backward(at: int, stage: int = stage, warm: int = warm) -> int:
            return (pieces - 1 - (at - warm) // stages % pieces) * stages + stage

        steady = pieces * micros - warm
        theirs = schedules._get_1f1b_rank_ops(pieces, stages, warm, steady, warm, stage, forward, backward)
        found = [
            Action(one.computation_type is schedules.FORWARD, one.stage_index // stages, one.microbatch_index)
            for one in theirs
            if one is not None
        ]
        assert one_forward_one_backward(stage, stages, pieces, micros) == found


@pytest.mark.parametrize(("stages", "pieces", "micros"), SHAPES)
@pytest.mark.parametrize("backward", [True, False])
def test_every_pass_is_made_once_and_the_stages_never_wait_for_each_other_in_a_circle(
    stages: int, pieces: int, micros: int, backward: bool
) -> None:
    """Limit of the results in a link that its receiver has not requested yet."""
    programs = [
        deque(
            one_forward_one_backward(stage, stages, pieces, micros)
            if backward
            else forward_only(stages, pieces, micros)
        )
        for stage in range(stages)
    ]
    # Untaken results, by sender and direction.
    links: Counter[tuple[int, bool]] = Counter()
    done = 0
    while any(programs):
        before = done
        for stage, program in enumerate(programs):
            while program:
                action = program[0]
                source, target = (of(action, stage, stages, pieces) for of in (source_of, target_of))
                if source is not None and not links[source, action.forward]:
                    break
                if target is not None and links[stage, action.forward] >= UNTAKEN:
                    break
                if source is not None:
                    links[source, action.forward] -= 1
                links[stage, action.forward] += target is not None
                program.popleft()
                done += 1
        assert done > before, "a circle"
    assert done == stages * pieces * micros * (2 if backward else 1)
    assert not any(links.values())


@pytest.mark.parametrize(("stages", "pieces", "micros"), SHAPES)
def test_a_link_carries_results_in_the_order_in_which_they_are_wanted(
    stages: int, pieces: int, micros: int
) -> None:
    programs = [one_forward_one_backward(stage, stages, pieces, micros) for stage in range(stages)]
    for sender in range(stages):
        for forward in (True, False):
            receiver = (sender + (1 if forward else -1)) % stages
            sent = [
                action.micro
                for action in programs[sender]
                if action.forward == forward and target_of(action, sender, stages, pieces) == receiver
            ]
            wanted = [
                action.micro
                for action in programs[receiver]
                if action.forward == forward and source_of(action, receiver, stages, pieces) == sender
            ]
            assert sent == wanted


@pytest.mark.parametrize(("stages", "pieces", "micros"), SHAPES)
def test_no_more_is_under_way_than_the_plan_counts(stages: int, pieces: int, micros: int) -> None:
    config = TrainConfig(
        model=ModelConfig(layers=stages * pieces),
        micro_batch=1,
        global_batch=micros,
        parallel=ParallelConfig(pipeline=stages, interleave=pieces),
    )
    for stage in range(stages):
        now = most = 0
        for action in one_forward_one_backward(stage, stages, pieces, micros):
            now += 1 if action.forward else -1
            most = max(most, now)
        assert now == 0
        assert most == pieces * under_way(config, Layout(pipeline=stages), stage)
