"""Train a GLM with GLM's own names in DeepSpeed's engine on two ranks; each runs `glm_states.py STAGE FILE FOLDER`.

FILE is a mp_rank_00_model_states.pt with the weights to begin with. The model's arithmetic is ours; the optimizer, its
division among the ranks and the files are DeepSpeed's.
"""

from __future__ import annotations

import logging
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from torch import Tensor, nn

import native
from tests.judges.deepspeed_states import RATE, STEPS
from tests.support.weights import GLM, GLM_NAMES
from trainer.model.glm import GLM as Network

SOURCE = 12
"""Tokens of each sample's source."""


def batch(step: int) -> tuple[Tensor, ...]:
    """Return a step's global batch: sources of 12 tokens, and a blank of 12."""
    length = GLM.sequence
    rows = torch.randint(300, (4, length + 1), generator=torch.Generator().manual_seed(step))
    behind = torch.arange(length) >= SOURCE
    places = torch.stack(
        [torch.arange(length).clamp(max=SOURCE), (torch.arange(length) - SOURCE + 1).clamp(min=0)]
    )
    return (
        rows[:, :-1].contiguous(),
        rows[:, 1:].contiguous(),
        behind.long().expand(4, -1).contiguous(),
        places.expand(4, -1, -1).contiguous(),
        torch.full((4,), SOURCE),
    )


def their_name(ours: str) -> str:
    """Return GLM's name of one of our tensors."""
    outside = {
        "tokens": "word_embeddings",
        "positions": "transformer.position_embeddings",
        "block_positions": "transformer.block_position_embeddings",
        "norm": "transformer.final_layernorm",
    }
    stem, _, leaf = ours.rpartition(".")
    if stem in outside:
        return f"{outside[stem]}.{leaf}"
    _, number, part = stem.split(".", 2)
    return f"transformer.layers.{number}.{GLM_NAMES[part]}.{leaf}"


class Named(nn.Module):
    """A GLM whose parameters have GLM's names."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        network = Network(GLM, native.choose("cpu"), None)
        network.config = GLM
        # Out of the list of modules, so that only the parameters below are known.
        self.network = [network.train()]
        for name, tensor in weights.items():
            *path, leaf = name.split(".")
            at: nn.Module = self
            for part in path:
                if part not in at._modules:
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
            at.register_parameter(leaf, nn.Parameter(tensor.clone()))

    def forward(self, *micro: Tensor) -> Tensor:
        own = self.network[0]
        given = {}
        for name, parameter in own.named_parameters():
            theirs = self.get_parameter(their_name(name))
            given[name] = theirs[: len(parameter)]
        loss: Tensor = torch.func.functional_call(own, given, own.arguments(micro))
        return loss


def main() -> None:
    stage, file, folder = sys.argv[1:]
    logging.disable(logging.WARNING)
    import deepspeed
    import deepspeed.ops

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", init_method=os.environ["INIT_METHOD"])
    model = Named(torch.load(file, weights_only=True)["module"])
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": int(stage)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-6)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    rank = torch.distributed.get_rank()
    for step in range(STEPS):
        loss = engine(*(part[2 * rank : 2 * rank + 2] for part in batch(step)))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, client_state={"iteration": STEPS})


if __name__ == "__main__":
    main()
