"""DeepSpeed's checkpoints: ZeRO 0 to 3, pipelines and universal ones are read, universal ones are written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from clusterctl.wire.requests import ExportRequest, ImportRequest
from trainer.checkpoint.access import check_access
from trainer.errors import CheckpointError
from trainer.files import BAD_PICKLE
from trainer.weights.contents import Contents, Progress
from trainer.weights.files.deepspeed import (
    MASTERS,
    UNIVERSAL,
    Saved,
    has_deepspeed,
    read_step,
    step_folder,
)
from trainer.weights.files.torch_read import attributes
from trainer.weights.files.torch_write import Scalar, write_torch
from trainer.weights.huggingface import family_for, named_by, write_rest
from trainer.weights.lazy import Lazy, NamedState
from trainer.weights.named.mapping import contents_by_name, group_of
from trainer.weights.target import Target

# The version of DeepSpeed whose form of universal checkpoints is written.
VERSION = "0.14.0"
_IN_LAYER = re.compile(r"(?:tied_modules\.[^.]+|(\d+))\.(.+)")
_BLOCK = re.compile(r"(input_layernorm|post_attention_layernorm|self_attention|attention|mlp)\..+")


def is_deepspeed(folder: Path) -> bool:
    """Return whether a folder, or the one that its pointer names, is a checkpoint of DeepSpeed."""
    return folder.is_dir() and has_deepspeed(step_folder(folder))


def read_deepspeed(folder: Path, request: ImportRequest) -> Contents:
    """Return the contents of a folder; tensors are not read yet."""
    check_access(folder)
    source = step_folder(folder)
    try:
        saved = read_step(source)
        states = _of_pipeline(saved) if saved.layers else saved.ranks
    except BAD_PICKLE as error:
        raise CheckpointError(f"{source}: not a checkpoint of DeepSpeed, or damaged: {error}") from None
    if request.state and saved.unknown is not None:
        raise saved.unknown
    steps, samples = (saved.facts.get(key) for key in ("global_steps", "global_samples"))
    progress = Progress(
        steps if type(steps) is int and steps > 0 else saved.optimizer_steps,
        saved.optimizer_steps,
        samples if type(samples) is int and samples > 0 else 0,
    )
    arguments = {key: saved.facts[key] for key in ("args", "checkpoint_version") if key in saved.facts}
    if "checkpoint_version" in arguments and not attributes(arguments.get("args")):
        del arguments["checkpoint_version"]
    return contents_by_name(source, "deepspeed", states, arguments, request, progress)


def _of_pipeline(saved: Saved) -> list[NamedState]:
    """Return the tensors of all stages as one model with Megatron's names, for each tensor parallel rank."""
    states = []
    for rank, layers in enumerate(saved.layers):
        # Masters have names by layer, such as `3.mlp.weight`; they are on the ranks of all stages.
        masters = _merged(saved.ranks[rank :: len(saved.layers)])
        blocks = [number for number in sorted(layers) if any(map(_BLOCK.fullmatch, layers[number]))]
        rename = partial(_renamed, blocks)
        weights = {
            rename(f"{at}.{name}"): tensor for at, layer in layers.items() for name, tensor in layer.items()
        }
        weights |= {rename(name): tensor for name, tensor in masters.weights.items()}
        moments = {
            kind: {rename(name): tensor for name, tensor in named.items()}
            for kind, named in masters.moments.items()
        }
        states.append(NamedState(weights, moments))
    return states


def _merged(ranks: Iterable[NamedState]) -> NamedState:
    weights: dict[str, Lazy] = {}
    moments: dict[str, dict[str, Lazy]] = {}
    for state in ranks:
        # Use the first stage's: the last stage has a copy of the tied module, but trains only its table.
        weights = {**state.weights, **weights}
        for kind, named in state.moments.items():
            moments[kind] = {**named, **moments.get(kind, {})}
    return NamedState(weights, moments)


def _renamed(blocks: Sequence[int], name: str) -> str:
    """Return Megatron's name of a tensor in a layer of a pipeline; `blocks`: the layer numbers of blocks."""
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        return name
    number, rest = match[1], match[2]
    if rest.startswith(("word_embeddings.", "position_embeddings.")):
        return f"embedding.{rest}"
    if number is not None and int(number) in blocks:
        return f"encoder.layers.{blocks.index(int(number))}.{rest}"
    if rest.removeprefix("final_layernorm.") in ("weight", "bias"):
        return f"encoder.final_layernorm.{rest.removeprefix('final_layernorm.')}"
    return "output_layer.weight" if rest == "lm_head.weight" else name


# -- write ----------------------------------------------------------------------------------------------------


def write_universal(contents: Contents, target: Target, request: ExportRequest) -> None:
    """Write a universal checkpoint, which DeepSpeed loads into a model of transformers on any ranks."""
    family = family_for(contents)
    named = named_by(family, contents)
    step = contents.progress.step
    tag = f"global_step{step}_universal"
    files = {MASTERS: named.weights, **named.moments}
    target.total = sum(tensor.bytes for tensors in files.values() for tensor in tensors.values())
    for name in named.weights:
        for kind, tensors in files.items():
            file, document = f"{tag}/{UNIVERSAL}/{name}/{kind}.pt", {"param": tensors[name], "cat_dim": 0}
            target.write_tensors(file, tensors[name].bytes, partial(write_torch, document=document))
        steps = Scalar(float(contents.progress.optimizer_steps))
        target.write_tensors(f"{tag}/{UNIVERSAL}/{name}/step.pt", 0, partial(write_torch, document=steps))
    for file, facts in _facts(contents):
        target.write_tensors(f"{tag}/{file}", 0, partial(write_torch, document=facts))
    target.write_bytes("latest_universal", tag.encode())
    write_rest(contents, family, target, request)


def _facts(contents: Contents) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the files in which DeepSpeed records facts other than the parameters."""
    group = group_of(contents.config)
    groups = [{**group, "params": []}, {**group, "weight_decay": 0.0, "params": []}]
    steps = Scalar(float(contents.progress.optimizer_steps))
    yield (
        f"{UNIVERSAL}/optimizer_state.pt",
        {
            "ds_version": VERSION,
            "param_groups": groups,
            # ZeRO 3 looks for both here.
            "optimizer_state_dict": {"state": {0: {"step": steps}}, "param_groups": groups},
        },
    )
    facts: dict[str, object] = {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": None,
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": [],
        "skipped_steps": 0,
        "global_steps": contents.progress.step,
        "global_samples": contents.progress.consumed_samples,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
    yield "mp_rank_00_model_states.pt", facts
    # ZeRO 3 looks for this name.
    yield "zero_pp_rank_0_mp_rank_00_model_states.pt", facts
