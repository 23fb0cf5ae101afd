"""Turn the options of another trainer into the keys of a job."""

from __future__ import annotations

import re
from collections.abc import Callable

from clusterctl.bash.texts import is_open, shown
from clusterctl.errors import Fault, InputFaults, did_you_mean
from clusterctl.migrate.facts import combine
from clusterctl.migrate.families import FAMILIES
from clusterctl.migrate.found import Found, Given, options_by_name
from clusterctl.migrate.translation import Facts, Translation


def translate(found: Found) -> Translation:
    """Return the job of a training; raise InputFaults with every value that cannot be read."""
    result = Translation(found, notes=list(found.notes))
    facts: Facts = {}
    faults = [
        Fault(f"{given.where} {given.name}", given.option.note, "such a model is not trained here")
        for given in found.given
        if given.option is not None and given.option.target == "!" and _asks(given)
    ]
    if faults:
        raise InputFaults(faults, f"{found.source} is not converted")
    for given in found.given:
        try:
            _translate_option(given, result, facts)
        except ValueError as error:
            faults.append(
                Fault(f"{given.where} {given.name}", str(error), "correct the value, or leave the option out")
            )
    if faults:
        raise InputFaults(faults)
    combine(result, facts)
    for key, value in found.defaults.items():
        if not any(own == key or own.startswith(f"{key}.") for own in result.values):
            result.set(key, value, f"default of {found.title}")
    _make_consistent(result)
    return result


def _translate_option(given: Given, result: Translation, facts: Facts) -> None:
    """Record one option: as a value of the job, as a fact to combine later, or as not mapped with the reason."""
    option = given.option
    if option is None:
        known = [name for family in FAMILIES for table in family.tables for name in options_by_name(table)]
        closest = did_you_mean(given.name.lstrip("-"), known)
        result.unmapped.append(
            (given.name, f"unknown to this table; {closest}" if closest else "unknown to this table")
        )
        return
    if option.target == "!":
        result.unmapped.append((given.name, "it is off"))
        return
    if not option.target:
        result.unmapped.append((given.name, option.note))
        return
    if any(isinstance(value, str) and is_open(value) for value in given.values):
        written = shown(" ".join(map(str, given.values)))
        remedy = "give it in the job" if option.target.startswith("@") else f"set {option.target}"
        result.unmapped.append(
            (given.name, f"its value {written} is known only when the script runs: {remedy}")
        )
        return
    value = READERS[option.kind](given)
    if value is None:
        result.unmapped.append((given.name, "it is empty"))
        return
    if option.target.startswith("@"):
        facts[option.target[1:]] = (value, given.name)
        result.mapped.append(given.name)
        return
    key, equals, constant = option.target.partition("=")
    if equals:
        value = {"true": True, "false": False}.get(
            constant, int(constant) if constant.isdigit() else constant
        )
        if option.kind == "bool" and not READERS["bool"](given):
            result.unmapped.append((given.name, "it is off"))
            return
    result.set(key, value, _shown(given))
    result.mapped.append(given.name)


def _asks(given: Given) -> bool:
    """Return whether an option asks for something; a size of 0 does not."""
    return not given.values or str(given.values[0]) not in ("0", "0.0", "none", "None", "false", "False")


def _shown(given: Given) -> str:
    text = " ".join(str(value) for value in given.values)
    return f"{given.name} {text}".strip()[:80]


def _text(given: Given) -> object:
    text = str(given.values[0]) if given.values else ""
    # Quotes inside of a variable are text for the shell.
    return text[1:-1] if re.fullmatch(r"'[^']*'|\"[^\"]*\"", text) else text or None


def _int(given: Given) -> object:
    number = _float(given)
    if number is None:
        return None
    assert isinstance(number, float)
    if number != int(number):
        raise ValueError(f"is {given.values[0]!r}; a whole number is needed")
    return int(number)


