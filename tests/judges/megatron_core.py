"""A program for an environment with megatron-core: saves a random GPT, or loads one, and writes its logits.

python megatron_core.py save FOLDER LOGITS     FOLDER/dist (torch_dist) and FOLDER/iter_0000005 (a file of a rank)
python megatron_core.py load FOLDER LOGITS     the logits of what our export holds
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

import torch

# Megatron-core expects a GPU; these three make it work on processors.
torch.cuda.synchronize = lambda *a, **k: None
torch.cuda.current_device = lambda: "cpu"

import megatron.core.tensor_parallel.random as random  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

random.CudaRNGStatesTracker.fork = lambda self, *a, **k: contextlib.nullcontext()
SHAPE = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4}


def gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def model() -> GPTModel:
    config = TransformerConfig(
        **SHAPE,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        activation_func=gelu,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=384,
        max_sequence_length=24,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
        parallel_output=False,
    ).eval()


@torch.no_grad()
def logits(gpt: GPTModel) -> torch.Tensor:
    tokens = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(3))
    mask = torch.triu(torch.ones(1, 1, 20, 20, dtype=torch.bool), 1)
    return gpt(tokens, torch.arange(20).expand(2, 20), mask)[..., :300]


def main() -> None:
    command, folder, target = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    torch.manual_seed(7)
    gpt = model()
    if command == "save":
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        given = {**SHAPE, "vocab_size": 300, "layernorm_epsilon": 1e-5, "bias_gelu_fusion": True}
        arguments = argparse.Namespace(**given)
        (folder / "dist").mkdir(parents=True)
        state = {**gpt.sharded_state_dict(), "iteration": 5, "args": arguments}
        dist_checkpointing.save(state, str(folder / "dist"))
        rank = folder / "legacy" / "iter_0000005" / "mp_rank_00"
        rank.mkdir(parents=True)
        document = {"args": arguments, "checkpoint_version": 3.0, "model": gpt.state_dict(), "iteration": 5}
        torch.save(document, rank / "model_optim_rng.pt")
        (folder / "legacy" / "latest_checkpointed_iteration.txt").write_text("5")
    else:
        loaded = dist_checkpointing.load(gpt.sharded_state_dict(), str(folder / "release"))
        # What is common to all ranks comes along.
        for name in ("args", "checkpoint_version", "iteration"):
            loaded.pop(name)
        gpt.load_state_dict(loaded)
    torch.save(logits(gpt), target)


if __name__ == "__main__":
    main()
