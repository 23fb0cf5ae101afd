"""The GPT decoder, whole: learned positions, layer norm before each part, embedding tied to the output."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import native
from trainer import masks
from trainer.layers import Block, LayerNorm, initialize
from trainer.masks import Ends
from trainer.models import ModelConfig


class GPT(nn.Module):
    """Tokens in, logits or loss out.

    The token table has padded rows (multiple of 128). They start at zero and never enter the loss, so they
    get no gradient and stay zero: the padded model computes exactly what the logical one does.
    """

    def __init__(
        self, config: ModelConfig, ops: native.Choice, seed: int = 1234, ends: Ends | None = None
    ) -> None:
        """`ends`: what an end of document does to the rest of its sample; nothing where it is None."""
        super().__init__()
        self.config = config
        self.ends = ends
        self.ops = ops
        self.tokens = nn.Embedding(config.padded_vocab, config.hidden)
        self.positions = nn.Embedding(config.sequence, config.hidden)
        self.blocks = nn.ModuleList(Block(config, ops) for _ in range(config.layers))
        self.norm = LayerNorm(config, ops)
        initialize(self, config.init_std, config.layers, torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self.tokens.weight[config.vocab :] = 0.0

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits of every position (batch, sequence, vocab); with targets, the mean loss instead."""
        ends, hidden = self.ends, None
        at = torch.arange(tokens.shape[1], device=tokens.device)
        if ends and ends.positions:
            at = masks.positions(tokens, ends.eod)
        if ends and ends.attention:
            hidden = masks.hidden(tokens, ends.eod)
        x = self.tokens(tokens) + self.positions(at)  # (batch, sequence, hidden)
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x, hidden)
        logits = F.linear(self.norm(x), self.tokens.weight)[..., : self.config.vocab]
        if targets is None:
            return logits
        if ends and ends.loss:
            targets = masks.counted(tokens, targets, ends.eod)
        return self.ops.cross_entropy(logits.flatten(0, 1), targets.flatten())


TOKEN_TABLE = "tokens.weight"


def logical(config: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    """A parameter (or its moment) as a checkpoint holds it: without the padding of the vocabulary."""
    return tensor[: config.vocab] if name == TOKEN_TABLE else tensor


def padded(config: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    """The reverse of `logical`."""
    if name != TOKEN_TABLE:
        return tensor
    return F.pad(tensor, (0, 0, 0, config.padded_vocab - config.vocab))
