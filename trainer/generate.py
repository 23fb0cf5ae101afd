"""Text from a checkpoint's folder alone: a GPT goes on with a prompt, a GLM fills in its blanks.

A GLM fills in the blanks of a prompt: `[MASK]` some words, `[sMASK]` sentences, `[gMASK]` the rest of a text.

The prompt is a source as training makes them (glm_blocks), in which the masks stand. Behind it each blank is written
in turn, from a start-of-piece token until the end of the piece; it sees the whole source and the blanks before it.

How the next token is drawn from what a model thinks of each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import native
from trainer.checkpoint.store import (
    TOKENIZER,
    Checkpoint,
    verify,
)
from trainer.config.glm import SPECIAL_TOKENS
from trainer.config.model_sizes import ModelConfig
from trainer.config.reader import read_section
from trainer.config.rules import model_faults
from trainer.corpus.tokenizer import GLM_TOKENS, Tokenizer
from trainer.engine.passes import Model
from trainer.engine.rank_state import load_parameters, shapes_of
from trainer.errors import CheckpointError, Fault, InputError
from trainer.model.glm import GLM
from trainer.model.gpt import GPT
from trainer.samples.glm_batches import tokens_of
from trainer.samples.glm_windows import GlmTokens


def load_model(found: Checkpoint) -> Model:
    """The model of a checkpoint, on CPU, ready to read text."""
    faults: list[Fault] = []
    config = read_section(ModelConfig, found.manifest["config"]["model"], "model", faults)
    faults += model_faults(config)
    if faults:
        raise CheckpointError(f"{found.path}: {faults[0]}")
    _check_shapes(found, config)
    model: Model = (GLM if config.kind == "glm" else GPT)(config, native.choose("cpu"))
    tensors = found.read(list(found.weights))
    load_parameters(model, tensors.items())
    return model.eval()


def _check_shapes(found: Checkpoint, config: ModelConfig) -> None:
    """Compare the config with the tensors that the files hold, before anything of its size is built."""
    shapes = found.weights
    held, wanted = sum(map(math.prod, shapes.values())), config.parameters()
    if held != wanted:
        what = f"its config describes a model of {wanted:,} parameters, and its files hold {held:,}"
        raise CheckpointError(f"{found.path}: {what}")
    with torch.device("meta"):
        expected = shapes_of((GLM if config.kind == "glm" else GPT)(config, native.choose("cpu")))
    if shapes != expected:
        wrong = sorted(name for name, _ in set(shapes.items()) ^ set(expected.items()))
        raise CheckpointError(f"{found.path}: its tensors are not those of its config: {wrong[0]}")


def generate(folder: Path, tokenizer: Path | None, prompt: str, sampling: Sampling) -> dict[str, object]:
    """What a prompt becomes, with how it came about."""
    sampling.check()
    found = verify(folder)
    if tokenizer is None and TOKENIZER not in found.manifest["files"]:
        raise InputError(f"{folder}: holds no tokenizer", "name one with --tokenizer")
    words = Tokenizer.load(tokenizer or folder / TOKENIZER)
    model = load_model(found)
    if isinstance(model, GLM):
        made = fill(model, words, found.manifest["config"]["data"], prompt, sampling)
    else:
        made = _continued(model, words, prompt, sampling)
    return {"prompt": prompt, **made, "step": found.step, "checkpoint": str(folder)}


def _continued(model: GPT, words: Tokenizer, prompt: str, sampling: Sampling) -> dict[str, object]:
    """A prompt and what follows; stops at the end of a document. An empty prompt begins a new document."""
    start = words.encode(prompt) or [words.eod]
    if max(start) >= model.config.vocab:
        raise InputError(
            f"the tokenizer has ids up to {words.vocab - 1}, the model only {model.config.vocab}",
            "use the tokenizer that made the training data",
        )
    new: list[int] = []
    for token in draw(model, start, sampling):
        if token == words.eod:
            break
        new.append(token)
    return {"text": words.decode([*(start if prompt else []), *new]), "tokens": len(new)}


@torch.no_grad()
def draw(model: GPT, ids: list[int], sampling: Sampling) -> Iterator[int]:
    """The next token, and the next, each read from the last `sequence` tokens."""
    generator = sampling.generator()
    ids = list(ids)
    for _ in range(sampling.max_tokens):
        window = torch.tensor([ids[-model.config.sequence :]])
        ids.append(sampling.pick(model(window)[0, -1].float(), generator))
        yield ids[-1]


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
        raise InputError(
            f"the prompt has {', '.join(unknown)}, which is no mask", f"the masks are {', '.join(MASKS)}"
        )
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
    # The beginning, and the end of the document.
    length = sum(map(len, pieces)) + blanks + 2
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
    return sorted((own | {*range(words.vocab, vocab)}) - {tokens.eop, tokens.eos})


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 or top_k 1 takes the likeliest; top_k 0 draws from all."""

    max_tokens: int = 64
    """In a text that goes on, and in each blank that is filled in."""
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 1234

    def check(self) -> None:
        faults = []
        if self.max_tokens < 1:
            faults.append(f"--max-tokens is {self.max_tokens}; at least 1 is needed")
        if not 0 <= self.temperature <= 100:
            faults.append(f"--temperature is {self.temperature}; 0 to 100 is needed")
        if self.top_k < 0:
            faults.append(f"--top-k is {self.top_k}; at least 0 is needed")
        if faults:
            raise InputError("\n".join(faults))

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def pick(self, logits: Tensor, generator: torch.Generator) -> int:
        """An id, from the logits of all of them."""
        if self.temperature == 0 or self.top_k == 1:
            return int(logits.argmax().item())
        logits = logits / self.temperature
        if 0 < self.top_k < len(logits):
            least = logits.topk(self.top_k).values[-1]
            logits = logits.masked_fill(logits < least, float("-inf"))
        return int(torch.multinomial(torch.softmax(logits, dim=0), 1, generator=generator).item())
