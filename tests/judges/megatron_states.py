"""A program for an environment with megatron-core: trains a GPT ten steps and saves it with its optimizer.

python megatron_states.py FORM WEIGHTS FOLDER

FORM is fp32 (one optimizer), bf16 (with masters), distributed or distributed-bf16. WEIGHTS has tensors by
Megatron-core's names. FOLDER gets the folder of a training, and state.pt with the optimizer's own tensors by name.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

# Megatron-core expects a GPU; these make it work on processors.
torch.cuda.synchronize = lambda *a, **k: None
torch.cuda.current_device = lambda: "cpu"
torch.cuda.current_stream = lambda *a, **k: None
torch.cuda.is_current_stream_capturing = lambda: False
plain_type = torch.Tensor.type


def type_there(self: torch.Tensor, *wanted: Any) -> Any:
    """Return the name of a tensor's type as on a GPU."""
    found = plain_type(self, *wanted)
    return found if wanted or ".cuda." in found else found.replace("torch.", "torch.cuda.")


torch.Tensor.type = type_there
torch.Tensor.cuda = lambda self, *a, **k: self


class OnProcessors(torch.overrides.TorchFunctionMode):
    """Makes tensors on the processor that are asked for on a GPU."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        return function(*arguments, **options)


import megatron.core.tensor_parallel.random as random  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

random.CudaRNGStatesTracker.fork = lambda self, *a, **k: contextlib.nullcontext()
SHAPE = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}
RATE, STEPS, SEQUENCE = 1e-3, 10, 24


def gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def model(bf16: bool) -> tuple[GPTModel, TransformerConfig]:
    config = TransformerConfig(
        **SHAPE,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        activation_func=gelu,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    made = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=384,
        max_sequence_length=SEQUENCE,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
        parallel_output=False,
    )
    return (made.bfloat16() if bf16 else made), config


def batch(step: int) -> torch.Tensor:
    """Return the tokens of a step's global batch, as the other programs here have them."""
    return torch.randint(300, (4, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))


def train(wrapped: Any, optimizer: Any, rank: int, world: int) -> None:
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    for step in range(STEPS):
        rows = batch(step).chunk(world)[rank]
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        logits = wrapped(rows[:, :-1], torch.arange(SEQUENCE).expand(len(rows), SEQUENCE), mask)
        loss = torch.nn.functional.cross_entropy(
            logits[..., :300].float().flatten(0, 1), rows[:, 1:].flatten()
        )
        loss.backward()
        wrapped.finish_grad_sync()
        sound, *_ = optimizer.step()
        assert sound


def save(folder: Path, gpt: GPTModel, wrapped: Any, optimizer: Any, distributed: bool, rank: int) -> None:
    """Save as Megatron-LM's training does in its older format."""
    place = folder / "iter_0000010" / "mp_rank_00"
    place.mkdir(parents=True, exist_ok=True)
    given = {**SHAPE, "vocab_size": 300, "layernorm_epsilon": 1e-5, "bias_gelu_fusion": True}
    document = {
        "args": argparse.Namespace(**given, consumed_train_samples=40),
        "checkpoint_version": 3.0,
        "iteration": STEPS,
        "model": gpt.state_dict_for_save_checkpoint(),
        "optimizer": optimizer.state_dict(),
    }
    if distributed:
        optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
    if rank == 0:
        torch.save(document, place / "model_optim_rng.pt")
        (folder / "latest_checkpointed_iteration.txt").write_text(str(STEPS))


def own_state(gpt: GPTModel, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return the optimizer's tensors under the model's names; of the distributed one, those of one rank."""
    inner = optimizer.chained_optimizers[0]
    found = {}
    for name, parameter in gpt.named_parameters():
        if hasattr(inner, "_get_main_param_and_optimizer_states"):
            tensors = inner._get_main_param_and_optimizer_states(parameter)
        else:
            main = getattr(parameter, "main_param", parameter)
            tensors = {"param": main, **inner.optimizer.state[main]}
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            found[f"{kind}.{name}"] = tensors[kind].detach().float().view(parameter.shape).clone()
    return found


def main() -> None:
    form, weights, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    store = dist.TCPStore("127.0.0.1", int(os.environ.get("MASTER_PORT", "0")), world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(1, 1)
    torch.manual_seed(7)
    bf16, distributed = form.endswith("bf16"), form.startswith("distributed")
    gpt, config = model(bf16)
    given = torch.load(weights, weights_only=True)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            parameter.copy_(given[name])
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config, ddp, gpt)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=RATE,
            weight_decay=0.1,
            adam_beta2=0.95,
            adam_eps=1e-6,
            clip_grad=0.0,
            bf16=bf16,
            use_distributed_optimizer=distributed,
        ),
        [wrapped],
    )
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = RATE, 0.1 * group["wd_mult"]
    train(wrapped, optimizer, rank, world)
    save(folder, gpt, wrapped, optimizer, distributed, rank)
    if world == 1:
        torch.save(own_state(gpt, optimizer), folder / "state.pt")


if __name__ == "__main__":
    with OnProcessors():
        main()
