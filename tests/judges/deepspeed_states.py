"""Train a model of transformers with DeepSpeed on two ranks; each runs `python deepspeed_states.py TASK STAGE ...`.

`save STAGE MODEL FOLDER [FORM]`: ten steps, then a checkpoint. FORM is fp32, or bf16 or fp16 (an fp32 copy of each
parameter), or bf16-rows or fp16-rows (a row of each group): of these, FOLDER/own.pt gets masters and averages by name.
`load STAGE MODEL FOLDER OUT`: load the universal checkpoint in FOLDER, take ten more steps, write the weights to OUT.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
import torch

STEPS, RATE = 10, 1e-3


def batch(step: int) -> torch.Tensor:
    """Return the tokens of a step's global batch."""
    return torch.randint(300, (4, 25), generator=torch.Generator().manual_seed(step))


def own_state(network: torch.nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of an optimizer for 16 bits under the names of the model."""
    names = {parameter: name for name, parameter in network.named_parameters()}
    found = {}
    rows = getattr(optimizer, "fp32_groups_flat", None)
    for at, group in enumerate(optimizer.fp16_groups):
        masters = [rows[at]] if rows else optimizer.fp32_groups[at]
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            parts = [
                master if kind == "param" else optimizer.optimizer.state[master][kind] for master in masters
            ]
            if rows:
                parts = list(parts[0].split([parameter.numel() for parameter in group]))
            for parameter, part in zip(group, parts, strict=True):
                found[f"{kind}.{names[parameter]}"] = part.detach().view(parameter.shape).clone()
    return found


def main() -> None:
    task, stage, model, folder, *out = sys.argv[1:]
    form = out[0] if task == "save" and out else "fp32"
    logging.disable(logging.WARNING)
    import deepspeed
    import deepspeed.ops
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", init_method=os.environ["INIT_METHOD"])
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    matrices = [p for p in network.parameters() if p.dim() > 1]
    vectors = [p for p in network.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if stage == "3":
        # A universal checkpoint has one decay for all groups of ZeRO 3.
        groups = [{"params": [*network.parameters()], "weight_decay": 0.0}]
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 100},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": task == "load"},
        "bf16": {"enabled": form.startswith("bf16")},
        "fp16": {"enabled": form.startswith("fp16"), "loss_scale": 128.0},
    }
    # Processors compute in fp16, slowly: DeepSpeed refuses it on those without instructions for it.
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    if form.endswith("rows"):
        # What it asks before it puts groups into rows.
        deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-6)
    engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=config)
    first = 0
    if task == "load":
        engine.load_checkpoint(folder)
        first = STEPS
    rank = torch.distributed.get_rank()
    for step in range(first, first + STEPS):
        tokens = batch(step)[2 * rank : 2 * rank + 2]
        for group in engine.optimizer.param_groups:
            group["lr"] = RATE
            # A load sets them to what the checkpoint records; ZeRO 3 gives all groups the decay of the first.
            group["eps"] = 1e-6
            group["weight_decay"] = 0.0 if stage == "3" else group["weight_decay"]
        logits = engine(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
    if task == "save":
        engine.save_checkpoint(folder)
        if rank == 0 and form != "fp32":
            torch.save(own_state(network, engine.optimizer), os.path.join(folder, "own.pt"))
        return
    if stage == "3":
        with deepspeed.zero.GatheredParameters([*network.parameters()]):
            state = {name: p.detach().clone() for name, p in network.named_parameters()}
    else:
        state = {name: p.detach().clone() for name, p in network.named_parameters()}
    if rank == 0:
        torch.save(state, out[0])


if __name__ == "__main__":
    main()
