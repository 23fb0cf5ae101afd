"""Rules between the keys of a training's config, the world size and the model. Only arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import native
from trainer.config.amounts import in_samples
from trainer.config.chips import NAMED
from trainer.config.curriculum import curriculum_faults
from trainer.config.deepspeed import settings_faults
from trainer.config.glm import SPECIAL_TOKENS, Infilling, Windows
from trainer.config.layout import Layout, accumulation, nearest_batches
from trainer.config.model import ModelConfig
from trainer.config.parts import EVALUATION_TASKS, LossScaleConfig
from trainer.config.rope import RopeConfig
from trainer.errors import Fault

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig


def layout_of(config: TrainConfig, world: int) -> tuple[Layout, list[Fault]]:
    """Return the layout of `world` ranks and its faults; with faults, a layout with which the checks can continue."""
    tensor, pipeline, context = config.parallel.tensor, config.parallel.pipeline, config.parallel.context
    if world % (tensor * pipeline * context) == 0:
        return Layout.of(world, tensor, pipeline, context), []
    problem = f"{world} ranks are not divisible by tensor {tensor} x pipeline {pipeline}"
    problem += f" x context {context}" if context > 1 else ""
    fitting = [n for n in range(1, world + 1) if world % n == 0]
    product = "tensor x pipeline x context" if context > 1 else "tensor x pipeline"
    remedy = f"{product} must divide {world}: {', '.join(map(str, fitting[:8]))}"
    return Layout(1, tensor, pipeline), [Fault("train.parallel", problem, remedy)]


def between_keys(config: TrainConfig, layout: Layout, before: Sequence[Fault] = ()) -> list[Fault]:
    """Return the faults that arise from several keys together.

    A rule about a key that already has a fault is skipped, because it would check a default and not the user's value.
    """
    batch = "micro_batch global_batch parallel"
    rules: list[tuple[Iterator[Fault], str]] = [
        (model_faults(config.model), "model"),
        (_eod_faults(config), "model data.eod"),
        (_batch_faults(config, layout), batch),
        (_ramp_faults(config, layout), f"{batch} batch_ramp"),
        (_rate_faults(config), "optimizer.lr optimizer.min_lr optimizer.schedule optimizer.power"),
        (
            _schedule_faults(config),
            "steps batch_ramp optimizer.warmup optimizer.warmup_steps optimizer.decay",
        ),
        (_tensor_faults(config, layout), "model parallel"),
        (_context_faults(config), "model parallel data engine"),
        (_pipeline_faults(config, layout), f"{batch} model engine"),
        (
            curriculum_faults(config.curriculum, config.model, config.parallel, config.tune.task),
            "model parallel curriculum",
        ),
        (_recompute_faults(config), "model parallel recompute"),
        (_engine_faults(config, layout), "engine parallel zero offload"),
        (_master_faults(config), "engine precision offload optimizer.masters"),
        (_profile_faults(config, layout), "steps profile"),
        (_chip_faults(config), "precision hardware.chip hardware.kind"),
        (_precision_faults(config), "precision loss_scale"),
        (_native_faults(config), "native"),
        (_compile_faults(config), "compile model parallel zero engine tune recompute"),
        (_save_faults(config), "save"),
        (_init_faults(config), "init resume"),
        (_task_faults(config), "eval engine parallel zero data.tokenizer"),
    ]
    found: list[Fault] = []
    for rule, keys in rules:
        if not any(fault.is_of(key) for fault in (*before, *found) for key in keys.split()):
            found += rule
    return found


def _native_faults(config: TrainConfig) -> Iterator[Fault]:
    try:
        native.check(config.native)
    except native.BadRequest as error:
        yield Fault("train.native", str(error), "`python -m native` lists the ops and their backends")


def _compile_faults(config: TrainConfig) -> Iterator[Fault]:
    how, kind = config.compile, config.hardware.kind
    if how == "graph" and kind == "cpu":
        yield Fault("train.compile", "a CPU has no graphs", "use compile: auto")
    elif how == "blocks" and kind == "npu":
        yield Fault("train.compile", "torch compiles no blocks for an NPU", "use compile: graph or off")
    elif how == "graph" and config.capture_fault:
        remedy = "use compile: auto or off" if config.block_fault else "use compile: auto, blocks or off"
        yield Fault("train.compile", f"no graph is possible: {config.capture_fault}", remedy)
    elif how == "blocks" and config.block_fault:
        problem = f"no block can be compiled: {config.block_fault}"
        yield Fault("train.compile", problem, "use compile: auto or off")


def _save_faults(config: TrainConfig) -> Iterator[Fault]:
    folder, copies = config.save.dir, config.save.copies
    if folder and not folder.startswith(("/", "~/")):
        yield Fault("train.save.dir", f"{folder!r} is not an absolute path", "as in /shared/checkpoints")
    if folder and copies > 1:
        problem = f"{copies} copies of checkpoints that all nodes share"
        yield Fault("train.save.copies", problem, "leave it out: the shared disk is the only place")


# Settings that change nothing without another one.
_NEEDED = {
    **{"windowed": "window", "window_base": "windowed", "rotated": "rotary"},
    **{"qk_norm_whole": "qk_norm", "gate": "swiglu", "q_rank": "kv_rank"},
    **dict.fromkeys(
        ("scoring", "router_bias", "expert_bias", "expert_groups", "routed_scale", "dense_layers"), "experts"
    ),
}
_PLAIN = ModelConfig()


def model_faults(model: ModelConfig) -> Iterator[Fault]:
    """Yield the faults of a model alone."""
    if model.hidden % model.heads and not model.head_dim:
        fitting = [heads for heads in range(1, model.hidden + 1) if model.hidden % heads == 0]
        best = min(fitting, key=lambda heads: abs(heads - model.heads))
        problem = f"hidden {model.hidden} is not divisible by {model.heads} heads"
        yield Fault("train.model.heads", problem, f"use {best}")
    if model.heads % model.groups:
        problem = f"{model.heads} heads are not divisible by {model.groups} groups"
        yield Fault("train.model.query_groups", problem, "use a divisor of heads, or 0")
    if model.rotary and model.kind == "glm":
        yield Fault("train.model.rotary", "GLM's two rows of positions are learned", "leave rotary out")
    if model.experts and model.top_k > model.experts:
        problem = f"is {model.top_k}, and there are {model.experts} experts"
        yield Fault("train.model.top_k", problem, f"use {model.experts} or less")
    if model.experts % model.expert_groups:
        problem = f"{model.experts} experts are not divisible by {model.expert_groups} groups"
        yield Fault("train.model.expert_groups", problem, "use a divisor of experts")
    elif model.experts and not 1 <= model.top_groups <= model.expert_groups:
        problem = f"is {model.top_groups}, and there are {model.expert_groups} groups"
        yield Fault("train.model.top_groups", problem, f"use {model.expert_groups} or less")
    elif model.experts and model.top_k > model.experts // model.expert_groups * model.top_groups:
        problem = f"is {model.top_k}, and {model.top_groups} groups have fewer experts"
        yield Fault("train.model.top_k", problem, "use fewer, or more top_groups")
    if model.shared_ffn and not model.experts:
        yield Fault("train.model.shared_ffn", "goes with experts, and experts is 0", "leave it out")
    if model.rotary:
        yield from _rope_faults(model)
    elif model.rope != RopeConfig():
        yield Fault("train.model.rope", "goes with rotary: true, and rotary is false", "add rotary: true")
    if model.swiglu and model.kind == "glm":
        yield Fault("train.model.swiglu", "GLM's feed-forward part is a GELU", "leave swiglu out")
    if model.kv_rank:
        settings = ("query_groups", "window", "qk_norm", "attention_cap", "sinks")
        for name in (name for name in settings if getattr(model, name)):
            yield Fault(f"train.model.{name}", "does not go with latent attention (kv_rank)", "leave it out")
        if model.kind == "glm" or not model.rotary or model.bias != "none":
            problem = "latent attention is that of a gpt with rotary: true and bias: none"
            yield Fault("train.model.kv_rank", problem, "change these, or leave kv_rank out")
    for name, other in _NEEDED.items():
        if getattr(model, name) != getattr(_PLAIN, name) and not getattr(model, other):
            yield Fault(f"train.model.{name}", f"goes with {other}", f"add {other}, or leave {name} out")
    if not (model.input_norms or model.sandwich_norms):
        problem = "is false: without sandwich_norms there is no norm"
        yield Fault("train.model.input_norms", problem, "add sandwich_norms: true")
    if model.window and model.kind == "glm":
        yield Fault("train.model.window", "a GLM attends to its complete source", "leave window out")
    if 0 < model.positions < model.sequence and not model.rotary:
        problem = f"{model.positions} positions are fewer than a sample's {model.sequence} tokens"
        yield Fault("train.model.positions", problem, f"use {model.sequence} or more, or 0")


def _rope_faults(model: ModelConfig) -> Iterator[Fault]:
    rope, key = model.rope, "train.model.rope"
    if rope.part > 1:
        yield Fault(f"{key}.part", f"is {rope.part}; at most 1 is needed")
    elif model.rotary_size % 2 or not model.rotary_size:
        yield Fault(
            f"{key}.part" if rope.part < 1 else "train.model.rotary",
            f"rotates pairs, and {model.rotary_size} numbers of a head's {model.head_size} are rotated",
            "change it so that this number is even and not 0",
        )
    if rope.scaling == "none" and rope.factor != 1:
        problem = f"is {rope.factor:g}, and scaling is none"
        yield Fault(f"{key}.factor", problem, "add scaling: linear, dynamic, yarn or llama3")
    if rope.low_freq >= rope.high_freq:
        yield Fault(
            f"{key}.high_freq", f"is {rope.high_freq:g}; more than low_freq {rope.low_freq:g} is needed"
        )
    if rope.beta_slow >= rope.beta_fast:
        yield Fault(
            f"{key}.beta_fast", f"is {rope.beta_fast:g}; more than beta_slow {rope.beta_slow:g} is needed"
        )


def _engine_faults(config: TrainConfig, layout: Layout) -> Iterator[Fault]:
    if config.zero >= 2 and layout.pipeline > 1 and config.engine == "deepspeed":
        problem = f"is {config.zero}: DeepSpeed's pipeline does 0 and 1 only"
        yield Fault("train.zero", problem, "use zero: 1, or engine: torch, or no pipeline")
    if config.deepspeed and config.global_batch:
        micros = accumulation(config.global_batch, config.micro_batch, layout.readers)
        yield from settings_faults(config.deepspeed, micros)
    if config.model.experts and config.engine == "deepspeed":
        yield Fault("train.engine", "deepspeed does not train models with experts here", "use engine: torch")
    if config.offload and config.zero == 0 and config.engine == "deepspeed":
        yield Fault("train.offload", "DeepSpeed moves only a divided optimizer off the device", "use zero: 1")


def _master_faults(config: TrainConfig) -> Iterator[Fault]:
    """Refuse remainders without bf16 weights, which they extend."""
    reasons = {
        f"precision is {config.precision}: only bf16 weights are the upper half of an fp32 value": (
            config.precision != "bf16"
        ),
        "DeepSpeed keeps its own masters": config.engine == "deepspeed",
        "the optimizer's state moves to the node and the weights stay on the device": config.offload,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        if config.optimizer.masters == "remainder":
            yield Fault(
                "train.optimizer.masters", f"remainder cannot be used: {reason}", "use fp32, or leave it out"
            )


def _tensor_faults(config: TrainConfig, layout: Layout) -> Iterator[Fault]:
    model, tensor = config.model, layout.tensor
    of_experts = {key: getattr(model, key) for key in ("experts", "shared_ffn", "dense_ffn")}
    shares = model.attention.counts | (of_experts if model.experts else {"ffn": model.inner})
    for name, value in shares.items():
        if value % tensor:
            fitting = [n for n in range(1, tensor + 1) if value % n == 0]
            problem = f"{name}: {value} is not divisible by {tensor} ranks"
            yield Fault("train.parallel.tensor", problem, f"use {fitting[-1]}")
    if config.parallel.sequence and tensor == 1:
        problem = "sequence parallel divides what tensor parallel leaves whole, and tensor is 1"
        yield Fault("train.parallel.sequence", problem, "leave it out, or set tensor to 2 or more")
    if config.parallel.sequence and model.sequence % tensor:
        problem = f"{model.sequence} tokens are not divisible by tensor {tensor}"
        yield Fault("train.parallel.sequence", problem, "leave it out, or change model.sequence")


def _context_faults(config: TrainConfig) -> Iterator[Fault]:
    model, context, key = config.model, config.parallel.context, "train.parallel.context"
    if context == 1:
        return
    stretch = context * (config.parallel.tensor if config.parallel.sequence else 1)
    if model.sequence % stretch:
        problem = f"{model.sequence} tokens are not divisible by {stretch} ranks"
        yield Fault(key, problem, "change it, or model.sequence")
    refused = {
        "a GLM, whose source is seen whole": model.kind == "glm",
        "a window": 0 < model.window < model.sequence,
        "experts": model.experts > 0,
        "attention_dropout": model.attention_dropout > 0,
        "data.reset_positions": config.data.reset_positions,
        "data.reset_attention": config.data.reset_attention,
        "engine deepspeed": config.engine == "deepspeed",
        f"tune.task {config.tune.task}": config.tune.task not in ("", "chat"),
    }
    for subject in (subject for subject, given in refused.items() if given):
        yield Fault(key, f"does not go with {subject}", "use 1")


def _pipeline_faults(config: TrainConfig, layout: Layout) -> Iterator[Fault]:
    parallel, model = config.parallel, config.model
    pieces = layout.pipeline * parallel.interleave
    if parallel.interleave > 1 and layout.pipeline == 1:
        yield Fault("train.parallel.interleave", "there is no pipeline to interleave", "use 1")
    if pieces > model.layers:
        problem = (
            f"{pieces} pieces (pipeline x interleave) of {model.layers} layers leave some without a layer"
        )
        yield Fault("train.parallel.pipeline", problem, f"use {model.layers} pieces at most")
    if parallel.layers and (len(parallel.layers) != pieces or sum(parallel.layers) != model.layers):
        problem = f"{len(parallel.layers)} pieces of {sum(parallel.layers)} layers"
        need = f"{pieces} numbers (pipeline x interleave) that add up to {model.layers}"
        yield Fault("train.parallel.layers", problem, f"give {need}, or leave it out")
    elif parallel.layers and not all(any(piece.layers for piece in stage) for stage in config.stages[1:-1]):
        problem = f"{', '.join(map(str, parallel.layers))} leaves a stage between the ends without a layer"
        yield Fault("train.parallel.layers", problem, "give it one, or use fewer stages")
    micros = (config.global_batch or 0) // (config.micro_batch * layout.readers)
    if parallel.interleave > 1 and micros % layout.pipeline:
        problem = (
            f"{micros} micro-batches are not divisible by {layout.pipeline} stages; interleaving needs that"
        )
        unit = config.micro_batch * layout.readers * layout.pipeline
        yield Fault("train.global_batch", problem, f"use a multiple of {unit}")
    if parallel.interleave > 1 and config.engine == "deepspeed":
        yield Fault(
            "train.parallel.interleave", "DeepSpeed's pipeline has one piece a stage", "use engine: torch"
        )


def _recompute_faults(config: TrainConfig) -> Iterator[Fault]:
    recompute = config.recompute
    if recompute.mode != "full" and (recompute.every > 1 or recompute.split):
        key = "every" if recompute.every > 1 else "split"
        yield Fault(
            f"train.recompute.{key}", f"goes with mode full, and mode is {recompute.mode}", "mode: full"
        )
    if recompute.split and config.parallel.tensor == 1:
        yield Fault("train.recompute.split", "there is one tensor parallel rank", "leave it out")
    if recompute.every > config.model.layers:
        problem = f"{recompute.every} is more than the model's {config.model.layers} layers"
        yield Fault("train.recompute.every", problem, f"use {config.model.layers} or less")


def _chip_faults(config: TrainConfig) -> Iterator[Fault]:
    """Yield the faults of the chip that the job names."""
    chip = NAMED.get(config.hardware.chip)
    if chip is None:
        return
    kind = config.hardware.kind
    if kind and kind != chip.kind:
        yield Fault(
            "train.hardware.chip",
            f"{chip.name} is of kind {chip.kind}, and the nodes' devices are of kind {kind}",
            f"name a chip of kind {kind}, leave it out, or use other nodes",
        )
    elif config.precision not in chip.types:
        problem = f"{config.precision} does not exist on {chip.title}"
        yield Fault("train.precision", problem, f"use {' or '.join(reversed(chip.types))}, or another chip")


def _precision_faults(config: TrainConfig) -> Iterator[Fault]:
    if config.precision != "fp16" and config.loss_scale != LossScaleConfig():
        yield Fault("train.loss_scale", f"is fp16's, and precision is {config.precision}", "leave it out")


def _task_faults(config: TrainConfig) -> Iterator[Fault]:
    """Yield the faults of tasks that a training evaluates."""
    tasks, parallel = config.eval.tasks, config.parallel
    for at, entry in enumerate(tasks):
        name, given, file = entry.partition("=")
        if name not in EVALUATION_TASKS or not given or not file:
            problem = f"{entry!r} is not TASK=FILE with a task that exists"
            yield Fault(f"train.eval.tasks[{at}]", problem, f"tasks: {', '.join(EVALUATION_TASKS)}")
    if not tasks:
        return
    if not config.data.tokenizer:
        yield Fault("train.data.tokenizer", "missing: train.eval.tasks encode texts", "name a tokenizer.json")
    reasons = {
        "engine is deepspeed": config.engine == "deepspeed",
        f"zero is {config.zero}": config.zero >= 2,
        f"parallel.pipeline is {parallel.pipeline}": parallel.pipeline > 1,
        "parallel.sequence is on": parallel.sequence,
        f"parallel.context is {parallel.context}": parallel.context > 1,
        f"tune.task is {config.tune.task}": bool(config.tune.task),
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        problem = f"need a rank with all layers and whole samples, and {reason}"
        yield Fault("train.eval.tasks", problem, "evaluate the checkpoints with `clusterctl eval`")


def _init_faults(config: TrainConfig) -> Iterator[Fault]:
    if config.init.extend_vocabulary and not config.init.source:
        yield Fault(
            "train.init.source", "missing: extend_vocabulary is about its vocabulary", "add source: FOLDER"
        )
    if config.init.source and config.resume not in ("auto", "never"):
        yield Fault(
            "train.init", f"the training continues from {config.resume} (resume)", "leave one of the two out"
        )


def _profile_faults(config: TrainConfig, layout: Layout) -> Iterator[Fault]:
    profile, world = config.profile, layout.world
    beyond = [rank for rank in profile.ranks if rank >= world]
    if profile.repeat and beyond:
        listed = ", ".join(map(str, beyond))
        yield Fault("train.profile.ranks", f"there is no rank {listed}", f"ranks count from 0 to {world - 1}")
    if profile.repeat and not profile.ranks:
        yield Fault("train.profile.ranks", "names no rank", "as in [0]; or leave profile out")
    cycle = profile.wait + profile.warmup + profile.active
    if profile.repeat and cycle > config.steps:
        problem = f"{cycle} steps (wait + warmup + active) do not fit into {config.steps}"
        yield Fault("train.profile", problem, "use fewer, or more train.steps")


def _eod_faults(config: TrainConfig) -> Iterator[Fault]:
    if config.data.eod is not None and config.data.eod >= config.model.vocab:
        problem = f"{config.data.eod} is no token of a model of {config.model.vocab} (train.model.vocab)"
        yield Fault("train.data.eod", problem, "use the tokenizer's own end of document")


def _batch_faults(config: TrainConfig, layout: Layout) -> Iterator[Fault]:
    assert config.global_batch is not None
    if config.global_batch % (config.micro_batch * layout.readers) == 0:
        return
    below, above = nearest_batches(config.global_batch, config.micro_batch, layout.readers)
    ranks = f"{layout.readers} data parallel ranks"
    problem = f"{config.global_batch} is not divisible by micro_batch {config.micro_batch} x {ranks}"
    yield Fault(
        "train.global_batch", problem, f"use {above}" if below == above else f"use {below} or {above}"
    )


def _ramp_faults(config: TrainConfig, layout: Layout) -> Iterator[Fault]:
    ramp, whole = config.batch_ramp, config.global_batch or 0
    given = (ramp.start, ramp.increment, ramp.samples)
    if not any(given):
        return
    if not all(given):
        remedy = "as in {start: 32, increment: 32, samples: 100000}"
        yield Fault("train.batch_ramp", "needs start, increment and samples", remedy)
        return
    unit = config.micro_batch * layout.readers
    per = f"micro_batch {config.micro_batch} x {layout.readers} data parallel ranks"
    if config.parallel.interleave > 1:
        unit, per = unit * layout.pipeline, f"{per} x {layout.pipeline} stages, as interleaving needs"
    for key, value in (("start", ramp.start), ("increment", ramp.increment)):
        if value % unit:
            yield Fault(
                f"train.batch_ramp.{key}", f"{value} is not divisible by {per}", f"use a multiple of {unit}"
            )
    if ramp.start > whole or (whole - ramp.start) % ramp.increment:
        problem = f"steps of {ramp.increment} from {ramp.start} do not meet global_batch {whole}"
        yield Fault("train.batch_ramp.increment", problem, "use a divisor of global_batch - start")


def _rate_faults(config: TrainConfig) -> Iterator[Fault]:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield Fault("train.optimizer.min_lr", f"{optimizer.min_lr} is more than lr {optimizer.lr}")
    if optimizer.schedule == "exponential" and not optimizer.min_lr:
        problem = "is 0, which an exponential schedule never reaches"
        yield Fault("train.optimizer.min_lr", problem, "use a small rate, such as lr / 100")
    if optimizer.power != 1 and optimizer.schedule != "polynomial":
        problem = f"goes with schedule polynomial, and schedule is {optimizer.schedule}"
        yield Fault("train.optimizer.power", problem, "schedule: polynomial, or leave it out")


def _schedule_faults(config: TrainConfig) -> Iterator[Fault]:
    optimizer = config.optimizer
    if optimizer.warmup and optimizer.warmup_steps:
        problem = f"{optimizer.warmup} in addition to warmup_steps {optimizer.warmup_steps}"
        yield Fault("train.optimizer.warmup", problem, "keep one of them")
    batches, sequence = config.batches, config.model.sequence
    whole = float(batches.consumed(config.steps))
    length = in_samples(optimizer.decay, batches, sequence, whole) if optimizer.decay else whole
    if length <= 0:
        yield Fault("train.optimizer.decay", "is 0", "leave it out for the whole training")
        return
    if optimizer.warmup_steps and batches.consumed(optimizer.warmup_steps) >= length:
        problem = f"{optimizer.warmup_steps} leaves nothing of {batches.in_steps(length):g} steps"
        yield Fault("train.optimizer.warmup_steps", problem, f"use less than {batches.in_steps(length):g}")
    warmup = in_samples(optimizer.warmup, batches, sequence, length) if optimizer.warmup else 0.0
    if warmup >= length:
        problem = f"{optimizer.warmup} leaves nothing of a schedule of {batches.in_steps(length):g} steps"
        yield Fault("train.optimizer.warmup", problem, "use less, or a longer decay")


def glm_faults(config: TrainConfig) -> Iterator[Fault]:
    """Yield the keys of a `data:` part that do not fit the kind of model."""
    data = config.data
    if config.model.kind != "glm":
        for key, kind in (("windows", Windows), ("infilling", Infilling)):
            if getattr(data, key) != kind():
                problem = f"is GLM's, and the model is a {config.model.kind}"
                yield Fault(f"train.data.{key}", problem, "leave it out, or use a glm model")
        return
    yield from _chance_faults(data.windows, data.infilling)
    if not data.tokenizer and data.eod is None:
        problem = "missing: GLM needs the end of a document, and with a tokenizer those of sentences too"
        yield Fault("train.data.tokenizer", problem, "add `tokenizer:`, or at least `eod:`")
    for key in ("mask_eod_loss", "reset_positions", "reset_attention"):
        if getattr(data, key):
            problem = "is GPT's: of GLM's samples only blanks are predicted, and each opens with ENC"
            yield Fault(f"train.data.{key}", problem, "leave it out")
    text = config.model.vocab - SPECIAL_TOKENS
    if text < 1:
        problem = f"{config.model.vocab} leaves no token in addition to GLM's {SPECIAL_TOKENS} own"
        yield Fault("train.model.vocab", problem, f"use the tokenizer's + {SPECIAL_TOKENS}")
    elif data.eod is not None and text <= data.eod < config.model.vocab:
        problem = f"{data.eod} is one of GLM's own tokens, the last {SPECIAL_TOKENS} of {config.model.vocab}"
        yield Fault("train.data.eod", problem, "use the tokenizer's end of document")


def _chance_faults(windows: Windows, infilling: Infilling) -> Iterator[Fault]:
    chances = {"windows.short_chance": windows.short_chance}
    for key in ("words", "sentences", "one_span", "inside", "hide"):
        chances[f"infilling.{key}"] = getattr(infilling, key)
    for key, chance in chances.items():
        if chance > 1:
            yield Fault(f"train.data.{key}", f"is {chance}; a chance is at most 1")
    if infilling.words + infilling.sentences > 1:
        problem = f"words {infilling.words} and sentences {infilling.sentences} are more than 1 together"
        yield Fault("train.data.infilling", problem, "leave the rest to [gMASK]")
