"""Load a checkpoint as a network with a cache, after planning its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import native
from native.decode.matrix import TYPES
from native.decode.packed import KINDS
from native.decode.paged import PAGE
from trainer.checkpoint.store import Checkpoint, open_checkpoint, verify, verify_file
from trainer.config.model import ModelConfig
from trainer.config.rules import model_faults
from trainer.corpus.tokenizer import Tokenizer
from trainer.device import Device
from trainer.engine.passes import Model
from trainer.engine.rank_state import load_parameters
from trainer.errors import CheckpointError, InputError
from trainer.files import sha256
from trainer.generate.batcher import SCORED_TOKENS
from trainer.generate.blanks import special_tokens
from trainer.generate.decoder import Decoder
from trainer.generate.device_network import DEVICE_PROMPT_TOKENS, DeviceNetwork
from trainer.generate.modules import page_bytes
from trainer.generate.network import (
    WHOLE_MODEL,
    Network,
    Place,
    device_network,
    empty_model,
    heads_of,
    network,
)
from trainer.generate.on_device import fill, weight_bytes
from trainer.generate.precision import weight_type
from trainer.generate.ranks import Division, Ranks, alone, on_ranks
from trainer.model.cuts import shapes_of
from trainer.model.glm import GLM
from trainer.model.gpt import GPT
from trainer.side_files import TOKENIZER, SideFiles
from trainer.weights.adapters.merge import whole

BYTES = {kind: torch.empty(0, dtype=dtype).element_size() for kind, dtype in KINDS.items()}
USUAL_WINDOWS = 16
"""By default the cache has pages for this many texts of full length, if half of the free memory suffices."""
LIBRARIES = 256 << 20
"""Bytes that a step may need on top of the bytes that are counted."""
ON_DEVICE = 1 << 30
"""The same on a device, where libraries keep buffers for matrix products and collectives."""
CPU = Device("cpu")


@dataclass(frozen=True)
class Memory:
    """How much memory a model needs, in bytes."""

    weights: int
    page: int
    window_pages: int
    """The number of pages that one text of full length needs."""
    work: int
    """The largest tensor while it is packed, the activations of a step, and the buffers of libraries."""
    free: int
    remedy: str = "use --weights int8 or bf16, or another machine"

    def pages(self, wanted: int | None) -> int:
        """Return how many pages the cache gets, for `wanted` bytes or by default; raise InputError if none fit."""
        least = self.weights + self.work + self.window_pages * self.page
        if least > self.free:
            raise InputError(
                f"the model needs {_size(least)} ({_size(self.weights)} of weights, "
                f"{_size(self.window_pages * self.page)} for one text of full length, {_size(self.work)} to compute), "
                f"and {_size(self.free)} are free: {_size(least - self.free)} are missing",
                self.remedy,
            )
        rest = self.free - self.weights - self.work
        if wanted is None:
            return max(self.window_pages, min(USUAL_WINDOWS * self.window_pages, rest // 2 // self.page))
        if wanted > rest:
            raise InputError(
                f"--cache: {_size(wanted)} do not fit next to {_size(self.weights)} of weights: "
                f"{_size(wanted - rest)} are missing"
            )
        if wanted < self.window_pages * self.page:
            raise InputError(
                f"--cache: {_size(wanted)} are not enough for one text of full length",
                f"use {_size(self.window_pages * self.page)} or more",
            )
        return wanted // self.page


def plan_memory(
    config: ModelConfig, kind: str, free: int, place: Place = WHOLE_MODEL, device: Device = CPU
) -> Memory:
    """Return the memory that a model, or a rank's part of it, needs with matrices of type `kind`."""
    if device.kind != "cpu":
        return _plan_on_device(config, kind, free, place)
    model = empty_model(config, place)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    weights = sum(
        math.prod(shape) * (BYTES[kind] if len(shape) == 2 else 4) + (4 * shape[0] if kind == "int8" else 0)
        for shape in shapes.values()
    )
    # A parameter is read whole before this rank's part is cut out.
    undivided = empty_model(config)
    largest = max(map(math.prod, shapes_of(undivided, undivided.parallel).values()))
    work = 3 * 4 * largest + 3 * 4 * SCORED_TOKENS * config.vocab + LIBRARIES
    page = page_bytes(heads_of(model))
    return Memory(weights, page, _window(config), work, free)


def _plan_on_device(config: ModelConfig, kind: str, free: int, place: Place) -> Memory:
    """Return the memory that a rank's part needs on a device; parameters arrive one at a time in their final type."""
    model, each, parts = empty_model(config, place), TYPES[kind].itemsize, place.tensor.size
    widest = config.up_width + config.inner + config.attention.outputs
    # For the tokens of a prompt: the residual stream, the activations of one layer, and the attention mask.
    step = max(DEVICE_PROMPT_TOKENS) * (
        4 * 4 * config.hidden + 2 * each * widest // parts + 2 * each * config.context
    )
    work = step + 3 * 4 * SCORED_TOKENS * config.vocab + ON_DEVICE
    page = page_bytes(heads_of(model), each)
    remedy = "use --weights bf16 or fp16, or more devices" if kind == "fp32" else "use more devices"
    return Memory(weight_bytes(model, kind), page, _window(config), work, free, remedy)


