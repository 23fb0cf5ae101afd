"""Find what a command, a script or a configuration file of another program does, and the options given."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from clusterctl.bash.evaluate import evaluate
from clusterctl.bash.evaluator import Command, Script, Word
from clusterctl.bash.texts import is_open, shown, unknown
from clusterctl.document import MAX_BYTES, Document, load_document, parse_document
from clusterctl.errors import Fault, InputFaults, UsageError
from clusterctl.migrate import manifest
from clusterctl.migrate.families import FAMILIES, KNOWN, Family
from clusterctl.migrate.found import ZERO, Found, Given, options_by_name, plain
from clusterctl.migrate.start import parse, refuse, start, start_by_options
from clusterctl.migrate.tables import deepspeed, mindformers, torchtitan, verbs


def from_document(document: Document, path: Path) -> Found:
    """Return the training of a DeepSpeed job, of another manifest with a command, or of MindFormers."""
    value = document.value
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a mapping", f"name {manifest.TITLE} or a run_*.yaml of MindFormers")
    if "kind" in value and "spec" in value:
        return manifest.from_manifest(document, path)
    if path.suffix == ".toml":
        found = from_keys(document, torchtitan.KEYS, "torchtitan", torchtitan.TITLE, path)
        found.defaults = torchtitan.DEFAULTS
        return found
    if not {"parallel_config", "runner_config", "model", "base_config"} & value.keys():
        problem = f"{path}: neither {manifest.TITLE} nor a configuration of MindFormers"
        raise UsageError(problem, "a job has `kind` and `spec`; a run_*.yaml has `parallel_config`")
    found = from_keys(document, mindformers.KEYS, "mindformers", mindformers.TITLE, path)
    found.defaults = mindformers.DEFAULTS
    for name in value.get("base_config") or ():
        neighbour = path.parent / str(name)
        if not neighbour.is_file():
            found.notes.append(f"base_config names {name}, which does not exist: its keys are missing")
            continue
        base = from_keys(load_document(neighbour), mindformers.KEYS, "mindformers", "", neighbour)
        own = {given.name for given in found.given}
        found.given += [given for given in base.given if given.name not in own]
    return found


def from_keys(document: Document, table: str, family: str, title: str, path: Path) -> Found:
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


# How often DeepSpeed itself prints; the program has its own interval.
PRINTED = "steps_per_print"


def read(text: str) -> Found:
    """Return the training that a command, or the file of this name, describes; raise UsageError if there is none."""
    if not text.strip():
        raise UsageError("--from: the command is empty", "give the command in quotes, or the name of a file")
    path = Path(text)
    if not any(char.isspace() for char in text.strip()) and not text.startswith("-"):
        if path.suffix in (".yaml", ".yml"):
            found = from_document(load_document(path), path)
            return _right_verb(_with_files(found, path, evaluate("", str(path), path)))
        if path.suffix == ".toml":
            return from_document(_document(_text(path), path), path)
        if path.suffix == ".json":
            return from_keys(load_document(path), deepspeed.KEYS, "deepspeed", "DeepSpeed", path)
        return _from_script(evaluate(_text(path), str(path), path), path.name, path)
    return _from_script(evaluate(text, "the command"), "a command", Path())


def _document(text: str, path: Path) -> Document:
    """Return a configuration file; TOML needs Python 3.11, which has a reader of it."""
    if path.suffix != ".toml":
        return parse_document(text, str(path))
    try:
        toml = importlib.import_module("tomllib")
    except ModuleNotFoundError:
        raise UsageError(f"{path}: Python 3.10 has no reader of TOML", "use Python 3.11 or newer") from None
    try:
        return Document(str(path), toml.loads(text), {})
    except ValueError as error:
        raise UsageError(f"{path}: {error}", "is this the right file?") from None


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


def _from_script(script: Script, source: str, path: Path) -> Found:
    """Return what the last command with a known program does; `choice` names the others."""
    # A training counts more than what is done before and after it, and what is certain more than what may be.
    commands = [command for command in _commands(script) if not command.followed]
    starts = [(command, *found) for command in commands if (found := start(command.words))]
    if not starts:
        for command in commands:
            refuse(command.words)
        starts = [(command, *found) for command in commands if (found := start_by_options(command.words))]
    starts.sort(key=lambda each: (each[1].verb == "job", each[0].certain))
    if not starts:
        raise _nothing_found(script, commands, source)
    command, family, at = starts[-1]
    result = parse(family, command.words, at, source, path)
    result.unknown = script.reasons(command.words)
    _add_callers(result, script)
    places = [f"{each.words[0].where} ({shown(each.words[max(at, 0)].text)})" for each, _, at in starts]
    skipped = [place for place in dict.fromkeys(places) if place != places[-1]]
    if skipped:
        result.choice = f"took {places[-1]}; skipped {', '.join(skipped)}"
    elif len({tuple(word.text for word in each.words) for each, *_ in starts}) > 1:
        result.choice = f"took the last of {len(starts)} rounds of {places[-1]}"
    return _right_verb(_with_files(_inside_container(result), path, script))


def _add_callers(found: Found, script: Script) -> None:
    """Add what the command that starts the script says of the ranks: `run_distribute.sh TABLE CONFIG [0,8] train`."""
    for command in script.commands:
        if command.followed and (begin := start(command.words)) and begin[0].name == found.family:
            given = parse(begin[0], command.words, begin[1], "", Path()).given
            found.given += [
                each for each in given if each.option and each.option.target in ("@range", "@world")
            ]


def _commands(script: Script) -> Iterator[Command]:
    """Yield the commands of a script, and those in a text that one of them hands to another machine or scheduler."""
    for command in script.commands:
        yield command
        for word in command.words if start(command.words) is None else ():
            if len(word.text.split()) > 2 and any(
                name in word.text for each in FAMILIES for name in each.programs
            ):
                text = word.text.partition("=")[2] if word.text.startswith("--") else word.text
                for inner in evaluate(text, word.where).commands:
                    yield Command([Word(each.text, word.where) for each in inner.words], command.certain)


def _nothing_found(script: Script, commands: Sequence[Command], source: str) -> UsageError:
    """Return the error for a script without a known program, with what may be the cause."""
    files = [word.text for each in commands for word in each.words if word.text.endswith(".sh")]
    remedy = f"start where {shown(files[0])} is, or name it alone; " if files else ""
    known = f"known programs: {KNOWN}"
    reasons = script.reasons([Word(unknown(""), "")])
    if reasons:
        problem = f"contains no training of a known program; {remedy}{known}"
        return InputFaults([Fault(source, problem), *(Fault(place, text) for place, text in reasons.items())])
    return UsageError(f"{source}: contains no training of a known program", f"{remedy}{known}")


def _inside_container(found: Found) -> Found:
    """Return the training that launch_container.py starts, with the container's own options."""
    inner = next((g for g in found.given if g.option is not None and g.option.target == "@command"), None)
    if inner is None:
        return found
    made = _from_script(evaluate(str(inner.values[0]), inner.where), found.source, Path())
    made.name = found.name
    made.given = [given for given in found.given if given is not inner] + made.given
    return made


