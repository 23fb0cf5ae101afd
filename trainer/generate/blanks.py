"""Fill in the blanks of a prompt with a GLM, or continue a prompt without blanks.

A blank is written as `[MASK]` for a few words, `[sMASK]` for sentences, or `[gMASK]` for the rest of a text. As in
training, the prompt with its masks is the source. The blanks are generated after it, one by one, each from a
start-of-piece token to an end-of-piece token; each attends to the whole source and to the blanks before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainer.config.data import DataConfig
from trainer.config.glm import SPECIAL_TOKENS
from trainer.config.model import ModelConfig
from trainer.corpus.tokenizer import GLM_TOKENS, Tokenizer
from trainer.errors import InputError
from trainer.generate.request import End, Fed, Taken
from trainer.generate.sampling import Sampling
from trainer.model.glm import GLM
from trainer.samples.glm_batches import tokens_of
from trainer.samples.glm_windows import GlmTokens

MASKS = {GLM_TOKENS["mask"]: "mask", GLM_TOKENS["smask"]: "sentence", GLM_TOKENS["gmask"]: "gap"}
"""The masks that a prompt may contain; the values are the fields of GlmTokens with their ids."""
REST = GLM_TOKENS["gmask"]
_ALMOST = re.compile(r"\[[a-z]{0,2}ma?sk\]", re.IGNORECASE)


@dataclass
class Blank:
    """The tokens that replace a mask."""

    mask: str
    ids: list[int] = field(default_factory=list)
    ended: str = ""
    """Why it ended: `end of piece`, `end of document`, `max tokens`, or `position` (the model's last position)."""


def own_tokens(model: GLM, tokenizer: Tokenizer, data: DataConfig) -> GlmTokens:
    """Return the ids of GLM's special tokens as in training."""
    return special_tokens(model.config, tokenizer, data)


def special_tokens(config: ModelConfig, tokenizer: Tokenizer, data: DataConfig) -> GlmTokens:
    """Return the ids of GLM's special tokens; `data` is the data section of the training's config."""
    eos = tokenizer.eod if data.eod is None else data.eod
    if data.tokenizer:
        return tokens_of(tokenizer, eos)
    return GlmTokens.above(config.vocab - SPECIAL_TOKENS, eos)


class Filling:
    """The `Course` of a prompt with blanks."""

    def __init__(
        self, config: ModelConfig, tokenizer: Tokenizer, tokens: GlmTokens, prompt: str, sampling: Sampling
    ) -> None:
        texts, masks = _parts(prompt)
        self._words, self._tokens, self._sampling = tokenizer, tokens, sampling
        self._pieces = [tokenizer.encode(text) for text in texts]
        _check(config, tokenizer, tokens, self._pieces, len(masks))
        self._ids, self._places = _source(self._pieces, masks, tokens)
        self._never = _no_text(tokenizer, tokens, config.vocab)
        self._last = config.position_rows - 1
        self.source = len(self._ids)
        self.blanks = [Blank(mask) for mask in masks]
        self._at = 0

    def begin(self) -> list[Fed]:
        source = [Fed(number, at) for at, number in enumerate(self._ids)]
        return [*source, Fed(self._tokens.sop, self._places[0], 1)]

    def most(self) -> int:
        return self.source + len(self.blanks) * (1 + min(self._sampling.max_tokens, self._last))

    def banned(self) -> Sequence[int]:
        # A blank may not end before its first token.
        return self._never if self.blanks[self._at].ids else [*self._never, self._tokens.eop]

    def is_end(self, number: int) -> bool:
        return number in (self._tokens.eop, self._tokens.eos)

    def take(self, number: int) -> Taken:
        blank = self.blanks[self._at]
        blank.ended = {self._tokens.eop: "end of piece", self._tokens.eos: "end of document"}.get(number, "")
        if blank.ended:
            return self._next(emit=False)
        blank.ids.append(number)
        position, second = self._places[self._at], len(blank.ids) + 1
        if len(blank.ids) == self._last:
            blank.ended = "position"
            return self._next(emit=True)
        fed = Fed(number, position, second)
        if len(blank.ids) == self._sampling.max_tokens:
            blank.ended = "max tokens"
            return self._next(True, fed)
        return Taken(True, (fed,))

    def _next(self, emit: bool, *feed: Fed) -> Taken:
        if self._at + 1 == len(self.blanks):
            cut = self.blanks[self._at].ended in ("max tokens", "position")
            return Taken(emit, end=End.LENGTH if cut else End.STOP)
        self._at += 1
        return Taken(emit, (*feed, Fed(self._tokens.sop, self._places[self._at], 1)))

    def text(self) -> str:
        """Return the prompt with the generated texts in place of its masks."""
        whole = list(self._pieces[0])
        for blank, piece in zip(self.blanks, self._pieces[1:], strict=True):
            whole += [*blank.ids, *piece]
        return self._words.decode(whole)

    def as_json(self) -> list[dict[str, object]]:
        """Return the mask, text, number of tokens and end of each blank."""
        return [
            {
                "mask": blank.mask,
                "text": self._words.decode(blank.ids),
                "tokens": len(blank.ids),
                "ended": blank.ended,
            }
            for blank in self.blanks
        ]


def _parts(prompt: str) -> tuple[list[str], list[str]]:
    """Return the texts around the masks, and the masks; a prompt without a mask gets [gMASK] at its end.

    Spaces before a mask are dropped, because this kind of tokenizer makes the space part of the next token.
    """
    unknown = [word for word in _ALMOST.findall(prompt) if word not in MASKS]
    if unknown:
        raise InputError(
            f"the prompt has {', '.join(unknown)}, which is not a mask", f"the masks are {', '.join(MASKS)}"
        )
    found = re.split(f"({'|'.join(map(re.escape, MASKS))})", prompt)
    texts, masks = found[::2], found[1::2]
    if not masks:
        texts, masks = [*texts, ""], [REST]
        return texts, masks
    return [*(text.rstrip(" ") for text in texts[:-1]), texts[-1]], masks


def _check(
    config: ModelConfig, tokenizer: Tokenizer, tokens: GlmTokens, pieces: list[list[int]], blanks: int
) -> None:
    text = tokenizer.vocab if tokenizer.glm_ids() is None else 0
    if text > tokens.sop or tokens.vocab > config.vocab:
        problem = (
            f"the tokenizer has {tokenizer.vocab} ids, and the model {config.vocab} with GLM's special tokens"
        )
        raise InputError(problem, "use the tokenizer that made the training data")
    # Two more: the tokens at the beginning and at the end of the document.
    length = sum(map(len, pieces)) + blanks + 2
    if length > config.sequence:
        problem = f"the prompt makes {length} tokens, and the model was trained on {config.sequence} at most"
        raise InputError(problem, "shorten the text around the blanks")


def _source(pieces: list[list[int]], masks: list[str], tokens: GlmTokens) -> tuple[list[int], list[int]]:
    """Return the ids of a source and the indices of its masks; a text after the last mask ends with end-of-document."""
    source, places = [tokens.enc, *pieces[0]], []
    for mask, piece in zip(masks, pieces[1:], strict=True):
        places.append(len(source))
        source += [getattr(tokens, MASKS[mask]), *piece]
    return ([*source, tokens.eos] if pieces[-1] else source), places


def _no_text(tokenizer: Tokenizer, tokens: GlmTokens, vocab: int) -> list[int]:
    """Return the ids that no blank may contain: those unknown to the tokenizer, and special ones except end tokens."""
    own = {
        tokens.sop,
        tokens.enc,
        tokens.mask,
        tokens.sep,
        tokens.unk,
        tokens.gap,
        tokens.sentence,
        tokens.block,
    }
    return sorted((own | {*range(tokenizer.vocab, vocab)}) - {tokens.eop, tokens.eos})
