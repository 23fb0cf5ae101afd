"""Rehearse the save of a 13B model on 1,536 ranks: the real number of files and tensors, with scaled-down data.

The layout is tensor 8, pipeline 8, data 24. Each rank's file is written; rank 0 reads the entries of all ranks from a
store over TCP, and one leader publishes the checkpoint. It prints the seconds that the manifest costs: for rank 0 to
make it, for the leader to write, check and publish it, and for a rank to read it and find its files in a load.

    python -m bench.train.checkpoints manifest [--divided rows]
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

import native
from bench.field import Option, free_port, read_options
from tests.support.checkpoints import MANIFEST
from trainer.checkpoint.board import Board
from trainer.checkpoint.names import Shape, tensor_table
from trainer.checkpoint.part import MOMENTS, Part
from trainer.checkpoint.save import SaveOrder, collect_manifest, publish_manifest
from trainer.checkpoint.store import open_checkpoint
from trainer.checkpoint.write import write_parts
from trainer.config.layout import pieces_of
from trainer.config.model import ModelConfig
from trainer.config.parts import KeepConfig
from trainer.device import Device
from trainer.engine.buckets import Buckets
from trainer.engine.parts import Place
from trainer.engine.rank_state import saves_copy
from trainer.model.cuts import shapes_of
from trainer.model.gpt import GPT
from trainer.model.layers import cuts_of
from trainer.parallel.group import Group
from trainer.parallel.pipeline import UNDIVIDED
from trainer.parallel.tensor import Parallel

TENSOR, STAGES, DATA = 8, 8, 24
WORLD = TENSOR * STAGES * DATA
# GPT-3 13B has 40 layers, 40 heads, hidden 5,120, 2,048 positions, 51,200 tokens; the last three are divided by 64.
MODEL = ModelConfig(layers=40, hidden=80, heads=40, sequence=32, vocab=800, tied=False)
T = TypeVar("T")


def model_of(stage: int, parallel: Parallel) -> GPT:
    """Return one rank's part of the model, without memory."""
    pieces = pieces_of(MODEL.layers, stage, STAGES)
    with torch.device("meta"):
        return GPT(MODEL, native.choose("cpu"), parallel=parallel, pieces=pieces)


def ranks_parts(divided: str) -> Iterator[list[Part]]:
    """Yield the parts that each rank owns: shares of buckets, as with ZeRO 1, or rows of each parameter."""
    for stage in range(STAGES):
        for tensor in range(TENSOR):
            parallel = Parallel(tensor, TENSOR)
            model = model_of(stage, parallel)
            cuts, parameters = cuts_of(model), dict(model.named_parameters())
            types = dict.fromkeys(parameters, torch.float32)
            for data in range(DATA):
                found = list[Part]()
                own = Buckets(parameters, data, DATA, types).own
                for name, parameter in parameters.items():
                    if not saves_copy(name, cuts[name], parallel, UNDIVIDED):
                        continue
                    place = Place(parameter.shape, cuts[name], parallel)
                    first, last = (len(parameter) * at // DATA for at in (data, data + 1))
                    row = parameter.numel() // max(1, len(parameter))
                    share = own[name] if divided == "shares" else slice(first * row, last * row)
                    for key in (name, *(f"{moment}.{name}" for moment in MOMENTS)):
                        found += place.flat(key, share.start, torch.zeros(share.stop - share.start), True)
                yield found


def seconds(times: dict[str, float], key: str, work: Callable[[], T]) -> T:
    began, processor = time.monotonic(), time.process_time()
    result = work()
    times[key] = round(time.monotonic() - began, 3)
    times["processor time of all"] = round(
        times.get("processor time of all", 0.0) + time.process_time() - processor, 3
    )
    return result


def main() -> int:
    options = read_options(__doc__, divided=Option("shares", "", ("shares", "rows")))
    with torch.device("meta"):
        whole = GPT(MODEL, native.choose("cpu"))
        shapes: dict[str, Shape] = shapes_of(whole, whole.parallel)
    order = SaveOrder(
        replace(MANIFEST, step=1, tensors=tensor_table(shapes, True)), "rehearsal", KeepConfig()
    )
    store = dist.TCPStore("127.0.0.1", free_port(), 1, True, timedelta(seconds=60))
    boards = [Board(Group(rank, WORLD, Device("cpu"), store=store), "saves") for rank in (0, 1)]
    folder, times = Path(tempfile.mkdtemp(prefix="manifest-")), dict[str, float]()
    try:
        aside, target = folder / ".tmp-rehearsal", folder / "step-00000001"
        aside.mkdir()
        last: list[Part] = []
        for rank, parts in enumerate(ranks_parts(options.divided)):
            entry = {}
            if parts:
                name = f"part-{rank:05d}.safetensors"
                entry = {name: write_parts(aside / name, parts, order.manifest.tensors).as_json()}
                last = parts
            boards[1].post(f"save/part/{rank}", entry)
        manifest = seconds(times, "make", lambda: collect_manifest(order, boards[0], "save", 0.0))
        seconds(times, "post", lambda: boards[0].post("save/manifest", manifest))
        (taken,) = seconds(times, "take", lambda: boards[1].take(["save/manifest"]))
        seconds(times, "publish", lambda: publish_manifest(taken, order, aside, target))
        checkpoint = seconds(times, "read", lambda: open_checkpoint(target))
        seconds(times, "find files of a load", lambda: checkpoint.files_for(last))
        size = (target / "manifest.json").stat().st_size
        facts = {"ranks": WORLD, "files": len(checkpoint.files), "manifest_bytes": size}
        processor = times.pop("processor time of all")
        total = {"all": round(sum(times.values()), 3), "processor time of all": processor}
        print(json.dumps({**facts, "seconds": {**times, **total}}, indent=2))
    finally:
        shutil.rmtree(folder)
    return 0
