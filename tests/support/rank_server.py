"""Forks ranks from a process that has torch loaded: a start costs 20 ms where a fresh interpreter takes 2 s.

Reads one JSON line a group of ranks ({"argv", "environments", "outputs", "deepspeed", "sharded"}) from stdin, runs
`python -m trainer` with them as the launcher would, and answers with their exit codes when all have ended. A rank that
hangs prints where its threads are and ends before the test's own limit.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import sys
from contextlib import suppress
from typing import Any

import torch

import native
from trainer.__main__ import main
from trainer.model.gpt import GPT

# Loaded here so that the forks need not: recomputed blocks load torch's compiler, which takes 1.3 s.
BY_ALL = (
    "numpy.ma",
    "torch._dynamo",
    "native.memory.torch_pool",
    "trainer.chat_template",
    "trainer.plan.resolve",
    "trainer.train.assemble",
    "trainer.train.commands",
)
BY_DEEPSPEED = (
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch.utils.cpp_extension",
    "trainer.engine.deepspeed_engine",
)
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


def load(*names: str) -> None:
    """Import modules; some versions of the libraries lack one."""
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)
    # The collector would write into every page that the forks share.
    gc.freeze()


def serve() -> None:
    for line in sys.stdin:
        ask = json.loads(line)
        load(
            *(BY_DEEPSPEED if ask["deepspeed"] else ()),
            *(["trainer.engine.sharded"] if ask["sharded"] else ()),
        )
        started = []
        for environment, output in zip(ask["environments"], ask["outputs"], strict=True):
            child = os.fork()
            if child == 0:
                rank(ask["argv"], environment, output)
            started.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started]
        os.write(answers, json.dumps(codes).encode() + b"\n")


load(*BY_ALL)
native.choose("cpu")
# What libraries print on stdout must not be taken for an answer.
answers = os.dup(1)
os.dup2(2, 1)
serve()
