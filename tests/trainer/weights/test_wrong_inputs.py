"""Wrong options and files of `checkpoint import` and `export`: place, remedy, exit code 2, and nothing written."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterctl.wire.requests import ExportRequest
from tests.support.weights import GPT, checkpoint, random_state
from trainer.__main__ import main
from trainer.weights.convert import export_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with our checkpoint, one of Hugging Face, one of Megatron, and an empty folder."""
    source = checkpoint(tmp_path / "ours", GPT, random_state(GPT))
    export_weights(source, tmp_path / "hf", "hf", ExportRequest())
    export_weights(source, tmp_path / "megatron", "megatron", ExportRequest())
    (tmp_path / "empty").mkdir()
    return tmp_path


def with_config(**changes: object) -> Callable[[Path], None]:
    """Return a function that changes keys of the config.json."""

    def change(folder: Path) -> None:
        file = folder / "hf" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def cut(folder: Path) -> None:
    file = folder / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def with_nan(folder: Path) -> None:
    file = folder / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + struct.pack("<f", math.nan))


def unchanged(_: Path) -> None:
    """Leave the files as they are."""


IMPORT, EXPORT = "checkpoint-import", "checkpoint-export"
CASES: list[tuple[Callable[[Path], None], str, str, tuple[str, ...], str, str]] = [
    (unchanged, IMPORT, "none", (), "none: no such file or folder", "check the path"),
    (unchanged, IMPORT, "empty", (), "empty: the folder is empty", "check the path"),
    (unchanged, IMPORT, "hf", ("--vocab", "-3"), "--vocab: -3 is too small", "0 or more"),
    (unchanged, IMPORT, "hf", ("--heads", "-1"), "--heads: -1 is too small", "0 or more"),
    (unchanged, IMPORT, "megatron", ("--heads", "5"), "--heads is 5, and", "leave out --heads"),
    (unchanged, IMPORT, "none", ("--from", "hf"), "none: no such file or folder", "check the path"),
    (unchanged, IMPORT, "hf/config.json", ("--from", "hf"), "config.json is not a folder", "name the folder"),
    (unchanged, IMPORT, "hf", ("--state",), "contains no optimizer state", "leave out --state"),
    (unchanged, IMPORT, "hf", ("--from", "gguf"), "--from: unknown 'gguf'", "one of hf, "),
    (with_nan, IMPORT, "hf", (), "hf: norm.bias holds numbers that are not finite", "copy it again"),
    (cut, IMPORT, "hf", (), "model.safetensors: tensor", "copy it again"),
    (with_config(n_layer="12"), IMPORT, "hf", (), "config.json: n_layer is '12'", "this variant"),
    (with_config(n_head=7), IMPORT, "hf", (), "not divisible by 7 heads", "this variant"),
    (with_config(vocab_size=77), IMPORT, "hf", (), "the config needs [77, 32]", "check that the config"),
    (unchanged, EXPORT, "none", ("--to", "hf"), "none: no such folder", "check the path"),
    (unchanged, EXPORT, "hf", ("--to", "hf"), "hf/manifest.json: No such file", "checkpoint import"),
    (unchanged, EXPORT, "ours", ("--to", "peft"), "no adapters", "--to hf"),
    (
        unchanged,
        EXPORT,
        "ours",
        ("--to", "megatron", "--tensor", "0"),
        "--tensor: 0 is too small",
        "1 or more",
    ),
    (
        unchanged,
        EXPORT,
        "ours",
        ("--to", "megatron", "--tensor", "3"),
        "does not divide 4 heads",
        "use sizes",
    ),
]


@pytest.mark.parametrize(("change", "verb", "source", "options", "place", "remedy"), CASES)
def test_each_is_refused_with_its_place_and_a_remedy(
    folder: Path,
    capsys: Any,
    change: Callable[[Path], None],
    verb: str,
    source: str,
    options: tuple[str, ...],
    place: str,
    remedy: str,
) -> None:
    change(folder)
    try:
        code: object = main([verb, str(folder / source), "--output", str(folder / "out"), *options])
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr().err
    assert code == 2
    # The remedy for a value of an option is in parentheses.
    ways = (f"try: {remedy}" in shown, f"({remedy}" in shown)
    assert (place in shown and any(ways)) or remedy in shown.partition("try: ")[2]
    assert not (folder / "out").exists()
