"""Train 20 steps in each layout, and continue in every other layout from the checkpoint at step 10.

The models are a tiny GPT and a tiny GLM in fp32 without dropout, on 1, 2 and 4 ranks, with real process groups on
loopback. For each pair (from, to): ten steps in the first layout, a load in the second, and ten more steps. The losses
must equal those of the first layout without interruption: to the last bit, with norms and files, if both layouts are
the same; otherwise within 1e-6.

    python -m bench.train.checkpoints pairs --json pairs.jsonl      all pairs except those that are already in the file
    python -m bench.train.checkpoints pairs --models gpt --only "zero 3"
    python -m bench.train.checkpoints pairs --read pairs.jsonl       print the table of a file
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.train.layouts import STEPS, Layout, config_of, corpus, largest_gap
from bench.train.rank_server import Failed, Server, Trained
from trainer.plan.resolve import try_config

ALLOWED = 1e-6
HALF = STEPS // 2
MODELS = ("gpt", "glm")


@dataclass(frozen=True)
class Place:
    """A layout, and the number of ranks."""

    ranks: int
    layout: Layout

    def __str__(self) -> str:
        return f"{self.layout.engine} on {self.ranks}: {self.layout.in_words(self.ranks)}"


PLACES = (
    Place(1, Layout("torch")),
    Place(2, Layout("torch", zero=1)),
    Place(2, Layout("torch", zero=3)),
    Place(2, Layout("torch", tensor=2)),
    Place(2, Layout("torch", pipeline=2)),
    Place(2, Layout("deepspeed", zero=0)),
    Place(2, Layout("deepspeed", zero=1)),
    Place(2, Layout("deepspeed", zero=3)),
    Place(4, Layout("torch", zero=0)),
    Place(4, Layout("torch", tensor=2, pipeline=2)),
    Place(4, Layout("torch", tensor=2, sequence=True, zero=1)),
    Place(4, Layout("torch", pipeline=2, interleave=2, zero=2)),
    Place(4, Layout("deepspeed", zero=2)),
)


def places_of(model: str, prefix: Path) -> list[Place]:
    """Return the layouts that the config's rules allow for a model."""
    return [
        place
        for place in PLACES
        if not try_config(config_of(model, prefix, **place.layout.config()), place.ranks)[1]
    ]


@dataclass
class Measure:
    """The pairs of one model."""

    server: Server
    prefix: Path
    model: str
    whole: dict[str, tuple[Trained, Path]] = field(default_factory=dict)

    def _config(self, place: Place) -> dict[str, Any]:
        return config_of(self.model, self.prefix, **place.layout.config())

    def uninterrupted(self, place: Place) -> tuple[Trained, Path]:
        """Return a training of all steps in one layout, and a copy of its checkpoint at the middle."""
        if str(place) not in self.whole:
            done = self.server.train(place.ranks, self._config(place))
            copy = self.server.folder / f"{self.model}-{len(self.whole)}"
            shutil.copytree(self.server.run_dir / "checkpoints" / f"step-{HALF:08d}", copy)
            self.whole[str(place)] = done, copy
        return self.whole[str(place)]

    def pair(self, source: Place, target: Place) -> dict[str, Any]:
        """Return a row: the largest relative difference of a loss, and the fault or ""."""
        row = {"model": self.model, "from": str(source), "to": str(target)}
        try:
            expected, middle = self.uninterrupted(source)
            found = self.server.continue_from(middle, target.ranks, self._config(target))
        except Failed as error:
            return row | {"off": None, "wrong": str(error)}
        off = largest_gap(found.losses, expected.losses[HALF:])
        wrong = [] if off <= ALLOWED else ["too far"]
        if source == target:
            same = found.losses == expected.losses[HALF:] and found.norms == expected.norms[HALF:]
            wrong += [] if same and found.files == expected.files else ["different bits in the same layout"]
        return row | {"off": off, "wrong": ", ".join(wrong)}


def pairs(places: Sequence[Place]) -> Iterator[tuple[Place, Place]]:
    for source in places:
        yield from ((source, target) for target in places)


def rows_of(file: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []


def measure(server: Server, options: argparse.Namespace, prefix: Path) -> list[dict[str, Any]]:
    rows = rows_of(options.json)
    known = {(row["model"], row["from"], row["to"]) for row in rows}
    end = time.monotonic() + options.seconds
    for model in options.models.split(","):
        found = Measure(server, prefix, model)
        for source, target in pairs(places_of(model, prefix)):
            if (model, str(source), str(target)) in known or options.only not in f"{source} {target}":
                continue
            if time.monotonic() > end:
                return rows
            rows.append(found.pair(source, target))
            mark = f"  <- {rows[-1]['wrong']}" if rows[-1]["wrong"] else ""
            print(f"{model:<4} {source} -> {target}: {rows[-1]['off']}{mark}", flush=True)
            if options.json:
                with options.json.open("a") as out:
                    out.write(json.dumps(rows[-1]) + "\n")
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return for each model the number of pairs, the largest difference, and the number of failures."""
    lines = [
        "| model | pairs | same layout, same bits | largest difference otherwise | wrong |",
        "|---|---|---|---|---|",
    ]
    for model in sorted({row["model"] for row in rows}):
        own = [row for row in rows if row["model"] == model]
        same = [row for row in own if row["from"] == row["to"]]
        largest = max((row["off"] for row in own if row["off"] is not None), default=0.0)
        wrong = sum(bool(row["wrong"]) for row in own)
        sound = sum(not row["wrong"] for row in same)
        lines.append(f"| {model} | {len(own)} | {sound} of {len(same)} | {largest:.1e} | {wrong} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--only", default="", metavar="TEXT", help="pairs whose names contain this text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line per pair to this file")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no pair after this time")
    parser.add_argument("--read", type=Path, metavar="FILE", help="print the table of a file and end")
    options = parser.parse_args()
    if options.read:
        print(table(rows_of(options.read)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            rows = measure(server, options, corpus(Path(folder)))
        finally:
            server.end()
    print(table(rows))
    return 1 if any(row["wrong"] for row in rows) else 0