def _with_files(found: Found, path: Path, script: Script) -> Found:
    """Return a training with the keys of the configuration file that an option of it names."""
    for given in list(found.given):
        target = given.option.target if given.option else ""
        if target not in ("@deepspeed_config", "@config") or not given.values:
            continue
        name = str(given.values[0])
        # The folder of the program is often another one than that of the script.
        text = script.content(name) or script.content(Path(name).name)
        if target == "@deepspeed_config":
            if text is not None and is_open(text) and not shown(text).lstrip().startswith("{"):
                # It is made from a template.
                how = shown(text).strip()[:120]
                found.notes.append(
                    f"{Path(shown(name)).name} is made by {how}, which cannot be read: its keys are missing"
                )
            elif text is not None:
                _add_deepspeed(found, given, text, shown(name))
            continue
        if text is None:
            raise UsageError(
                f"{given.where} {given.name}: no file {shown(name)}", "start in the folder that contains it"
            )
        neighbour = path.parent / name
        made = from_document(_document(text, neighbour), neighbour)
        made.given += [each for each in found.given if each is not given]
        made.unknown = found.unknown
        return made
    return found


def _add_deepspeed(found: Found, given: Given, text: str, name: str) -> None:
    """Add the keys of DeepSpeed's configuration: some count more than the command's options, others less."""
    own = from_keys(parse_document(text, name), deepspeed.KEYS, "deepspeed", "", Path(name)).given
    glm = found.family == "glm"
    first = [
        each for each in own if (glm and each.name != PRINTED) or each.name.startswith(deepspeed.STRONGER)
    ]
    found.given = [each for each in own if each not in first] + [
        each for each in found.given if each is not given
    ]
    found.given += first
    found.defaults = {**found.defaults, "train.engine": "deepspeed"}
    found.notes.append(f"the keys of {Path(name).name} are read: the job replaces this file")


def _right_verb(found: Found) -> Found:
    """Return a training that only evaluates or generates as such."""
    values = {given.option.target: given.values for given in found.given if given.option and given.values}
    task = str(values.get("@task", ("",))[0]).lower()
    mode = str(values.get("@run_mode", ("",))[0])
    if found.family == "glm" and (
        task in verbs.EVALUATED or ZERO.fullmatch(str(values.get("@epochs", (1,))[0]))
    ):
        found.verb = "eval"
    elif mode in ("predict", "eval"):
        found.verb = "generate" if mode == "predict" else "eval"
    if found.verb != "job" and found.family in ("glm", "mindformers"):
        family = Family(found.family, found.title, (), verbs.TABLES[found.verb])
        found.given = [replace(given, option=family.option(given.name)) for given in found.given]
    return found
