"""The peers of bench/train: other projects' models, or models written in the common way, and their training step.

This module runs under any interpreter with torch and the peer's package, and imports nothing of this repository. Every
peer has the usual optimizations: the fused AdamW, gradients freed instead of zeroed, torch's attention kernels,
autocast.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.train.spec import ModelWork, rows

Wrap = Callable[[nn.Module], nn.Module]


class Attention(nn.Module):
    """Attention of GPT-2 (with biases), or of Llama (with groups of heads and rotated queries and keys)."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, self.heads, self.groups = model["hidden"], model["heads"], model["groups"]
        self.size, is_llama = hidden // self.heads, model["norm"] == "rms"
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.groups) * self.size, bias=not is_llama)
        self.out = nn.Linear(hidden, hidden, bias=not is_llama)

    def forward(self, x: Tensor, *angles: Tensor) -> Tensor:
        each = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = each.split((self.heads, self.groups, self.groups), 1)
        if angles:
            q, k = turned(q, *angles), turned(k, *angles)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)
        return self.out(mixed.transpose(1, 2).flatten(2))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys rotated by their positions."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class FeedForward(nn.Module):
    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, self.gated = model["hidden"], model["norm"] == "rms"
        inner = model["inner"] if self.gated else 4 * hidden
        self.up = nn.Linear(hidden, (1 + self.gated) * inner, bias=not self.gated)
        self.down = nn.Linear(inner, hidden, bias=not self.gated)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def norm_of(model: Mapping[str, Any]) -> nn.Module:
    return (nn.RMSNorm if model["norm"] == "rms" else nn.LayerNorm)(model["hidden"], model["eps"])


class Block(nn.Module):
    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        self.norm_1, self.attention = norm_of(model), Attention(model)
        self.norm_2, self.feed_forward = norm_of(model), FeedForward(model)

    def forward(self, x: Tensor, *angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), *angles)
        return x + self.feed_forward(self.norm_2(x))


class Eager(nn.Module):
    """GPT-2 or Llama as an engineer writes it by hand; forward also computes the loss, so that a compiler sees it all.

    Its parameters have the trainer's names, so that weights can be copied in both directions.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, size, self.is_llama = (
            model["hidden"],
            model["hidden"] // model["heads"],
            model["norm"] == "rms",
        )
        self.tokens = nn.Embedding(rows(model["vocab"]), hidden)
        if not self.is_llama:
            self.positions = nn.Embedding(model["sequence"], hidden)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model["layers"]))
        self.norm = norm_of(model)
        if self.is_llama:
            slow = 1.0 / model["rope_base"] ** (torch.arange(0, size, 2) / size)
            turns = torch.outer(torch.arange(model["sequence"]), slow).repeat(1, 2)
            self.register_buffer("cos", turns.cos(), persistent=False)
            self.register_buffer("sin", turns.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                shrink = (2 * model["layers"]) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=model["init_std"] / shrink)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, batch: Tensor) -> Tensor:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        x, angles = self.tokens(tokens), ()
        if self.is_llama:
            angles = tuple(table[: tokens.shape[1]] for table in (self.cos, self.sin))
            if torch.is_autocast_enabled("cpu"):
                # Use the type of queries and keys, like transformers: otherwise both would become fp32.
                angles = tuple(table.bfloat16() for table in angles)
        else:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, *angles)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class HuggingFace(nn.Module):
    """transformers' GPT2LMHeadModel or LlamaForCausalLM with torch's attention."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        import transformers

        if model["norm"] == "rms":
            config = transformers.LlamaConfig(
                vocab_size=rows(model["vocab"]),
                max_position_embeddings=model["sequence"],
                hidden_size=model["hidden"],
                intermediate_size=model["inner"],
                num_hidden_layers=model["layers"],
                num_attention_heads=model["heads"],
                num_key_value_heads=model["groups"],
                rms_norm_eps=model["eps"],
                rope_parameters={"rope_type": "default", "rope_theta": model["rope_base"]},
                tie_word_embeddings=True,
                attn_implementation="sdpa",
                use_cache=False,
            )
            self.model = transformers.LlamaForCausalLM(config)
            return
        config = transformers.GPT2Config(
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
        self.model = transformers.GPT2LMHeadModel(config)

    def forward(self, batch: Tensor) -> Tensor:
        # The model's own shift by one would copy the logits, so shift the targets here.
        tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, shift_labels=targets).loss
        return loss


class MegatronCore(nn.Module):
    """megatron-core's GPTModel with local layers, which it uses without Transformer Engine.

    With bf16 its weights are in bf16 and the optimizer keeps fp32 copies; the backward pass of its matrices rejects
    autocast.
    """

    def __init__(self, model: Mapping[str, Any]) -> None:
        super().__init__()
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        if not torch.cuda.is_available():
            # megatron-core queries the current CUDA device for every new tensor, even for a model on a CPU.
            torch.cuda.current_device = lambda: torch.device("cpu")
            # There is no dropout, so random states need not be saved.
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
    "regional": Eager,
    "huggingface": HuggingFace,
    "megatron": MegatronCore,
}
NEEDS = {"huggingface": "transformers", "megatron": "megatron.core"}


class Peer:
    """A model, its optimizer, and a training step as common scripts write it."""

    def __init__(self, model: nn.Module, work: ModelWork, wrap: Wrap | None = None) -> None:
        """Make the optimizer; `wrap` returns the module that a step calls instead of the model."""
        self.device = work.device
        self.weights = list(model.parameters())
        # The optimizer keeps fp32 copies of these weights.
        self.own = [p.dtype == torch.bfloat16 and not work.narrow for p in self.weights]
        self.kept = [
            nn.Parameter(p.detach().float()) if own else p
            for p, own in zip(self.weights, self.own, strict=True)
        ]
        groups = [
            {"params": [p for p in self.kept if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.kept if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=work.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.cast = work.precision == "bf16" and not any(self.own) and not work.narrow
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
        for weight, gradient, own in zip(self.weights, self.kept, self.own, strict=True):
            if own and weight.grad is not None:
                gradient.grad, weight.grad = weight.grad.float(), None

    @torch.no_grad()
    def _bring_weights(self) -> None:
        if any(self.own):
            pairs = [(w, k) for w, k, own in zip(self.weights, self.kept, self.own, strict=True) if own]
            torch._foreach_copy_([weight for weight, _ in pairs], [copy for _, copy in pairs])


def build(subject: str, work: ModelWork) -> Peer:
    """Return the peer with this name."""
    torch.manual_seed(work.seed)
    model = MODELS[subject]({**work.model, "precision": work.precision}).to(work.device)
    if work.narrow:
        model = model.bfloat16()
    wraps: dict[str, Wrap] = {"compile": torch.compile, "regional": compile_blocks}
    return Peer(model, work, wraps.get(subject))


def compile_blocks(model: nn.Module) -> nn.Module:
    """Compile each block of a model separately: all have one code, so that it takes seconds instead of minutes."""
    for block in model.get_submodule("blocks").children():
        block.compile()
    return model


def missing(subject: str) -> str:
    """Return why a peer cannot run here, or ""."""
    try:
        importlib.import_module(NEEDS.get(subject, "torch"))
    except ImportError as error:
        return str(error)
    return ""
