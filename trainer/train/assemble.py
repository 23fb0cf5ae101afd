"""Build every part of a training from its config and environment, and run it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import cast

import torch

import native
from clusterctl.wire.contract import CHECKPOINT_DIR
from clusterctl.wire.metrics import Ended
from native import products
from native.compiled import build
from trainer.checkpoint.access import check_access
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.compat import why_not_sharded
from trainer.config.data import DataConfig, DataIdentity
from trainer.config.deepspeed import uses_disk
from trainer.config.train_config import TrainConfig
from trainer.corpus.tokenizer import Tokenizer, single_file
from trainer.corpus.verify import other_tokenizer
from trainer.device import Device, open_device, pool_buffers
from trainer.engine.passes import Model
from trainer.engine.torch_engine import Engine, TorchEngine
from trainer.env import Env
from trainer.errors import DataError, InputError
from trainer.model.cuts import shapes_of
from trainer.model.glm import GLM
from trainer.model.gpt import GPT
from trainer.model.masks import Ends
from trainer.model.recompute import Recompute
from trainer.model.unallocated import Unallocated, allocate
from trainer.parallel.group import Group, Groups
from trainer.parallel.tensor import ALONE
from trainer.samples.cache import IndexCache
from trainer.samples.dataset import (
    Batches,
    Data,
    Readable,
    Share,
)
from trainer.samples.known_ids import ids_fault, text_ids
from trainer.train.draw import draw
from trainer.train.events import Event
from trainer.train.loop import Training, train
from trainer.train.not_finite import NonFiniteSearch
from trainer.train.observers import emit, observers, started
from trainer.train.rates import MemoryReport, planned_bytes
from trainer.train.reference import fill_references
from trainer.train.startup import Startup
from trainer.tune.progress import CountsAnswers, EarlyStop, accuracy_of
from trainer.tune.task import TaskData, open_task, tuned_model


class StopOnSigterm:
    """Records SIGTERM; the loop checks it after each step."""

    def __init__(self) -> None:
        self._requested = False
        signal.signal(signal.SIGTERM, self._record)

    def _record(self, *_: object) -> None:
        self._requested = True

    def __call__(self) -> bool:
        return self._requested


def run_training(
    config: TrainConfig,
    environment: Env,
    run_dir: Path,
    stop: Callable[[], bool],
    startup: Startup | None = None,
) -> tuple[Ended, Group]:
    """Train as this rank of a run, with files below `run_dir`; return how it ended, and the group, which the caller
    leaves."""
    startup = startup or Startup()
    startup.done("libraries")
    # The library that was pushed with the code may be for another processor than this node's.
    compiled = build.ensure()
    device = _open_device(config, environment)
    unpooled = _pool_buffers() if device.kind == "cpu" else ""
    before = device.memory_before()
    data = _open_data(config, environment.cache_dir or run_dir / "indices")
    orders = _make_orders(config, data)
    startup.done("data")
    ops = _choose_ops(config, device)
    group = Group.join(environment, device, always=config.engine == "deepspeed")
    layout = config.layout(group.world)
    groups = Groups.of(group, layout, config.parallel.sequence, config.parallel.interleave, config.model.tied)
    startup.done("group")
    model = model_on_device(config, ops, groups, device)
    engine = _engine(model, config, groups, device, ops, environment.run_id or run_dir.name)
    startup.done("model")
    side, folder = _side_files(config, group, run_dir), _checkpoint_folder(config, environment, run_dir)
    checkpointer = Checkpointer(config, engine, group, folder, data.identity(), *side)
    checkpointer.require_shared(config.save.dir)
    share = _share(config, groups)
    prefer = partial(fill_references, config, engine, model, orders, share, group, run_dir)
    step = _begin(config, checkpointer, engine, group, run_dir, prefer)
    checkpointer.notes += [*filter(None, [compiled, unpooled]), *data.notes, *_notes(config, device)]
    startup.done("checkpoint")
    start = started(config, environment, group, device, ops, checkpointer, step, startup)
    watchers = observers(config, environment, run_dir, groups, start)
    emit(watchers, start)
    run = Training(
        config,
        engine,
        train=Batches(orders["train"], share),
        valid=Batches(orders["valid"], share) if "valid" in orders else None,
        checkpoints=checkpointer,
        emit=partial(emit, watchers),
        stop_requested=stop,
        measure=MemoryReport(device, group, planned_bytes(config, layout, device.kind), before),
        search=NonFiniteSearch(model, group, layout) if config.nan.name_layer else None,
        accuracy=partial(accuracy_of, cast("CountsAnswers", model), group) if config.tune.task else None,
        is_enough=EarlyStop(config.tune.patience, by_loss=config.tune.task == "chat"),
        dropout_place=groups.dropout_place,
        tasks=_tasks(config, model, groups, device),
        # A CPU computes while nothing else runs.
        ahead=None if device.kind == "cpu" else device.ahead,
    )
    ended = train(run, step)
    engine.finish()
    return ended, group


def _pool_buffers() -> str:
    """Let torch take large buffers from the native pool; return a note if it cannot, or ""."""
    fault = pool_buffers()
    return fault and f"note: freed buffers stay in glibc's heap, which takes more memory: {fault}"


def _tasks(
    config: TrainConfig, model: Model, groups: Groups, device: Device
) -> Callable[[int], Iterable[Event]]:
    if not config.eval.tasks:
        return lambda step: ()
    from trainer.train.task_evaluations import TaskEvaluations

    return TaskEvaluations(config, model, groups, device)


def _side_files(config: TrainConfig, group: Group, run_dir: Path) -> tuple[Path | None, Path | None]:
    """Return tokenizer.json and the initial weights' generation_config.json for checkpoints. A collective of all ranks.

    A vocabulary with merges is converted to a tokenizer.json in `run_dir`.
    """
    tokenizer = single_file(Path(config.data.tokenizer), run_dir) if config.data.tokenizer else None
    if not config.init.source:
        return tokenizer, None
    from trainer.train.initial import generation_file

    return tokenizer, generation_file(config, group, run_dir)


def _begin(
    config: TrainConfig,
    checkpointer: Checkpointer,
    engine: Engine,
    group: Group,
    run_dir: Path,
    prefer: Callable[[DataIdentity], None],
) -> int:
    """Load the weights with which the training starts or continues; return its finished steps.

    `prefer` computes the log probabilities of preference pairs under the initial weights.
    """

    def begin() -> None:
        draw(config, engine)
        if config.init.source:
            # The import of all formats takes 0.15 s.
            from trainer.train.initial import load_initial

            checkpointer.notes.append(load_initial(config, engine, group, run_dir))

    # Checkpoints of adapters contain only adapters, and the reference model has the initial weights.
    adapts = config.tune.lora.rank > 0
    at_once = adapts or config.tune.task == "dpo"
    if at_once:
        begin()
    if adapts:
        from trainer.train.initial import base_of

        checkpointer.base = base_of(config, group, run_dir)
    if config.tune.task == "dpo":
        prefer(checkpointer.data)
    step = checkpointer.resume()
    if not checkpointer.resumed_from and not at_once:
        begin()
    return step


def _open_device(config: TrainConfig, environment: Env) -> Device:
    return open_device(
        environment.device_kind,
        environment.local_rank,
        environment.local_world_size,
        environment.threads,
        config.deterministic,
    )


def _notes(config: TrainConfig, device: Device) -> Iterator[str]:
    """Yield notes about settings that have another effect than a user might expect."""
    masked = {
        "train.data.reset_attention": config.data.reset_attention,
        "train.model.window": 0 < config.model.window < config.model.sequence,
    }
    for key in (key for key, given in masked.items() if given and device.kind == "cuda"):
        yield f"note: {key} uses torch's attention with a mask, not the fused op"
    if config.model.attention_dropout and device.kind == "npu":
        yield "note: train.model.attention_dropout needs all scores: training uses torch's products, not the fused op"
    if config.compile == "auto" and device.kind == "cuda" and config.capture_fault:
        how = "op by op" if config.block_fault else "in compiled blocks"
        yield f"note: training steps run {how}, not as a captured graph: {config.capture_fault}"
    if config.compile == "graph" and device.kind == "cpu":
        yield "note: train.compile: graph has no effect on a CPU"
    if config.compile == "blocks" and device.kind == "npu":
        yield "note: train.compile: blocks has no effect on an NPU, for which torch compiles nothing"
    if config.offload and device.kind == "cpu" and not uses_disk(config.deepspeed):
        yield "note: train.offload has no effect on a CPU"
    if config.model.kind == "glm" and not config.data.tokenizer:
        yield "note: without train.data.tokenizer each document counts as one sentence for [sMASK]"


def _checkpoint_folder(config: TrainConfig, environment: Env, run_dir: Path) -> Path:
    """Return where this run's checkpoints are: in the run's folder, or on a disk that all nodes share."""
    if not config.save.dir:
        return run_dir / CHECKPOINT_DIR
    shared = Path(config.save.dir).expanduser()
    if not shared.is_dir():
        raise InputError(f"train.save.dir: {shared}: no such folder", "create it on the shared disk")
    check_access(shared)
    return shared / (environment.saved_as or environment.run_id or run_dir.name)


def _open_data(config: TrainConfig, cache: Path) -> Data | TaskData:
    """Open the examples of a task or the corpora, before this rank waits for others."""
    return open_task(config) if config.tune.task else _open_corpora(config, cache)


def _open_corpora(config: TrainConfig, cache: Path) -> Data:
    """Open the corpora and return them; refuse unreadable ones before this rank waits for others."""
    data = Data(config.data, config.model.sequence, IndexCache(cache))
    _check_tokenizer(config)
    known = text_ids(config)
    for prefix, largest in data.largest_ids().items():
        if found := ids_fault(config, Path(f"{prefix}.bin"), largest, known):
            raise DataError(*found)
    return data


def _check_tokenizer(config: TrainConfig) -> None:
    """Refuse a model with fewer ids than its tokenizer, including GLM's special tokens."""
    vocab = config.model.vocab
    if config.model.kind == "glm":
        from trainer.samples.glm_batches import glm_tokens

        needed = glm_tokens(config).vocab
        if needed > vocab:
            problem = (
                f"train.model.vocab is {vocab}, but the tokenizer and GLM's special tokens need {needed}"
            )
            raise InputError(problem, f"use vocab: {needed}")
    if not config.data.tokenizer:
        return
    tokenizer = Tokenizer.load(Path(config.data.tokenizer))
    if config.model.kind != "glm" and tokenizer.vocab > vocab:
        raise InputError(
            f"train.model.vocab is {vocab}, but the tokenizer has {tokenizer.vocab} ids",
            f"use vocab: {tokenizer.vocab}",
        )
    for prefix in config.data.prefixes().values():
        if other := other_tokenizer(Path(prefix), tokenizer):
            raise InputError(f"train.data.tokenizer: {other[0]}", other[1])


