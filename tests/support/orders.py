"""Made-up corpora and settings, and what the order of their samples is by Megatron-core and by this trainer.

The two answer in the same form, so that they can be compared item by item, or by a digest that is kept.

    python tests/support/orders.py --record [--cases 1000]

writes the digests of Megatron-core's answers; run it where megatron-core 0.16.1 is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from trainer.config.data import DataConfig, Source  # noqa: E402
from trainer.corpus.indexed import write_index  # noqa: E402
from trainer.splits import split_bounds, split_fractions  # noqa: E402

GOLDENS = ROOT / "tests" / "cases" / "samples" / "megatron-core-0.16.1.json"
CASES = 1000
# Whose tokens and masks are compared; the indices are compared whole.
ITEMS = 12
EOD = 3
SPLITS = ["949,50,1", "80,20", "1", "90,10,0", "50,25,25", "0.7,0.2,0.1", "98/1/1", "1,1,1"]


@dataclass(frozen=True)
class Setting:
    """One corpus or several, and how samples are read from them."""

    # Plain, blend, apart (a corpus for each part), sizes (without weights).
    kind: str
    # Of each corpus' sequences.
    lengths: list[list[int]]
    split: str
    weights: list[float] | None
    sequence: int
    # Of train, of valid.
    samples: tuple[int | None, int | None]
    seed: int
    reset_positions: bool
    reset_attention: bool
    mask_eod: bool


def setting(case: int) -> Setting:
    """The same for the same case, whoever asks; one in four blends, and each kind of mask in half of them."""
    random = np.random.RandomState(case)
    kind = ("plain", "plain", "blend", "plain", "apart", "plain", "blend", "sizes")[case % 8]
    number = 1 if kind == "plain" else int(random.randint(1 if kind == "blend" else 2, 6))
    lengths = [_lengths(random) for _ in range(number)]
    split = SPLITS[int(random.randint(len(SPLITS)))]
    weights = None
    if kind in ("blend", "apart"):
        weights = [
            float(w) for w in np.round(random.gamma(0.7, size=number) + 0.01, int(random.randint(1, 6)))
        ]
        weights = [max(w, 0.1) for w in weights]
    return _asked(random, kind, lengths, split, weights)


def _lengths(random: np.random.RandomState) -> list[int]:
    longest = int(random.choice([3, 20, 60]))
    # Empty sequences in half of the corpora.
    least = int(random.randint(2))
    return [int(n) for n in random.randint(least, longest + 1, int(random.randint(2, 60)))]


def _asked(
    random: np.random.RandomState,
    kind: str,
    lengths: list[list[int]],
    split: str,
    weights: list[float] | None,
) -> Setting:
    """The length and number of samples; except in `plain`, no part is shorter than a sample."""
    parts = [_tokens(one, split, kind) for one in lengths]
    shortest = min(min(n for n in part if n is not None) for part in parts)
    # A part without tokens, which Megatron-core would wait for without end.
    if shortest < 4:
        return _asked(random, kind, [one + [7, 9] * 30 for one in lengths], split, weights)
    longest = shortest + 3 if kind == "plain" else shortest - 1
    sequence = int(random.randint(2, min(33, longest) + 1))
    asked: list[int | None] = []
    for which in (0, 1):
        there = [part[which] for part in parts]
        if None in there:
            asked.append(None)
        elif kind == "sizes":
            total = sum((n - 1) // sequence for n in there if n is not None)
            asked.append(int(random.randint(1, total + 1)))
        else:
            asked.append(int(random.randint(1 if kind != "plain" else 0, 160)))
    flags = random.randint(0, 2, 3).tolist()
    seed = int(random.randint(1, 2**31))
    return Setting(kind, lengths, split, weights, sequence, (asked[0], asked[1]), seed, *map(bool, flags))


def _tokens(lengths: list[int], split: str, kind: str) -> list[int | None]:
    """Tokens of train, valid and test; None for a part that the split does not have."""
    if kind == "apart":
        return [sum(lengths), sum(lengths), None]
    bounds, fractions = split_bounds(split, len(lengths)), split_fractions(split)
    return [sum(lengths[slice(*bounds[i])]) if fractions[i] else None for i in range(3)]


def write_corpora(asked: Setting, folder: Path) -> list[str]:
    """The corpora as files: small ids, EOD among them. Without the syncs of a Writer, which take 2 minutes of disk."""
    prefixes = []
    for number, lengths in enumerate(asked.lengths):
        random = np.random.RandomState(asked.seed % 1000 + number)
        prefixes.append(str(folder / f"corpus{number}"))
        dtype = np.dtype((np.uint16, np.int32)[number % 2])
        tokens = np.concatenate([random.randint(0, 14, length) for length in lengths]).astype(dtype)
        Path(prefixes[-1] + ".bin").write_bytes(tokens.tobytes())
        marks = np.arange(1, len(lengths) + 1, dtype=np.int64)
        with open(prefixes[-1] + ".idx", "wb") as index:
            sizes = np.array(lengths, np.int32)
            write_index(index, dtype, io.BytesIO(sizes.tobytes()), io.BytesIO(marks.tobytes()))
    return prefixes


@dataclass(frozen=True)
class Answer:
    """What is read of a part: each index, and the first items with their masks."""

    arrays: dict[str, Any]

    def digest(self) -> str:
        whole = hashlib.sha256()
        for name, array in self.arrays.items():
            plain = np.ascontiguousarray(array)
            whole.update(f"{name} {plain.shape} ".encode() + plain.astype(np.int64).tobytes())
        return whole.hexdigest()[:12]


def config_of(asked: Setting, prefixes: list[str]) -> DataConfig:
    """The setting in the form of a job; every part has all corpora, in reverse order for validation."""
    weights = asked.weights or [None] * len(prefixes)
    sources = tuple(Source(prefix, weight) for prefix, weight in zip(prefixes, weights, strict=True))
    if asked.kind == "plain":
        return DataConfig(prefix=prefixes[0], split=asked.split, seed=asked.seed)
    if asked.kind == "apart":
        return DataConfig(train=sources, valid=sources[::-1], seed=asked.seed)
    return DataConfig(blend=sources, split=asked.split, seed=asked.seed)


def ours(asked: Setting, prefixes: list[str]) -> dict[str, Answer]:
    """Of each part, this trainer's answer."""
    from trainer.samples.blend import Blend
    from trainer.samples.dataset import Data
    from trainer.samples.gpt import Recipe, Samples, follow

    data, answers = Data(config_of(asked, prefixes), asked.sequence), {}
    for which, count in zip(("train", "valid"), asked.samples, strict=True):
        if count is None:
            continue
        # Also parts that are shorter than a sample, which a job may not ask for.
        if asked.kind == "plain":
            corpus = data.corpora[prefixes[0]]
            bounds = split_bounds(asked.split, len(corpus.lengths))[("train", "valid").index(which)]
            order = follow(
                Recipe.of(corpus.lengths, bounds, count, asked.sequence, asked.seed), corpus.lengths
            )
            samples: Samples | Blend = Samples(corpus, order, asked.sequence)
        else:
            samples = data.samples(which, count)
        blended = isinstance(samples, Blend)
        parts = samples.parts if blended else [samples]
        arrays = {}
        for i, part in enumerate(parts):
            arrays |= _indices(i, part.order.documents, part.order.samples, part.order.shuffle)
        if blended:
            arrays |= {"corpus": samples.order.corpus, "sample": samples.order.sample}
        items = samples.read(np.arange(min(ITEMS, len(samples))))
        answers[which] = Answer({**arrays, "length": len(samples), **_masks(asked, items)})
    return answers