def _window(config: ModelConfig) -> int:
    """Return how many pages one text of full length needs."""
    return -(-config.context // PAGE)


def free_memory() -> int:
    """Return how many bytes this process can still get: the machine's, or its control group's if that is less."""
    free = _figure(Path("/proc/meminfo"), "MemAvailable:") * 1024 or 1 << 62
    group = Path("/sys/fs/cgroup")
    try:
        most = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        cached = _figure(group / "memory.stat", "inactive_file")
    except (OSError, ValueError):
        return free
    return min(free, most - used + cached)


def _figure(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def load_network(
    folder: Path,
    kind: str = "",
    cache: int | None = None,
    ranks: Ranks | None = None,
    division: Division = Division(),
    base: Path | None = None,
) -> tuple[Network, Checkpoint, int]:
    """Return the network of a checkpoint on the ranks' devices, the checkpoint, and the number of pages of its cache.

    Every file is verified while it is read. kind: the type of matrices; "": the device's default. cache: bytes for
    the pages; None: the default. ranks: the ranks that divide the model; None: this process has all of it. base: the
    folder of the base weights of adapters, if it was moved.
    """
    ranks = ranks or alone()
    device = ranks.group.device
    kind = weight_type(kind, device)
    found = open_checkpoint(folder)
    found = whole(verify(folder) if found.is_old else found, base)
    config = _config_of(found)
    ranks.divide(config, division)
    free = free_memory() // ranks.neighbours if device.kind == "cpu" else device.memory_free()
    memory = plan_memory(config, kind, free, ranks.place, device)
    pages = ranks.fewest(memory.pages(cache))

    def read(name: str) -> Tensor:
        return found.read([name])[name]

    if device.kind == "cpu":
        own = network(config, read, kind, pages, place=ranks.place)
    else:
        own = device_network(config, read, kind, pages, device, ranks.place)
        if ranks.group.world == 1:
            own = DeviceNetwork(own, device)
    return on_ranks(own, ranks), found, pages


def open_decoder(
    folder: Path,
    tokenizer: Path | None = None,
    kind: str = "",
    cache: int | None = None,
    most_running: int = 64,
    ranks: Ranks | None = None,
    division: Division = Division(),
    base: Path | None = None,
    template: Path | None = None,
    add_bos: bool | None = None,
) -> Decoder:
    """Return the decoder of a checkpoint; refuse a tokenizer that does not fit, or a model too large for the memory.

    ranks: those that divide the model; all of them call this. base: the base weights of adapters, if they were moved.
    template: a chat template instead of the tokenizer's. add_bos: as in `Tokenizer.prefix`.
    """
    ranks = ranks or alone()
    # Check the type before any file is read.
    kind = weight_type(kind, ranks.group.device)
    loaded = tokenizer_for(folder, tokenizer)
    net, found, pages = load_network(folder, kind, cache, ranks, division, base)
    config = net.config
    if not net.is_glm and loaded.vocab > config.vocab:
        raise InputError(
            f"the tokenizer has ids up to {loaded.vocab - 1}, the model only {config.vocab}",
            "use the tokenizer that made the training data",
        )
    data, side = found.manifest.config.data, SideFiles.beside(tokenizer or folder, folder)
    glm = special_tokens(config, loaded, data) if net.is_glm else None
    ends = [*side.ends(loaded, side.template(template)), *([] if data.eod is None else [data.eod])]
    return Decoder(net, loaded, pages, glm, found, most_running, ends, loaded.prefix(add_bos))


def tokenizer_for(folder: Path, named: Path | None) -> Tokenizer:
    """Return the verified tokenizer of a checkpoint, or the named one; refuse one that gives a text other ids."""
    own, found = folder / TOKENIZER, open_checkpoint(folder)
    if not own.is_file():
        if named is None:
            raise InputError(f"{folder}: contains no tokenizer", "name one with --tokenizer")
        return Tokenizer.load(named)
    if TOKENIZER in found.files:
        verify_file(found, TOKENIZER)
    if named is None:
        return Tokenizer.load(own)
    loaded = Tokenizer.load(named)
    if sha256(own) != loaded.sha256 and Tokenizer.load(own).fingerprint != loaded.fingerprint:
        problem = f"{named}: is not the tokenizer of {folder}, which gives texts other ids"
        raise InputError(problem, "leave out --tokenizer")
    return loaded


def load_model(
    found: Checkpoint, base: Path | None = None, device: Device = CPU, kind: str = "fp32"
) -> Model:
    """Return the model of a checkpoint in evaluation mode on a device, with matrices of type `kind`.

    On a CPU the type is always fp32. `base` is as in `load_network`.
    """
    found = whole(found, base)
    config = _config_of(found)
    ops = native.choose(device.kind)
    if device.kind == "cpu":
        model: Model = (GLM if config.kind == "glm" else GPT)(config, ops, None)
        load_parameters(model, found.read(list(found.weights)).items())
        return model.eval()
    model = empty_model(config, ops=ops)
    fill(model, lambda name: found.read([name])[name], kind, device)
    return model


def _config_of(found: Checkpoint) -> ModelConfig:
    """Return the checked config of a checkpoint; refuse files whose tensors are not those of this model."""
    config = found.model
    if faults := list(model_faults(config)):
        raise CheckpointError(f"{found.path}: {faults[0]}")
    shapes = found.weights
    held, wanted = sum(map(math.prod, shapes.values())), config.parameters()
    if held != wanted:
        problem = f"its config describes a model of {wanted:,} parameters, and its files hold {held:,}"
        raise CheckpointError(f"{found.path}: {problem}")
    undivided = empty_model(config)
    expected = shapes_of(undivided, undivided.parallel)
    if shapes != expected:
        wrong = sorted(name for name, _ in set(shapes.items()) ^ set(expected.items()))
        raise CheckpointError(f"{found.path}: its tensors do not fit its config: {wrong[0]}")
    return config


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
