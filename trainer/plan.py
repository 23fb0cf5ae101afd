"""What a config means before anything starts: the launcher asks this at plan time, so it loads no torch."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import TrainConfig, split_fractions, try_config
from trainer.errors import Fault
from trainer.layout import Layout
from trainer.models import memory


def check(document: object) -> dict[str, Any]:
    """Answer `{"train": ..., "world_size": n, "base_dir": "...", "check_data": bool}`: all faults at once."""
    if not isinstance(document, Mapping):
        return _answer([Fault("", "the document is not a mapping", 'give {"train": {...}, "world_size": 4}')])
    world = document.get("world_size", 1)
    if not isinstance(world, int) or isinstance(world, bool) or world < 1:
        return _answer([Fault("world_size", f"is {world!r}; a whole number of at least 1 is needed")])
    config, faults = try_config(document.get("train"), world)
    tokens = None
    if document.get("check_data") and config.data.prefix:
        tokens, data_faults = _look_at_data(config, Path(str(document.get("base_dir") or ".")))
        faults += data_faults
    return {
        **_answer(faults),
        "config": config.as_json(),
        "summary": None if faults else summary(config, world, tokens),
    }


def _answer(faults: list[Fault]) -> dict[str, Any]:
    return {
        "ok": not faults,
        "faults": [fault.as_json() for fault in faults],
        "config": None,
        "summary": None,
    }


def summary(config: TrainConfig, world: int, corpus_tokens: int | None) -> dict[str, Any]:
    """Sizes of a checked config; `epochs` is None where the data is not at hand."""
    assert config.global_batch is not None
    layout = Layout.of(world)
    a_step = config.global_batch * config.model.sequence
    share = split_fractions(config.data.split)[0]
    need = memory(config.model, config.micro_batch, config.precision, layout.data, config.zero)
    return {
        "parameters": config.model.parameters(),
        "layout": layout.as_json(),
        "steps": config.steps,
        "accumulation": config.global_batch // (config.micro_batch * layout.data),
        "tokens_per_step": a_step,
        "tokens_total": a_step * config.steps,
        "epochs": a_step * config.steps / (corpus_tokens * share) if corpus_tokens and share else None,
        "memory_per_device_bytes": need.as_json(),
    }


def _look_at_data(config: TrainConfig, base: Path) -> tuple[int | None, list[Fault]]:
    """Tokens of the corpus by the size of its .bin, and what is missing."""
    faults = []
    prefix = base / config.data.prefix
    binary, index = prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")
    for path in (binary, index):
        if not path.is_file():
            faults.append(
                Fault("train.data.prefix", f"{path} does not exist", "build it with `clusterctl data build`")
            )
    tokenizer = base / config.data.tokenizer
    if config.data.tokenizer and not tokenizer.is_file():
        faults.append(Fault("train.data.tokenizer", f"{tokenizer} does not exist"))
    return (None if faults else _tokens(binary, index)), faults


def _tokens(binary: Path, index: Path) -> int | None:
    with index.open("rb") as stream:
        head = stream.read(18)
    if len(head) < 18:
        return None
    code = struct.unpack_from("<B", head, 17)[0]
    width = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}.get(code)
    return binary.stat().st_size // width if width else None
