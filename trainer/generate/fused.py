"""A model's blocks as a program for the compiled library: one call computes a step, or the part between exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from native.decode.packed import Packed, quantized_bytes
from native.decode.paged import Spans
from native.decode.program import Activation, Buffer, Inputs, Instruction, Op, Program
from trainer.config.model import ModelConfig
from trainer.model.norm import Norm

Pages = tuple[Tensor, Tensor]
ACTIVATIONS = {"gelu_tanh": Activation.GELU_TANH, "gelu": Activation.GELU}


def _even(width: int) -> int:
    """Return the row width of a buffer for a product's result: `width` rounded up to whole panels of 16."""
    return -(-width // 16) * 16


@dataclass(frozen=True)
class BlockWeights:
    """The weights of a block, or this tensor parallel rank's part of them."""

    norms: tuple[Norm, Norm]
    post_norms: tuple[Norm | None, Norm | None]
    head_norms: tuple[Norm, Norm] | None
    qkv: Packed
    out: Packed
    up: Packed
    down: Packed
    pages: Pages
    heads: int
    groups: int


@dataclass(frozen=True)
class Ends:
    """The layers before and after the blocks, if this rank has them."""

    table: Packed | None = None
    positions: Tensor | None = None
    inner_positions: Tensor | None = None
    norm: Norm | None = None
    head: Packed | None = None


class Fused:
    """The program of a model, or of one pipeline stage of it."""

    def __init__(self, config: ModelConfig, blocks: Sequence[BlockWeights], ends: Ends, summed: bool) -> None:
        """`summed`: whether the results of several tensor parallel ranks are summed in each block."""
        self.config, self.summed = config, summed
        self._code: list[Instruction] = []
        self._narrow: dict[int, Buffer] = {}
        # Where to sum the ranks' results: after this many instructions, in this buffer.
        self.sums: list[tuple[int, Buffer]] = []
        first = blocks[0]
        reads = first.qkv.reads
        width = _even(config.hidden)
        self.x = Buffer(width)
        # The results of norms and activations are inputs of products: they are in bf16 if the product reads bf16.
        dtype = torch.bfloat16 if reads == torch.bfloat16 else torch.float32
        self._bytes = reads == torch.int8
        self._normal, self._feed_normal = Buffer(width, dtype), Buffer(width, dtype)
        self._qkv = Buffer(_even(first.qkv.outputs))
        self._mixed = Buffer(first.out.inputs)
        self._mixed_rounded = Buffer(first.out.inputs, dtype) if dtype == torch.bfloat16 else None
        self._part = Buffer(width)
        self._up, self._inner = Buffer(_even(first.up.outputs)), Buffer(_even(first.down.inputs), dtype)
        if ends.table is not None:
            self._add(
                Op.EMBED, out=self.x, product=ends.table, weight=ends.positions, bias=ends.inner_positions
            )
        for block in blocks:
            self._block(block)
        self.logits: Buffer | None = None
        if ends.norm is not None and ends.head is not None:
            self._norm(ends.norm, self.x, self._normal, of_wanted=True)
            self.logits = Buffer(_even(ends.head.outputs))
            self._product(ends.head, self._normal, out=self.logits, of_wanted=True)
        self._program = Program(self._code)

    def run(self, inputs: Inputs, begin: int = 0, end: int | None = None) -> None:
        """Run the instructions [begin, end)."""
        self._program.run(inputs, begin, end)

    def reserve(self, tokens: int) -> None:
        """Make the buffers large enough for this many tokens."""
        self._program.reserve(tokens)

    def _add(self, op: Op, **parts: object) -> None:
        self._code.append(Instruction(op, **parts))  # type: ignore[arg-type]

    def _block(self, block: BlockWeights) -> None:
        config = self.config
        self._norm(block.norms[0], self.x, self._normal)
        if config.parallel_residual:
            # The feed-forward part reads the residual stream before attention changes it.
            self._norm(block.norms[1], self.x, self._feed_normal)
        self._attention(block)
        self._residual(block, 0, self._mixed_rounded or self._mixed, block.out)
        normal = self._normal
        if config.parallel_residual:
            normal = self._feed_normal
        else:
            self._norm(block.norms[1], self.x, normal)
        if config.swiglu:
            self._product(block.up, normal, out=self._up)
            self._add(Op.GATE, x=self._up, width=block.down.inputs, **_into(self._inner))
        else:
            activation = ACTIVATIONS[config.activation]
            rounded = self._inner if self._inner.dtype == torch.bfloat16 else None
            out = self._up if rounded else self._inner
            self._product(block.up, normal, out=out, rounded=rounded, activation=activation)
        self._residual(block, 1, self._inner, block.down)

    def _attention(self, block: BlockWeights) -> None:
        size = self.config.head_size
        self._product(block.qkv, self._normal, out=self._qkv)
        if block.head_norms is not None:
            for norm, heads, offset in zip(
                block.head_norms, (block.heads, block.groups), (0, block.heads * size), strict=True
            ):
                self._norm(norm, self._qkv, self._qkv, heads=heads, offset=offset)
        rotated = self.config.rotary_size if self.config.rotary else 0
        same = {"pages": block.pages, "width": size, "heads": block.heads, "groups": block.groups}
        turning = {"rotated": rotated, "interleaved": self.config.rope.interleaved}
        self._add(Op.PLACE, x=self._qkv, **same, **turning)
        into = {"out": self._mixed, "rounded": self._mixed_rounded}
        self._add(Op.ATTEND, x=self._qkv, scale=size**-0.5, **same, **into)

    def _product(self, product: Packed, x: Buffer, of_wanted: bool = False, **parts: object) -> None:
        """Add a product of `x`; `x` is first quantized if the product reads int8."""
        if self._bytes:
            narrow = self._narrow.get(product.inputs) or Buffer(quantized_bytes(product.inputs), torch.int8)
            self._narrow[product.inputs] = narrow
            self._add(Op.QUANTIZE, x=x, rounded=narrow, width=product.inputs, of_wanted=of_wanted)
            x = narrow
        self._add(Op.PRODUCT, x=x, product=product, of_wanted=of_wanted, **parts)

    def _residual(self, block: BlockWeights, half: int, x: Buffer, product: Packed) -> None:
        """Add the instructions that add the product of `x` to the residual stream."""
        post = block.post_norms[half]
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
