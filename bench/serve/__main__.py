"""`python -m bench.serve`: measures a random GPT-2 of 124M parameters; prints one JSON line per figure.

`--clients` starts a server and compares its clients with the same texts in one batch. `--peer` measures Hugging Face's
transformers instead, in an environment that has it. Run it on a quiet machine, or with `--cpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from typing import Any

# This must run before torch is imported; see trainer.device.prepare_threads.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch

import native
from bench.serve import clients, decode, peer
from trainer.generate.network import of_model
from trainer.model.gpt import GPT


def lines(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the figures."""
    if arguments.clients:
        network = of_model(GPT(decode.CONFIG, native.choose("cpu")).eval(), decode.PAGES, arguments.weights)
        yield from clients.in_turn(network, arguments.weights, arguments.threads, arguments.rounds)
        return
    clock = time.process_time if arguments.cpu else time.perf_counter
    if arguments.peer:
        yield from peer.figures(arguments.only, clock)
        return
    yield from decode.figures(arguments.only, clock)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="seconds of processor time, for a busy machine")
    parser.add_argument(
        "--clients", action="store_true", help="of a server, in turn with the same texts in one batch"
    )
    parser.add_argument("--weights", default="fp32", help="the type of matrices for --clients")
    parser.add_argument("--rounds", type=int, default=5, help="of --clients")
    parser.add_argument("--only", default="", help="figures whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for line in lines(arguments):
        print(json.dumps({"threads": arguments.threads, "cpu_seconds": arguments.cpu, **line}), flush=True)


if __name__ == "__main__":
    main()
