"""PEFT folders: adapter_config.json, and the adapters' matrices under Hugging Face's names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoint.access import check_access
from trainer.checkpoint.manifest import Origin
from trainer.checkpoint.saved_file import SavedFile
from trainer.config.lora import TARGETS, LoraConfig, lora_faults, sections_of
from trainer.config.model import ModelConfig
from trainer.config.tune import TuneConfig
from trainer.errors import CheckpointError, InputError
from trainer.model.adapter import MARK
from trainer.weights.adapters.experts import Found, read_experts, write_experts
from trainer.weights.adapters.merge import base_at, contents_at
from trainer.weights.contents import AdapterContents, Contents, ExportRequest, ImportRequest, Report
from trainer.weights.convert import FORMATS, Format
from trainer.weights.families.family import Family
from trainer.weights.files.safetensors import read_safetensors, write_safetensors
from trainer.weights.huggingface import as_json, family_for, read_json
from trainer.weights.keys import Keys
from trainer.weights.lazy import DTYPES, Lazy, cast, in_memory
from trainer.weights.rules import Heads, Rule, in_sections, rules_of, to_theirs
from trainer.weights.target import Target

CONFIG_FILE = "adapter_config.json"
FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
FINGERPRINT = "base_fingerprint"
_NAME = re.compile(re.escape(PREFIX) + r"(.+)\.lora_([AB])(?:\.default)?\.weight")


def is_peft(folder: Path) -> bool:
    """Return whether a folder is in PEFT's format."""
    return (folder / CONFIG_FILE).is_file()


# -- names --------------------------------------------------------------------------------------------------


