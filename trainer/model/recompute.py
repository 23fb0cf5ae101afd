"""Recompute activations in the backward pass instead of storing them, with bit-identical results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.parallel.tensor import ALONE, Parallel, exchanged

# Stored inputs are split along this dimension: it is divisible wherever the heads are.
HIDDEN = -1


@dataclass(frozen=True)
class Recompute:
    """What is stored: with `full` the input of every `every` blocks, with `selective` all except attention scores."""

    mode: str = "none"
    every: int = 1
    split: bool = False
    """Whether each tensor parallel rank stores only its part of an input; the backward pass gathers the parts."""
    parallel: Parallel = ALONE
    norms: bool = False
    """Whether the input of a matrix that follows a norm is computed again from the norm's input."""

    def through(self, blocks: Sequence[Callable[..., Tensor]], x: Tensor, *shared: object) -> Tensor:
        """Run the blocks in order and return the result; `shared` is passed to each of them."""
        if self.mode != "full" or not torch.is_grad_enabled():
            return _through(blocks, x, *shared)
        for start in range(0, len(blocks), self.every):
            x = self._again(blocks[start : start + self.every], x, *shared)
        return x

    def scores(self, run: Callable[..., Tensor], *arguments: Tensor | None, draws: bool = False) -> Tensor:
        """Run the core of attention, whose activations grow with the square of the sequence.

        `draws`: it draws random numbers, which must be the same when it is recomputed.
        """
        if self.mode != "selective" or not torch.is_grad_enabled():
            return run(*arguments)
        result: Tensor = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=draws)
        return result

    def _again(self, blocks: Sequence[Callable[..., Tensor]], x: Tensor, *shared: object) -> Tensor:
        # With sequence parallel the input is already divided.
        if not self.split or self.parallel.sequence:
            result: Tensor = checkpoint(_through, blocks, x, *shared, use_reentrant=False)
            return result
        # Keep the whole input for the first pass, which then needs no exchange.
        unsplit = [x.detach()]

        def run(part: Tensor) -> Tensor:
            return _through(blocks, _whole(part, self.parallel, unsplit), *shared)

        result = checkpoint(run, self.parallel.own(x, HIDDEN), use_reentrant=False)
        return result


NOTHING = Recompute()


def _through(blocks: Sequence[Callable[..., Tensor]], x: Tensor, *shared: object) -> Tensor:
    for block in blocks:
        x = block(x, *shared)
    return x


def _whole(part: Tensor, parallel: Parallel, unsplit: list[Tensor]) -> Tensor:
    def gathered(part: Tensor) -> Tensor:
        return unsplit.pop() if unsplit else parallel.gather(part, HIDDEN)

    def back(upstream: Tensor) -> Tensor:
        return upstream.chunk(parallel.size, HIDDEN)[parallel.rank].contiguous()

    return exchanged(part, gathered, back)
