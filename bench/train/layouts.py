"""Train a tiny GPT and a tiny GLM with every layout that a config accepts, and compare each with one process.

Each trains 20 steps in fp32 without dropout, on 1, 2, 4 and 8 ranks, with real process groups on loopback. The result
is the largest relative difference of a loss; recomputation must not change any bit. With --resume each layout also
resumes from its tenth step, which must give the same bytes.

    python -m bench.train.layouts                                       both models, torch's engine
    python -m bench.train.layouts --engine deepspeed --ranks 1,2,4
    python -m bench.train.layouts --models glm --ranks 8 --resume --json layouts.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench.train.rank_server import Failed, Server, Trained
from trainer.corpus.indexed import Writer
from trainer.plan.resolve import try_config

STEPS, BATCH, VOCAB = 20, 8, 60
SHAPE = {"layers": 4, "hidden": 64, "heads": 8, "sequence": 32}
MODELS = {
    "gpt": {**SHAPE, "vocab": VOCAB},
    "newer": {**SHAPE, "vocab": VOCAB, "rotary": True, "swiglu": True, "ffn": 128},
    "glm": {**SHAPE, "kind": "glm", "vocab": VOCAB + 9},
}
ALLOWED, ALLOWED_NORM = 1e-5, 1e-4


@dataclass(frozen=True)
class Recompute:
    """The recomputation of a layout in the backward pass."""

    mode: str = "none"
    every: int = 1
    split: bool = False

    def config(self) -> dict[str, object]:
        return {
            "mode": self.mode,
            **({"every": self.every} if self.every > 1 else {}),
            **({"split": True} if self.split else {}),
        }

    def __str__(self) -> str:
        every = f" {self.every}" if self.every > 1 else ""
        return f"recompute {self.mode}{every}{' split' if self.split else ''}"


NONE, WHOLE = Recompute(), Recompute("full")
KEEPING = [NONE, Recompute("selective"), WHOLE, Recompute("full", every=2), Recompute("full", split=True)]


@dataclass(frozen=True)
class Layout:
    """The division of a job's work among its ranks."""

    engine: str
    tensor: int = 1
    pipeline: int = 1
    interleave: int = 1
    sequence: bool = False
    layers: tuple[int, ...] = ()
    zero: int = 0
    offload: bool = False
    recompute: Recompute = NONE

    def config(self) -> dict[str, object]:
        parallel = {"tensor": self.tensor, "pipeline": self.pipeline, "interleave": self.interleave}
        return {
            "engine": self.engine,
            "parallel": {**parallel, "sequence": self.sequence, "layers": list(self.layers)},
            "zero": self.zero,
            "offload": self.offload,
            "recompute": self.recompute.config(),
        }

    def without_recompute(self) -> tuple[Any, ...]:
        """Return all settings except recomputation."""
        rest = (self.tensor, self.pipeline, self.interleave, self.sequence, self.layers)
        return (*rest, self.zero, self.offload)

    def in_words(self, ranks: int) -> str:
        parts = [f"data {ranks // self.tensor // self.pipeline}"]
        for name in ("tensor", "pipeline", "interleave"):
            parts += [f"{name} {getattr(self, name)}"] if getattr(self, name) > 1 else []
        parts += ["sequence"] * self.sequence
        parts += [f"layers {'+'.join(map(str, self.layers))}"] if self.layers else []
        parts += [f"zero {self.zero}"] if self.zero else []
        parts += ["offload"] * self.offload
        parts += [str(self.recompute)] if self.recompute != NONE else []
        return ", ".join(parts)


def layouts(engine: str, ranks: int, model: str) -> Iterator[Layout]:
    """Yield all candidate layouts; the config's rules decide later which are legal on this number of ranks.

    On up to 4 ranks the first model gets every kind of recomputation, otherwise only that of whole blocks: with ZeRO 0,
    and with ZeRO 3, which gathers and frees weights. There is ZeRO only with several data parallel ranks. The newer GPT
    gets only the shapes, without ZeRO or recomputation.
    """
    kinds = KEEPING if model == "gpt" and ranks < 8 else [NONE] if model == "newer" else [NONE, WHOLE]
    zeros = (0,) if model == "newer" else (0, 1, 2, 3)
    for tensor, pipeline, interleave in product((1, 2, 4, 8), (1, 2, 4), (1, 2)):
        levels = zeros if ranks > tensor * pipeline else zeros[:1]
        for sequence in (False, True):
            shape = {"tensor": tensor, "pipeline": pipeline, "interleave": interleave, "sequence": sequence}
            for zero, recompute in product(levels, kinds):
                if recompute == NONE or zero == 0 or (zero == 3 and recompute == WHOLE):
                    yield Layout(engine, **shape, zero=zero, recompute=recompute)
            if model == "newer" or sequence:
                continue
            if (pipeline, interleave) == (2, 1):
                yield Layout(engine, **shape, layers=(1, 3))
            for zero in levels:
                yield Layout(engine, **shape, zero=zero, offload=True)


