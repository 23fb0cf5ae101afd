"""The model card of an export: what the model is and how it was trained."""

from __future__ import annotations

from trainer.config.data import DataConfig
from trainer.config.parts import OptimizerConfig
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
        before = contents.origin.before
        came = f" They were imported from the format {before.format}." if before else ""
        return [f"clusterctl did not train these weights.{came}"]
    config, progress = contents.config, contents.progress
    rows: dict[str, object] = {
        "optimizer steps": f"{progress.step:,}",
        "samples": f"{progress.consumed_samples:,}",
        "tokens": f"{progress.tokens:,}" if progress.tokens else "",
        "loss of the last step": progress.loss,
        "loss of the last evaluation": progress.eval_loss,
        "samples per step": config.global_batch,
        "precision": config.precision,
        "data": _data(config.data),
        "optimizer": _optimizer(config.optimizer),
        "dropout": contents.model.dropout or "",
        "seed": config.seed,
    }
    shown = [f"| {name} | {value} |" for name, value in rows.items() if value not in (None, "")]
    return ["| | |", "|---|---|", *shown]


def _data(data: DataConfig) -> str:
    """Return the names of the corpora without folders, which would show the training machine's paths."""
    prefixes = [source.prefix for source in data.sources("train")]
    return ", ".join(prefix.rpartition("/")[2] for prefix in prefixes if prefix)


def _optimizer(optimizer: OptimizerConfig) -> str:
    given = ", ".join(
        f"{key.replace('_', ' ')} {getattr(optimizer, key)}"
        for key in ("lr", "min_lr", "betas", "eps", "weight_decay", "clip", "schedule", "warmup_steps")
    )
    return f"AdamW: {given}"
