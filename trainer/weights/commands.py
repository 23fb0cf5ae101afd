"""The commands `clusterctl checkpoint import` and `export`: parse arguments, print the result. Imports no torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import InputError

if TYPE_CHECKING:
    from trainer.weights.convert import Conversion

ADD = Callable[[str, Any, str], argparse.ArgumentParser]


def add_verbs(verb: ADD) -> None:
    """Add the commands and their arguments."""
    described = verb("weights-model", _model, "describe the model of a checkpoint, as keys of a job")
    described.add_argument("source", type=Path)
    inward = verb("checkpoint-import", _import, "convert another program's checkpoint to ours")
    inward.add_argument("source", type=Path)
    inward.add_argument("--output", type=Path, required=True, metavar="DIR")
    inward.add_argument("--from", dest="form", default="", metavar="FORMAT")
    inward.add_argument("--heads", type=int, default=0)
    inward.add_argument("--vocab", type=int, default=0)
    outward = verb("checkpoint-export", _export, "convert our checkpoint to another format")
    outward.add_argument("source", type=Path)
    outward.add_argument("--output", type=Path, required=True, metavar="DIR")
    outward.add_argument("--to", dest="form", required=True, metavar="FORMAT")
    outward.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"))
    outward.add_argument("--tensor", type=int, default=1)
    outward.add_argument("--pipeline", type=int, default=1)
    for parser in (inward, outward):
        parser.add_argument("--base", default="", metavar="DIR")
        parser.add_argument("--state", action="store_true")
        parser.add_argument("--dry-run", action="store_true")
        parser.add_argument("--json", action="store_true")


def _model(arguments: argparse.Namespace) -> int:
    from trainer.device import prepare_import

    prepare_import()
    from trainer.weights.initial import open_source

    source = open_source(arguments.source)
    tokenizer = "" if source.tokenizer is None else str(source.tokenizer)
    answer = {"model": chosen_keys(source.model), "context": source.model.context, "tokenizer": tokenizer}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def chosen_keys(config: object) -> dict[str, object]:
    """Return the values of a section of a job that are not its defaults, by their keys."""
    assert is_dataclass(config)
    keys: dict[str, object] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            if inner := chosen_keys(value):
                keys[field.name] = inner
        elif value != field.default:
            keys[field.name] = value
    return keys


def _import(arguments: argparse.Namespace) -> int:
    from trainer.device import prepare_import

    prepare_import()
    from trainer.weights.adapters.peft import ALL_FORMATS
    from trainer.weights.contents import ImportRequest
    from trainer.weights.convert import import_weights, readable

    _check_format(arguments.form, ["", *readable(), "peft"], "--from")
    for name in ("heads", "vocab"):
        if getattr(arguments, name) < 0:
            problem = f"--{name} is {getattr(arguments, name)}; at least 1 is needed"
            raise InputError(problem, f"leave out --{name}, or correct it")
    request = ImportRequest(arguments.state, arguments.heads, arguments.vocab, arguments.base)
    source, output = arguments.source, arguments.output
    done = import_weights(source, output, arguments.form, request, arguments.dry_run, ALL_FORMATS)
    _show(done, arguments, f"from {done.format}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from trainer.device import prepare_import

    prepare_import()
    from trainer.weights.adapters.merge import read_whole
    from trainer.weights.adapters.peft import ALL_FORMATS
    from trainer.weights.contents import ExportRequest
    from trainer.weights.convert import export_weights, writable

    _check_format(arguments.form, [*writable(), "peft"], "--to")
    for name in ("tensor", "pipeline"):
        if getattr(arguments, name) < 1:
            problem = f"--{name} is {getattr(arguments, name)}; at least 1 is needed"
            raise InputError(problem, f"leave out --{name}, or correct it")
    wanted = ExportRequest(
        arguments.state, arguments.dtype, arguments.tensor, arguments.pipeline, arguments.base
    )
    form, base = ALL_FORMATS[arguments.form], Path(arguments.base) if arguments.base else None
    read = partial(read_whole, base=base)
    done = export_weights(
        arguments.source, arguments.output, arguments.form, wanted, arguments.dry_run, form, read
    )
    _show(done, arguments, f"to {done.format}")
    return 0


def _check_format(name: str, known: list[str], option: str) -> None:
    if name not in known:
        raise InputError(f"{option} {name}: no such format", f"use one of {', '.join(filter(None, known))}")


def _show(done: Conversion, arguments: argparse.Namespace, direction: str) -> None:
    """Print what was done, or with --dry-run what would be done."""
    if arguments.json:
        sys.stdout.write(json.dumps(done.as_json(), indent=2) + "\n")
        return
    for note in done.notes:
        sys.stderr.write(f"note: {note}\n")
    model = done.model
    size = f"{model.kind}, {model.layers} layers, hidden {model.hidden}, vocabulary {model.vocab}"
    state = "weights and the state of the optimizer" if done.state else "weights"
    lines = [
        f"{done.output}: {direction}: {state} of {done.parameters:,} parameters ({size}), step {done.step}"
    ]
    if done.seconds is None:
        lines.append(f"nothing was written; {done.bytes / 1e6:,.1f} MB in fp32 would be")
    else:
        lines.append(f"{done.bytes / 1e6:,.1f} MB in fp32, {done.seconds:.1f} s, verified")
    if done.resumed_files:
        lines.append(f"{done.resumed_files} files are from an earlier conversion that was stopped")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
