"""Find the known program that a command starts, and the options that it is given."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from clusterctl.bash.evaluator import Word
from clusterctl.errors import Fault, InputFaults, UsageError
from clusterctl.migrate.families import FAMILIES, LAUNCHER, Family
from clusterctl.migrate.found import Found, Given
from clusterctl.migrate.tables import ascend
from clusterctl.migrate.tables.verbs import REFUSED

# Commands that do not start a program that they name.
NO_STARTERS = ("cp", "mv", "ln", "ls", "chmod", "rm", "grep", "pip", "wget")
# run_distribute.sh TABLE CONFIG RANGE MODE [SIZE]
POSITIONS = ("RANK_TABLE_FILE", "CONFIG_PATH", "DEVICE_RANGE", "RUN_MODE", "RANK_SIZE")


# A program of another name, by which nothing is trained.
OTHER_PROGRAM = re.compile(
    r"generat|server|infer|eval|convert|checkpoint|preprocess|export|quantize|prune|download"
)


def start_by_options(words: Sequence[Word]) -> tuple[Family, int] | None:
    """Return the family that knows most of a command's options, if at least three, and the place before the first."""
    names = [word.text.partition("=")[0] for word in words if word.text.startswith("--")]
    names = [name for name in names if LAUNCHER.option(name) is None]
    training = [family for family in FAMILIES if family.verb == "job"]
    family = max(training, key=lambda each: sum(each.option(name) is not None for name in names))
    first = next((at for at, word in enumerate(words) if word.text.startswith("--")), 0) - 1
    if sum(family.option(name) is not None for name in names) < 3:
        return None
    return None if OTHER_PROGRAM.search(words[max(first, 0)].text) else (family, first)


def start(words: Sequence[Word]) -> tuple[Family, int] | None:
    """Return the family of the known program in a command, and its place; None if the command only names it."""
    if words and words[0].text in NO_STARTERS:
        return None
    for at, word in enumerate(words):
        for family in FAMILIES:
            if any(word.text == name or word.text.endswith(f"/{name}") for name in family.programs):
                return family, at
    return None


def refuse(words: Sequence[Word]) -> None:
    """Raise UsageError for a program that is known and has no counterpart."""
    for word in words:
        if reason := REFUSED.get(posixpath.basename(word.text)):
            raise UsageError(
                f"{word.where}: {posixpath.basename(word.text)}: {reason}", "see docs/guide/training.md"
            )


def parse(family: Family, words: Sequence[Word], at: int, source: str, path: Path) -> Found:
    """Return the options of the program at a place in a command, and those of its launcher."""
    result = Found(family.name, family.title, source, defaults=family.defaults, verb=family.verb)
    program = words[at].text if at >= 0 else ""
    script = words[0].where.rpartition(":")[0]
    named = path.stem or (Path(script).stem if script.endswith(".sh") else Path(program).stem) or family.name
    result.name = re.sub(r"[^A-Za-z0-9._-]+", "-", named).strip("-.")[:41] or family.name
    before = [given for given in _options(LAUNCHER, words[: max(at, 0)]) if given.option]
    rest = words[at + 1 :]
    if program.endswith("run_distribute.sh"):
        positional = [word for word in rest[: len(POSITIONS)] if not word.text.startswith("-")]
        if len(positional) >= len(POSITIONS) - 1:
            pairs = list(zip(POSITIONS, positional, strict=False))
            result.given += [
                Given(name, (word.text,), word.where, family.option(name)) for name, word in pairs
            ]
            rest = rest[len(pairs) :]
    result.given += [*before, *_options(family, rest)]
    if program.rpartition("/")[2] in ascend.GLM_PROGRAMS:
        result.defaults = ascend.GLM_FINETUNE if "finetune" in program else ascend.GLM_PRETRAIN
    return result


def _options(family: Family, words: Sequence[Word]) -> Iterator[Given]:
    """Yield the options among some words, each with its values."""
    faults = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not re.match(r"--?[A-Za-z]", word.text):
            continue
        name, equals, value = word.text.partition("=")
        option = family.option(name) or (LAUNCHER.option(name) if name.startswith("--") else None)
        where = word.where
        values = [value] if equals else []
        most = 0 if equals or (option and option.kind == "flag") else 1
        if option is not None and option.kind == "words":
            most = len(words)
        while most and at < len(words) and not re.match(r"--?[A-Za-z]", words[at].text):
            values.append(words[at].text)
            at += 1
            most -= 1
        if option is not None and option.target and option.kind not in ("flag", "any", "bool") and not values:
            faults.append(Fault(f"{where} {name}", "has no value", "write it after the option"))
        yield Given(name, tuple(values), where, option)
    if faults:
        raise InputFaults(faults)
