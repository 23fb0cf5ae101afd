"""Text from a checkpoint's folder alone: a GPT goes on with a prompt, a GLM fills in its blanks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

import native
from trainer.checkpoint import MODEL, TOKENIZER, Checkpoint, verify
from trainer.errors import CheckpointError, Fault, InputError
from trainer.generate_glm import fill
from trainer.glm import GLM
from trainer.gpt import GPT
from trainer.holding import load_parameters, shapes_of
from trainer.models import ModelConfig
from trainer.passes import Model
from trainer.sampling import Sampling
from trainer.settings import read_section
from trainer.tokenizer import Tokenizer


def load_model(found: Checkpoint) -> Model:
    """The model of a checkpoint, on CPU, ready to read text."""
    faults: list[Fault] = []
    config = read_section(ModelConfig, found.manifest["config"]["model"], "model", faults)
    if faults:
        raise CheckpointError(f"{found.path}: {faults[0]}")
    model: Model = (GLM if config.kind == "glm" else GPT)(config, native.choose("cpu"))
    tensors = found.tensors(MODEL)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != shapes_of(model):
        wrong = sorted(name for name, _ in set(shapes.items()) ^ set(shapes_of(model).items()))
        raise CheckpointError(f"{found.path}: its tensors are not those of its config: {wrong[0]}")
    load_parameters(model, tensors.items())
    return model.eval()


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
