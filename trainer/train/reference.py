"""Log probabilities of preference pairs under the initial weights, computed once and stored in the run's folder."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.config.data import DataIdentity
from trainer.config.train_config import TrainConfig
from trainer.engine.passes import Model
from trainer.engine.torch_engine import Engine
from trainer.files import replace_file
from trainer.parallel.group import Group
from trainer.samples.dataset import Batches, Readable, Share
from trainer.train.loop import tensors
from trainer.tune.dpo_model import PreferenceModel
from trainer.tune.pairs import PairSamples


def fill_references(
    config: TrainConfig,
    engine: Engine,
    model: Model,
    orders: Mapping[str, Readable],
    share: Share,
    group: Group,
    run_dir: Path,
    identity: DataIdentity,
) -> None:
    """Set the log probabilities of all pairs under the weights that are loaded now. A collective of all ranks."""
    assert isinstance(model, PreferenceModel)
    facts = config.as_json()
    about = {key: facts[key] for key in ("model", "init", "seed", "precision")}
    text = json.dumps([about, identity.as_json(), config.tune.valid], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    for which, samples in orders.items():
        assert isinstance(samples, PairSamples)
        file = run_dir / f"reference-{which}-{digest}.npy"
        known = _read(file, len(samples))
        if group.any(known is None):
            known = _computed(engine, model, samples, share, group)
            run_dir.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            np.save(content, known, allow_pickle=False)
            replace_file(file, content.getvalue())
        assert known is not None
        samples.reference = known


def _read(file: Path, pairs: int) -> NDArray[np.float32] | None:
    try:
        found: NDArray[np.float32] = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == (pairs, 2) and found.dtype == np.float32 else None


def _computed(
    engine: Engine, model: PreferenceModel, samples: PairSamples, share: Share, group: Group
) -> NDArray[np.float32]:
    """Return the log probabilities of both answers of each pair; each rank computes those of its samples."""
    batches = -(-len(samples) // share.global_batch)
    model.recorded = []
    engine.evaluate(tensors(batch) for batch in Batches(samples.in_order(), share).first(batches))
    model.take_accuracy()
    recorded, model.recorded = model.recorded, None
    starts = range(0, batches * share.global_batch, share.global_batch)
    numbers = [number for start in starts for micro in share.samples_of(start) for number in micro]
    # A stage before the last records nothing.
    own = list(zip(numbers, torch.cat(recorded).tolist(), strict=True)) if recorded else []
    found = np.zeros((len(samples), 2), np.float32)
    for entries in group.gather(own):
        for number, pair in entries:
            if number < len(samples):
                found[number] = pair
    return found
