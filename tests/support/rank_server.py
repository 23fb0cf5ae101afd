"""Forks ranks from a process that has torch loaded: a start costs 20 ms where a fresh interpreter takes 2 s.

Reads one JSON line a group of ranks ({"argv", "environments", "outputs", "deepspeed", "sharded"}) from stdin, runs
`python -m trainer` with them as the launcher would, and answers with their exit codes when all have ended. A rank that
hangs prints where its threads are and ends before the test's own limit.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from typing import Any

# Loaded here so that the forks need not.
import torch

import trainer.train.assemble
from trainer.__main__ import main
from trainer.model.gpt import GPT

LIMIT = 240.0


def rank(argv: list[str], environment: dict[str, str], output: str) -> None:
    """This fork becomes a rank; an uncaught exception ends it as it would end an interpreter."""
    os.environ.update(environment)
    for name, number in ((".out", 1), (".err", 2)):
        handle = os.open(output + name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    code = 1
    try:
        if environment["RANK"] == environment.get("TEST_OVERFLOW_RANK"):
            overflow([int(number) for number in environment["TEST_OVERFLOW_FORWARDS"].split(",")])
        code = main(argv)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def overflow(numbers: list[int]) -> None:
    """Make the gradients of some forward passes infinite, in this process: those of these numbers, from 1."""
    forward, calls = GPT.forward, iter(range(1, sys.maxsize))

    def overflowing(self: GPT, *given: Any, **named: Any) -> torch.Tensor:
        result = forward(self, *given, **named)
        if result.requires_grad and next(calls) in numbers:
            result.register_hook(lambda gradient: gradient * float("inf"))
        return result

    GPT.forward = overflowing  # type: ignore[method-assign]


def serve() -> None:
    for line in sys.stdin:
        ask = json.loads(line)
        if ask["deepspeed"]:
            import deepspeed
            import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  (what it loads late: the compiler)
        if ask["sharded"]:
            import torch._dynamo  # noqa: F401  (what fully_shard loads late)

            import trainer.engine.sharded  # noqa: F401
        started = []
        for environment, output in zip(ask["environments"], ask["outputs"], strict=True):
            child = os.fork()
            if child == 0:
                rank(ask["argv"], environment, output)
            started.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started]
        os.write(answers, json.dumps(codes).encode() + b"\n")


assert trainer.train.assemble
# What libraries print on stdout must not be taken for an answer.
answers = os.dup(1)
os.dup2(2, 1)
serve()
