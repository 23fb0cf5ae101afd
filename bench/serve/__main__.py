"""`python -m bench.serve`: a random GPT-2 of 124M parameters; prints one JSON line for each figure.

`--peer` measures Hugging Face's transformers instead, in an environment that has it. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any

# Before torch is imported: see trainer.device.prepare_threads.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import torch

from bench.serve import decode, peer


def lines(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the figures."""
    if arguments.peer:
        yield from peer.figures(arguments.only)
        return
    yield from decode.figures(arguments.only)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--only", default="", help="figures whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for line in lines(arguments):
        print(json.dumps({"threads": arguments.threads, **line}), flush=True)


if __name__ == "__main__":
    main()
