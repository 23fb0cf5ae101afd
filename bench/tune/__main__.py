"""Compare the steps per second of instruction tuning, of all weights and of adapters, with transformers and peft.

    python -m bench.tune [--threads 2] [--model 124M|20M] [--steps 3] [--only lora|all]
                         [--precision fp32|bf16]

It needs an interpreter with transformers and peft: pip install -e '.[train,judges]'. Both sides have the same random
GPT-2, the same examples and AdamW without dropout, and take steps in turn. Theirs is the usual way: examples padded to
the longest, torch's fused AdamW, its attention kernel, and the logits of all tokens; for bf16 it uses autocast, like
transformers' Trainer. `mixed` examples have 32 to 128 tokens, `equal` ones 128; the last third of each is the answer.
On a busy machine the processor seconds, the least of all steps, are most reliable.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from numpy.random import RandomState
from torch import Tensor

import native
from bench.field import Option, in_turn, read_options, timed
from bench.serve.scoring import take_weights
from trainer.config.lora import LoraConfig
from trainer.config.model import ModelConfig
from trainer.config.parts import OptimizerConfig
from trainer.config.train_config import TrainConfig
from trainer.config.tune import TuneConfig
from trainer.device import open_device
from trainer.engine.torch_engine import TorchEngine
from trainer.env import Env
from trainer.model.recompute import NOTHING
from trainer.parallel.group import Group, Groups
from trainer.parallel.tensor import ALONE
from trainer.tune.examples import UNCOUNTED, joined
from trainer.tune.task import tuned_model

SIZES = {"124M": (12, 768, 12), "20M": (6, 256, 8)}
EXAMPLES, LONGEST, SHORTEST = 8, 128, 32
RANK, ALPHA = 8, 16
Step = Callable[[], float]
"""Takes a step and returns its loss."""


def examples(equal: bool, vocab: int) -> list[tuple[Tensor, int]]:
    """Return the tokens of each example, and how many of them belong to the prompt."""
    random = RandomState(1)
    lengths = [LONGEST if equal else int(random.randint(SHORTEST, LONGEST + 1)) for _ in range(EXAMPLES)]
    return [(torch.from_numpy(random.randint(0, vocab, length)), length * 2 // 3) for length in lengths]


def theirs(model: Any, rows: Sequence[tuple[Tensor, int]], precision: str) -> Step:
    """Return a function that takes a step of transformers, with peft's adapters if the model has some."""
    longest = max(len(tokens) for tokens, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, UNCOUNTED)
    for at, (tokens, start) in enumerate(rows):
        ids[at, : len(tokens)], mask[at, : len(tokens)] = tokens, 1
        labels[at, start : len(tokens)] = tokens[start:]
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    model.train()

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def ours(
    peer: Any,
    size: ModelConfig,
    lora: bool,
    rows: Sequence[tuple[Tensor, int]],
    arguments: argparse.Namespace,
) -> Step:
    """Return a function that takes a step of the trainer, with the weights of a model of transformers."""
    threads = arguments.threads
    device = open_device("cpu", 0, 1, threads, False)
    own = LoraConfig(RANK, float(ALPHA)) if lora else LoraConfig()
    config = TrainConfig(
        model=size,
        tune=TuneConfig(task="chat", lora=own),
        optimizer=OptimizerConfig(lr=1e-4, schedule="constant"),
        precision=arguments.precision,
        micro_batch=EXAMPLES,
        global_batch=EXAMPLES,
    )
    group = Group.join(Env(device_kind="cpu", threads=threads), device)
    groups = Groups.of(group, config.layout(1), False, 1)
    model = tuned_model(config, native.choose("cpu"), ALONE, NOTHING, ())
    take_weights(model, size, peer)
    engine = TorchEngine(model, config, groups, device)
    pairs = []
    for tokens, start in rows:
        targets = tokens[1:].clone()
        targets[: start - 1] = UNCOUNTED
        pairs.append((tokens[:-1].numpy(), targets.numpy()))
    micro = tuple(torch.from_numpy(part) for part in joined(pairs))
    return lambda: engine.step([micro], 1e-4, 1).loss


def measure(name: str, lora: bool, equal: bool, arguments: argparse.Namespace) -> None:
    """Print one line of the table."""
    import peft
    import transformers

    layers, hidden, heads = SIZES[arguments.model]
    torch.manual_seed(0)
    peer = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=layers, n_embd=hidden, n_head=heads, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
        )
    )
    size = ModelConfig(layers=layers, hidden=hidden, heads=heads, sequence=1024, vocab=peer.config.vocab_size)
    rows = examples(equal, size.vocab)
    steps = [ours(peer, replace(size), lora, rows, arguments)]
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["c_attn"], fan_in_fan_out=True)
    steps.append(theirs(peft.get_peft_model(peer, settings) if lora else peer, rows, arguments.precision))
    first = [step() for step in steps]

    def used(step: Step) -> tuple[float, float]:
        before = time.process_time()
        return timed(step), time.process_time() - before

    ways = {"ours": partial(used, steps[0]), "theirs": partial(used, steps[1])}
    mine, peers = in_turn(ways, arguments.steps).values()
    own, other = (median(seconds for seconds, _ in side) for side in (mine, peers))
    difference = abs(first[0] - first[1])
    ratios = sorted(b / a for (a, _), (b, _) in zip(mine, peers, strict=True))
    print(
        f"| {name} | {1 / own:.2f} | {1 / other:.2f} | {other / own:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        f" | {min(cpu for _, cpu in mine):.2f} | {min(cpu for _, cpu in peers):.2f} | {difference:.0e} |",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    arguments = read_options(
        __doc__,
        threads=2,
        steps=3,
        only=Option(str, "only adapters, or only all weights", ("lora", "all")),
        precision=Option("fp32", "", ("fp32", "bf16")),
        model=Option("124M", "", tuple(SIZES)),
    )
    torch.set_num_threads(arguments.threads)
    print(
        f"GPT-2 {arguments.model}, {arguments.threads} threads, {arguments.precision}, {EXAMPLES} examples a step"
    )
    print(
        "| | ours, steps/s | transformers and peft, steps/s | ours / theirs | ours, processor s | theirs, processor s"
        " | difference of the first loss |"
    )
    for lora in (True, False):
        if arguments.only not in (None, "lora" if lora else "all"):
            continue
        for equal in (False, True):
            title = f"{'LoRA' if lora else 'all weights'}, {'equal' if equal else 'mixed'} lengths"
            measure(title, lora, equal, arguments)


if __name__ == "__main__":
    main()
