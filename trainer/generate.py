"""Generate text from a checkpoint: a GPT continues a prompt, a GLM fills in the blanks of one.

A GLM's blanks are `[MASK]` for some words, `[sMASK]` for sentences, `[gMASK]` for the rest of a text. The prompt with
its masks is a source, as in training. Behind it the blanks are written in turn, each from a start-of-piece token to an
end-of-piece token; each sees the whole source and the blanks before it.
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
from trainer.config.model import ModelConfig
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
    """Return the model of a checkpoint, on the CPU and in evaluation mode."""
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
        problem = f"its config describes a model of {wanted:,} parameters, and its files hold {held:,}"
        raise CheckpointError(f"{found.path}: {problem}")
    with torch.device("meta"):
        expected = shapes_of((GLM if config.kind == "glm" else GPT)(config, native.choose("cpu")))
    if shapes != expected:
        wrong = sorted(name for name, _ in set(shapes.items()) ^ set(expected.items()))
        raise CheckpointError(f"{found.path}: its tensors are not those of its config: {wrong[0]}")


def generate(folder: Path, tokenizer: Path | None, prompt: str, sampling: Sampling) -> dict[str, object]:
    """Return the text that a prompt becomes, and the facts of its generation, as a JSON document."""
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
    """Continue a prompt until the end of the document; an empty prompt begins a new document."""
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
    """Yield token after token, each predicted from the last `sequence` tokens."""
    generator = sampling.generator()
    ids = list(ids)
    for _ in range(sampling.max_tokens):
        window = torch.tensor([ids[-model.config.sequence :]])
        ids.append(sampling.pick(model(window)[0, -1].float(), generator))
        yield ids[-1]


MASKS = {GLM_TOKENS["mask"]: "mask", GLM_TOKENS["smask"]: "sentence", GLM_TOKENS["gmask"]: "gap"}
"""The masks of a prompt, and the field of GlmTokens for each."""
REST = GLM_TOKENS["gmask"]
_ALMOST = re.compile(r"\[[a-z]{0,2}ma?sk\]", re.IGNORECASE)


@dataclass(frozen=True)
class Blank:
    """The tokens that replace a mask."""

    mask: str
    ids: list[int]
    ended: str
    """Why it ends: `end of piece`, `end of document`, `max tokens`, or `position`, the model's last one."""


def fill(
    model: GLM, words: Tokenizer, data: Mapping[str, Any], prompt: str, sampling: Sampling
) -> dict[str, object]:
    """Fill in the blanks of a prompt, or continue one without a blank; `data` is the data config of the training."""
    tokens = own_tokens(model, words, data)
    texts, masks = _parts(prompt)
    pieces = [words.encode(text) for text in texts]
    _check(model, words, tokens, pieces, len(masks))
    source, places = _source(pieces, masks, tokens)
    never = _no_text(words, tokens, model.config.vocab)
    blanks = _written(model, source, places, masks, tokens, never, sampling)
    whole = list(pieces[0])
    for blank, piece in zip(blanks, pieces[1:], strict=True):
        whole += [*blank.ids, *piece]
    written = [
        {
            "mask": blank.mask,
            "text": words.decode(blank.ids),
            "tokens": len(blank.ids),
            "ended": blank.ended,
        }
        for blank in blanks
    ]
    total = sum(len(blank.ids) for blank in blanks)
    return {"text": words.decode(whole), "tokens": total, "blanks": written}


def own_tokens(model: GLM, words: Tokenizer, data: Mapping[str, Any]) -> GlmTokens:
    """Return the ids of GLM's special tokens in the training."""
    eos = words.eod if data.get("eod") is None else int(data["eod"])
    if data.get("tokenizer"):
        return tokens_of(words, eos)
    return GlmTokens.above(model.config.vocab - SPECIAL_TOKENS, eos)


def _parts(prompt: str) -> tuple[list[str], list[str]]:
    """Return the texts around the masks, and the masks; a prompt without one gets [gMASK] at its end.

    Spaces before a mask are dropped: this kind of tokenizer puts the space into the next token.
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


def _check(model: GLM, words: Tokenizer, tokens: GlmTokens, pieces: list[list[int]], blanks: int) -> None:
    config, text = model.config, words.vocab if words.glm_ids() is None else 0
    if text > tokens.sop or tokens.vocab > config.vocab:
        problem = (
            f"the tokenizer has {words.vocab} ids, and the model {config.vocab} with GLM's special tokens"
        )
        raise InputError(problem, "use the tokenizer that made the training data")
    # Two more for the beginning and the end of the document.
    length = sum(map(len, pieces)) + blanks + 2
    if length > config.sequence:
        problem = f"the prompt makes {length} tokens, and the model was trained on {config.sequence} at most"
        raise InputError(problem, "shorten the text around the blanks")


def _source(pieces: list[list[int]], masks: list[str], tokens: GlmTokens) -> tuple[list[int], list[int]]:
    """Return the ids of a source and the indices of its masks; a text after the last mask ends the document."""
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
    """Write the blanks in their order in the prompt; each gets at least one token, and none of the ids in `never`."""
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
    """Return the ids that a blank never contains: unknown to the tokenizer, or special and not the end of a piece."""
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
    """How the next token is drawn: temperature 0 or top_k 1 takes the most likely; top_k 0 draws from all."""

    max_tokens: int = 64
    """The most tokens of a continuation, and of each blank."""
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
        """Return an id, drawn by the logits of all ids."""
        if self.temperature == 0 or self.top_k == 1:
            return int(logits.argmax().item())
        logits = logits / self.temperature
        if 0 < self.top_k < len(logits):
            least = logits.topk(self.top_k).values[-1]
            logits = logits.masked_fill(logits < least, float("-inf"))
        return int(torch.multinomial(torch.softmax(logits, dim=0), 1, generator=generator).item())
