"""Train a GPT with Megatron's names in DeepSpeed's own pipeline of two stages; each rank runs this program.

`python deepspeed_pipeline.py ZERO TOPOLOGY WEIGHTS FOLDER`: begin with the tensors in WEIGHTS, take ten steps, save.
TOPOLOGY is `plain` (names of layers without a model parallel rank) or `model`, as Megatron-DeepSpeed has it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.judges.deepspeed_states import RATE, STEPS, batch

LAYERS, HIDDEN, HEADS, POSITIONS, VOCAB = 4, 32, 4, 24, 300


class Embedding(nn.Module):
    """Tokens and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, HIDDEN)
        self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        both: Tensor = self.word_embeddings(tokens) + self.position_embeddings.weight[: tokens.shape[1]]
        return both


class SelfAttention(nn.Module):
    """Causal attention; the rows of each head's queries, keys and values are neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        each = self.query_key_value(x).unflatten(-1, (HEADS, 3, HIDDEN // HEADS)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*each.unbind(3), is_causal=True)
        result: Tensor = self.dense(mixed.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x), approximate="tanh"))
        return result


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attention = nn.LayerNorm(HIDDEN), SelfAttention()
        self.post_attention_layernorm, self.mlp = nn.LayerNorm(HIDDEN), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


def logits(embedding: Embedding, x: Tensor) -> Tensor:
    return F.linear(x, embedding.word_embeddings.weight)


def loss_of(result: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(result.flatten(0, 1), targets.flatten())


def pipeline(topology: str) -> Any:
    """Return this rank's stage."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology

    made = PipeDataParallelTopology(2, 1)
    if topology == "model":
        made = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=1)
    tied = "word_embeddings.weight"
    layers = [
        TiedLayerSpec("embed", Embedding, tied_weight_attr=tied),
        *(LayerSpec(Layer) for _ in range(LAYERS)),
        LayerSpec(nn.LayerNorm, HIDDEN),
        TiedLayerSpec("embed", Embedding, forward_fn=logits, tied_weight_attr=tied),
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        return PipelineModule(layers, topology=made, loss_fn=loss_of, partition_method="uniform")


def load(stage: Any, weights: dict[str, Tensor]) -> None:
    """Give a stage the weights, by Megatron's names."""
    for name, parameter in stage.named_parameters():
        at, _, rest = name.removeprefix("tied_modules.").partition(".")
        if at == "embed":
            key = f"embedding.{rest}"
        else:
            key = f"layers.{int(at) - 1}.{rest}" if int(at) <= LAYERS else f"final_layernorm.{rest}"
        # Without the padding of the table.
        parameter.data.copy_(weights[key][: len(parameter)])


def main() -> None:
    zero, topology, weights, folder = sys.argv[1:]
    logging.disable(logging.WARNING)
    import deepspeed
    import deepspeed.ops

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    stage = pipeline(topology)
    load(stage, torch.load(weights, weights_only=True))
    groups = [
        {"params": [p for p in stage.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in stage.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": int(zero)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-6)
    engine, *_ = deepspeed.initialize(model=stage, optimizer=optimizer, config=config)
    for step in range(STEPS):
        halves = batch(step).chunk(2)
        engine.train_batch(iter([(half[:, :-1].contiguous(), half[:, 1:].contiguous()) for half in halves]))
    arguments = argparse.Namespace(num_attention_heads=HEADS, vocab_size=VOCAB, bias_gelu_fusion=True)
    engine.save_checkpoint(folder, client_state={"args": arguments, "checkpoint_version": 3.0})


if __name__ == "__main__":
    main()