def _matrices(family: Family, model: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of the matrices that may have adapters."""
    modules = {module for module, _ in TARGETS.values()}
    for rule in rules_of(family.rules, model.layers):
        # The names of experts' matrices depend on the number of experts.
        if rule.theirs and rule.ours.endswith(".weight") and ".".join(rule.ours.split(".")[2:-1]) in modules:
            yield rule


def _module_names(rule: Rule, family: Family) -> list[str]:
    prefix = next(iter(family.prefixes), "")
    return [prefix + name.removesuffix(".weight") for name in rule.theirs]


# -- write --------------------------------------------------------------------------------------------------


def write_peft(contents: Contents, target: Target, wanted: ExportRequest, report: Report) -> None:
    """Write a folder that PEFT loads."""
    adapters = contents.adapters
    if adapters is None:
        problem = "the checkpoint contains whole weights and no adapters"
        raise InputError(problem, "export it with --to hf")
    family, tensors, ranks = family_for(contents), dict[str, Lazy](), dict[str, int]()
    for rule in _matrices(family, contents.model):
        for name, (a, b) in _theirs(rule, family, contents.model, adapters.tensors).items():
            ranks[name] = a.shape[0]
            for letter, matrix in (("A", a), ("B", b)):
                tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = cast(
                    in_memory(matrix), DTYPES[wanted.dtype]
                )
    of_experts, parameters = write_experts(contents.model, adapters.tensors)
    for name, pair in of_experts.items():
        for letter, matrix in zip("AB", pair, strict=True):
            tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = cast(in_memory(matrix), DTYPES[wanted.dtype])
    metadata = {"format": "pt", FINGERPRINT: adapters.base.fingerprint}
    total = sum(tensor.bytes for tensor in tensors.values())
    target.write(FILE, partial(_write_file, tensors, metadata))
    report(total, total)
    every = [name for rule in _matrices(family, contents.model) for name in _module_names(rule, family)]
    target.write_bytes(CONFIG_FILE, as_json(_config(adapters, ranks, parameters, family, every)))


def _write_file(tensors: Mapping[str, Lazy], metadata: Mapping[str, str], file: Path) -> SavedFile:
    return write_safetensors(file, tensors, metadata, lambda size: None)


def _theirs(
    rule: Rule, family: Family, model: ModelConfig, pairs: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return both matrices for each of PEFT's modules that a rule names; {} without an adapter."""
    path = rule.ours.removesuffix(".weight")
    own = {key.removeprefix(path + MARK) for key in pairs if key.startswith(path + MARK)}
    if not own:
        return {}
    names = _module_names(rule, family)
    sections = sections_of(model, ".".join(path.split(".")[2:]))
    chosen = [name for name in ("all", *sections) if f"{name}.a" in own]
    chosen = list(dict.fromkeys(chosen))
    found = {name: (pairs[f"{path}{MARK}{name}.a"], pairs[f"{path}{MARK}{name}.b"]) for name in chosen}
    if len(names) > 1 and "all" not in found:
        return {names[list(sections).index(section)]: pair for section, pair in found.items()}
    a, b = found["all"] if "all" in found else _stacked(found, sections)
    # Put the rows into the order of the matrix's rows; PEFT does not transpose adapters.
    rows = to_theirs(replace(rule, transposed=False), model, in_memory(b))
    return {name: (a, part.whole()) for name, part in zip(names, rows.values(), strict=True)}


def _stacked(
    found: Mapping[str, tuple[Tensor, Tensor]], sections: Mapping[str, int]
) -> tuple[Tensor, Tensor]:
    """Return one adapter of a higher rank that adds the same as those of the sections."""
    a = torch.cat([pair[0] for pair in found.values()])
    b, row, column = torch.zeros(sum(sections.values()), len(a)), 0, 0
    for section, width in sections.items():
        if section in found:
            own = found[section][1]
            b[row : row + width, column : column + own.shape[1]] = own
            column += own.shape[1]
        row += width
    return a, b


def _config(
    adapters: AdapterContents,
    ranks: Mapping[str, int],
    parameters: Mapping[str, int],
    family: Family,
    every: list[str],
) -> dict[str, object]:
    lora, both = adapters.lora, {**ranks, **parameters}
    rank = lora.rank if lora.rank in both.values() or parameters else next(iter(both.values()))
    others = {name: own for name, own in both.items() if own != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapters.base.source,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": lora.scale * rank,
        # PEFT refuses dropout for parameters; it only matters in training.
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "target_modules": sorted(_suffixes(ranks, every)),
        **({"target_parameters": sorted(parameters)} if parameters else {}),
        "rank_pattern": others,
        # Scale alpha with the rank, so that alpha / rank is equal everywhere.
        "alpha_pattern": {name: lora.scale * own for name, own in others.items()},
        "bias": "none",
        "fan_in_fan_out": any(rule.transposed for rule in family.rules),
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _suffixes(adapted: Mapping[str, int], every: list[str]) -> set[str]:
    """Return endings of names that match these modules and no others of the model."""
    found = set()
    for name in adapted:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            suffix = ".".join(parts[-count:])
            fitting = [other for other in every if f".{other}".endswith(f".{suffix}")]
            if all(other in adapted for other in fitting):
                found.add(suffix)
                break
    return found


# -- read ---------------------------------------------------------------------------------------------------


def read_peft(folder: Path, request: ImportRequest) -> Contents:
    """Return the adapters in a folder; `request.base`: the folder of their base weights."""
    check_access(folder)
    keys = Keys(f"{folder / CONFIG_FILE}", read_json(folder / CONFIG_FILE))
    base = request.base or str(keys.get("base_model_name_or_path", default=""))
    if not base or not Path(base).exists():
        problem = f"{folder}: its base weights are not at {base!r}"
        raise InputError(problem, "name them with --base: a checkpoint, a run, or a folder of Hugging Face")
    rank = keys.number("r")
    scale = keys.real("lora_alpha", default=float(rank)) / rank
    for key, wanted in (
        ("bias", "none"),
        ("use_dora", False),
        ("use_rslora", False),
        ("modules_to_save", None),
    ):
        keys.must_be(key, wanted, wanted, "our adapters do not support it")
    _check_patterns(keys, scale)
    keys.check()
    whole, known = contents_at(Path(base)), base_at(Path(base))
    theirs = _pairs(folder)
    pairs, chosen = _ours(folder, whole, theirs, rank)
    lora = LoraConfig(rank, scale * rank, keys.real("lora_dropout", default=0.0), tuple(chosen))
    faults = list(lora_faults(whole.model, lora))
    if faults:
        raise CheckpointError(f"{folder}: {faults[0]}")
    return Contents(
        whole.model,
        {name: in_memory(matrix) for name, matrix in pairs.items()},
        Origin("peft", str(folder), family=family_for(whole).name),
        whole.files,
        config=replace(whole.config, tune=TuneConfig(lora=lora)),
        adapters=AdapterContents(lora, pairs, known),
    )


def _check_patterns(keys: Keys, scale: float) -> None:
    """Add faults for ranks that differ; only experts' gate and up together may have another rank."""
    ranks: Any = keys.get("rank_pattern") or {}
    alphas: Any = keys.get("alpha_pattern") or {}
    for key, pattern in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if any(not name.endswith("gate_up_proj") for name in pattern):
            keys.faults.append(f"{key}: our adapters must all have the same rank and alpha")
            return
    for name in {**ranks, **alphas}:
        if name not in ranks or name not in alphas or float(alphas[name]) != scale * float(ranks[name]):
            keys.faults.append(
                f"alpha_pattern: alpha / rank of {name} differs from that of the other adapters"
            )


def _pairs(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Return the matrices A and B of each module in a folder."""
    found: dict[str, dict[str, Tensor]] = {}
    if not (folder / FILE).is_file():
        raise CheckpointError(f"{folder}: has no {FILE}", "save the adapter with safe_serialization")
    for name, lazy in read_safetensors(folder / FILE).items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{folder / FILE}: {name} is not a matrix of a LoRA adapter")
        found.setdefault(match[1], {})[match[2]] = lazy.whole().to(torch.float32)
    return found


def _ours(
    folder: Path, whole: Contents, theirs: Mapping[str, Mapping[str, Tensor]], rank: int
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the adapters under our names, and their targets; refuse targets that only some layers have."""
    family, model = family_for(whole), whole.model
    pairs, used, layers_of = dict[str, Tensor](), set[str](), dict[str, int]()
    of_matrices = list[Found]()
    for rule in _matrices(family, model):
        path, names = rule.ours.removesuffix(".weight"), _module_names(rule, family)
        module = ".".join(path.split(".")[2:])
        sections = list(sections_of(model, module))
        for at, name in enumerate(names):
            if name not in theirs:
                continue
            a, b = theirs[name].get("A"), theirs[name].get("B")
            if a is None or b is None:
                raise CheckpointError(f"{folder}: {name} has only one of lora_A and lora_B")
            if len(names) == 1:
                b = in_sections(in_memory(b), rule.rows, Heads.of(model)).whole()
            section = "all" if len(names) == 1 else sections[at]
            of_matrices.append(Found(path, section, (a, b), (name,)))
    of_experts = read_experts(str(folder), family, model, theirs, rank) if model.experts else ()
    for found in (*of_matrices, *of_experts):
        pairs |= {
            f"{found.path}{MARK}{found.section}.{which}": m for which, m in zip("ab", found.pair, strict=True)
        }
        module = ".".join(found.path.split(".")[2:])
        target = next(key for key, value in TARGETS.items() if value == (module, found.section))
        target = "up" if target == "gate_up" and not model.swiglu else target
        layers_of[target] = layers_of.get(target, 0) + 1
        used.update(found.names)
    if left := sorted(set(theirs) - used):
        raise CheckpointError(
            f"{folder}: {left[0]} is not a matrix of a {family.name} that can have adapters"
        )
    for target, count in layers_of.items():
        if count != model.layers:
            raise CheckpointError(f"{folder}: {count} of {model.layers} layers have an adapter on {target}")
    if not pairs:
        raise CheckpointError(f"{folder}: contains no adapters")
    return pairs, list(layers_of)


ALL_FORMATS: Mapping[str, Format] = {**FORMATS, "peft": Format("PEFT", is_peft, read_peft, write_peft)}
