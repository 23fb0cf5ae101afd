"""Find the training in a command, a script or a configuration file: its program's family and the options given."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterctl.bash.evaluate import evaluate
from clusterctl.bash.evaluator import Script, Word
from clusterctl.bash.texts import shown
from clusterctl.document import MAX_BYTES, Document, load_document, parse_document
from clusterctl.errors import Fault, InputFaults, UsageError
from clusterctl.migrate.option import Option, options_by_name, plain
from clusterctl.migrate.tables import (
    ascend,
    deepspeed,
    glm,
    launchers,
    manifest,
    megatron,
    mindformers,
    oneflow,
    preprocess,
)


@dataclass(frozen=True)
class Given:
    """An option as it was given: `name` as written, its values, and the place for messages."""

    name: str
    values: tuple[object, ...]
    where: str
    option: Option | None = None
    """None for an option that no table has."""


@dataclass
class Found:
    """A training of another program."""

    family: str
    title: str
    source: str
    """What was read, for the head of the job: a file's name or "a command"."""
    given: list[Given] = field(default_factory=list)
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Keys of the job that the program sets if an option is left out."""
    name: str = ""
    notes: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    """What a script decides only when it runs, by place."""
    choice: str = ""
    """If a script has several trainings: which one was taken, and which ones were skipped."""


@dataclass(frozen=True)
class Family:
    """The options of one program."""

    name: str
    title: str
    programs: tuple[str, ...]
    tables: tuple[str, ...]
    defaults: Mapping[str, object] = field(default_factory=dict)

    def option(self, name: str) -> Option | None:
        """Return the row of an option; the first table that has it counts."""
        return next((row for table in self.tables if (row := options_by_name(table).get(plain(name)))), None)


FAMILIES = (
    Family(
        "oneflow",
        oneflow.TITLE,
        oneflow.PROGRAMS,
        (oneflow.OPTIONS, oneflow.CONTAINER, megatron.OPTIONS),
        oneflow.DEFAULTS,
    ),
    Family("glm", glm.TITLE, glm.PROGRAMS, (glm.OPTIONS, megatron.OPTIONS), glm.DEFAULTS),
    Family("ascend", ascend.TITLE, ascend.PROGRAMS, (ascend.OPTIONS,), {}),
    Family("ascend-glm", ascend.TITLE, ascend.GLM_PROGRAMS, (ascend.GLM, ascend.OPTIONS), {}),
    Family(
        "mindformers", mindformers.TITLE, mindformers.PROGRAMS, (mindformers.OPTIONS,), mindformers.DEFAULTS
    ),
    Family("preprocess", "preprocess_data.py", preprocess.PROGRAMS, (preprocess.OPTIONS,)),
    Family("megatron", megatron.TITLE, megatron.PROGRAMS, (megatron.OPTIONS,), megatron.DEFAULTS),
)
LAUNCHER = Family("launcher", "", (), (launchers.OPTIONS,))
KNOWN = ", ".join(name for family in FAMILIES for name in family.programs[:1])
# Commands that do not start a program that they name.
NO_STARTERS = ("cp", "mv", "ln", "ls", "chmod", "rm", "grep", "pip", "wget")
# run_distribute.sh TABLE CONFIG RANGE MODE SIZE
POSITIONS = ("RANK_TABLE_FILE", "CONFIG_PATH", "DEVICE_RANGE", "RUN_MODE", "RANK_SIZE")


def read(text: str) -> Found:
    """Return the training that a command, or the file of this name, describes; raise UsageError if there is none."""
    if not text.strip():
        raise UsageError("--from: the command is empty", "give the command in quotes, or the name of a file")
    path = Path(text)
    if not any(char.isspace() for char in text.strip()) and not text.startswith("-"):
        if path.suffix in (".yaml", ".yml"):
            return _from_document(load_document(path), path)
        if path.suffix == ".json":
            return _from_keys(load_document(path), deepspeed.KEYS, "deepspeed", "DeepSpeed", path)
        return _from_script(evaluate(_text(path), str(path), path), path.name, path)
    return _from_script(evaluate(text, "the command"), "a command", Path())


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path}: larger than {MAX_BYTES >> 20} MB", "is this the right file?")
        return path.read_text("utf-8")
    except FileNotFoundError:
        remedy = "give the whole command in quotes, or the name of a script, job yaml or run_*.yaml"
        raise UsageError(f"{path}: no such file", remedy) from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text", "name a script, a job yaml or a run_*.yaml") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", "check the name and its permissions") from None


# ---- commands


def _from_script(script: Script, source: str, path: Path) -> Found:
    """Return the training that the last command with a known program starts; `choice` names the others."""
    sure = sorted(script.commands, key=lambda command: command.certain)
    starts = [(command.words, *start) for command in sure if (start := _program(command.words))]
    starts = starts or [(command.words, *start) for command in sure if (start := _by_options(command.words))]
    if starts:
        words, family, at = starts[-1]
        result = _parsed(family, words, at, source, path, script)
        result.unknown = {place: shown(reason) for place, reason in script.unknown.items()}
        if len(starts) > 1:
            *skipped, taken = [_place_of(words, at) for words, _, at in starts]
            result.choice = f"took {taken}; skipped {', '.join(dict.fromkeys(skipped))}"
        return result
    named = [word.text for each in script.commands for word in each.words if word.text.endswith(".sh")]
    remedy = f"start where {shown(named[0])} is, or name it alone; " if named else ""
    known = f"known programs: {KNOWN}"
    if script.unknown:
        problem = f"{source}: contains no training of a known program; {remedy}{known}"
        raise InputFaults(
            [Fault(source, problem), *(Fault(place, shown(text)) for place, text in script.unknown.items())]
        )
    raise UsageError(f"{source}: contains no training of a known program", f"{remedy}{known}")


def _place_of(words: Sequence[Word], at: int) -> str:
    """Return `train.sh:3 (pretrain_gpt.py)` for a command and the place of its program."""
    return f"{words[0].where} ({shown(words[max(at, 0)].text)})"


def _by_options(words: Sequence[Word]) -> tuple[Family, int] | None:
    """Return the family that knows most of a command's options, if at least three, and the place before the first."""
    names = [word.text.partition("=")[0] for word in words if word.text.startswith("--")]
    family = max(FAMILIES, key=lambda each: sum(each.option(name) is not None for name in names))
    if sum(family.option(name) is not None for name in names) < 3:
        return None
    return family, next(at for at, word in enumerate(words) if word.text.startswith("--")) - 1


