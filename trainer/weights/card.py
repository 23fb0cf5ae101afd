"""The model card of an export: what the model is and how it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.weights.contents import Contents


def model_card(contents: Contents, dtype: str) -> str:
    """Return README.md, with the front matter that model hubs read."""
    model = contents.model
    lines = [
        "---",
        "library_name: transformers",
        "tags:",
        f"- {model.kind}",
        "- clusterctl",
        "---",
        "",
        f"# {model.kind.upper()} with {model.parameters():,} parameters",
        "",
        f"Exported by clusterctl in {dtype}.",
        "",
        "| | |",
        "|---|---|",
        f"| layers | {model.layers} |",
        f"| hidden size | {model.hidden} |",
        f"| attention heads | {model.heads} |",
        f"| sequence | {model.sequence} |",
        f"| vocabulary | {model.vocab} |",
        "",
        "## Training",
        "",
        *_training(contents),
        "",
    ]
    return "\n".join(lines)


def _training(contents: Contents) -> list[str]:
    if not contents.progress.step:
        origin = contents.origin.get("origin") or {}
        came = f" They were imported from the format {origin['format']}." if origin.get("format") else ""
        return [f"clusterctl did not train these weights.{came}"]
    config, origin = contents.config, contents.origin
    rows: dict[str, object] = {
        "optimizer steps": f"{contents.progress.step:,}",
        "samples": f"{contents.progress.consumed_samples:,}",
        "tokens": f"{origin['tokens']:,}" if origin.get("tokens") else "",
        "loss of the last step": origin.get("loss"),
        "loss of the last evaluation": origin.get("eval_loss"),
        "samples per step": config.get("global_batch"),
        "precision": config.get("precision"),
        "data": _data(config.get("data") or {}),
        "optimizer": _optimizer(config.get("optimizer") or {}),
        "dropout": contents.model.dropout or "",
        "seed": config.get("seed"),
    }
    shown = [f"| {name} | {value} |" for name, value in rows.items() if value not in (None, "")]
    return ["| | |", "|---|---|", *shown]


def _data(data: Mapping[str, Any]) -> str:
    """Return the names of the corpora, without the folders of the machine that trained."""
    sources = [*(data.get("train") or ()), *(data.get("blend") or ())]
    prefixes = [str(source.get("prefix", "")) for source in sources] or [str(data.get("prefix", ""))]
    return ", ".join(prefix.rpartition("/")[2] for prefix in prefixes if prefix)


def _optimizer(optimizer: Mapping[str, Any]) -> str:
    if not optimizer:
        return ""
    given = ", ".join(
        f"{key.replace('_', ' ')} {optimizer[key]}"
        for key in ("lr", "min_lr", "betas", "eps", "weight_decay", "clip", "schedule", "warmup_steps")
        if key in optimizer
    )
    return f"AdamW: {given}"
