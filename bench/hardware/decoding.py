"""The step `decoding`: tokens and prompts per second of a model, and of transformers' generate.

    python -m bench.hardware.decoding DEVICE MODEL ours|transformers

Random weights in bf16. `GB moved` of a token: the weights, and the keys and values of all texts at half their length.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import torch

import native
from bench.hardware.step import emit, part
from bench.serve.decode import prompts, run, submitted
from bench.serve.peer import exactly
from bench.train.activities import Recorder, seconds
from native.decode.paged import PAGE
from trainer.config.model import ModelConfig
from trainer.config.model_sizes import SIZES, sized
from trainer.device import Device
from trainer.generate.device_network import DeviceNetwork
from trainer.generate.network import Network, device_network, of_model, reader_of
from trainer.model.gpt import GPT

TABLE, PROMPTS = "decoding, bf16", "prompts, bf16"
TEXTS = (1, 8, 64)
SMALL: dict[str, object] = {"layers": 2, "hidden": 64, "heads": 2, "sequence": 256, "vocab": 384}
# Tokens of a prompt and new tokens.
LENGTHS = {"cuda": (512, 128), "npu": (512, 128), "cpu": (32, 16)}
RECORDED = 10


def gigabytes(config: ModelConfig, texts: int, length: int) -> float:
    """Return what a step of one token per text must read."""
    keys = 2 * config.layers * config.groups * (config.hidden // config.heads) * length * texts
    return 2 * (config.parameters() + keys) / 1e9


def network_of(config: ModelConfig, device: str, pages: int) -> Network:
    model = GPT(config, native.choose("cpu", "reference"), 1).eval()
    if device == "cpu":
        return of_model(model, pages, "fp32")
    placed = Device(device)
    return DeviceNetwork(device_network(config, reader_of(model), "bf16", pages, placed), placed)


def ours(config: ModelConfig, device: str) -> None:
    length, new = LENGTHS[device]
    pages = max(TEXTS) * (-(-(length + new) // PAGE) + 1)
    network = network_of(config, device, pages)
    for texts in TEXTS:
        about = {"by": "ours", "texts": texts}
        with part(TABLE, **about), torch.inference_mode():
            ids = prompts(texts, length, config.vocab)
            for _ in range(2):
                began, clocks = run(network, [(each, new) for each in ids], pages=pages)
            first, last = (max(clock.times[at] for clock in clocks) for at in (0, -1))
            seconds = (last - first) / (new - 1)
            recorded = record(network, pages, ids, new)
            busy, count = recorded.busy / RECORDED or None, recorded.count / RECORDED or None
            emit(
                TABLE,
                **about,
                **{"tokens/s": texts / seconds, "ms a token": seconds * 1e3},
                **{"us a layer": seconds / config.layers * 1e6, "busy share": busy and busy / seconds},
                **{"activities": count, "starts": recorded.starts / RECORDED or None},
                **{"waits": recorded.waits / RECORDED or None},
                **{"GB moved": gigabytes(config, texts, length + new // 2)},
            )
            emit(
                PROMPTS,
                **about,
                tokens=length,
                s=first - began,
                **{"tokens/s": texts * length / (first - began)},
            )


def record(network: Network, pages: int, ids: list[list[int]], new: int) -> Any:
    """Return what the device does in some steps in the middle of texts."""
    batcher, _ = submitted(network, [(each, new) for each in ids], time.perf_counter, pages)
    # The prompts take several steps; a graph is captured in the second one of a token per text.
    while batcher.waiting or any(len(s.ids) - s.computed != 1 for r in batcher.running for s in r.sequences):
        batcher.step()
    batcher.step()
    batcher.step()
    recorder = Recorder(device_of(network))
    for _ in range(min(RECORDED, new - 4)):
        batcher.step()
    return recorder.stop()


def device_of(network: Network) -> str:
    return network.device.name if isinstance(network, DeviceNetwork) else "cpu"


def transformers(config: ModelConfig, device: str) -> None:
    """Measure generate with its growing cache, then with a static one whose step is compiled."""
    from transformers import GPT2Config, GPT2LMHeadModel

    length, new = LENGTHS[device]
    made = GPT2Config(
        vocab_size=-(-config.vocab // 64) * 64,
        n_positions=config.sequence,
        n_embd=config.hidden,
        n_layer=config.layers,
        n_head=config.heads,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(made).to(device, torch.bfloat16).eval()
    for name, more in (("transformers", {}), ("transformers, static", {"cache_implementation": "static"})):
        for texts in TEXTS:
            about = {"by": name, "texts": texts}
            with part(TABLE, **about), torch.inference_mode():
                ids = torch.tensor(prompts(texts, length, config.vocab), device=device)
                few, many = (
                    seconds(device, partial(exactly, model, ids, count, **more), 1, warm=1)
                    for count in (1, new + 1)
                )
                each = (many - few) / new
                emit(
                    TABLE,
                    **about,
                    **{"tokens/s": texts / each, "ms a token": each * 1e3},
                    **{"us a layer": each / config.layers * 1e6},
                    **{"GB moved": gigabytes(config, texts, length + new // 2)},
                )
                emit(PROMPTS, **about, tokens=length, s=few, **{"tokens/s": texts * length / few})


def main() -> None:
    device, name, by = sys.argv[1:]
    config = sized(name, **SMALL) if device == "cpu" else SIZES[name]
    {"ours": ours, "transformers": transformers}[by](config, device)


if __name__ == "__main__":
    main()
