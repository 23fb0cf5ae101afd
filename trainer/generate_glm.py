"""A GLM fills in the blanks of a prompt: `[MASK]` some words, `[sMASK]` sentences, `[gMASK]` the rest of a text.

The prompt is a source as training makes them (glm_blocks), in which the masks stand. Behind it each blank is written
in turn, from a start-of-piece token until the end of the piece; it sees the whole source and the blanks before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainer.errors import InputError
from trainer.glm import GLM
from trainer.glm_config import SPECIAL_TOKENS
from trainer.glm_data import tokens_of
from trainer.glm_samples import GlmTokens
from trainer.sampling import Sampling
from trainer.tokenizer import GLM_TOKENS, Tokenizer

MASKS = {GLM_TOKENS["mask"]: "mask", GLM_TOKENS["smask"]: "sentence", GLM_TOKENS["gmask"]: "gap"}
"""As they are written in a prompt, and which of GlmTokens each is."""
REST = GLM_TOKENS["gmask"]
_ALMOST = re.compile(r"\[[a-z]{0,2}ma?sk\]", re.IGNORECASE)


@dataclass(frozen=True)
class Blank:
    """What was written in the place of a mask."""

    mask: str
    ids: list[int]
    ended: str
    """By `end of piece` or `end of document`, or because of `max tokens` or the model's last `position`."""


def fill(
    model: GLM, words: Tokenizer, data: Mapping[str, Any], prompt: str, sampling: Sampling
) -> dict[str, object]:
    """The prompt with its blanks filled in; one without a blank is gone on with. `data`: the training's."""
    tokens = _own_tokens(model, words, data)
    texts, masks = _parts(prompt)
    pieces = [words.encode(text) for text in texts]
    _check(model, words, tokens, pieces, len(masks))
    source, places = _source(pieces, masks, tokens)
    never = _no_text(words, tokens, model.config.vocab)
    blanks = _written(model, source, places, masks, tokens, never, sampling)
    whole = list(pieces[0])
    for blank, piece in zip(blanks, pieces[1:], strict=True):
        whole += [*blank.ids, *piece]
    told = [
        {
            "mask": blank.mask,
            "text": words.decode(blank.ids),
            "tokens": len(blank.ids),
            "ended": blank.ended,
        }
        for blank in blanks
    ]
    total = sum(len(blank.ids) for blank in blanks)
    return {"text": words.decode(whole), "tokens": total, "blanks": told}


def _own_tokens(model: GLM, words: Tokenizer, data: Mapping[str, Any]) -> GlmTokens:
    """GLM's ids as the training had them."""
    eos = words.eod if data.get("eod") is None else int(data["eod"])
    if data.get("tokenizer"):
        return tokens_of(words, eos)
    return GlmTokens.above(model.config.vocab - SPECIAL_TOKENS, eos)


def _parts(prompt: str) -> tuple[list[str], list[str]]:
    """The texts around the masks, and the masks; what has none is a beginning.

    A blank's first token brings the space before it, as within any text of this kind of tokenizer.
    """
    unknown = [word for word in _ALMOST.findall(prompt) if word not in MASKS]
    if unknown:
        raise InputError(f"the prompt has {', '.join(unknown)}, which is no mask", f"the masks are {', '.join(MASKS)}")
    found = re.split(f"({'|'.join(map(re.escape, MASKS))})", prompt)
    texts, masks = found[::2], found[1::2]
    if not masks:
        texts, masks = [*texts, ""], [REST]
        return texts, masks
    return [*(text.rstrip(" ") for text in texts[:-1]), texts[-1]], masks


def _check(model: GLM, words: Tokenizer, tokens: GlmTokens, pieces: list[list[int]], blanks: int) -> None:
    config, text = model.config, words.vocab if words.glm_ids() is None else 0
    if text > tokens.sop or tokens.vocab > config.vocab:
        what = f"the tokenizer has {words.vocab} ids, and the model {config.vocab} with GLM's own"
        raise InputError(what, "use the tokenizer that made the training data")
    length = sum(map(len, pieces)) + blanks + 2  # the beginning, and the end of the document
    if length > config.sequence:
        what = f"the prompt makes {length} tokens, and the model was trained on {config.sequence} at most"
        raise InputError(what, "shorten the text around the blanks")


def _source(pieces: list[list[int]], masks: list[str], tokens: GlmTokens) -> tuple[list[int], list[int]]:
    """The ids of a source, and the places of its masks; behind a last text the document ends."""
    source, places = [tokens.enc, *pieces[0]], []
    for mask, piece in zip(masks, pieces[1:], strict=True):
        places.append(len(source))
        source += [getattr(tokens, MASKS[mask]), *piece]
    return ([*source, tokens.eos] if pieces[-1] else source), places


@torch.no_grad()
def _written(
    model: GLM,
    source: list[int],
    places: list[int],
    masks: list[str],
    tokens: GlmTokens,
    never: list[int],
    sampling: Sampling,
) -> list[Blank]:
    """One blank after the other, as they stand in the prompt; each has at least one token, of no id in `never`."""
    generator, separator = sampling.generator(), torch.tensor([len(source)])
    ids, first, second = list(source), list(range(len(source))), [0] * len(source)
    last = model.config.position_rows - 1
    blanks = []
    for mask, place in zip(masks, places, strict=True):
        new, ended, given = list[int](), "", tokens.sop
        while not ended:
            ids, first, second = [*ids, given], [*first, place], [*second, len(new) + 1]
            logits = model(torch.tensor([ids]), torch.tensor([[first, second]]), separator)[0, -1].float()
            logits[never if new else [*never, tokens.eop]] = float("-inf")
            given = sampling.pick(logits, generator)
            ended = {tokens.eop: "end of piece", tokens.eos: "end of document"}.get(given, "")
            if ended:
                break
            new.append(given)
            if len(new) == sampling.max_tokens:
                ended = "max tokens"
            elif len(new) == last:
                ended = "position"
        blanks.append(Blank(mask, new, ended))
    return blanks


def _no_text(words: Tokenizer, tokens: GlmTokens, vocab: int) -> list[int]:
    """Ids that a blank never holds: those that the tokenizer does not know, and GLM's own but what ends a piece."""
    own = {tokens.sop, tokens.enc, tokens.mask, tokens.sep, tokens.unk, tokens.gap, tokens.sentence, tokens.block}
    return sorted((own | {*range(words.vocab, vocab)}) - {tokens.eop, tokens.eos})