def _program(words: Sequence[Word]) -> tuple[Family, int] | None:
    """Return the family of the known program in a command, and its place; None if the command only names it."""
    if words and words[0].text in NO_STARTERS:
        return None
    for at, word in enumerate(words):
        for family in FAMILIES:
            if any(word.text == name or word.text.endswith(f"/{name}") for name in family.programs):
                return family, at
    return None


def _parsed(family: Family, words: Sequence[Word], at: int, source: str, path: Path, script: Script) -> Found:
    result = Found(family.name, family.title, source, defaults=family.defaults)
    program = words[at].text if at >= 0 else ""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(program).stem or family.name).strip("-.")
    result.name = (path.stem if path.name else stem)[:41] or family.name
    before = [given for given in _options(LAUNCHER, words[: max(at, 0)]) if given.option]
    rest = words[at + 1 :]
    positional = [word for word in rest[: len(POSITIONS)] if not word.text.startswith("-")]
    if program.endswith("run_distribute.sh") and len(positional) == len(POSITIONS):
        named = zip(POSITIONS, positional, strict=True)
        result.given += [Given(name, (word.text,), word.where, family.option(name)) for name, word in named]
        rest = rest[len(POSITIONS) :]
    result.given += [*before, *_options(family, rest)]
    if program.rpartition("/")[2] in ascend.GLM_PROGRAMS:
        result.defaults = ascend.GLM_FINETUNE if "finetune" in program else ascend.GLM_PRETRAIN
    return _with_files(_inside_container(result), path, script)


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
        option = family.option(name)
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


def _inside_container(found: Found) -> Found:
    """Return the training that launch_container.py starts, with the container's own options."""
    inner = next((g for g in found.given if g.option is not None and g.option.target == "@command"), None)
    if inner is None:
        return found
    made = _from_script(evaluate(str(inner.values[0]), inner.where), found.source, Path())
    made.given = [given for given in found.given if given is not inner] + made.given
    return made


def _with_files(found: Found, path: Path, script: Script) -> Found:
    """Return a training with the keys of the configuration file that an option of it names."""
    for given in list(found.given):
        target = given.option.target if given.option else ""
        if target == "@deepspeed_config" and given.values:
            _add_curriculum(found, str(given.values[0]), script)
        if target != "@config" or not given.values:
            continue
        text = script.content(str(given.values[0]))
        if text is None:
            problem = f"{given.where} {given.name}: no file {shown(str(given.values[0]))}"
            raise UsageError(problem, "start in the folder that contains it")
        neighbour = path.parent / str(given.values[0])
        made = _from_document(parse_document(text, str(neighbour)), neighbour)
        made.given += [each for each in found.given if each is not given]
        return made
    return found


def _add_curriculum(found: Found, name: str, script: Script) -> None:
    """Add the curriculum of sample lengths in DeepSpeed's configuration: the job controls it, not the engine."""
    text = script.content(name)
    if text is None:
        return
    own = _from_keys(parse_document(text, name), deepspeed.KEYS, "deepspeed", "", Path(name))
    given = [each for each in own.given if each.name.startswith(deepspeed.CURRICULUM)]
    if given:
        found.given += given
        found.notes.append(f"remove the curriculum from {Path(name).name}: train.curriculum replaces it")


# ---- files


