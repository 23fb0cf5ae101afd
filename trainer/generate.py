"""Text from a checkpoint's folder alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import native
from trainer.checkpoint import MODEL, TOKENIZER, Checkpoint, verify
from trainer.engine import load_parameters, shapes_of
from trainer.errors import CheckpointError, Fault, InputError
from trainer.gpt import GPT
from trainer.models import ModelConfig
from trainer.settings import read_section
from trainer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Temperature 0 or top_k 1 takes the likeliest; top_k 0 draws from all."""

    max_tokens: int = 64
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


def load_model(found: Checkpoint) -> GPT:
    """The model of a checkpoint, on CPU, ready to read text."""
    faults: list[Fault] = []
    config = read_section(ModelConfig, found.manifest["config"]["model"], "model", faults)
    if faults:
        raise CheckpointError(f"{found.path}: {faults[0]}")
    if config.kind != "gpt":
        raise InputError(f"{found.path}: is a {config.kind}, which does not continue a text", "use a gpt's checkpoint")
    model = GPT(config, native.choose("cpu"))
    tensors = found.tensors(MODEL)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != shapes_of(model):
        wrong = sorted(name for name, _ in set(shapes.items()) ^ set(shapes_of(model).items()))
        raise CheckpointError(f"{found.path}: its tensors are not those of its config: {wrong[0]}")
    load_parameters(model, tensors.items())
    return model.eval()


@torch.no_grad()
def draw(model: GPT, ids: list[int], sampling: Sampling) -> Iterator[int]:
    """The next token, and the next, each read from the last `sequence` tokens."""
    generator = torch.Generator().manual_seed(sampling.seed)
    ids = list(ids)
    for _ in range(sampling.max_tokens):
        window = torch.tensor([ids[-model.config.sequence :]])
        ids.append(_pick(model(window)[0, -1].float(), sampling, generator))
        yield ids[-1]


def _pick(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0 or sampling.top_k == 1:
        return int(logits.argmax().item())
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < len(logits):
        least = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return int(torch.multinomial(torch.softmax(logits, dim=0), 1, generator=generator).item())


def generate(folder: Path, tokenizer: Path | None, prompt: str, sampling: Sampling) -> dict[str, object]:
    """Continue a prompt; stops at the end of a document. An empty prompt begins a new document."""
    sampling.check()
    found = verify(folder)
    if tokenizer is None and TOKENIZER not in found.manifest["files"]:
        raise InputError(f"{folder}: holds no tokenizer", "name one with --tokenizer")
    words = Tokenizer.load(tokenizer or folder / TOKENIZER)
    model = load_model(found)
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
    text = words.decode([*(start if prompt else []), *new])
    return {"prompt": prompt, "text": text, "tokens": len(new), "step": found.step, "checkpoint": str(folder)}
