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
from bench.field import Option, read_options
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
    arguments = read_options(
        __doc__,
        threads=2,
        peer=False,
        cpu=Option(False, "seconds of processor time, for a busy machine"),
        clients=Option(False, "of a server, in turn with the same texts in one batch"),
        weights=Option("fp32", "the type of matrices for --clients"),
        rounds=Option(5, "of --clients"),
        only=Option("", "figures whose name contains this"),
    )
    torch.set_num_threads(arguments.threads)
    for line in lines(arguments):
        print(json.dumps({"threads": arguments.threads, "cpu_seconds": arguments.cpu, **line}), flush=True)


if __name__ == "__main__":
    main()