def _indices(number: int, documents: Any, samples: Any, shuffle: Any) -> dict[str, Any]:
    return {f"documents{number}": documents, f"samples{number}": samples, f"shuffle{number}": shuffle}


def _masks(asked: Setting, items: Any) -> dict[str, Any]:
    import torch

    import native
    from native.reference import hidden
    from trainer.model import masks

    tokens = torch.from_numpy(items)
    inputs, labels, nowhere = tokens[:, :-1], tokens[:, 1:], -1
    documents = masks.documents(inputs, EOD if asked.reset_attention else nowhere)
    size = inputs.shape[1]
    counted = masks.counted(inputs, labels, EOD if asked.mask_eod else nowhere)
    return {
        "tokens": inputs.numpy(),
        "labels": labels.numpy(),
        "loss_mask": (counted != masks.UNCOUNTED).numpy(),
        "positions": masks.positions(inputs, EOD if asked.reset_positions else nowhere).numpy(),
        "hidden": hidden(native.Mask(documents=documents), size, size, inputs.device).numpy(),
    }


class _Words:
    """All that a GPTDataset asks of a tokenizer."""

    eod, vocab_size = EOD, 100
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012


def megatron(asked: Setting, prefixes: list[str]) -> dict[str, Answer]:
    """Of each part, megatron-core's answer."""
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    blends: dict[str, Any] = {"blend": (prefixes, asked.weights), "split": asked.split.replace("/", ",")}
    if asked.kind == "apart":
        turned = (prefixes[::-1], (asked.weights or [])[::-1])
        blends = {"blend_per_split": [(prefixes, asked.weights), turned, None]}
    config = GPTDatasetConfig(
        random_seed=asked.seed,
        sequence_length=asked.sequence,
        tokenizer=_Words(),
        reset_position_ids=asked.reset_positions,
        reset_attention_mask=asked.reset_attention,
        eod_mask_loss=asked.mask_eod,
        path_to_cache=None,
        **blends,
    )
    counts = [count or 0 for count in asked.samples] + [0]
    built = BlendedMegatronDatasetBuilder(GPTDataset, counts, lambda: True, config).build()
    answers = {}
    for which, count, samples in zip(("train", "valid"), asked.samples, built[:2], strict=True):
        if count is None:
            continue
        blended = isinstance(samples, BlendedDataset)
        arrays = {}
        for i, part in enumerate(samples.datasets if blended else [samples]):
            arrays |= _indices(i, part.document_index, part.sample_index, part.shuffle_index)
        if blended:
            arrays |= {"corpus": samples.dataset_index, "sample": samples.dataset_sample_index}
        items = [samples[k] for k in range(min(ITEMS, len(samples)))]
        names = {"tokens": "tokens", "labels": "labels", "loss_mask": "loss_mask"}
        names |= {"positions": "position_ids", "hidden": "attention_mask"}
        shown = {name: np.stack([item[key].numpy() for item in items]) for name, key in names.items()}
        answers[which] = Answer({**arrays, "length": len(samples), **shown})
    return answers


def record(cases: int) -> None:
    """Keep the digests of megatron-core's answers; every case is compared on the way."""
    kept = []
    for case in range(cases):
        asked = setting(case)
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            prefixes = write_corpora(asked, Path(folder))
            answers = megatron(asked, prefixes)
        kept.append({which: answer.digest() for which, answer in answers.items()})
    GOLDENS.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(one) for one in kept)
    GOLDENS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", action="store_true", required=True)
    parser.add_argument("--cases", type=int, default=CASES)
    record(parser.parse_args().cases)
