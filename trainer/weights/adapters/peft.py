"""PEFT folders: adapter_config.json, and the adapters' matrices under Hugging Face's names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import isclose, sqrt
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from clusterctl.wire.requests import ExportRequest, ImportRequest
from trainer.checkpoint.access import check_access
from trainer.checkpoint.manifest import Origin
from trainer.config.lora import TARGETS, LoraConfig, lora_faults, module_of, sections_of
from trainer.config.model import ModelConfig
from trainer.config.tune import TuneConfig
from trainer.errors import CheckpointError, InputError
from trainer.model.adapter import MARK
from trainer.weights.adapters.experts import Found, read_experts, stacked, write_experts
from trainer.weights.adapters.merge import base_at, contents_at
from trainer.weights.attention import in_sections
from trainer.weights.contents import AdapterContents, Contents
from trainer.weights.convert import FORMATS, Format
from trainer.weights.families.family import Family
from trainer.weights.files.safetensors import read_safetensors, write_safetensors
from trainer.weights.huggingface import as_json, family_for, read_json
from trainer.weights.keys import Keys
from trainer.weights.lazy import DTYPES, Lazy, cast, in_memory
from trainer.weights.rules import Rule, rules_of, to_ours, to_theirs
from trainer.weights.target import Target

CONFIG_FILE = "adapter_config.json"
FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
FINGERPRINT = "base_fingerprint"
# The ends of the names of modules with one pair of matrices for all experts.
_EXPERTS = (".mlp.experts", ".mlp.experts.base_layer")
_NAME = re.compile(re.escape(PREFIX) + r"(.+)\.lora_([AB])(?:\.default)?\.weight")


def is_peft(folder: Path) -> bool:
    """Return whether a folder is in PEFT's format."""
    return (folder / CONFIG_FILE).is_file()


# -- names --------------------------------------------------------------------------------------------------


def _matrices(family: Family, model: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of the matrices that may have adapters."""
    modules = {module for module, _ in TARGETS.values()}
    for rule in rules_of(family.rules, model):
        if not rule.experts and rule.ours.endswith(".weight") and module_of(rule.ours) in modules:
            yield rule


def _module_names(rule: Rule, family: Family) -> list[str]:
    prefix = next(iter(family.prefixes), "")
    return [prefix + name.removesuffix(".weight") for name in rule.theirs]


# -- write --------------------------------------------------------------------------------------------------


def write_peft(contents: Contents, target: Target, wanted: ExportRequest) -> None:
    """Write a folder that PEFT loads."""
    adapters = contents.adapters
    if adapters is None:
        problem = "the checkpoint contains whole weights and no adapters"
        raise InputError(problem, "export it with --to hf")
    family, tensors, ranks = family_for(contents), dict[str, Lazy](), dict[str, int]()
    for rule in _matrices(family, contents.model):
        for name, pair in _theirs(rule, family, contents.model, adapters.tensors).items():
            a, b = _without_zeros(*pair)
            if not len(a):
                continue
            ranks[name] = len(a)
            for letter, matrix in (("A", a), ("B", b)):
                tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = cast(
                    in_memory(matrix), DTYPES[wanted.dtype]
                )
    of_experts, parameters = write_experts(contents.model, adapters.tensors)
    for name, pair in of_experts.items():
        for letter, matrix in zip("AB", pair, strict=True):
            tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = cast(in_memory(matrix), DTYPES[wanted.dtype])
    saved = _saved_theirs(family, contents.model, adapters.tensors)
    tensors |= {PREFIX + name: cast(tensor, DTYPES[wanted.dtype]) for name, tensor in saved.items()}
    metadata = {"format": "pt", FINGERPRINT: adapters.base.fingerprint}
    target.total = sum(tensor.bytes for tensor in tensors.values())
    target.write_tensors(FILE, target.total, partial(write_safetensors, tensors=tensors, metadata=metadata))
    every = [name for rule in _matrices(family, contents.model) for name in _module_names(rule, family)]
    config = _config(adapters, ranks, parameters, family, every)
    config["modules_to_save"] = sorted({name.rpartition(".")[0] for name in saved}) or None
    target.write_bytes(CONFIG_FILE, as_json(config))


def _theirs(
    rule: Rule, family: Family, model: ModelConfig, pairs: Mapping[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return both matrices for each of PEFT's modules that a rule names; {} without an adapter."""
    path = rule.ours.removesuffix(".weight")
    own = {key.removeprefix(path + MARK) for key in pairs if key.startswith(path + MARK)}
    if not own:
        return {}
    names = _module_names(rule, family)
    sections = sections_of(model, module_of(rule.ours))
    chosen = dict.fromkeys(name for name in ("all", *sections) if f"{name}.a" in own)
    found = {name: (pairs[f"{path}{MARK}{name}.a"], pairs[f"{path}{MARK}{name}.b"]) for name in chosen}
    if len(names) > 1 and "all" not in found:
        return {names[list(sections).index(section)]: pair for section, pair in found.items()}
    a, b = found["all"] if "all" in found else stacked(found, sections)
    # Put the rows into the order of the matrix's rows; PEFT does not transpose adapters.
    rows = to_theirs(replace(rule, transposed=False), model, in_memory(b))
    return {name: (a, part.whole()) for name, part in zip(names, rows.values(), strict=True)}


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
        "use_dora": False,
        "use_rslora": False,
    }


