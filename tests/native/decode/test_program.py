"""Threads of a step: any number of them, two steps at a time, and a fork give the same numbers."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from native.decode.packed import Packed
from native.decode.paged import Spans
from native.decode.program import Activation, Buffer, Inputs, Instruction, Op, Program, likelihoods, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

WIDTH, ROWS, LAYERS = 256, 3, 12


class Chain:
    """Products that follow one another, each of which reads what all pieces of the one before it wrote."""

    def __init__(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.weights = [torch.randn(WIDTH, WIDTH, generator=random) / WIDTH**0.5 for _ in range(LAYERS)]
        self.buffers = [Buffer(WIDTH) for _ in range(LAYERS + 1)]
        self.x = torch.randn(ROWS, WIDTH, generator=random)
        code = [
            Instruction(
                Op.PRODUCT,
                x=self.buffers[layer],
                out=self.buffers[layer + 1],
                product=Packed.of(weight, None, "fp32", True),
                activation=Activation.GELU_TANH,
            )
            for layer, weight in enumerate(self.weights)
        ]
        self.program = Program(code)

    def result(self) -> Tensor:
        one = torch.ones(1, dtype=torch.int32)
        spans = Spans(torch.zeros(1, 1, dtype=torch.int32), one, one, one, one.long(), 1)
        self.program.reserve(ROWS)
        self.buffers[0].data[:ROWS] = self.x
        self.program.run(Inputs(ROWS, spans, one.long()))
        return self.buffers[-1].data[:ROWS].clone()

    def expected(self) -> Tensor:
        x = self.x
        for weight in self.weights:
            x = torch.nn.functional.gelu(x @ weight.T, approximate="tanh")
        return x


@pytest.fixture
def four_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
def test_four_threads_on_fewer_cores_compute_what_one_does() -> None:
    chain = Chain(1)
    torch.testing.assert_close(chain.result(), chain.expected(), atol=1e-4, rtol=1e-4)
    torch.set_num_threads(1)
    alone = chain.result()
    torch.set_num_threads(4)
    assert all(torch.equal(chain.result(), alone) for _ in range(200))


@pytest.mark.usefixtures("four_threads")
def test_two_steps_at_a_time_do_not_mix() -> None:
    chains = [Chain(1), Chain(2)]
    wanted = [chain.result() for chain in chains]

    def repeat(at: int) -> bool:
        return all(torch.equal(chains[at].result(), wanted[at]) for _ in range(200))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(repeat, range(2)))


@pytest.mark.usefixtures("four_threads")
def test_a_fork_computes_alone() -> None:
    chain = Chain(1)
    wanted = chain.result()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if torch.equal(chain.result(), wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_likelihoods_are_those_of_torch_and_the_first_of_equal_logits_is_the_best() -> None:
    random = torch.Generator().manual_seed(1)
    for width in (1, 15, 300, 1100):
        # Rows lie apart, as those of a padded head do.
        logits = (torch.randn(11, width + 5, generator=random) * 20)[:, :width]
        logits[0, -1] = logits[0].max()
        targets = logits.argmax(1)
        targets[1], targets[0] = 0, width - 1
        found, best = likelihoods(logits, targets)
        expected = torch.log_softmax(logits.double(), 1).gather(1, targets[:, None])[:, 0]
        assert torch.allclose(found.double(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(best, logits.argmax(1) == targets)
    assert likelihoods(torch.empty(0, 5), torch.empty(0, dtype=torch.int64))[0].shape == (0,)
    logits = torch.randn(3, 9)
    logits[1, 4] = float("nan")
    assert likelihoods(logits, torch.tensor([1, 2, 3]))[0].isnan().tolist() == [False, True, False]