def _float(given: Given) -> object:
    if not given.values or given.values[0] == "":
        return None
    try:
        number = float(str(given.values[0]).replace("_", ""))
    except ValueError:
        raise ValueError(f"is {given.values[0]!r}; a number is needed") from None
    if number != number or abs(number) == float("inf"):
        raise ValueError(f"is {given.values[0]!r}; a finite number is needed")
    return number


def _bool(given: Given) -> object:
    word = str(given.values[0]).lower() if given.values else "true"
    if word in ("true", "1", "yes", "on", "t", "y"):
        return True
    if word in ("false", "0", "no", "off", "f", "n"):
        return False
    raise ValueError(f"is {given.values[0]!r}; true or false is needed")


def _words(given: Given) -> object:
    return [str(value) for value in given.values]


READERS: dict[str, Callable[[Given], object]] = {
    "flag": lambda given: True,
    "int": _int,
    "float": _float,
    "text": _text,
    "bool": _bool,
    "words": _words,
    "any": lambda given: given.values[0] if given.values else None,
}


def _make_consistent(result: Translation) -> None:
    """Drop keys that need others which the training does not have, and add a note for each."""
    values = result.values

    def has(key: str) -> bool:
        return key in values

    precision = values["train.precision"].value if has("train.precision") else "fp32"
    if precision != "fp16":
        _drop(result, "train.loss_scale", f"needs fp16, and the precision is {precision}")
    mode = values.get("train.recompute.mode", values.get("train.recompute"))
    if mode is None or mode.value != "full":
        _drop(result, "train.recompute.every", "needs full recomputation")
        _drop(result, "train.recompute.split", "needs full recomputation")
    tensor = values["train.parallel.tensor"].value if has("train.parallel.tensor") else 1
    if tensor == 1:
        _drop(result, "train.parallel.sequence", "needs tensor parallel ranks")
        _drop(result, "train.recompute.split", "needs tensor parallel ranks")
    positions, sequence = values.get("train.model.positions"), values.get("train.model.sequence")
    if positions is not None and sequence is not None and positions.value == sequence.value:
        del values["train.model.positions"]
    if has("train.parallel.context") and values["train.parallel.context"].value == 1:
        del values["train.parallel.context"]
    dropout = values.get("train.model.attention_dropout")
    refused = {
        "dropout of attention": dropout is not None and dropout.value != 0,
        "documents that do not see each other": has("train.data.reset_attention"),
        "experts": has("train.model.experts"),
    }
    for reason in (reason for reason, holds in refused.items() if holds):
        _drop(result, "train.parallel.context", f"does not go with {reason}; its ranks are data parallel")
    if has("train.parallel.context") and has("train.engine") and values["train.engine"].value != "torch":
        del values["train.engine"]
        result.notes.append("engine torch is used: DeepSpeed's engine has no context parallel ranks here")
    if has("train.tune.task") and values["train.tune.task"].value != "chat":
        _drop(result, "train.parallel.sequence", "needs longer rows than those of this task")
    groups, heads = values.get("train.model.query_groups"), values.get("train.model.heads")
    if groups is not None and heads is not None and groups.value == heads.value:
        del values["train.model.query_groups"]
    if not has("train.model.experts"):
        for key in ("top_k", "aux_loss", "renormalize", "capacity", "shared_ffn"):
            values.pop(f"train.model.{key}", None)
    elif has("train.engine") and values["train.engine"].value != "torch":
        del values["train.engine"]
        result.notes.append(
            "engine torch is used: DeepSpeed's engine does not train models with experts here"
        )


def _drop(result: Translation, key: str, reason: str) -> None:
    for own in [own for own in result.values if own == key or own.startswith(f"{key}.")]:
        dropped = result.values.pop(own)
        if dropped.origin.startswith("default of"):
            continue
        if own.endswith(".every") and dropped.value == 1:
            continue
        result.notes.append(f"{dropped.origin.partition(' ')[0]} is left out: it {reason}")
