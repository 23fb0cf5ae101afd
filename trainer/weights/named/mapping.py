"""Convert tensors under another program's names to contents, and the settings of AdamW to those of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from clusterctl.wire.requests import ImportRequest
from trainer.config.train_config import TrainConfig
from trainer.errors import CheckpointError, InputError
from trainer.weights import huggingface
from trainer.weights.contents import Contents, Progress
from trainer.weights.huggingface import CONFIG_FILE
from trainer.weights.lazy import NamedState
from trainer.weights.megatron import ranks
from trainer.weights.megatron.names import core_name

EMBEDDING = "embedding.word_embeddings.weight"


def contents_by_name(
    source: Path,
    form: str,
    states: Sequence[NamedState],
    arguments: Mapping[str, object],
    request: ImportRequest,
    progress: Progress,
) -> Contents:
    """Return the contents of all tensor parallel ranks; `arguments`: what the source records with the tensors.

    A config.json in the folder, or in its parent folder, tells the family. Without one the names must be Megatron's.
    """
    if request.state and not states[0].moments:
        raise InputError(f"{source}: contains no optimizer state", "leave out --state")
    if not request.state:
        states = [NamedState(state.weights) for state in states]
    described = [folder for folder in (source, *source.parents[:1]) if (folder / CONFIG_FILE).is_file()]
    if described:
        if len(states) > 1:
            problem = f"{source}: its tensors are divided among {len(states)} ranks, but config.json is not Megatron's"
            raise CheckpointError(problem, "merge the ranks with the program that saved them")
        found = huggingface.contents_of(described[0], str(source), lambda: states[0], form)
    elif EMBEDDING in {core_name(name) for name in states[0].weights}:
        found = _megatron(source, form, states, arguments, request)
    else:
        some = ", ".join(sorted(states[0].weights)[:3])
        problem = f"{source}: contains {some} and more, but no {CONFIG_FILE} that describes the model"
        raise CheckpointError(problem, f"copy the model's {CONFIG_FILE} of Hugging Face into the folder")
    return replace(found, progress=progress if request.state else Progress())


def _megatron(
    source: Path,
    form: str,
    states: Sequence[NamedState],
    arguments: Mapping[str, object],
    request: ImportRequest,
) -> Contents:
    documents = {
        (rank, 0): {
            "checkpoint_version": 3.0,
            **arguments,
            "model": dict(state.weights),
            **{moment: dict(named) for moment, named in state.moments.items()},
        }
        for rank, state in enumerate(states)
    }
    return ranks.contents_of(ranks.RankStates(source, documents, len(states), 1), form, request)


def group_of(config: TrainConfig) -> dict[str, object]:
    """Return a parameter group of torch's AdamW, given the config of our training."""
    optimizer = config.optimizer
    return {
        "lr": optimizer.lr,
        "betas": optimizer.betas,
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }
