"""Use every device of a node once: start it, multiply, and add over all devices of the node.

The text of this file runs on the node as `python -c TEXT KIND DEVICE...`, with the ranks' Python, which imports torch.
It prints the torch and, by device, the step that failed with the library's own error, and the seconds of some products.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
BACKENDS = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}
# Seconds for the sum over the devices; NCCL and HCCL wait longer by themselves.
SUM_LIMIT = 45
# Characters of an error.
MOST = 300
# Products of squares of this size are timed, so many times.
EDGE, TIMES = 4096, 10


def main(kind: str, devices: list[str]) -> None:
    """Print the result for these devices; nothing if this Python cannot use such devices."""
    if find_spec("torch") is None or (kind == "npu" and find_spec("torch_npu") is None):
        print("{}")
        return
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if kind in VISIBLE:
        os.environ[VISIBLE[kind]] = ",".join(devices)
    with tempfile.TemporaryDirectory() as folder:
        answers = []
        for index in range(len(devices)):
            reader, writer = os.pipe()
            if not os.fork():
                os.close(reader)
                _touch(kind, index, len(devices), folder, writer)
            os.close(writer)
            answers.append(os.fdopen(reader))
        # Each child writes a line for its own device, and another one for the sum, which waits for all.
        own = [json.loads(answer.readline() or "{}") for answer in answers]
        failed = any(entry.get("error", "it ended") for entry in own)
        with open(f"{folder}/aside", "w") as file:
            file.write("no" if failed else "yes")
        os.rename(f"{folder}/aside", f"{folder}/go")
        sums = [json.loads(answer.readline() or "{}") for answer in answers]
    torch = next((entry["torch"] for entry in own if entry.get("torch")), "")
    by_device = {device: entry.get("error", "it ended") for device, entry in zip(devices, own)}  # noqa: B905
    seconds = {device: entry.get("seconds", 0.0) for device, entry in zip(devices, own)}  # noqa: B905
    total = next(filter(None, (entry.get("error", "a process ended in it") for entry in sums)), "")
    answer = {"torch": torch, "devices": by_device, "seconds": seconds, "sum": "" if failed else total}
    print(json.dumps(answer))


def _touch(kind: str, index: int, count: int, folder: str, writer: int) -> None:
    """Use one device in a process of its own, which ends here."""
    torch_name: list[str] = []
    taken = [0.0]

    def step(work: Callable[[], None]) -> None:
        error = ""
        try:
            work()
        except Exception as problem:
            error = " ".join(str(problem).split())[:MOST] or type(problem).__name__
        text = json.dumps({"error": error, "torch": "".join(torch_name), "seconds": taken[0]})
        os.write(writer, f"{text}\n".encode())

    def multiply() -> None:
        import torch

        if kind == "npu":
            import torch_npu  # noqa: F401
        built = f" for CUDA {torch.version.cuda}" if kind == "cuda" and torch.version.cuda else ""
        torch_name.append(f"torch {torch.__version__}{built}")
        if kind != "cpu":
            runtime = getattr(torch, kind)
            runtime.init()
            runtime.set_device(index)
        ones = torch.ones(256, 256, device=kind if kind == "cpu" else f"{kind}:{index}")
        if float((ones @ ones).sum()) != 256.0**3:
            raise RuntimeError("a product of ones is wrong")
        # A simulated device takes longer for the small product.
        if kind != "cpu" and _seconds(kind, index, EDGE // 4, 1) < 0.01:
            taken[0] = _seconds(kind, index, EDGE, TIMES)

    def add() -> None:
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        while not os.path.exists(f"{folder}/go"):
            time.sleep(0.02)
        with open(f"{folder}/go") as file:
            if file.read() == "no" or count == 1:
                return
        dist.init_process_group(
            BACKENDS[kind],
            init_method=f"file://{folder}/store",
            rank=index,
            world_size=count,
            timeout=timedelta(seconds=SUM_LIMIT),
        )
        ones = torch.ones(1024, device=kind if kind == "cpu" else f"{kind}:{index}")
        dist.all_reduce(ones)
        if float(ones.sum()) != 1024.0 * count:
            raise RuntimeError("the sum is wrong")

    step(multiply)
    step(add)
    os._exit(0)


def _seconds(kind: str, index: int, edge: int, times: int) -> float:
    """Return the time of some products of squares, after the kernel is loaded."""
    import torch

    square, taken = torch.ones(edge, edge, device=f"{kind}:{index}", dtype=torch.float16), 0.0
    for _ in range(2):
        began = time.perf_counter()
        for _ in range(times):
            square @ square
        getattr(torch, kind).synchronize()
        taken = time.perf_counter() - began
    return taken


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
