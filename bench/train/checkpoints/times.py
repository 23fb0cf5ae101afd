"""Save and load times of a GPT-2 124M with AdamW on two ranks, compared with torch's distributed checkpoints.

`python -m bench.train.checkpoints times` prints a JSON object with the median of each time in seconds, the processor
time of both ranks for a load, and the ratios. Both programs write 12 bytes per parameter to the same disk, in turn;
ours hashes everything, torch hashes nothing. A load reads what a rank of ZeRO 1 needs to continue: all weights and its
share of the moments. `torch_load_own` only reads what the rank saved, half of the weights; a training would still have
to exchange them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import native
from trainer.checkpoint.checkpointer import Checkpointer, Progress
from trainer.config.data import DataIdentity
from trainer.config.train_config import TrainConfig
from trainer.device import Device
from trainer.engine.torch_engine import TorchEngine
from trainer.env import Env
from trainer.parallel.group import Group, Groups
from trainer.plan.resolve import read_config
from trainer.train.assemble import build_model

RANKS = 2
ROUNDS = 5


def config_of(size: str, background: str) -> TrainConfig:
    raw = {
        "model": size,
        "data": {"prefix": "none"},
        "steps": 1000,
        "micro_batch": 1,
        "global_batch": RANKS,
        "zero": 1,
        "save": {"background": background, "keep": 1},
    }
    return read_config(raw, RANKS)


def rank_main(rank: int, size: str, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    device = Device("cpu")
    group = Group.join(Env(rank, rank, RANKS, RANKS, "127.0.0.1", port), device)
    config = config_of(size, "never")
    groups = Groups.of(group, config.layout(RANKS))
    engine = TorchEngine(build_model(config, native.choose("cpu"), groups), config, groups, device)
    times: dict[str, list[float]] = defaultdict(list)
    ours, theirs = Path(folder) / "ours", Path(folder) / "torch"
    savers = {
        background: Checkpointer(
            config_of(size, background), engine, group, ours / background, DataIdentity()
        )
        for background in ("never", "always")
    }
    # A weight has the same key on both ranks: torch saves it once, and each rank loads it.
    state = {part.key: part.tensor for part in engine.parts()}
    own = {part.key: part.tensor for part in engine.parts() if part.owned}
    processes = dist.new_group(backend="gloo")
    for number in range(1, ROUNDS + 2):
        measure_ours(savers, number, group, times)
        measure_torch(state, own, theirs, number, processes, times)
        if rank == 0:
            sys.stderr.write(
                f"round {number}: { {key: round(found[-1], 2) for key, found in times.items()} }\n"
            )
    if rank == 0:
        # The first round fills memory and caches of the disk.
        medians = {key: statistics.median(found[1:]) for key, found in times.items()}
        bytes_ours = sum(file.stat().st_size for file in (ours / "never").rglob("*") if file.is_file())
        parameters = config.model.parameters()
        print(
            json.dumps(
                {
                    "seconds": medians,
                    "bytes_per_parameter": bytes_ours / parameters,
                    "ratios": ratios(medians),
                },
                indent=2,
            )
        )
    group.barrier()
    os._exit(0)


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    best = min(seconds["torch_thread_stall"], seconds["torch_process_stall"])
    return {
        "stall / torch's best stall (at most 0.6)": seconds["stall"] / best,
        "save / torch's save (at most 1.3)": seconds["save"] / seconds["torch_save"],
        "load / torch's load (at most 1.2)": seconds["load"] / seconds["torch_load"],
        "load / torch's load of what each rank saved": seconds["load"] / seconds["torch_load_own"],
        "processor time of a load / torch's": seconds["load_processor"] / seconds["torch_load_processor"],
    }


def timed(times: dict[str, list[float]], key: str, work: Callable[[], Any]) -> Any:
    dist.barrier()
    began, processor = time.monotonic(), time.process_time()
    result = work()
    used = torch.tensor(time.process_time() - processor)
    dist.all_reduce(used)
    times[key].append(time.monotonic() - began)
    if "load" in key:
        times[f"{key}_processor"].append(float(used))
    return result


def measure_ours(
    savers: dict[str, Checkpointer], number: int, group: Group, times: dict[str, list[float]]
) -> None:
    timed(times, "save", lambda: savers["never"].save(Progress(number)))
    began = time.monotonic()
    timed(times, "stall", lambda: savers["always"].save(Progress(number)))
    savers["always"].finish()
    group.barrier()
    times["background_total"].append(time.monotonic() - began)
    timed(times, "load", lambda: savers["never"].resume())


def measure_torch(
    state: dict[str, Any],
    own: dict[str, Any],
    folder: Path,
    number: int,
    processes: Any,
    times: dict[str, list[float]],
) -> None:
    paths = {kind: str(folder / f"{kind}-{number}") for kind in ("save", "thread", "process")}
    timed(times, "torch_save", lambda: dcp.save(state, checkpoint_id=paths["save"]))
    timed(times, "torch_load", lambda: dcp.load(state, checkpoint_id=paths["save"]))
    timed(times, "torch_load_own", lambda: dcp.load(own, checkpoint_id=paths["save"]))
    for kind, of in (("thread", AsyncCheckpointerType.THREAD), ("process", AsyncCheckpointerType.PROCESS)):
        began = time.monotonic()
        future = timed(
            times,
            f"torch_{kind}_stall",
            lambda kind=kind, of=of: dcp.async_save(
                state, checkpoint_id=paths[kind], process_group=processes, async_checkpointer_type=of
            ),
        )
        future.result()
        dist.barrier()
        times[f"torch_{kind}_total"].append(time.monotonic() - began)
    dist.barrier()
    if dist.get_rank() == 0:
        for path in paths.values():
            shutil.rmtree(path)
    dist.barrier()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    size = sys.argv[1] if len(sys.argv) > 1 else "gpt2-124M"
    folder = tempfile.mkdtemp(prefix="checkpoints-")
    try:
        mp.spawn(rank_main, (size, folder, free_port()), nprocs=RANKS)
    finally:
        shutil.rmtree(folder)
