"""The commands `clusterctl checkpoint import` and `export`: print the result. Imports no torch."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.wire.requests import Conversion as Request
from clusterctl.wire.requests import ConvertIn, ConvertOut, WeightsRequest
from clusterctl.wire.results import Weights
from clusterctl.wire.typed_json import encode

if TYPE_CHECKING:
    from trainer.weights.convert import Conversion


def model(request: WeightsRequest) -> int:
    """Print the model of weights as keys of a job; return 0."""
    from trainer.device import prepare_import

    prepare_import()
    from trainer.weights.initial import open_source

    source = open_source(request.source)
    tokenizer = "" if source.tokenizer is None else str(source.tokenizer)
    answer = Weights(chosen_keys(source.model), source.model.context, tokenizer)
    sys.stdout.write(json.dumps(encode(answer)) + "\n")
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


def import_(request: ConvertIn) -> int:
    """Convert another program's checkpoint to ours; return 0."""
    from trainer.device import prepare_import

    prepare_import()
    from trainer.weights.adapters.peft import ALL_FORMATS
    from trainer.weights.convert import import_weights

    options = request.options
    done = import_weights(
        request.source, options.output, options.from_, options.request, request.dry_run, ALL_FORMATS
    )
    _show(done, request, f"from {done.format}")
    return 0


def export(request: ConvertOut) -> int:
    """Convert our checkpoint for another program; return 0."""
    from trainer.device import prepare_import

    prepare_import()
    from trainer.weights.adapters.merge import read_whole
    from trainer.weights.adapters.peft import ALL_FORMATS
    from trainer.weights.convert import export_weights

    options = request.options
    form, base = ALL_FORMATS[options.to], options.request.base
    read = partial(read_whole, base=Path(base) if base else None)
    done = export_weights(
        request.source, options.output, options.to, options.request, request.dry_run, form, read
    )
    _show(done, request, f"to {done.format}")
    return 0


def _show(done: Conversion, request: Request, direction: str) -> None:
    """Print what was done, or with --dry-run what would be done."""
    if request.json:
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
