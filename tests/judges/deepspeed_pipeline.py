"""Train a GPT with Megatron's names in DeepSpeed's own pipeline of two stages; each rank runs this program.

`python deepspeed_pipeline.py ZERO TOPOLOGY DTYPE WEIGHTS FOLDER`: begin with the tensors in WEIGHTS, take ten steps,
save. TOPOLOGY is `plain` (names of layers without a model parallel rank), `model`, as Megatron-DeepSpeed has it, or
`tensor`: two tensor parallel ranks of each stage. With DTYPE bf16 each rank also saves masters and averages by name.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.judges.deepspeed_states import RATE, STEPS, batch

LAYERS, HIDDEN, HEADS, POSITIONS, VOCAB = 4, 32, 4, 24, 300
ROWS = ("word_embeddings", "query_key_value", "dense_h_to_4h")
COLUMNS = ("dense.weight", "dense_4h_to_h.weight")


class Shares:
    """The tensor parallel ranks of this rank's stage."""

    count, own, group = 1, 0, None


class Copied(torch.autograd.Function):
    """The same on all ranks, whose gradients add up."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return summed(gradient)


class Added(torch.autograd.Function):
    """The sum over all ranks."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


class Joined(torch.autograd.Function):
    """The last dimension of all ranks, one after the other."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        if Shares.count == 1:
            return x.view_as(x)
        parts = [torch.empty_like(x) for _ in range(Shares.count)]
        dist.all_gather(parts, x.contiguous(), group=Shares.group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.chunk(Shares.count, -1)[Shares.own].contiguous()


def summed(x: Tensor) -> Tensor:
    x = x.clone()
    if Shares.count > 1:
        dist.all_reduce(x, group=Shares.group)
    return x


class Embedding(nn.Module):
    """Tokens, each rank with some of them, and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB // Shares.count, HIDDEN)
        self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN)

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - Shares.own * (VOCAB // Shares.count)
        inside = (own >= 0) & (own < VOCAB // Shares.count)
        found = self.word_embeddings(own * inside) * inside.unsqueeze(-1)
        both: Tensor = Added.apply(found) + self.position_embeddings.weight[: tokens.shape[1]]
        return both


class Rows(nn.Linear):
    """A matrix whose rows the ranks divide."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs // Shares.count)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Copied.apply(x))


class Columns(nn.Linear):
    """A matrix whose columns the ranks divide."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs // Shares.count, outputs)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Added.apply(F.linear(x, self.weight)) + self.bias
        return result


class SelfAttention(nn.Module):
    """Causal attention; the rows of each head's queries, keys and values are neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = Rows(HIDDEN, 3 * HIDDEN), Columns(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        each = self.query_key_value(x).unflatten(-1, (HEADS // Shares.count, 3, HIDDEN // HEADS))
        query, key, value = each.transpose(1, 2).unbind(3)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.dense(mixed.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense_h_to_4h, self.dense_4h_to_h = Rows(HIDDEN, 4 * HIDDEN), Columns(4 * HIDDEN, HIDDEN)

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
    result: Tensor = Joined.apply(F.linear(Copied.apply(x), embedding.word_embeddings.weight))
    return result


def loss_of(result: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(result.float().flatten(0, 1), targets.flatten())


def pipeline(topology: str) -> Any:
    """Return this rank's stage."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology

    made = PipeDataParallelTopology(2, 1)
    if topology != "plain":
        Shares.count = 2 if topology == "tensor" else 1
        Shares.own = dist.get_rank() % Shares.count
        made = PipeModelDataParallelTopology(num_pp=2, num_mp=Shares.count, num_dp=1)
    tied = "word_embeddings.weight"
    layers = [
        TiedLayerSpec("embed", Embedding, tied_weight_attr=tied),
        *(LayerSpec(Layer) for _ in range(LAYERS)),
        LayerSpec(nn.LayerNorm, HIDDEN),
        TiedLayerSpec("embed", Embedding, forward_fn=logits, tied_weight_attr=tied),
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        stage = PipelineModule(layers, topology=made, loss_fn=loss_of, partition_method="uniform")
    Shares.group = stage.mpu().get_slice_parallel_group() if Shares.count > 1 else None
    return stage


def megatron_name(name: str) -> str:
    """Return Megatron's name of a parameter of a stage."""
    at, _, rest = name.removeprefix("tied_modules.").partition(".")
    if at == "embed":
        return f"embedding.{rest}"
    return f"layers.{int(at) - 1}.{rest}" if int(at) <= LAYERS else f"final_layernorm.{rest}"


def part(name: str, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    if "word_embeddings" in name:
        # Without the padding of the table.
        whole = whole[:VOCAB]
    if name.endswith(COLUMNS):
        return whole.chunk(Shares.count, 1)[Shares.own]
    return whole.chunk(Shares.count)[Shares.own] if any(word in name for word in ROWS) else whole


def own_state(stage: Any, optimizer: Any) -> dict[str, Tensor]:
    """Return this rank's masters and averages under Megatron's names."""
    names = {parameter: megatron_name(name) for name, parameter in stage.named_parameters()}
    found = {}
    # Without ZeRO, and with it.
    groups = getattr(optimizer, "bf16_groups", None) or optimizer.bit16_groups
    rows = getattr(optimizer, "fp32_groups_flat_partition", None) or optimizer.single_partition_of_fp32_groups
    for group, row in zip(groups, rows, strict=True):
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            held = row if kind == "param" else optimizer.optimizer.state[row][kind]
            begun = 0
            for parameter in group:
                part = held[begun : begun + parameter.numel()]
                found[f"{kind}.{names[parameter]}"] = part.detach().view(parameter.shape).clone()
                begun += parameter.numel()
    return found


def main() -> None:
    zero, topology, dtype, weights, folder = sys.argv[1:]
    logging.disable(logging.WARNING)
    import deepspeed
    import deepspeed.ops

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", init_method=os.environ["INIT_METHOD"])
    stage = pipeline(topology)
    given = torch.load(weights, weights_only=True)
    for name, parameter in stage.named_parameters():
        parameter.data.copy_(part(megatron_name(name), given[megatron_name(name)]))
        # What all ranks have is counted once in the norm of gradients.
        parameter.tensor_model_parallel = name.endswith(COLUMNS) or any(word in name for word in ROWS)
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
        "bf16": {"enabled": dtype == "bf16"},
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-6)
    engine, *_ = deepspeed.initialize(model=stage, optimizer=optimizer, config=config)
    for step in range(STEPS):
        halves = batch(step).chunk(2)
        engine.train_batch(iter([(half[:, :-1].contiguous(), half[:, 1:].contiguous()) for half in halves]))
    arguments = argparse.Namespace(num_attention_heads=HEADS, vocab_size=VOCAB, bias_gelu_fusion=True)
    engine.save_checkpoint(folder, client_state={"args": arguments, "checkpoint_version": 3.0})
    if dtype == "bf16":
        torch.save(own_state(stage, engine.optimizer), Path(folder) / f"own-{dist.get_rank()}.pt")


if __name__ == "__main__":
    main()
