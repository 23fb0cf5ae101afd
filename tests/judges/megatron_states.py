"""A program for an environment with megatron-core: trains a GPT ten steps and saves it with its optimizer.

python megatron_states.py FORM SAVED WEIGHTS FOLDER [TENSOR PIPELINE]

FORM is fp32 (one optimizer), bf16 (with masters), distributed or distributed-bf16. SAVED is ranks (a file of each
rank), or the kind of a distributed checkpoint: plain, fully_reshardable or dp_reshardable. WEIGHTS has tensors by
Megatron-core's names. FOLDER gets the folder of a training, and state-RANK.pt with the optimizer's own tensors by name.
Several tensor parallel ranks or stages begin with weights of their own and learn from random gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import zlib
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
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
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
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
    )
    made = GPTModel(
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
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


def random_like(parameter: torch.Tensor, name: str, ranks: tuple[int, int], step: int) -> torch.Tensor:
    """Return random numbers in the shape of a parameter, the same on ranks that share it."""
    tied = name.endswith(("word_embeddings.weight", "output_layer.weight"))
    divided = getattr(parameter, "tensor_model_parallel", False)
    seed = (step, ranks[0] if divided else 0, *(() if tied else (name, ranks[1])))
    return torch.randn(
        parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    )


def learn_at_random(wrapped: Any, optimizer: Any, ranks: tuple[int, int]) -> None:
    """Take the steps with gradients that are random, and the same for what ranks share."""
    for step in range(STEPS):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        for name, parameter in wrapped.named_parameters():
            with torch.no_grad():
                parameter.main_grad.copy_(random_like(parameter, name.removeprefix("module."), ranks, step))
        sound, *_ = optimizer.step()
        assert sound


def save(
    folder: Path, gpt: GPTModel, wrapped: Any, optimizer: Any, distributed: bool, saved: str, rank: int
) -> None:
    """Save as Megatron-LM's training does, in its older format or as a distributed checkpoint."""
    place = folder / "iter_0000010" / ("mp_rank_00" if saved == "ranks" else "")
    place.mkdir(parents=True, exist_ok=True)
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    given = {**SHAPE, "vocab_size": 300, "layernorm_epsilon": 1e-5, "bias_gelu_fusion": True}
    given |= {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": stages}
    document = {
        "args": argparse.Namespace(**given, consumed_train_samples=40),
        "checkpoint_version": 3.0,
        "iteration": STEPS,
    }
    (folder / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    if saved != "ranks":
        metadata = {"chained_optim_avoid_prefix": True, "distrib_optim_fully_reshardable_mem_efficient": True}
        if saved != "plain":
            metadata["distrib_optim_sharding_type"] = saved
        document["model"] = gpt.sharded_state_dict(metadata=metadata)
        document["optimizer"] = optimizer.sharded_state_dict(document["model"], metadata=metadata)
        dist.barrier()
        dist_checkpointing.save(document, str(place))
        return
    document["model"] = gpt.state_dict_for_save_checkpoint()
    document["optimizer"] = optimizer.state_dict()
    if distributed:
        optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
    if rank == 0:
        torch.save(document, place / "model_optim_rng.pt")


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
    form, saved, weights, folder = *sys.argv[1:4], Path(sys.argv[4])
    tensor, stages = map(int, sys.argv[5:] or (1, 1))
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    store = dist.FileStore(os.environ["MEETING"], world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(tensor, stages)
    torch.manual_seed(7 + rank if tensor * stages > 1 else 7)
    bf16, distributed = form.endswith("bf16"), form.startswith("distributed")
    gpt, config = model(bf16)
    ranks = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    given = torch.load(weights, weights_only=True)
    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            if tensor * stages == 1:
                parameter.copy_(given[name])
            else:
                # The same on all ranks for what they share, and no two vectors alike.
                parameter.copy_(0.1 * random_like(parameter, name, ranks, STEPS))
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
    if tensor * stages > 1:
        learn_at_random(wrapped, optimizer, ranks)
    else:
        train(wrapped, optimizer, rank, world)
    save(folder, gpt, wrapped, optimizer, distributed, saved, rank)
    if world == tensor * stages:
        torch.save(own_state(gpt, optimizer), folder / f"state-{rank}.pt")


if __name__ == "__main__":
    with OnProcessors():
        main()
