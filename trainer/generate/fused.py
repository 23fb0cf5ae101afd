"""A model's blocks as a program for the compiled library: one call computes a step, or the part between exchanges."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from native.decode.packed import Packed, quantized_bytes
from native.decode.paged import Spans
from native.decode.program import Activation, Buffer, Inputs, Instruction, Op, Program
from trainer.config.model import ModelConfig
from trainer.config.norm import NORMS
from trainer.engine.passes import Model
from trainer.model.norm import Norm

ACTIVATIONS = {"gelu_tanh": Activation.GELU_TANH, "gelu": Activation.GELU}


# The settings of which the compiled decoder has the default alone.
PLAIN = (
    *(
        "kv_rank",
        "experts",
        "rotated",
        "windowed",
        "attention_cap",
        "sinks",
        "qk_norm_whole",
        "input_norms",
        "gate",
    ),
    *("scaled_embeddings", "logit_cap"),
)


def is_compiled(config: ModelConfig) -> bool:
    """Return whether the compiled library has a decoder for such a model."""
    plain = ModelConfig()
    usual = all(getattr(config, name) == getattr(plain, name) for name in PLAIN)
    return usual and NORMS[config.norm].decoded


def _even(width: int) -> int:
    """Return the row width of a buffer for a product's result: `width` rounded up to whole panels of 16."""
    return -(-width // 16) * 16


class Fused:
    """The program of a model, or of one pipeline stage of it."""

    def __init__(self, model: Model, begins: bool, closes: bool) -> None:
        """`begins` and `closes`: whether this rank has the layers before and after the blocks.

        The results of several tensor parallel ranks are summed in each block, and after the embedding, by the caller.
        """
        config, self.summed = model.config, model.parallel.size > 1
        self.config, own = config, cast(Any, model)
        blocks: list[Any] = list(model.blocks.values())
        self._code: list[Instruction] = []
        self._narrow: dict[int, Buffer] = {}
        # Where to sum the ranks' results: after this many instructions, in this buffer.
        self.sums: list[tuple[int, Buffer]] = []
        attention, forward = blocks[0].attention.own, blocks[0].feed_forward
        qkv, out = attention.qkv.packed, attention.out.packed
        up, down = forward.up.packed, forward.down.packed
        reads, width = qkv.reads, _even(config.hidden)
        self.x = Buffer(width)
        # The results of norms and activations are inputs of products: they are in bf16 if the product reads bf16.
        dtype = torch.bfloat16 if reads == torch.bfloat16 else torch.float32
        self._bytes = reads == torch.int8
        self._normal, self._feed_normal = Buffer(width, dtype), Buffer(width, dtype)
        self._qkv = Buffer(_even(qkv.outputs))
        self._mixed = Buffer(out.inputs)
        self._mixed_rounded = Buffer(out.inputs, dtype) if dtype == torch.bfloat16 else None
        self._part = Buffer(width)
        self._up, self._inner = Buffer(_even(up.outputs)), Buffer(_even(down.inputs), dtype)
        if begins and not self.summed:
            tables = (getattr(model, name, None) for name in ("positions", "block_positions"))
            at, inner = (None if table is None else table.weight.detach() for table in tables)
            self._add(Op.EMBED, out=self.x, product=own.tokens.packed, weight=at, bias=inner)
        for block in blocks:
            self._block(block)
        self.logits: Buffer | None = None
        if closes:
            head = own.head.packed
            self._norm(model.norm, self.x, self._normal, of_wanted=True)
            self.logits = Buffer(_even(head.outputs))
            self._product(head, self._normal, out=self.logits, of_wanted=True)
        self._program = Program(self._code)

    def run(self, inputs: Inputs, begin: int = 0, end: int | None = None) -> None:
        """Run the instructions [begin, end)."""
        self._program.run(inputs, begin, end)

    def reserve(self, tokens: int) -> None:
        """Make the buffers large enough for this many tokens."""
        self._program.reserve(tokens)

    def _add(self, op: Op, **parts: object) -> None:
        self._code.append(Instruction(op, **parts))  # type: ignore[arg-type]

    def _block(self, block: Any) -> None:
        config = self.config
        up, down = block.feed_forward.up.packed, block.feed_forward.down.packed
        self._norm(block.norm_1, self.x, self._normal)
        if config.parallel_residual:
            # The feed-forward part reads the residual stream before attention changes it.
            self._norm(block.norm_2, self.x, self._feed_normal)
        self._attention(block.attention)
        mixed = self._mixed_rounded or self._mixed
        self._residual(block.post_norm_1, mixed, block.attention.own.out.packed)
        normal = self._normal
        if config.parallel_residual:
            normal = self._feed_normal
        else:
            self._norm(block.norm_2, self.x, normal)
        if config.swiglu:
            self._product(up, normal, out=self._up)
            self._add(Op.GATE, x=self._up, width=down.inputs, **_into(self._inner))
        else:
            activation = ACTIVATIONS[config.activation]
            rounded = self._inner if self._inner.dtype == torch.bfloat16 else None
            out = self._up if rounded else self._inner
            self._product(up, normal, out=out, rounded=rounded, activation=activation)
        self._residual(block.post_norm_2, self._inner, down)

    def _attention(self, attention: Any) -> None:
        own, pages = attention.own, attention.cache.layers[attention.layer]
        self._product(own.qkv.packed, self._normal, out=self._qkv)
        for norm, heads, offset in (
            (own.q_norm, own.heads, 0),
            (own.k_norm, own.groups, own.heads * own.size),
        ):
            if norm is not None:
                self._norm(norm, self._qkv, self._qkv, heads=heads, offset=offset)
        rotated = self.config.rotary_size if self.config.rotary else 0
        same = {"pages": pages, "width": own.size, "heads": own.heads, "groups": own.groups}
        self._add(Op.PLACE, x=self._qkv, **same, rotated=rotated, interleaved=own.interleaved)
        into = {"out": self._mixed, "rounded": self._mixed_rounded}
        self._add(Op.ATTEND, x=self._qkv, scale=own.factor * own.size**-0.5, **same, **into)

    def _product(self, product: Packed, x: Buffer, of_wanted: bool = False, **parts: object) -> None:
        """Add a product of `x`; `x` is first quantized if the product reads int8."""
        if self._bytes:
            narrow = self._narrow.get(product.inputs) or Buffer(quantized_bytes(product.inputs), torch.int8)
            self._narrow[product.inputs] = narrow
            self._add(Op.QUANTIZE, x=x, rounded=narrow, width=product.inputs, of_wanted=of_wanted)
            x = narrow
        self._add(Op.PRODUCT, x=x, product=product, of_wanted=of_wanted, **parts)

    def _residual(self, post: Norm | None, x: Buffer, product: Packed) -> None:
        """Add the instructions that add the product of `x`, or its norm, to the residual stream."""
        if not self.summed and post is None:
            self._product(product, x, out=self._part, sum=self.x)
            return
        self._product(product, x, out=self._part)
        if self.summed:
            self.sums.append((len(self._code), self._part))
        if post is not None:
            self._norm(post, self._part, self._part)
        self._add(Op.ADD, x=self._part, out=self.x, width=self.config.hidden)

    def _norm(
        self,
        norm: Norm,
        x: Buffer,
        out: Buffer,
        *,
        heads: int = 1,
        offset: int = 0,
        of_wanted: bool = False,
    ) -> None:
        weight, bias = norm.weight, norm.bias
        self._add(
            Op.NORM,
            x=x,
            weight=weight.detach(),
            bias=None if bias is None else bias.detach(),
            width=len(weight),
            heads=heads,
            centered=bias is not None,
            eps=norm.eps,
            offset=offset,
            of_wanted=of_wanted,
            **_into(out),
        )


def _into(buffer: Buffer) -> dict[str, Buffer]:
    """Return the output argument for a buffer: `rounded` for bf16, else `out`."""
    return {"rounded" if buffer.dtype == torch.bfloat16 else "out": buffer}


def inputs_of(
    ids: Tensor, positions: Tensor, spans: Spans, wanted: Tensor, turns: tuple[Tensor, Tensor] | None
) -> Inputs:
    """Return the inputs of a step; `positions` has shape (tokens), or (2, tokens) for a GLM."""
    first, inner = (
        (positions[0].contiguous(), positions[1].contiguous()) if positions.dim() == 2 else (positions, None)
    )
    angles = (
        None if turns is None else tuple(part.reshape(len(ids), -1).float().contiguous() for part in turns)
    )
    return Inputs(len(ids), spans, wanted, ids, first, inner, angles)  # type: ignore[arg-type]
