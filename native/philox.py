"""Random words from a key and a counter by Philox 4x32-10: the same at any time.

For attention on a CPU, number i of a tensor has word i % 4 of counter i // 4. For `dropout_add` it has half i % 8 of
the words of counter i // 8, with the lower half of each word first. The order of computation and the threads have no
effect, so a backward pass or a recomputation makes the same numbers again. `dropout_add` drops the same numbers on
every device; attention on other devices than a CPU uses the device's own generator, so its mask is another one there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from native.masks import Dropout, threshold_of

ROUNDS = 10
# How many numbers of 16 bits the four words of a counter have.
HALVES = 8
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_SEED = (1 << 63) - 1


def words(seed: int | Tensor, counters: Tensor) -> Tensor:
    """Return four words of 32 bits for each int64 counter, (..., 4) in int64."""
    c0, c1 = counters & _WORD, (counters >> 32) & _WORD
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(ROUNDS):
        # The product of two words has 64 bits; its sign in int64 does not matter.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((second >> 32) & _WORD) ^ c1 ^ k0, second & _WORD
        c2, c3 = ((first >> 32) & _WORD) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return torch.stack((c0, c1, c2, c3), -1)


def draws_itself(device: torch.device) -> bool:
    """Return whether the device's own generator is used, because int64 arithmetic is slow there; it is repeatable."""
    return device.type != "cpu"


@contextmanager
def drawing(dropout: Dropout, device: torch.device) -> Iterator[None]:
    """Let the device's generator draw what the state of `dropout` decides; without a state, what comes next.

    Tensor parallel ranks need a state: they draw the same numbers, but must drop differently in their heads.
    """
    if dropout.state is None:
        yield
        return
    devices = [] if device.type == "cpu" else [device]
    # torch.manual_seed takes 64 bits.
    seed = (int(dropout.state) + dropout.first_head) & _SEED
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        yield


def factors(dropout: Dropout, probabilities: Tensor) -> Tensor:
    """Return the factor of each of `probabilities` (batch, heads, queries, keys): 0, or 1 / (1 - chance).

    The length of a row of keys is rounded up to a multiple of four.
    """
    if draws_itself(probabilities.device):
        with drawing(dropout, probabilities.device):
            drawn = torch.empty_like(probabilities).bernoulli_(1.0 - dropout.chance)
        return drawn.div_(1.0 - dropout.chance)
    assert dropout.state is not None
    batch, heads, queries, keys = probabilities.shape
    device = probabilities.device
    every, row = dropout.heads or heads, -(-keys // 4)
    rows = torch.arange(batch, device=device).view(-1, 1) * every + dropout.first_head
    rows = rows + torch.arange(heads, device=device)  # (batch, heads)
    rows = rows.unsqueeze(-1) * queries + torch.arange(queries, device=device)
    counters = rows.unsqueeze(-1) * row + torch.arange(row, device=device)
    random = words(dropout.state, counters).flatten(-2)[..., :keys]
    return ((random >= dropout.threshold).float() / (1.0 - dropout.chance)).to(probabilities.dtype)


def kept_numbers(shape: torch.Size, state: Tensor, probability: float) -> Tensor:
    """Return the mask of dropout, True for numbers that are kept; `state` has the seed and the first counter."""
    seed, offset = state[0], state[1]
    count = shape.numel()
    counters = offset + torch.arange(-(-count // HALVES), device=state.device)
    random = words(seed, counters)
    halves = torch.stack((random & 0xFFFF, random >> 16), -1).view(-1)[:count]
    return (halves >= threshold_of(probability, 16)).view(shape)
