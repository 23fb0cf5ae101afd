"""The peers of bench/train: models of others, or written as others write them, and the step that all of them take.

It runs under any interpreter that has torch and the peer's own package; it knows nothing of this repository. Every peer
gets what makes it fast: the fused AdamW, gradients freed instead of zeroed, torch's own attention kernels, autocast.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Wrap = Callable[[nn.Module], nn.Module]

# Rows of a table that matrix kernels like.
VOCAB_MULTIPLE = 64


def rows(vocab: int) -> int:
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, eps: float) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(hidden, eps), Attention(hidden, heads)
        self.norm_2, self.feed_forward = nn.LayerNorm(hidden, eps), FeedForward(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class Eager(nn.Module):
    """GPT-2 as one writes it by hand in an afternoon; the loss is made in forward, so that a compiler sees all of it.

    Its parameters have the trainer's names: weights go from one to the other.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, eps = model["hidden"], model["eps"]
        self.tokens = nn.Embedding(rows(model["vocab"]), hidden)
        self.positions = nn.Embedding(model["sequence"], hidden)
        self.blocks = nn.ModuleList(Block(hidden, model["heads"], eps) for _ in range(model["layers"]))
        self.norm = nn.LayerNorm(hidden, eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                shrink = (2 * model["layers"]) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=model["init_std"] / shrink)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, batch: Tensor) -> Tensor:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class HuggingFace(nn.Module):
    """transformers' GPT2LMHeadModel with torch's attention."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=rows(model["vocab"]),
            n_positions=model["sequence"],
            n_embd=model["hidden"],
            n_layer=model["layers"],
            n_head=model["heads"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="sdpa",
            use_cache=False,
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, batch: Tensor) -> Tensor:
        # Its own shift by one would be done on the logits, which copies them: the targets come shifted.
        tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, shift_labels=targets).loss
        return loss


class MegatronCore(nn.Module):
    """megatron-core's GPTModel of local layers, which is what it has where there is no Transformer Engine.

    Its bf16 is weights in bf16, with the optimizer's own in fp32; its matrices' backward refuses autocast.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        if not torch.cuda.is_available():
            # It asks for the current CUDA device wherever it makes a tensor, whatever the model's own device.
            torch.cuda.current_device = lambda: torch.device("cpu")
            # Nothing is dropped, so that no state of a generator has to be kept for it.
            tensor_parallel.get_cuda_rng_tracker().fork = lambda name="": contextlib.nullcontext()
        if not torch.distributed.is_initialized():
            kind = "nccl" if torch.cuda.is_available() else "gloo"
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group(kind, store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        if torch.cuda.is_available():
            tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=model["layers"],
            hidden_size=model["hidden"],
            num_attention_heads=model["heads"],
            hidden_dropout=0.0,
            attention_dropout=0.0,
            layernorm_epsilon=model["eps"],
            use_cpu_initialization=not torch.cuda.is_available(),
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=True,
            masked_softmax_fusion=torch.cuda.is_available(),
            init_method_std=model["init_std"],
            bf16=model["precision"] == "bf16",
            params_dtype=torch.bfloat16 if model["precision"] == "bf16" else torch.float32,
        )
        sizes = (rows(model["vocab"]), model["sequence"])
        made = GPTModel(config, get_gpt_layer_local_spec(), *sizes, share_embeddings_and_output_weights=True)
        self.model = made.bfloat16() if config.bf16 else made
        size = model["sequence"]
        self.register_buffer("mask", torch.ones(1, 1, size, size).tril() < 0.5, persistent=False)
        self.register_buffer("at", torch.arange(size).unsqueeze(0), persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        losses: Tensor = self.model(tokens, self.at.expand_as(tokens), self.mask, labels=targets)
        return losses.mean()


MODELS: dict[str, Callable[[Mapping[str, Any]], nn.Module]] = {
    "eager": Eager,
    "compile": Eager,
    "huggingface": HuggingFace,
    "megatron": MegatronCore,
}
NEEDS = {"huggingface": "transformers", "megatron": "megatron.core"}


class Peer:
    """A model, its optimizer, and a step as the scripts of the world have it."""

    def __init__(self, model: nn.Module, work: Mapping[str, Any], wrap: Wrap | None = None) -> None:
        """`wrap`: what a step calls instead of the model itself."""
        self.device = work["device"]
        self.weights = list(model.parameters())
        # Those of which the optimizer has copies.
        self.own = [p.dtype == torch.bfloat16 for p in self.weights]
        self.kept = [
            nn.Parameter(p.detach().float()) if own else p
            for p, own in zip(self.weights, self.own, strict=True)
        ]
        groups = [
            {"params": [p for p in self.kept if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.kept if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=work["lr"], betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.cast = work["precision"] == "bf16" and not any(self.own)
        self.model = model
        self.run = wrap(model) if wrap else model

    def step(self, batch: Tensor) -> float:
        batch = batch.to(self.device, non_blocking=True)
        with torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.cast):
            loss = self.run(batch)
        loss.backward()
        self._bring_gradients()
        torch.nn.utils.clip_grad_norm_(self.kept, 1.0)
        self.optimizer.step()
        self._bring_weights()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    def _bring_gradients(self) -> None:
        for weight, kept, own in zip(self.weights, self.kept, self.own, strict=True):
            if own and weight.grad is not None:
                kept.grad, weight.grad = weight.grad.float(), None

    @torch.no_grad()
    def _bring_weights(self) -> None:
        if any(self.own):
            pairs = [(w, k) for w, k, own in zip(self.weights, self.kept, self.own, strict=True) if own]
            torch._foreach_copy_([weight for weight, _ in pairs], [kept for _, kept in pairs])


def build(subject: str, work: Mapping[str, Any]) -> Peer:
    """A peer by its name."""
    torch.manual_seed(work["seed"])
    model = MODELS[subject]({**work["model"], "precision": work["precision"]}).to(work["device"])
    return Peer(model, work, torch.compile if subject == "compile" else None)


def missing(subject: str) -> str:
    """Why a peer is not here, or nothing."""
    try:
        importlib.import_module(NEEDS.get(subject, "torch"))
    except ImportError as error:
        return str(error)
    return ""