def _from_document(document: Document, path: Path) -> Found:
    """Return the training of a DeepSpeed job, of another manifest with a command, or of MindFormers."""
    value = document.value
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a mapping", "name a job of Kubernetes or a run_*.yaml of MindFormers")
    if "kind" in value and "spec" in value:
        return _from_manifest(document, path)
    if not {"parallel_config", "runner_config", "model", "base_config"} & value.keys():
        problem = f"{path}: neither a job of Kubernetes nor a configuration of MindFormers"
        raise UsageError(problem, "a job has `kind` and `spec`; a run_*.yaml has `parallel_config`")
    found = _from_keys(document, mindformers.KEYS, "mindformers", mindformers.TITLE, path)
    found.defaults = mindformers.DEFAULTS
    for name in value.get("base_config") or ():
        neighbour = path.parent / str(name)
        if not neighbour.is_file():
            found.notes.append(f"base_config names {name}, which does not exist: its keys are missing")
            continue
        base = _from_keys(load_document(neighbour), mindformers.KEYS, "mindformers", "", neighbour)
        own = {given.name for given in found.given}
        found.given += [given for given in base.given if given.name not in own]
    return found


def _from_keys(document: Document, table: str, family: str, title: str, path: Path) -> Found:
    """Return the options that a configuration's keys give; a section that the table names as a whole is one option."""
    if not isinstance(document.value, dict):
        raise UsageError(f"{path}: not a mapping", "is this the right file?")
    found = Found(family, title, path.name, name=re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem)[:41].strip("-."))
    rows = options_by_name(table)

    def walk(value: object, keys: tuple[str, ...]) -> Iterator[Given]:
        name = ".".join(keys)
        option = rows.get(plain(name))
        deeper = isinstance(value, dict) and any(row.startswith(plain(name) + ".") for row in rows)
        if option is None and isinstance(value, dict) and value and (not keys or deeper):
            for key, inner in value.items():
                yield from walk(inner, (*keys, str(key)))
        elif isinstance(value, dict) and option is not None and deeper:
            for key, inner in value.items():
                part = rows.get(plain(f"{name}.{key}"))
                yield from walk(inner, (*keys, str(key))) if part else ()
            yield Given(name, (), document.where(keys), option)
        elif name:
            values = () if value is None else (value,)
            yield Given(name, values, document.where(keys).partition(" ")[0], option)

    found.given = list(walk(document.value, ()))
    return found


def _from_manifest(document: Document, path: Path) -> Found:
    """Return the training in a manifest: the command of a known program, and the numbers of nodes and devices."""
    for words in _placed(document, path):
        start = _program(words)
        if start is None:
            continue
        found = _parsed(start[0], words, start[1], path.name, path, evaluate("", str(path), path))
        found.name = str((document.value.get("metadata") or {}).get("name") or path.stem)[:41]
        found.given += _manifest_facts(document)
        return found
    raise UsageError(f"{path}: no container starts a known program", f"known programs: {KNOWN}")


def _commands_in(value: object, keys: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], list[str]]]:
    """Yield each list of words in a manifest, and the words of each command in a text, such as that of `sh -c`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _commands_in(inner, (*keys, key))
    elif isinstance(value, list):
        if value and all(isinstance(each, (str, int, float)) for each in value):
            yield keys, [str(each) for each in value]
        for at, inner in enumerate(value):
            yield from _commands_in(inner, (*keys, at))
            if isinstance(inner, str) and len(inner.split()) > 3:
                for command in evaluate(inner, "the manifest").commands:
                    yield keys, [word.text for word in command.words]


def _placed(document: Document, path: Path) -> Iterator[list[Word]]:
    """Yield each command of a manifest as words with their lines in the file."""
    for keys, texts in _commands_in(document.value, ()):
        lines = [document.lines.get((*keys, at), document.lines.get(keys, 1)) for at in range(len(texts))]  # type: ignore[arg-type]
        yield [Word(text, f"{path}:{line}") for text, line in zip(texts, lines, strict=True)]


def _manifest_facts(document: Document) -> Iterator[Given]:
    """Yield the numbers of nodes and devices that a manifest requests, and its other keys that the table names."""
    rows = options_by_name(manifest.KEYS)

    def walk(value: object, keys: tuple[str | int, ...]) -> Iterator[Given]:
        if isinstance(value, list):
            for at, inner in enumerate(value):
                yield from walk(inner, (*keys, at))
        if not isinstance(value, dict):
            return
        for key, inner in value.items():
            place = (*keys, key)
            option = rows.get(plain(str(key)))
            # Requests repeat the limits.
            if option is not None and not isinstance(inner, (dict, list)) and "requests" not in keys:
                where = document.where(place).partition(" ")[0]
                if option.kind != "int" or str(inner).isdigit():
                    yield Given(str(key), (inner,), where, option)
            else:
                yield from walk(inner, place)

    yield from walk(document.value, ())
