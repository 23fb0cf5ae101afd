"""How the next token is chosen from the logits. The random number depends on the seed and the token's index."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from clusterctl.wire.fields import keys_of, misfit, range_of, rule_of, setting
from clusterctl.wire.requests import DrawingOptions
from native.decode.program import largest
from trainer.errors import InputError

_FIRST_TRY = 512
"""Most top-p sets lie within this many of the most likely ids; sorting all of 50,000 takes 3 ms."""


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are drawn, and when it ends; temperature 0 or top_k 1 takes the most likely token."""

    max_tokens: int = setting(64, least=0)
    """The most tokens of a continuation, or of each blank."""
    temperature: float = 1.0
    top_k: int = 0
    """Choose among this many of the most likely ids; 0: among all."""
    top_p: float = 1.0
    """Choose among the most likely ids whose probabilities sum up to this value."""
    min_p: float = 0.0
    """Exclude ids whose probability is below this fraction of the largest probability."""
    repetition_penalty: float = 1.0
    """For ids in the prompt or the text: divide positive logits by this, and multiply negative logits by it."""
    presence_penalty: float = 0.0
    """Subtract this from the logits of ids in the text."""
    frequency_penalty: float = 0.0
    """For each id in the text: subtract this times the id's count from its logit."""
    no_repeat_ngram: int = 0
    """Never repeat a sequence of this many ids; 0: repeats are allowed."""
    bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Add these values to the logits of these ids."""
    seed: int = 1234
    stop: tuple[str, ...] = ()
    """The text ends before the first of these."""
    stop_ids: tuple[int, ...] = ()
    """The text ends before any of these ids."""
    ignore_end: bool = False
    """Whether the text continues after an end-of-document token."""
    logprobs: int | None = None
    """Report the log probability of each token and of this many of the most likely ids; None: report nothing."""
    beams: int = 1
    """Above 1: beam search with this many beams; temperature, top_k, top_p and min_p are then unused."""
    length_penalty: float = 1.0
    """Beam search divides a text's log probability by its length to this power."""
    top_p_decay: float = setting(0.0, least=0, most=1)
    """Multiply top_p by this after each token; 0: never."""
    top_p_bound: float = setting(0.0, least=0)
    """The minimum of a decaying top_p."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    def faults(self) -> list[tuple[str, str]]:
        """Return each field whose value is out of range, with an error message."""
        own = [item for item in fields(self) if "rule" in item.metadata]
        rules = {item.name: rule_of(item) for item in (*keys_of(DrawingOptions), *own)}
        faults = []
        for name, rule in rules.items():
            value = getattr(self, name, None)
            if misfit(rule, value)[0]:
                text = _shortened(json.dumps(value))
                faults.append((name, f"{text} is out of range: {rule.example or range_of(rule)}"))
        faults += [
            (name, problem) for name, problem, _ in DrawingOptions(stop=self.stop, seed=self.seed).problems()
        ]
        if self.top_p_bound > self.top_p:
            faults.append(("top_p_bound", f"{self.top_p_bound} is out of range: 0 to top_p"))
        if not all(-100 <= value <= 100 for value in self.bias.values()):
            faults.append(("logit_bias", "a value is out of range: -100 to 100"))
        return faults

    def check(self) -> None:
        """Raise an InputError that lists all values out of range."""
        if faults := self.faults():
            raise InputError("\n".join(f"--{name.replace('_', '-')}: {text}" for name, text in faults))


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


@dataclass(frozen=True)
class Drawn:
    """A chosen token."""

    id: int
    logprob: float = 0.0
    """The log probability in the model's own distribution, before temperature and penalties."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely ids and their log probabilities."""


def choose(
    logits: Tensor, sampling: Sampling, prompt: Sequence[int], new: Sequence[int], banned: Sequence[int] = ()
) -> Drawn:
    """Return the next token. `new`: the ids drawn so far; the random number depends on the seed and their count."""
    scores = adjusted(logits, sampling, prompt, new)
    if banned:
        scores = scores.clone() if scores is logits else scores
        scores[list(banned)] = -math.inf
    number = largest(scores) if sampling.greedy else _drawn(scores, sampling, len(new))
    if sampling.logprobs is None:
        return Drawn(number)
    own = torch.log_softmax(logits, -1)
    return Drawn(number, float(own[number]), top_of(own, sampling.logprobs))


