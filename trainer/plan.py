"""What a config means before anything starts: the launcher asks this at plan time, so it loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import TrainConfig, try_config
from trainer.errors import Fault
from trainer.layout import Layout
from trainer.models import memory

if TYPE_CHECKING:
    from trainer.plan_data import CorpusUse


def check(document: object) -> dict[str, Any]:
    """Answer `{"train": ..., "world_size": n, "base_dir": "...", "check_data": bool}`: all faults at once."""
    if not isinstance(document, Mapping):
        return _answer([Fault("", "the document is not a mapping", 'give {"train": {...}, "world_size": 4}')])
    world = document.get("world_size", 1)
    if not isinstance(world, int) or isinstance(world, bool) or world < 1:
        return _answer([Fault("world_size", f"is {world!r}; a whole number of at least 1 is needed")])
    config, faults = try_config(document.get("train"), world)
    uses: list[CorpusUse] = []
    if document.get("check_data") and config.data.prefixes():
        from trainer.plan_data import look_at_data  # with NumPy, which a plan without data does not need

        uses, data_faults = look_at_data(config, Path(str(document.get("base_dir") or ".")))
        faults += data_faults
    return {
        **_answer(faults),
        "config": config.as_json(),
        "summary": None if faults else summary(config, world, uses),
    }


def _answer(faults: list[Fault]) -> dict[str, Any]:
    return {
        "ok": not faults,
        "faults": [fault.as_json() for fault in faults],
        "config": None,
        "summary": None,
    }


def summary(config: TrainConfig, world: int, uses: Sequence[CorpusUse] = ()) -> dict[str, Any]:
    """Sizes of a checked config; `epochs` is None where the data is not at hand."""
    assert config.global_batch is not None
    layout = Layout.of(world)
    a_step = config.global_batch * config.model.sequence
    need = memory(config.model, config.micro_batch, config.precision, layout.data, config.zero)
    return {
        "parameters": config.model.parameters(),
        "layout": layout.as_json(),
        "steps": config.steps,
        "accumulation": config.global_batch // (config.micro_batch * layout.data),
        "tokens_per_step": a_step,
        "tokens_total": a_step * config.steps,
        "epochs": a_step * config.steps / sum(use.tokens for use in uses) if uses else None,
        "corpora": [asdict(use) for use in uses],
        "memory_per_device_bytes": need.as_json(),
    }