def corpus(folder: Path) -> Path:
    """Write 60 documents of random ids, four of five of which depend on the previous id; return their prefix."""
    random = np.random.RandomState(7)
    with Writer(folder / "text_document", np.uint16) as writer:
        for _ in range(60):
            ids = [int(random.randint(VOCAB))]
            for _ in range(random.randint(40, 200)):
                ids.append(int(random.randint(VOCAB)) if random.rand() < 0.2 else (ids[-1] + 1) % VOCAB)
            writer.add_document([ids])
    return folder / "text_document"


def config_of(model: str, prefix: Path, **changes: Any) -> dict[str, object]:
    data = {"prefix": str(prefix), "split": "1", **({"eod": 3} if model == "glm" else {})}
    base = {
        "model": MODELS[model],
        "data": data,
        "steps": STEPS,
        "micro_batch": 1,
        "global_batch": BATCH,
        "optimizer": {"lr": 3e-3, "warmup_steps": 2},
        "eval": {"batches": 0},
        "save": {"every": STEPS // 2, "keep": 9},
    }
    return {**base, **changes}


@dataclass
class Measure:
    """The measurement of one model on one engine, layout by layout."""

    server: Server
    prefix: Path
    model: str
    engine: str
    resume: bool
    alone: Trained = field(init=False)
    seen: dict[tuple[Any, ...], list[float]] = field(default_factory=dict)
    rows: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.alone = self.server.train(1, config_of(self.model, self.prefix))

    def of(self, ranks: int, layout: Layout) -> dict[str, object]:
        """Return a row: the largest difference of its losses from those of one process, and the faults."""
        row = {"model": self.model, "engine": self.engine, "ranks": ranks, "layout": layout.in_words(ranks)}
        config = config_of(self.model, self.prefix, **layout.config())
        try:
            done = self.server.train(ranks, config)
            off = largest_gap(done.losses, self.alone.losses)
            wrong = ["too far"] if not off <= ALLOWED else []
            wrong += (
                ["different norm"] if not largest_gap(done.norms, self.alone.norms) <= ALLOWED_NORM else []
            )
            same = self.seen.setdefault((ranks, *layout.without_recompute()), done.losses) == done.losses
            wrong += ["different bits than without recomputation"] if not same else []
            if self.resume and layout.recompute == NONE:
                wrong += self._resumed(ranks, config, done)
            row |= {"off": off, "wrong": ", ".join(wrong)}
        except Failed as error:
            row |= {"off": float("nan"), "wrong": str(error)}
        self.rows.append(row)
        return row

    def _resumed(self, ranks: int, config: dict[str, object], whole: Trained) -> list[str]:
        half = self.server.go_on(ranks, config)
        same = half.losses == whole.losses[STEPS // 2 :] and half.norms == whole.norms[STEPS // 2 :]
        wrong = [] if same else ["different bits after a resume"]
        return wrong if half.files == whole.files else [*wrong, "different checkpoint after a resume"]


def largest_gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    if len(ours) != len(theirs):
        return float("inf")
    return max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))


def measure(server: Server, options: argparse.Namespace, prefix: Path) -> bool:
    good = True
    for model in options.models.split(","):
        found = Measure(server, prefix, model, options.engine, options.resume)
        for ranks in map(int, options.ranks.split(",")):
            for layout in layouts(options.engine, ranks, model):
                if not all(word in layout.in_words(ranks) for word in options.only.split(",")):
                    continue
                if try_config(config_of(model, prefix, **layout.config()), ranks)[1]:
                    continue
                row = found.of(ranks, layout)
                mark = f"  <- {row['wrong']}" if row["wrong"] else ""
                print(f"{model:<5} {ranks} ranks: {row['layout']:<60} {row['off']:.1e}{mark}", flush=True)
                if options.json:
                    with options.json.open("a") as out:
                        out.write(json.dumps(row) + "\n")
        good &= not any(row["wrong"] for row in found.rows)
        largest = max((row["off"] for row in found.rows), default=0.0)
        print(f"{model:<5} {len(found.rows)} layouts, {STEPS} steps: at most {largest:.1e} from one process")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="torch", choices=("torch", "deepspeed"))
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--ranks", default="1,2,4,8", help="some of 1,2,4,8")
    parser.add_argument(
        "--only",
        default="",
        metavar="WORDS",
        help="only layouts whose line has all of these: pipeline,zero 3",
    )
    parser.add_argument("--resume", action="store_true", help="also resume each from its middle")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line per layout to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            return 0 if measure(server, options, corpus(Path(folder))) else 1
        finally:
            server.end()


if __name__ == "__main__":
    sys.exit(main())
