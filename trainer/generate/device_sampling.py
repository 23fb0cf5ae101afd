"""Draw the next tokens of many texts on the device, so that a step copies one number per text and no logits.

It follows `sampling.choose` for requests without penalties, biases and log probabilities. The random number of a token
depends on its seed and index, as there; a text's token does not depend on the other texts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.generate.sampling import Sampling, top_p_at, uniform


@dataclass(frozen=True)
class Wish:
    """The row of a text's logits, how its token is drawn, and how many tokens were drawn before."""

    row: int
    sampling: Sampling
    index: int


# Takes rows of logits, and how a token of each is drawn; returns the tokens.
Kind = Callable[[Tensor, Sequence[Wish]], Tensor]


def serves(own: Sampling, banned: Sequence[int]) -> bool:
    """Return whether `draw` draws the tokens of such a request."""
    changed = own.presence_penalty or own.frequency_penalty or own.no_repeat_ngram or own.bias or banned
    return own.beams == 1 and own.logprobs is None and own.repetition_penalty == 1 and not changed


def draw(logits: Tensor, wishes: Sequence[Wish]) -> list[int]:
    """Return the token of each wish; `logits` are (rows, vocab) in fp32 on the device."""
    places: dict[Kind, list[int]] = {}
    for place, wish in enumerate(wishes):
        places.setdefault(_kind(wish), []).append(place)
    parts = []
    for run, own in places.items():
        chosen = [wishes[place] for place in own]
        rows = [wish.row for wish in chosen]
        taken = logits if rows == [*range(len(logits))] else logits[_moved(rows, logits)]
        parts.append(run(taken, chosen))
    numbers = (torch.cat(parts) if len(parts) > 1 else parts[0]).tolist() if parts else []
    return [number for _, number in sorted(zip(itertools.chain(*places.values()), numbers, strict=True))]


def _kind(wish: Wish) -> Kind:
    sampling = wish.sampling
    if sampling.greedy:
        return _most_likely
    restricted = sampling.top_k or sampling.min_p or top_p_at(sampling, wish.index) < 1
    return _among_some if restricted else _among_all


def _moved(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return numbers on the device; floats in fp64."""
    floats = any(isinstance(number, float) for number in numbers)
    return torch.tensor(numbers, dtype=torch.float64 if floats else torch.int64).to(like.device)


def _most_likely(rows: Tensor, _: Sequence[Wish]) -> Tensor:
    return rows.argmax(-1)


def _among_all(rows: Tensor, wishes: Sequence[Wish]) -> Tensor:
    scores = rows / _temperatures(rows, wishes)
    return _at(torch.softmax(scores.double(), -1).cumsum(-1), wishes)


def _among_some(rows: Tensor, wishes: Sequence[Wish]) -> Tensor:
    """Apply the temperature, then top-k, then top-p over the rest, then min-p."""
    scores = rows / _temperatures(rows, wishes)
    values, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    vocab = rows.shape[1]
    order = torch.arange(vocab, device=rows.device)
    counts = _moved([wish.sampling.top_k or vocab for wish in wishes], rows).unsqueeze(-1)
    odds = torch.softmax(values.double().masked_fill(order >= counts, float("-inf")), -1)
    sums = odds.cumsum(-1)
    top_p = _moved([float(top_p_at(wish.sampling, wish.index)) for wish in wishes], rows).unsqueeze(-1)
    counts = counts.clamp(max=vocab)
    keep = torch.where(top_p >= 1, counts, (sums < top_p).sum(-1, keepdim=True) + 1).minimum(counts)
    least = _moved([float(wish.sampling.min_p) for wish in wishes], rows).unsqueeze(-1)
    likely = (odds >= least * odds[:, :1]).sum(-1, keepdim=True)
    keep = torch.where(least > 0, torch.minimum(keep, likely), keep)
    # Beyond the kept ids the sums do not rise, so none of them is drawn.
    total = sums.gather(-1, keep - 1)
    places = _at(torch.minimum(sums, total), wishes, keep).unsqueeze(-1)
    return torch.gather(ids, -1, places).squeeze(-1)


def _temperatures(rows: Tensor, wishes: Sequence[Wish]) -> Tensor:
    return _moved([float(wish.sampling.temperature) for wish in wishes], rows).float().unsqueeze(-1)


def _at(sums: Tensor, wishes: Sequence[Wish], keep: Tensor | None = None) -> Tensor:
    """Return for each row the first index whose cumulative sum exceeds the wish's fraction of the total."""
    points = _moved([uniform(wish.sampling.seed, wish.index) for wish in wishes], sums).unsqueeze(-1)
    found = torch.searchsorted(sums, points * sums[:, -1:], right=True)
    last = torch.full_like(found, sums.shape[1] - 1) if keep is None else keep - 1
    return torch.minimum(found, last).squeeze(-1)
