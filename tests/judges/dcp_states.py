"""Train a GPT-2 of plain torch with torch's AdamW and save it by torch.distributed.checkpoint, on each rank.

`python dcp_states.py HEADS WEIGHTS FOLDER`: ten steps. With several ranks the weights are divided by `fully_shard`.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.judges.deepspeed_states import RATE, STEPS, batch


class Conv1D(nn.Module):
    """A matrix with a bias that is stored with its inputs first, as GPT-2's are."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.zeros(inputs, outputs)),
            nn.Parameter(torch.zeros(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Layer(nn.Module):
    """A block under the names of transformers."""

    def __init__(self, hidden: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.c_attn, self.attn.c_proj = Conv1D(hidden, 3 * hidden), Conv1D(hidden, hidden)
        self.mlp.c_fc, self.mlp.c_proj = Conv1D(hidden, inner), Conv1D(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attn.c_attn(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh"))


class Model(nn.Module):
    """GPT-2; its output matrix is the table of tokens."""

    def __init__(self, weights: dict[str, Tensor], heads: int) -> None:
        super().__init__()
        tokens, positions = (weights[f"transformer.{name}.weight"] for name in ("wte", "wpe"))
        layers = 1 + max(int(name.split(".")[2]) for name in weights if ".h." in name)
        inner = len(weights["transformer.h.0.mlp.c_fc.bias"])
        self.transformer = nn.Module()
        self.transformer.wte, self.transformer.wpe = (
            nn.Embedding(*tokens.shape),
            nn.Embedding(*positions.shape),
        )
        self.transformer.h = nn.ModuleList(Layer(tokens.shape[1], inner, heads) for _ in range(layers))
        self.transformer.ln_f = nn.LayerNorm(tokens.shape[1])
        self.load_state_dict(weights)

    def forward(self, tokens: Tensor) -> Tensor:
        own = self.transformer
        x = own.wte(tokens) + own.wpe(torch.arange(tokens.shape[1]))
        for layer in own.h:
            x = layer(x)
        return F.linear(own.ln_f(x), own.wte.weight)


def main() -> None:
    heads, weights, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=os.environ["INIT_METHOD"])
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Model(torch.load(weights, weights_only=True), int(heads))
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-6)
    for step in range(STEPS):
        own = batch(step).chunk(ranks)[rank]
        logits = model(own[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
