"""Combine options that only together determine a key of a job: batches, lengths, schedules, layouts, files."""

from __future__ import annotations

import posixpath
import re

from clusterctl.migrate import manifest
from clusterctl.migrate.model import set_model, set_task
from clusterctl.migrate.tables import ascend
from clusterctl.migrate.translation import Facts, Translation, current, leave_out, number, of, wrong

SCHEDULES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "wsd": "wsd",
    "exponential": "exponential",
    "polynomial": "polynomial",
    "cosinewithwarmuplr": "cosine",
    "linearwithwarmuplr": "linear",
    "constantwarmuplr": "constant",
    "warmupdecaylr": "linear",
    "polynomialwithwarmuplr": "polynomial",
}
OPTIMIZERS = (
    "adam",
    "adamw",
    "fusedadamweightdecay",
    "adamweightdecay",
    "fusedcastadamweightdecay",
    "fp32stateadamweightdecay",
)
# Tasks of GLM that can be learned here.
TASKS = ("copa",)


def combine(result: Translation, facts: Facts) -> None:
    """Turn facts into keys of the job."""
    for step in (
        _recipe,
        set_model,
        _nodes,
        _layout,
        _batches,
        _length,
        _curriculum,
        _schedule,
        _optimizer,
        _precision,
        _files,
        set_task,
        manifest.set_platform,
        _rest,
    ):
        step(result, facts)


def _recipe(result: Translation, facts: Facts) -> None:
    """Add the values that the ModelZoo script sets for a model size."""
    size = of(facts, "model_size") or ("345M" if result.found.family == "ascend" else "")
    if not size:
        return
    chosen = ascend.MODEL_SIZES.get(str(size))
    if chosen is None:
        known = ", ".join(ascend.MODEL_SIZES)
        raise wrong(result, facts["model_size"][1], f"there is no size {size!r}", f"use one of {known}")
    result.found.defaults = {**chosen, **result.found.defaults}


