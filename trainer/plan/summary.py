"""Summarize what a config would train and what it costs. The launcher runs this to plan, so it imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from clusterctl.wire.train_summary import (
    CorpusUse,
    Hardware,
    LayoutSizes,
    ParallelSettings,
    StagePlan,
    StepTime,
    TrainSummary,
)
from clusterctl.wire.typed_json import encode
from trainer.config.attention import WIDE
from trainer.config.chips import with_reported
from trainer.config.deepspeed import parts_on_disk, settings_of
from trainer.config.layout import Layout, accumulation
from trainer.config.train_config import TrainConfig
from trainer.errors import Fault
from trainer.json_types import JsonObject
from trainer.plan.auto import Choice
from trainer.plan.checkpoints import checkpoint_cost, disk_faults
from trainer.plan.checks import lint, name_notes
from trainer.plan.hardware import hardware_of
from trainer.plan.memory import Stage, learned_parameters, learned_sizes, sizes_of, stages
from trainer.plan.resolve import plan_config
from trainer.plan.time import CONVENTIONS, Cost, cost, passes_of, per_token, shortened

# Bytes of a number in files: the optimizer has masters, two moments and gradients, all in fp32 in every precision.
ON_DISK = {"offload_optimizer": 4 * WIDE, "offload_param": WIDE}


def check(document: object) -> JsonObject:
    """Return the summary of `{"train": ..., "world_size": n, "base_dir": "...", "check_data": bool}`, or its faults.

    `reported`: the name of the nodes' devices according to the driver's tool, `reported_memory` their MiB. `data`: the
    folder that all nodes get.
    """
    if not isinstance(document, Mapping):
        return _answer([Fault("", "the document is not a mapping", 'give {"train": {...}, "world_size": 4}')])
    world = document.get("world_size", 1)
    if not isinstance(world, int) or isinstance(world, bool) or world < 1:
        return _answer([Fault("world_size", f"is {world!r}; a whole number of at least 1 is needed")])
    train, chip_faults = with_reported(
        document.get("train"), document.get("reported"), document.get("reported_memory") or 0
    )
    base = Path(str(document.get("base_dir") or "."))
    found = plan_config(train, world, base if document.get("check_data") else None)
    config, faults = found.config, [*chip_faults, *found.faults]
    uses: list[CorpusUse] = []
    data_notes: list[str] = []
    length: float | None = None
    if document.get("check_data") and config.data.prefixes():
        data_faults, data_notes, uses = _check_data(config, base, faults)
        faults += data_faults
    if config.tune.task and document.get("check_data") and not faults:
        from trainer.plan.tune import check_examples, sample_length

        example_faults, example_notes = check_examples(config, Path(str(document.get("base_dir") or ".")))
        faults, data_notes = faults + example_faults, data_notes + example_notes
        length = None if faults else sample_length(config, base)
    if config.init.source and not faults:
        from trainer.plan.check_init import check_init

        nodes = -(-world // hardware_of(config, world).devices_per_node)
        data = document.get("data")
        init_faults, init_notes = check_init(
            config, base, nodes, Path(data) if isinstance(data, str) else None
        )
        faults += init_faults
        data_notes = [*data_notes, *init_notes]
    whole = None if faults else summary(config, world, uses, found.choice, length)
    if not faults:
        layout = config.layout(world)
        faults = disk_faults(config, checkpoint_cost(config, layout, hardware_of(config, world)))
    if whole is not None:
        named = name_notes(str(document.get("name", "")), config)
        whole = replace(whole, notes=(*named, *whole.notes, *data_notes))
    return {**_answer(faults), "config": config.as_json(), "summary": encode(whole)}


def _check_data(
    config: TrainConfig, base: Path, known: Sequence[Fault]
) -> tuple[list[Fault], list[str], list[CorpusUse]]:
    """Return the faults of tokenizer and corpora, notes, and how the corpora are used; `known`: the config's faults.

    Without NumPy or tokenizers, which a launcher need not have, a note says that the ranks check the data.
    """
    try:
        from trainer.plan.check_data import check_corpora, check_tokenizer
    except ModuleNotFoundError as error:
        note = f"train.data: not checked here, since {error.name} is not installed; the ranks check it"
        return [], [note], []
    faults, notes = check_tokenizer(config, base)
    sound = not any(fault.is_of(part) for fault in [*known, *faults] for part in ("model", "data"))
    uses, of_corpora = check_corpora(config, base, ids=sound)
    return [*of_corpora, *faults], notes, uses


def _answer(faults: list[Fault]) -> JsonObject:
    return {
        "ok": not faults,
        "faults": [fault.as_json() for fault in faults],
        "config": None,
        "summary": None,
    }


def summary(
    config: TrainConfig,
    world: int,
    uses: Sequence[CorpusUse] = (),
    choice: Choice | None = None,
    length: float | None = None,
) -> TrainSummary:
    """Return the figures of a checked config; `epochs` is None if the data is unknown.

    `length`: the mean tokens of a task's samples, if they vary.
    """
    assert config.global_batch is not None
    layout = config.layout(world)
    a_step = round(config.global_batch * (length or config.model.sequence))
    total = config.tokens(config.steps) if length is None else config.steps * a_step
    drawn = config.batches.consumed(config.steps) * config.model.sequence
    micros = accumulation(config.global_batch, config.micro_batch, layout.readers)
    hardware, found = hardware_of(config, world), stages(config, layout)
    part = length / config.tune.rows / config.model.sequence if length else 1.0
    step = shortened(cost(config, layout, hardware), a_step, part)
    highest = max(found, key=lambda stage: stage.memory.total)
    need = highest.memory
    flops = per_token(config.model, config.recompute.mode, passes_of(config))
    rates = {name: count * step.tokens_per_second / world / 1e12 for name, count in flops.items()}
    return TrainSummary(
        parameters=config.model.parameters(),
        trained_parameters=learned_parameters(config),
        active_parameters=config.model.active_parameters(),
        layout=LayoutSizes(layout.data, layout.tensor, layout.pipeline, layout.context),
        parallel=ParallelSettings(**asdict(config.parallel)),
        zero=config.zero,
        offload=config.offload,
        recompute=config.recompute.mode,
        steps=config.steps,
        micro_batch=config.micro_batch,
        accumulation=micros,
        bubble=(layout.pipeline - 1) / config.parallel.interleave / micros,
        tokens_per_step=a_step,
        tokens_total=total,
        epochs=drawn / sum(use.tokens for use in uses) if uses else None,
        corpora=tuple(uses),
        memory_per_device_bytes=need.by_purpose(),
        highest_stage=highest.stage,
        memory_of_the_node_bytes=max(stage.node for stage in found),
        offload_disk_bytes=offload_disk(config, layout, hardware),
        memory_of_a_device_bytes=int(hardware.memory * 1e9) or None,
        usable_memory_bytes=int(hardware.room) or None,
        fits=need.total <= hardware.room if hardware.room else None,
        stages=tuple(_stage_plan(stage, layout) for stage in found),
        time=_step_time(step, total),
        checkpoints=checkpoint_cost(config, layout, hardware, step.seconds),
        flops_per_token=flops,
        tflops_per_device=rates,
        conventions=CONVENTIONS,
        hardware=hardware,
        chosen=choice.summary() if choice else None,
        notes=tuple(lint(config, layout, hardware, need, uses)),
    )


def _step_time(step: Cost, total: int) -> StepTime:
    rate = step.tokens_per_second
    names = ("compute", "tensor", "pipeline", "bubble", "data", "update", "tokens")
    parts = {name: getattr(step, name) for name in names}
    return StepTime(**parts, seconds=step.seconds, tokens_per_second=rate, in_all=total / rate)


def _stage_plan(stage: Stage, layout: Layout) -> StagePlan:
    size = layout.tensor * layout.data
    return StagePlan(
        ranks=(stage.stage * size, (stage.stage + 1) * size),
        layers=stage.layers,
        parameters_per_rank=stage.parameters,
        memory=stage.memory.by_purpose(),
        moment=stage.moment,
        most_activations=stage.activations,
    )


def offload_disk(config: TrainConfig, layout: Layout, hardware: Hardware) -> int:
    """Return the bytes on the disk of a node with all its ranks, at most: rows of less than 1 MiB stay in memory."""
    parts = parts_on_disk(settings_of(config.deepspeed))
    if not parts:
        return 0
    whole = sizes_of(config, layout, 0)
    numbers = {"offload_optimizer": learned_sizes(config, layout, whole).all, "offload_param": whole.all}
    rank = sum(ON_DISK[part] * -(-numbers[part] // layout.data) for part in parts)
    return rank * min(layout.world, hardware.devices_per_node or layout.world)