def top_of(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` most likely ids with their log probabilities."""
    if not count:
        return ()
    values, ids = logprobs.topk(min(count, len(logprobs)))
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))


def adjusted(logits: Tensor, sampling: Sampling, prompt: Sequence[int], new: Sequence[int]) -> Tensor:
    """Return the logits after penalties and biases; the same tensor if there are none."""
    scores = logits
    if sampling.repetition_penalty != 1 and (prompt or new):
        ids = torch.tensor(sorted({*prompt, *new}))
        own = scores[ids]
        penalty = sampling.repetition_penalty
        scores = scores.index_put((ids,), torch.where(own > 0, own / penalty, own * penalty))
    if (sampling.presence_penalty or sampling.frequency_penalty) and new:
        ids, counts = torch.tensor(new).unique(return_counts=True)
        minus = sampling.presence_penalty + sampling.frequency_penalty * counts
        scores = scores.index_put((ids,), scores[ids] - minus)
    if sampling.bias:
        ids, values = torch.tensor(list(sampling.bias)), torch.tensor(list(sampling.bias.values()))
        scores = scores.index_put((ids,), scores[ids] + values)
    if repeats := _repeats([*prompt, *new], sampling.no_repeat_ngram) if sampling.no_repeat_ngram else []:
        scores = scores.index_fill(0, torch.tensor(repeats), -math.inf)
    return scores


def _repeats(ids: Sequence[int], size: int) -> list[int]:
    """Return the ids that would complete a sequence of `size` ids that has already occurred."""
    if len(ids) < size:
        return []
    end = tuple(ids[len(ids) - size + 1 :])
    found = {ids[i + size - 1] for i in range(len(ids) - size + 1) if tuple(ids[i : i + size - 1]) == end}
    return sorted(found)


def uniform(seed: int, index: int) -> float:
    """Return a number in [0, 1) that depends only on the seed and the index."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def top_p_at(sampling: Sampling, index: int) -> float:
    """Return top_p for the token after `index` others."""
    if not sampling.top_p_decay:
        return sampling.top_p
    return max(sampling.top_p_bound, sampling.top_p * sampling.top_p_decay**index)


def _drawn(scores: Tensor, sampling: Sampling, index: int) -> int:
    scores = scores / sampling.temperature
    top_p = top_p_at(sampling, index)
    point = uniform(sampling.seed, index)
    if not sampling.top_k and top_p >= 1 and not sampling.min_p:
        return _at(torch.softmax(scores.double(), -1).cumsum(-1), point)
    values, ids = _candidates(scores, sampling.top_k, top_p)
    # Temperature, then top-k, then top-p over the rest, then min-p: the same order as in other programs.
    odds = (
        torch.softmax(values.double(), -1)
        if sampling.top_k
        else torch.exp(values.double() - torch.logsumexp(scores.double(), -1))
    )
    sums = odds.cumsum(-1)
    keep = len(odds) if top_p >= 1 else min(len(odds), int((sums < top_p).sum()) + 1)
    if sampling.min_p:
        keep = min(keep, int((odds >= sampling.min_p * odds[0]).sum()))
    return int(ids[_at(sums[:keep], point)])


def _candidates(scores: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Return scores and ids, most likely first; enough of them for top-k and top-p."""
    if 0 < top_k < len(scores):
        return scores.topk(top_k)
    if not top_k and top_p < 1 and len(scores) > _FIRST_TRY:
        found = scores.topk(_FIRST_TRY)
        share = torch.logsumexp(found.values.double(), -1) - torch.logsumexp(scores.double(), -1)
        if math.exp(float(share)) >= top_p:
            return found
    return scores.sort(descending=True, stable=True)


def _at(sums: Tensor, point: float) -> int:
    """Return the first index whose cumulative sum exceeds the fraction `point` of the total."""
    total = float(sums[-1])
    return min(int(torch.searchsorted(sums, point * total, right=True)), len(sums) - 1)