def _nodes(result: Translation, facts: Facts) -> None:
    devices = int(number(facts, "devices"))
    text = str(of(facts, "range") or "")
    if found := re.fullmatch(r"\[?(\d+),(\d+)[\])]?", text):
        devices = int(found[2]) - int(found[1])
    world = int(number(facts, "world"))
    nodes = (
        int(str(of(facts, "nodes") or "0").partition(":")[0] or 0)
        if str(of(facts, "nodes") or "0")[:1].isdigit()
        else 0
    )
    if world and devices and not nodes:
        nodes = max(1, world // devices)
        facts["nodes"] = (nodes, facts["world"][1])
    if devices:
        origin = next(facts[name][1] for name in ("devices", "range") if name in facts)
        result.set("devices", f"[0,{devices})", origin)
        facts["all_ranks"] = (devices * max(nodes, 1), origin)
    if nodes:
        noun = "node" if nodes == 1 else "nodes"
        hosts = f" ({of(facts, 'addresses')})" if "addresses" in facts else ""
        result.notes.append(
            f"it ran on {nodes} {noun}{hosts}: choose nodes with `nodes:`, or with -n when you launch"
        )
    if "rdma" in facts:
        result.set("network.rdma", "on" if of(facts, "rdma") else "auto", facts["rdma"][1])
    if "device" in facts and str(of(facts, "device")) not in ("Ascend", "GPU", "CPU"):
        leave_out(result, facts, "device", "the inventory names the kind of the devices")


def _layout(result: Translation, facts: Facts) -> None:
    if "virtual_layers" in facts:
        layers, stages = current(result, "train.model.layers"), current(result, "train.parallel.pipeline")
        pieces = int(layers / stages / max(1.0, number(facts, "virtual_layers")))
        result.set("train.parallel.interleave", max(1, pieces), facts["virtual_layers"][1])
    for name, mode in (("recompute", "full"), ("select_recompute", "selective")):
        if "train.recompute.mode" in result.values or not _asks(of(facts, name)):
            continue
        result.set("train.recompute.mode", mode, facts[name][1])
        if isinstance(of(facts, name), (list, dict)):
            result.notes.append(
                f"{facts[name][1]} chooses layers or operations; here all layers are recomputed"
            )
    if of(facts, "zero") and "train.zero" not in result.values:
        result.set("train.zero", 1, facts["zero"][1])


def _asks(value: object) -> bool:
    """Return whether a switch, or numbers of layers per stage, asks for something."""
    if isinstance(value, dict):
        return _asks(list(value.values()))
    return any(map(_asks, value)) if isinstance(value, list) else value not in (None, 0, "False", "false")


def _batches(result: Translation, facts: Facts) -> None:
    micro = int(current(result, "train.micro_batch", 0))
    accumulation = int(number(facts, "accumulation") or number(facts, "micro_batches") or 1)
    cuts = current(result, "train.parallel.tensor") * current(result, "train.parallel.pipeline")
    cuts *= current(result, "train.parallel.context")
    if "parallel_mode" in facts and number(facts, "parallel_mode") == 0:
        # MindSpore's mode of data parallel ranks alone.
        facts["data_parallel"] = (int(number(facts, "all_ranks")), facts["parallel_mode"][1])
    ranks = int(number(facts, "data_parallel") or number(facts, "all_ranks") // cuts)
    name = next(
        (facts[key][1] for key in ("accumulation", "micro_batches", "data_parallel") if key in facts), ""
    )
    batch = int(current(result, "train.global_batch", 0))
    if not batch and micro and ranks and name:
        product = micro * ranks * accumulation
        result.set(
            "train.global_batch", product, f"{micro} samples x {ranks} ranks x {accumulation} micro-batches"
        )
    elif batch and micro and ranks and "accumulation" in facts and batch != micro * ranks * accumulation:
        makes = f"{micro} x {ranks} ranks x {accumulation} = {micro * ranks * accumulation}"
        result.notes.append(
            f"{name} contradicts the global batch of {batch}: {makes}; the global batch is used"
        )
    if not micro and batch and ranks:
        result.set(
            "train.micro_batch", max(1, batch // ranks // accumulation), "global batch / ranks / accumulation"
        )
    ramp = of(facts, "ramp")
    if isinstance(ramp, list) and len(ramp) == 3 and all(str(part).isdigit() for part in ramp):
        for key, part in zip(("start", "increment", "samples"), ramp, strict=True):
            result.set(f"train.batch_ramp.{key}", int(part), facts["ramp"][1])


def _length(result: Translation, facts: Facts) -> None:
    given = [name for name in ("tokens", "samples", "epochs") if number(facts, name)]
    has_steps = "train.steps" in result.values
    task = "task" in facts or "train.tune.task" in result.found.defaults
    if task and "epochs" in facts:
        result.set("train.tune.epochs", int(number(facts, "epochs")), facts["epochs"][1])
        given = [name for name in given if name != "epochs"]
    for name in given if has_steps else given[1:]:
        leave_out(result, facts, name, "another option gives the training's length, and that one is used")
    if given and not has_steps:
        amount = _short(int(number(facts, given[0])))
        result.set("train.length", f"{amount} {given[0]}", facts[given[0]][1])


def _curriculum(result: Translation, facts: Facts) -> None:
    """Turn DeepSpeed's curriculum of sequence lengths into train.curriculum."""
    names = [name for name in facts if name.startswith("curriculum_")]
    kind = str(of(facts, "curriculum_kind") or "seqlen_truncate")
    schedule = str(of(facts, "curriculum_schedule") or "fixed_linear")
    reason = ""
    if not of(facts, "curriculum_on"):
        reason = "the curriculum is off"
    elif not kind.startswith("seqlen"):
        reason = f"a curriculum of {kind} is not supported: only the length of samples can grow"
    elif schedule not in ("fixed_linear", "fixed_root"):
        reason = f"the schedule {schedule} is not supported: use fixed_linear or fixed_root"
    for name in names if reason else ():
        leave_out(result, facts, name, reason)
    if reason:
        return
    for key, name in (
        ("start", "curriculum_start"),
        ("steps", "curriculum_steps"),
        ("multiple", "curriculum_multiple"),
    ):
        if name in facts:
            result.set(f"train.curriculum.{key}", *facts[name])
    if "curriculum_root" in facts and schedule == "fixed_root":
        result.set("train.curriculum.root", *facts["curriculum_root"])
    if "curriculum_schedule" in facts:
        result.set(
            "train.curriculum.schedule", schedule.removeprefix("fixed_"), facts["curriculum_schedule"][1]
        )
    whole = int(number(facts, "curriculum_whole"))
    sequence = int(current(result, "train.model.sequence", 0))
    if whole and not sequence:
        result.set("train.model.sequence", whole, facts["curriculum_whole"][1])
    elif whole and whole != sequence:
        leave_out(result, facts, "curriculum_whole", f"lengths grow up to train.model.sequence, {sequence}")


def _short(number: int) -> str:
    """Return 2.5B for 2,500,000,000; return all digits if a short form would lose some."""
    for scale, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= scale and number * 1000 % scale == 0:
            return f"{number / scale:g}{letter}"
    return str(number)


def _schedule(result: Translation, facts: Facts) -> None:
    if "schedule" in facts:
        word = str(of(facts, "schedule")).lower().replace("_", "").replace("-", "")
        if word in SCHEDULES:
            result.set(
                "train.optimizer.schedule",
                SCHEDULES[word],
                f"{facts['schedule'][1]} {of(facts, 'schedule')}",
            )
        else:
            leave_out(
                result,
                facts,
                "schedule",
                f"there is no schedule {of(facts, 'schedule')!r}, only {', '.join(dict.fromkeys(SCHEDULES.values()))}",
            )
    for kind, key in (("decay", "train.optimizer.decay"), ("warmup", "train.optimizer.warmup")):
        for unit in ("tokens", "samples", "steps"):
            name = f"{kind}_{unit}"
            if number(facts, name) > 0 and key not in result.values:
                result.set(key, f"{_short(int(number(facts, name)))} {unit}", facts[name][1])
            elif name in facts and number(facts, name) <= 0:
                leave_out(
                    result,
                    facts,
                    name,
                    "it is 0 or less, which means the whole training" if kind == "decay" else "it is 0",
                )
    if number(facts, "warmup_part") > 0 and "train.optimizer.warmup" not in result.values:
        part = number(facts, "warmup_part")
        result.set("train.optimizer.warmup", f"{part * 100:g}%", facts["warmup_part"][1])
    elif "warmup_part" in facts:
        leave_out(result, facts, "warmup_part", "it is 0, or another warm-up is given")
    if "lr_ratio" in facts and "train.optimizer.lr" in result.values:
        rate = current(result, "train.optimizer.lr") * number(facts, "lr_ratio")
        result.set("train.optimizer.min_lr", float(f"{rate:g}"), facts["lr_ratio"][1])


def _optimizer(result: Translation, facts: Facts) -> None:
    if "optimizer" in facts and str(of(facts, "optimizer")).lower() not in OPTIMIZERS:
        leave_out(result, facts, "optimizer", "AdamW is the only optimizer")
    if "beta1" in facts or "beta2" in facts:
        default = result.found.defaults.get("train.optimizer.betas", [0.9, 0.999])
        assert isinstance(default, list)
        betas = [
            number(facts, name) if name in facts else default[at]
            for at, name in enumerate(("beta1", "beta2"))
        ]
        origin = ", ".join(facts[name][1] for name in ("beta1", "beta2") if name in facts)
        result.set("train.optimizer.betas", betas, origin)
    if "betas" in facts:
        result.set("train.optimizer.betas", *facts["betas"])
    if "clip" in facts and not (of(facts, "clip") and "train.optimizer.clip" in result.values):
        result.set("train.optimizer.clip", 1.0 if of(facts, "clip") else 0.0, facts["clip"][1])


def _precision(result: Translation, facts: Facts) -> None:
    for name in ("fp16", "bf16"):
        if of(facts, name):
            result.set("train.precision", name, facts[name][1])
    if "dtype" in facts:
        word = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}.get(str(of(facts, "dtype")), "")
        if word:
            result.set("train.precision", word, facts["dtype"][1])
        else:
            leave_out(result, facts, "dtype", f"{of(facts, 'dtype')} is not one of fp32, bf16, fp16")
    if number(facts, "fixed_scale"):
        result.set("train.loss_scale.initial", number(facts, "fixed_scale"), facts["fixed_scale"][1])
        result.set("train.loss_scale.dynamic", False, facts["fixed_scale"][1])
    if "scale_power" in facts:
        result.set("train.loss_scale.initial", 2.0 ** number(facts, "scale_power"), facts["scale_power"][1])


def _files(result: Translation, facts: Facts) -> None:
    """Set the job's `data` folder, and the paths of the corpora and of the tokenizer in it."""
    prefixes = _corpora(of(facts, "data"))
    folder = posixpath.dirname(prefixes[0][0]) if prefixes else str(of(facts, "data_folder") or "data")
    task = result.found.defaults.get("train.tune.task") or of(facts, "task")
    name = next((facts[key][1] for key in ("data", "data_folder") if key in facts), "where the corpora are")
    if folder.startswith("/"):
        result.set("data_there", folder, name)
    else:
        result.set("data", f"./{posixpath.normpath(folder)}" if folder else "./data", name)
    if "data" in facts and result.found.family not in ("mindformers",) and len(prefixes) == 1:
        result.set("train.data.prefix", f"{{data}}/{_stem(prefixes[0][0])}", facts["data"][1])
    elif len(prefixes) > 1:
        blend = [{"prefix": f"{{data}}/{_stem(path)}", "weight": weight} for path, weight in prefixes]
        result.set("train.data.blend", blend, facts["data"][1])
    elif not task:
        result.set("train.data.prefix", "{data}/corpus_text_document", "what `clusterctl data build` wrote")
    for kind in ("train_data", "valid_data"):
        found = _corpora(of(facts, kind))
        if found:
            result.values.pop("train.data.prefix", None)
            result.set(
                f"train.data.{kind.partition('_')[0]}",
                [f"{{data}}/{_stem(path)}" for path, _ in found],
                facts[kind][1],
            )
    vocabulary = str(of(facts, "tokenizer") or of(facts, "vocab_file") or "")
    file = posixpath.basename(vocabulary.rstrip("/")) or "tokenizer.json"
    origin = next((facts[key][1] for key in ("tokenizer", "vocab_file") if key in facts), "put it there")
    if file.endswith(".model"):
        # A SentencePiece model.
        file, vocabulary, origin = (
            "tokenizer.json",
            "",
            f"{origin}: its tokenizer.json, which transformers writes",
        )
    result.set(
        "train.data.tokenizer",
        f"{{data}}/{file}",
        f"{origin}: copy it into the data folder" if vocabulary else origin,
    )
    if "eod" in facts:
        # Others of several only end a chat.
        ends = of(facts, "eod")
        end = str(ends[0] if isinstance(ends, list) and ends else ends)
        if end.isdigit():
            result.set("train.data.eod", int(end), facts["eod"][1])
    if task and str(task).lower() not in TASKS:
        known = "tasks: copa; `tune: {task: classify}` reads texts with labels"
        raise wrong(result, facts["task"][1], f"there is no task {task} here", known)
    if task:
        result.set(
            "train.tune.task", str(task).lower(), facts["task"][1] if "task" in facts else "fine-tuning"
        )
        # GLM's folder of a task has the task's name; some options name this folder, others the one above.
        inside = posixpath.basename(folder.rstrip("/")).lower() == str(task).lower()
        part = "" if inside else f"{str(task).upper()}/"
        for key, file in (("train", "train.jsonl"), ("valid", "val.jsonl")):
            result.set(f"train.tune.{key}", f"{{data}}/{part}{file}", name)


def _stem(path: str) -> str:
    return (
        re.sub(r"\.(bin|idx|jsonl|json)$", "", posixpath.basename(path.rstrip("/"))) or "corpus_text_document"
    )


def _corpora(value: object) -> list[tuple[str, float]]:
    """Return paths with weights, from `PATH` or `WEIGHT PATH WEIGHT PATH ...`."""
    words = [str(word) for word in value] if isinstance(value, list) else [str(value)] if value else []
    if (
        len(words) > 1
        and len(words) % 2 == 0
        and all(re.fullmatch(r"[0-9.eE+-]+", word) for word in words[::2])
    ):
        return [(path, float(weight)) for weight, path in zip(words[::2], words[1::2], strict=True)]
    return [(word, 1.0) for word in words]


def _rest(result: Translation, facts: Facts) -> None:
    save, load = of(facts, "save"), of(facts, "load")
    if save:
        result.notes.append(
            f"{facts['save'][1]} {save}: checkpoints are in the run's folder; `save: {{dir: ...}}` names a shared disk"
        )
    if load and load != save:
        result.set("train.init", str(load), f"{facts['load'][1]}: `clusterctl checkpoint import` reads it")
    elif load:
        result.notes.append(
            f"{facts['load'][1]}: a failed run resumes automatically from its newest valid checkpoint"
        )
    if "finetune" in facts and not load:
        leave_out(result, facts, "finetune", "no weights are given: set train.init")
    if str(of(facts, "run_mode") or "train") not in ("train", "finetune"):
        leave_out(result, facts, "run_mode", "use `clusterctl generate` or `clusterctl eval` for this")
    offload = of(facts, "cpu_offload")
    if offload is True or (isinstance(offload, dict) and offload.get("device") not in (None, "none")):
        result.set("train.offload", True, facts["cpu_offload"][1])
    if of(facts, "profile"):
        result.set("train.profile.repeat", 1, facts["profile"][1])
    if "deepspeed_config" in facts:
        result.set("train.engine", {"deepspeed": of(facts, "deepspeed_config")}, facts["deepspeed_config"][1])
