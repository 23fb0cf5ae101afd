"""The named model sizes and their arithmetic: parameters and padded vocabulary. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.config.reader import setting

# Matrix kernels want aligned rows; Megatron pads to 128 x tensor parallel.
VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model."""

    kind: str = setting("gpt", choices=("gpt", "glm"))
    """gpt predicts the next token; glm fills in blanks (two rows of positions, the source seen whole)."""
    layers: int = setting(4, least=1)
    """Blocks."""
    hidden: int = setting(128, least=1)
    """Width of the residual stream."""
    heads: int = setting(4, least=1)
    """Attention heads; hidden divides by it."""
    query_groups: int = setting(0, least=0)
    """Heads of keys and values, each shared by heads / query_groups queries; 0 means as many as heads."""
    sequence: int = setting(128, least=2)
    """Tokens per sample."""
    positions: int = setting(0, least=0)
    """Learned positions; 0 means one for each token of a sample. GLM has two tables, of one more each."""
    rotary: bool = setting(False)
    """Rotate queries and keys by their position instead of adding learned positions."""
    vocab: int = setting(2048, least=2)
    """Token ids that exist; the table is padded to a multiple of 128, and padded ids never appear."""
    ffn: int = setting(0, least=0)
    """Width inside the feed-forward part; 0 means 4 x hidden, with swiglu 8/3 x hidden rounded up to 64."""
    swiglu: bool = setting(False)
    """Use a gated feed-forward part, silu(gate) x up, instead of GELU; `activation` is then unused."""
    dropout: float = setting(0.0, least=0.0, below=1.0)
    """Chance to drop an activation, in training only."""
    attention_dropout: float = setting(0.0, least=0.0, below=1.0)
    """Chance to drop an attention probability, in training only. Above 0 no kernel is used: all scores are kept."""
    activation: str = setting("gelu_tanh", choices=("gelu_tanh", "gelu"))
    """gelu_tanh is what GPT-2 was trained with; gelu is the exact form."""
    eps: float = setting(1e-5, above=0.0)
    """Added to the variance by layer norm."""
    init_std: float = setting(0.02, above=0.0)
    """Deviation of the initial weights; the two projections into the residual use it / sqrt(2 x layers)."""

    @property
    def inner(self) -> int:
        if self.swiglu and not self.ffn:
            return -(-8 * self.hidden // (3 * 64)) * 64
        return self.ffn or 4 * self.hidden

    @property
    def up_width(self) -> int:
        """Return the output width of the first feed-forward matrix: gate and up, or up alone."""
        return 2 * self.inner if self.swiglu else self.inner

    @property
    def groups(self) -> int:
        """Return the heads of keys and values."""
        return self.query_groups or self.heads

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def qkv_width(self) -> int:
        """Return the width of queries, keys and values together."""
        return self.hidden + 2 * self.groups * self.head_size

    @property
    def position_rows(self) -> int:
        """Return the rows of each learned position table; GLM's row 0 means outside of a span."""
        if self.rotary and self.kind == "gpt":
            return 0
        return (self.positions or self.sequence) + (1 if self.kind == "glm" else 0)

    @property
    def position_tables(self) -> int:
        return 2 if self.kind == "glm" else 1

    @property
    def padded_vocab(self) -> int:
        return self.padded(1)

    def padded(self, tensor: int) -> int:
        """Return the rows of the token table shared by so many tensor parallel ranks, each with a multiple of 128."""
        unit = VOCAB_MULTIPLE * tensor
        return -(-self.vocab // unit) * unit

    def layer_parameters(self) -> int:
        """Return the parameters of one block."""
        h, inner = self.hidden, self.inner
        attention = h * self.qkv_width + self.qkv_width + h * h + h
        feed_forward = h * self.up_width + self.up_width + inner * h + h
        return attention + feed_forward + 4 * h

    def parameters(self) -> int:
        """Return the parameters of the model, without the padding of the vocabulary."""
        tables = self.vocab + self.position_tables * self.position_rows
        return tables * self.hidden + self.layers * self.layer_parameters() + 2 * self.hidden


GPT2_VOCAB = 50257
# GPT-2's and nine special tokens.
GLM_VOCAB = 50266


def _gpt(layers: int, hidden: int, heads: int, sequence: int, init_std: float = 0.02) -> ModelConfig:
    return ModelConfig(
        layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocab=GPT2_VOCAB, init_std=init_std
    )


def _glm(layers: int, hidden: int, heads: int, positions: int) -> ModelConfig:
    return ModelConfig(
        "glm", layers, hidden, heads, sequence=512, positions=positions, vocab=GLM_VOCAB, dropout=0.1
    )


SIZES: dict[str, ModelConfig] = {
    # About 1.07 million parameters: trains in a minute on two CPU cores.
    "gpt-tiny": ModelConfig(),
    # The same as 124M: 117M is how the paper counted it.
    "gpt2-117M": _gpt(12, 768, 12, 1024),
    "gpt2-124M": _gpt(12, 768, 12, 1024),
    "gpt2-345M": _gpt(24, 1024, 16, 1024),
    # One node of eight devices: 2 x 4 x 1.
    "gpt2-1536x16": _gpt(16, 1536, 16, 2048),
    "gpt2-1.3B": _gpt(24, 2048, 16, 1024),
    # Four nodes of eight devices: 2 x 4 x 4.
    "gpt2-2304x24": _gpt(24, 2304, 24, 2048),
    "gpt2-2.7B": _gpt(32, 2560, 32, 2048),
    "gpt2-3.7B": _gpt(32, 3072, 32, 2048),
    "gpt2-13B": _gpt(40, 5120, 40, 1024),
    "gpt2-52B": _gpt(64, 8192, 32, 1024),
    # GPT-3's sizes, with the deviation of their first weights.
    "gpt3-125M": _gpt(12, 768, 12, 2048),
    "gpt3-350M": _gpt(24, 1024, 16, 2048, 0.018),
    "gpt3-760M": _gpt(24, 1536, 16, 2048, 0.015),
    "gpt3-1.3B": _gpt(24, 2048, 16, 2048, 0.013),
    "gpt3-2.7B": _gpt(32, 2560, 32, 2048, 0.011),
    "gpt3-6.7B": _gpt(32, 4096, 32, 2048, 0.009),
    "gpt3-13B": _gpt(40, 5120, 40, 2048, 0.008),
    "gpt3-175B": _gpt(96, 12288, 96, 2048, 0.005),
    "glm-tiny": ModelConfig("glm"),
    "glm-base": _glm(12, 768, 12, 512),
    "glm-large": _glm(24, 1024, 16, 512),
    "glm-10B": _glm(48, 4096, 64, 1024),
}


def sized(name: str, **changes: object) -> ModelConfig:
    """Return a named size with some of its fields changed."""
    return replace(SIZES[name], **changes)  # type: ignore[arg-type]