def _without_zeros(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return an adapter without the rows of A and columns of B that are 0: an import fills adapters up with them."""
    kept = a.any(1) | b.any(0)
    return (a, b) if kept.all() else (a[kept].contiguous(), b[:, kept].contiguous())


def _saved_theirs(family: Family, model: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Lazy]:
    """Return the whole tensors that were saved with the adapters, under their names."""
    return {
        family.full_name(name): tensor
        for rule in rules_of(family.rules, model, tensors)
        for name, tensor in to_theirs(rule, model, in_memory(tensors[rule.ours])).items()
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
    scales = _Scales(keys, rank)
    for key, wanted in (("bias", "none"), ("use_dora", False)):
        keys.must_be(key, wanted, wanted, "our adapters do not support it")
    dropout, tying = keys.real("lora_dropout", default=0.0), bool(keys.get("ensure_weight_tying"))
    keys.check()
    whole, known = contents_at(Path(base)), base_at(Path(base))
    given, saved = _pairs(folder)
    rank, theirs = _equal(given, scales)
    pairs, chosen = _ours(folder, whole, theirs, rank)
    pairs |= _saved_ours(folder, whole, saved, tying=tying)
    lora = LoraConfig(rank, scales.of("", scales.rank) * rank, dropout, tuple(chosen))
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


def _pattern(name: str) -> str:
    """Return the expression of the modules that a key of PEFT's patterns stands for."""
    return rf"(.*\.)?({name})"


def _by_pattern(keys: Keys, key: str) -> dict[str, float]:
    """Return the numbers of modules; add a fault for each pattern that is no regular expression or may take minutes."""
    found = dict[str, float]()
    for name, number in keys.by_name(key).items():
        try:
            if re.search(r"[*+}]\)[*+{]", name):
                raise re.error("it repeats a repetition")
            re.compile(_pattern(name))
            found[name] = number
        except re.error as error:
            keys.faults.append(f"{key}: {name!r} is not a usable regular expression: {error}")
    return found


class _Scales:
    """The factor of each adapter's product in a folder of PEFT."""

    def __init__(self, keys: Keys, rank: int) -> None:
        self.rank = rank
        self._alpha = keys.real("lora_alpha", default=float(rank))
        if not self._alpha:
            keys.faults.append("lora_alpha is 0: its adapters add nothing")
        self._by_root = bool(keys.get("use_rslora", default=False))
        ranks, self._alphas = (_by_pattern(keys, f"{which}_pattern") for which in ("rank", "alpha"))
        for name in {**ranks, **self._alphas}:
            if "experts." in name and not isclose(self.of(name, ranks.get(name, rank)), self.of("", rank)):
                keys.faults.append(
                    f"alpha_pattern: the factor of {name} differs from that of the other adapters"
                )

    def of(self, module: str, rank: float) -> float:
        """Return the factor of a module's adapter of rank `rank`."""
        fits = (alpha for name, alpha in self._alphas.items() if re.fullmatch(_pattern(name), module))
        alpha = next(fits, self._alpha)
        return alpha / (sqrt(rank) if self._by_root else rank)


def _equal(
    theirs: Mapping[str, Mapping[str, Tensor]], scales: _Scales
) -> tuple[int, dict[str, Mapping[str, Tensor]]]:
    """Return adapters of one rank and factor that add the same: filled up with zeros, with B multiplied.

    The zeros stay 0 in a training. Experts' adapters in one tensor keep their rank.
    """
    plain = [name for name, pair in theirs.items() if len(pair) == 2 and not name.endswith(_EXPERTS)]
    rank = max([len(theirs[name]["A"]) for name in plain], default=scales.rank)
    found, common = dict(theirs), scales.of("", scales.rank)
    for name in plain:
        a, b = theirs[name]["A"], theirs[name]["B"]
        more, factor = rank - len(a), scales.of(name, len(a)) / common
        b = b if isclose(factor, 1.0) else b * factor
        found[name] = {"A": F.pad(a, (0, 0, 0, more)), "B": F.pad(b, (0, more))}
    return rank, found


def _pairs(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Lazy]]:
    """Return the matrices A and B of each module in a folder, and the whole tensors."""
    pairs: dict[str, dict[str, Tensor]] = {}
    saved = dict[str, Lazy]()
    if not (folder / FILE).is_file():
        raise CheckpointError(f"{folder}: has no {FILE}", "save the adapter with safe_serialization")
    for name, lazy in read_safetensors(folder / FILE).items():
        match = _NAME.fullmatch(name)
        if match is not None:
            pairs.setdefault(match[1], {})[match[2]] = lazy.whole().to(torch.float32)
        elif name.startswith(PREFIX) and ".lora_" not in name:
            saved[name.removeprefix(PREFIX)] = lazy
        else:
            raise CheckpointError(f"{folder / FILE}: {name} is not a matrix of a LoRA adapter")
    return pairs, saved


