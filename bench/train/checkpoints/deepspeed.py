"""Saves and loads by DeepSpeed itself, of a GPT-2 124M with AdamW and ZeRO 1.

`python -m bench.train.checkpoints deepspeed` prints the median seconds of its `save_checkpoint` and `load_checkpoint`
on two ranks. DeepSpeed does not call fsync and computes no hashes. The module `reshard` also uses these ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.train.ranks import run

SEQUENCE = 64
ROUNDS = 4
GLOBAL_BATCH = 4


def start_ranks(task: str, ranks: int, size: str, folder: Path) -> dict[str, Any]:
    """Run `ranks` ranks with task `save`, `continue` or `times`; return the result that rank 0 prints."""
    (folder / task).mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "bench.train.checkpoints.deepspeed", task, size, str(folder)]
    lines = run(argv, ranks, folder / task)[0].splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def engine_of(size: str, universal: bool = False) -> Any:
    """Return DeepSpeed's engine as the trainer configures it; `universal`: it loads universal checkpoints."""
    import torch

    import native
    from trainer.device import Device
    from trainer.engine import deepspeed_engine
    from trainer.env import Env
    from trainer.parallel.group import Group, Groups
    from trainer.plan.resolve import read_config
    from trainer.train.assemble import build_model

    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    device = Device("cpu")
    env = Env(rank, rank, world, world, "127.0.0.1", int(os.environ["MASTER_PORT"]))
    group = Group.join(env, device, always=True)
    config = read_config(
        {
            "model": {"name": size, "sequence": SEQUENCE},
            "data": {"prefix": "none"},
            "steps": 2,
            "micro_batch": 1,
            "global_batch": GLOBAL_BATCH,
            "engine": "deepspeed",
            "zero": 1,
        },
        world,
    )
    if universal:
        usual = deepspeed_engine.settings
        deepspeed_engine.settings = lambda *given: {
            **usual(*given),
            "checkpoint": {"load_universal": True},
        }
    groups = Groups.of(group, config.layout(world))
    model = build_model(config, native.choose("cpu"), groups)
    return deepspeed_engine.DeepSpeedEngine(model, config, groups, device).engine


def take_step(engine: Any) -> None:
    """Take one step of the global batch."""
    import torch

    micros = GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
    for number in range(micros):
        random = torch.Generator().manual_seed(number)
        loss = engine(torch.randint(1000, (1, SEQUENCE + 1), generator=random))
        engine.backward(loss)
        engine.step()


def take_times(engine: Any, folder: Path) -> dict[str, float]:
    """Return the median seconds of a save and of a load; the first of each is left out, because it fills caches."""
    import torch.distributed as dist

    times: dict[str, list[float]] = {"save": [], "load": []}

    def timed(key: str, work: Callable[[], object]) -> None:
        dist.barrier()
        began = time.monotonic()
        work()
        dist.barrier()
        times[key].append(time.monotonic() - began)

    for number in range(ROUNDS):
        timed("save", lambda number=number: engine.save_checkpoint(str(folder), tag=f"step-{number}"))
        timed("load", lambda number=number: engine.load_checkpoint(str(folder), tag=f"step-{number}"))
    return {key: statistics.median(found[1:]) for key, found in times.items()}


def rank_main(task: str, size: str, folder: Path) -> None:
    """Do one rank's part; rank 0 prints a line of JSON."""
    engine = engine_of(size, universal=task == "continue")
    result: dict[str, Any] = {}
    if task == "continue":
        engine.load_checkpoint(str(folder), tag="universal")
    take_step(engine)
    if task == "save":
        engine.save_checkpoint(str(folder), tag="global_step1")
    elif task == "times":
        result = take_times(engine, folder)
    result["time"] = time.time()
    if os.environ["RANK"] == "0":
        print(json.dumps(result), flush=True)
    engine.destroy()
    os._exit(0)


def main() -> int:
    if len(sys.argv) > 3:
        rank_main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    size = sys.argv[1] if len(sys.argv) > 1 else "gpt2-124M"
    with tempfile.TemporaryDirectory() as folder:
        found = start_ranks("times", 2, size, Path(folder))
    del found["time"]
    print(json.dumps({"deepspeed's seconds": found}, indent=2))
    return 0


if __name__ == "__main__":
    main()