def _ends(data: DataConfig) -> Ends | None:
    """Return how an end of document affects the rest of its sample; None: not at all."""
    if not data.needs_eod:
        return None
    eod = Tokenizer.load(Path(data.tokenizer)).eod if data.eod is None else data.eod
    return Ends(eod, data.mask_eod_loss, data.reset_positions, data.reset_attention)


def _make_orders(config: TrainConfig, data: Data | TaskData) -> Mapping[str, Readable]:
    """Return the order of samples, which one rank of each node computes, before this rank waits for other nodes."""
    assert config.global_batch is not None
    if not isinstance(data, Data):
        return data.orders()
    if config.model.kind == "glm":
        from trainer.samples.glm_batches import glm_batches

        return glm_batches(config, data)
    orders = {"train": data.samples("train", config.batches.consumed(config.steps))}
    if config.eval.batches:
        orders["valid"] = data.samples("valid", config.eval.batches * config.global_batch)
    return orders


def _share(config: TrainConfig, groups: Groups) -> Share:
    """Return this rank's share of every global batch, by its place among the ranks that read other samples."""
    assert config.global_batch is not None
    data, size = groups.data, groups.context.size
    return Share(config.micro_batch, config.global_batch, data.rank // size, data.world // size)


def _choose_ops(config: TrainConfig, device: Device) -> native.Choice:
    try:
        ops = native.choose(device.kind, config.native)
    except native.NativeError as error:
        raise InputError(f"train.native: {error}", "use native: auto") from None
    products.use_kernel(any(chosen.op == "linear" and chosen.backend == "cpu" for chosen in ops.report()))
    return ops


def build_model(config: TrainConfig, ops: native.Choice, groups: Groups, drawn: bool = True) -> Model:
    """Return this rank's part of the model; the initial weights are the same in every layout.

    Without `drawn`, matrices are 0 until they are drawn or loaded.
    """
    seed = config.seed if drawn else None
    wanted = config.recompute
    norms = config.recomputes_norms(groups.data.device.kind)
    recompute = Recompute(wanted.mode, wanted.every, wanted.split, groups.tensor, norms)
    pieces = config.stages[groups.pipeline.stage] if groups.pipeline.stages > 1 else ()
    if config.tune.task:
        return tuned_model(config, ops, groups.tensor, recompute, pieces, groups.context, drawn)
    if config.model.kind == "glm":
        return GLM(config.model, ops, seed, groups.tensor, recompute, pieces)
    ends = _ends(config.data)
    return GPT(config.model, ops, seed, ends, groups.tensor, recompute, pieces, groups.context)


def model_on_device(config: TrainConfig, ops: native.Choice, groups: Groups, device: Device) -> Model:
    """Return this rank's part of the model for an engine; its weights are drawn when no checkpoint has them.

    No rank needs CPU memory for complete matrices that its device or other ranks store. ZeRO 2 and 3 allocate and
    divide one block after another, and DeepSpeed moves the model itself.
    """
    sharded = config.zero >= 2 and groups.data.world > 1
    if sharded and config.engine == "torch" and (problem := why_not_sharded()):
        raise InputError(f"train.zero: {config.zero} {problem}", "use zero: 1, or engine: deepspeed")
    if config.engine == "deepspeed" or (device.kind == "cpu" and not sharded):
        return build_model(config, ops, groups, drawn=False)
    with Unallocated():
        model = build_model(config, ops, groups, drawn=False)
    if not sharded:
        allocate(model, device.name)
        model.to(device.name)
    return model


def _whole_shapes(config: TrainConfig, ops: native.Choice, groups: Groups) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole model's parameters, without allocating them."""
    with torch.device("meta"):
        whole = build_model(config, ops, Groups(groups.everyone, groups.everyone, ALONE))
        return shapes_of(whole, whole.parallel)


def _engine(
    model: Model, config: TrainConfig, groups: Groups, device: Device, ops: native.Choice, run: str
) -> Engine:
    shapes = _whole_shapes(config, ops, groups) if groups.pipeline.stages > 1 else None
    if config.engine == "deepspeed":
        from trainer.engine.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(model, config, groups, device, shapes, run)
    return TorchEngine(model, config, groups, device, shapes)
