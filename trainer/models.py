"""The named sizes, and the arithmetic of a size: parameters, padded vocabulary, memory. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.settings import setting

VOCAB_MULTIPLE = 128  # matrix kernels want aligned rows; Megatron pads to 128 x tensor parallel


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT decoder."""

    layers: int = setting(4, least=1)
    """Decoder blocks."""
    hidden: int = setting(128, least=1)
    """Width of the residual stream."""
    heads: int = setting(4, least=1)
    """Attention heads; hidden divides by it."""
    sequence: int = setting(128, least=2)
    """Tokens a sample, and the number of learned positions."""
    vocab: int = setting(2048, least=2)
    """Token ids that exist; the table is padded to a multiple of 128, and padded ids never appear."""
    ffn: int = setting(0, least=0)
    """Width inside the feed-forward part; 0 means 4 x hidden."""
    dropout: float = setting(0.0, least=0.0, below=1.0)
    """Chance to drop an activation, in training only."""
    activation: str = setting("gelu_tanh", choices=("gelu_tanh", "gelu"))
    """gelu_tanh is what GPT-2 was trained with; gelu is the exact form."""
    eps: float = setting(1e-5, above=0.0)
    """Added to the variance by layer norm."""
    init_std: float = setting(0.02, above=0.0)
    """Deviation of the initial weights; the two projections into the residual use it / sqrt(2 x layers)."""

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def parameters(self) -> int:
        """Trained numbers of the logical model; the padding of the vocabulary is not counted."""
        h, inner = self.hidden, self.inner
        attention = h * 3 * h + 3 * h + h * h + h
        feed_forward = h * inner + inner + inner * h + h
        return (self.vocab + self.sequence) * h + self.layers * (attention + feed_forward + 4 * h) + 2 * h


SIZES: dict[str, ModelConfig] = {
    # About 1.07 million parameters: trains in a minute on two CPU cores.
    "gpt-tiny": ModelConfig(),
    "gpt2-124M": ModelConfig(layers=12, hidden=768, heads=12, sequence=1024, vocab=50257),
    "gpt2-345M": ModelConfig(layers=24, hidden=1024, heads=16, sequence=1024, vocab=50257),
}


def sized(name: str, **changes: object) -> ModelConfig:
    """A named size with some of its fields changed."""
    return replace(SIZES[name], **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Memory:
    """Bytes a device needs; the activations are an estimate, the rest is counted."""

    weights: int
    gradients: int
    optimizer: int
    activations_estimate: int

    def as_json(self) -> dict[str, int]:
        return {**self.__dict__, "total": sum(self.__dict__.values())}


def memory(model: ModelConfig, micro_batch: int, precision: str, data: int, zero: int) -> Memory:
    """Memory of one data parallel rank.

    Weights, gradients and the two Adam moments are fp32 in both precisions (bf16 computes on cast copies).
    Activations a layer: s*b*h*(34 + 5*a*s/h) bytes at two bytes a number (arXiv 2205.05198), twice that in
    fp32; then the logits and their gradient.
    """
    numbers = model.parameters() + (model.padded_vocab - model.vocab) * model.hidden
    s, b, h = model.sequence, micro_batch, model.hidden
    width = 1 if precision == "bf16" else 2
    layer = width * (34 * s * b * h + 5 * model.heads * s * s * b)
    logits = 2 * 2 * width * s * b * model.padded_vocab
    cast_weights = 2 * numbers if precision == "bf16" else 0
    return Memory(
        weights=4 * numbers,
        gradients=4 * numbers,
        optimizer=8 * numbers // (data if zero >= 1 else 1),
        activations_estimate=layer * model.layers + logits + cast_weights,
    )
