"""`python -m bench.serve.parts`: the processor time of each kind of work in scoring texts, on one thread.

It runs the instructions of a step one by one, with the requests of `bench.serve.scoring`. It prints one JSON line per
task: seconds as a whole and of each part, and the GFLOP/s of products.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from typing import Any
from unittest.mock import patch

import torch

import native
from bench.serve.scoring import CONFIG, requests, scored
from native.decode.program import likelihoods
from trainer.evaluate import packed_scorer
from trainer.evaluate.packed_scorer import PackedScorer
from trainer.generate.fused import Fused
from trainer.model.gpt import GPT

ROUNDS = 3
RUN = Fused.run


class Parts:
    """Seconds and operations of each part."""

    def __init__(self) -> None:
        self.seconds, self.operations = defaultdict[str, float](float), Counter[str]()

    def run(self, program: Any, inputs: Any, begin: int = 0, end: int | None = None) -> None:
        """Run the instructions one by one."""
        for at, instruction in enumerate(program._code[begin:end], begin):
            name, product = instruction.op.name.lower(), instruction.product
            if name == "product":
                name = f"product {product.outputs} x {product.inputs}"
                rows = len(inputs.wanted) if instruction.of_wanted else inputs.tokens
                self.operations[name] += 2 * rows * product.outputs * product.inputs
            began = time.process_time()
            RUN(program, inputs, at, at + 1)
            self.seconds[name] += time.process_time() - began

    def likelihoods(self, *arguments: Any) -> Any:
        began = time.process_time()
        found = likelihoods(*arguments)
        self.seconds["log probabilities"] += time.process_time() - began
        return found


def main() -> None:
    torch.set_num_threads(1)
    scorer = PackedScorer(GPT(CONFIG, native.choose("cpu")).eval())
    for task, wanted in requests(texts=48, windows=2).items():
        best = (float("inf"), Parts())
        for _ in range(ROUNDS):
            parts = Parts()
            with (
                patch.object(Fused, "run", lambda *given, of=parts: of.run(*given)),
                patch.object(packed_scorer, "likelihoods", parts.likelihoods),
            ):
                began = time.process_time()
                scored(scorer, wanted)
                best = min(best, (time.process_time() - began, parts), key=lambda entry: entry[0])
        seconds, parts = best
        products = {
            name: round(count / parts.seconds[name] / 1e9) for name, count in parts.operations.items()
        }
        shares = sorted(parts.seconds.items(), key=lambda entry: -entry[1])
        line = {
            "task": task,
            "tokens": sum(entry.length for entry in wanted),
            "seconds": round(seconds, 3),
            "parts": {name: round(part, 3) for name, part in shares},
            "products": round(sum(parts.seconds[name] for name in products), 3),
            "gflop": round(sum(parts.operations.values()) / 1e9),
            "gflop_per_second": products,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