def _saved_ours(
    folder: Path, whole: Contents, saved: Mapping[str, Lazy], *, tying: bool
) -> dict[str, Tensor]:
    """Return whole tensors of a folder (PEFT's modules_to_save) under our names."""
    family, found, used = family_for(whole), dict[str, Tensor](), set[str]()
    prefix = next(iter(family.prefixes), "")
    given = {name.removeprefix(prefix): tensor for name, tensor in saved.items()}
    for rule in rules_of(family.rules, whole.model, whole.parameters):
        if all(name in given for name in rule.theirs):
            tensor, used = to_ours(rule, whole.model, given), used.union(rule.theirs)
            if tensor.shape != whole.parameters[rule.ours].shape:
                shapes = f"{list(tensor.shape)}, and its base weights have {list(whole.parameters[rule.ours].shape)}"
                raise CheckpointError(f"{folder}: {', '.join(rule.theirs)} has the shape {shapes}")
            found[rule.ours] = tensor.whole().to(torch.float32)
    if whole.model.tied and not tying and "tokens.weight" in found:
        raise CheckpointError(
            f"{folder}: has its own token table, and the head of its base weights is their token table"
        )
    if left := sorted(set(given) - used):
        raise CheckpointError(f"{folder}: modules_to_save: {left[0]} is no tensor of a {family.name}")
    return found


def _ours(
    folder: Path, whole: Contents, theirs: Mapping[str, Mapping[str, Tensor]], rank: int
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the adapters under our names, and their targets."""
    family, model = family_for(whole), whole.model
    pairs, used, targets = dict[str, Tensor](), set[str](), dict[str, None]()
    of_matrices = list[Found]()
    for rule in _matrices(family, model):
        path, names = rule.ours.removesuffix(".weight"), _module_names(rule, family)
        sections = list(sections_of(model, module_of(rule.ours)))
        for at, name in enumerate(names):
            if name not in theirs:
                continue
            a, b = theirs[name].get("A"), theirs[name].get("B")
            if a is None or b is None:
                raise CheckpointError(f"{folder}: {name} has only one of lora_A and lora_B")
            if len(names) == 1:
                b = in_sections(in_memory(b), rule.rows, model.attention).whole()
            section = "all" if len(names) == 1 else sections[at]
            of_matrices.append(Found(path, section, (a, b), (name,)))
    of_experts = read_experts(str(folder), family, model, theirs, rank) if model.experts else ()
    for found in (*of_matrices, *of_experts):
        pairs |= {
            f"{found.path}{MARK}{found.section}.{which}": m for which, m in zip("ab", found.pair, strict=True)
        }
        module = module_of(f"{found.path}.weight")
        target = next(key for key, value in TARGETS.items() if value == (module, found.section))
        target = "up" if target == "gate_up" and not model.swiglu else target
        targets[target] = None
        used.update(found.names)
    if left := sorted(set(theirs) - used):
        raise CheckpointError(
            f"{folder}: {left[0]} is not a matrix of a {family.name} that can have adapters"
        )
    if not pairs:
        raise CheckpointError(f"{folder}: contains no adapters")
    return _in_every_layer(pairs, model.layers), list(targets)


def _in_every_layer(pairs: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return adapters for all layers; those that the folder does not have are 0, also in a training."""
    found = dict(pairs)
    for name, matrix in pairs.items():
        block, _, rest = name.removeprefix("blocks.").partition(".")
        for number in range(layers):
            if str(number) != block and f"blocks.{number}.{rest}" not in found:
                found[f"blocks.{number}.{rest}"] = torch.zeros_like(matrix)
    return found


ALL_FORMATS: Mapping[str, Format] = {**FORMATS, "peft": Format("PEFT", is_peft, read_peft, write_peft)}
