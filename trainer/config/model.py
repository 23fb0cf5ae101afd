"""The shape of a model and its arithmetic: parameters and padded vocabulary. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from clusterctl.wire.fields import setting
from trainer.config.attention import Heads, Latent
from trainer.config.norm import NORMS
from trainer.config.rope import RopeConfig
from trainer.config.router import TopK

# Matrix kernels want aligned rows; Megatron pads to 128 x tensor parallel.
VOCAB_MULTIPLE = 128
GATES = ("silu", "gelu_tanh", "gelu", "clamped")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model."""

    kind: str = setting("gpt", choices=("gpt", "glm"))
    """gpt predicts the next token; glm fills in blanks (two rows of positions; all tokens attend to the complete
    source).
    """
    layers: int = setting(4, least=1)
    """Blocks."""
    hidden: int = setting(128, least=1)
    """Width of the residual stream."""
    heads: int = setting(4, least=1)
    """Attention heads; hidden must be divisible by it, unless head_dim is set."""
    query_groups: int = setting(0, least=0)
    """Heads of keys and values, each shared by heads / query_groups queries; 0 means as many as heads."""
    head_dim: int = setting(0, least=0)
    """Width of a head; 0 means hidden / heads."""
    kv_rank: int = setting(0, least=0)
    """Latent attention: width of the latent of a token of which its keys and values are made; 0: they are not. head_dim
    is then the width of the part of a query that is not rotated."""
    q_rank: int = setting(0, least=0)
    """With kv_rank: width of the latent of which queries are made; 0: they are made of the input."""
    rope_dim: int = setting(64, least=2)
    """With kv_rank: width of the part of a query that is rotated; all heads share that of the key."""
    value_dim: int = setting(128, least=1)
    """With kv_rank: width of a value."""
    sequence: int = setting(128, least=2)
    """Tokens per sample."""
    positions: int = setting(0, least=0)
    """Number of learned positions, or with rotary the longest sequence for the model; 0 means model.sequence. GLM has
    two tables, each with one more."""
    rotary: bool = setting(False)
    """Rotate queries and keys by their position instead of adding learned positions."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """With rotary: base, rotated part and scaling."""
    rotated: tuple[int, ...] = setting((), least=0)
    """With rotary: for each layer 1 if it rotates, else 0, repeated up to the last layer; empty: all do."""
    window: int = setting(0, least=0)
    """Tokens that a token attends to, itself included; 0 means all before it."""
    windowed: tuple[int, ...] = setting((), least=0)
    """With window: for each layer 1 if it has the window and 0 if its tokens attend to all before them, repeated up to
    the last layer; empty: all have it."""
    window_base: float = setting(0.0, least=0.0)
    """With windowed and rotary: `rope.base` of the layers with the window, whose positions are then not scaled; 0: as
    in the other layers."""
    attention_scale: float = setting(0.0, least=0.0)
    """Factor of attention's scores; 0 means 1 / sqrt(width of a head)."""
    attention_cap: float = setting(0.0, least=0.0)
    """Soft limit of attention's scores: cap x tanh(score / cap); 0: none."""
    sinks: bool = setting(False)
    """Each head of attention has a learned score without a value, which takes its share of the probability."""
    norm: str = setting("layer", choices=tuple(NORMS))
    """layer: layer norm, with mean and bias. rms: RMS norm, which only divides by the root mean square. rms_offset: RMS
    norm whose weight is stored as its difference from 1."""
    qk_norm: bool = setting(False)
    """Divide each head's query and key by their root mean square, with a weight, before they are rotated."""
    qk_norm_whole: bool = setting(False)
    """With qk_norm: divide by the root mean square of all heads' queries together, and of all keys."""
    sandwich_norms: bool = setting(False)
    """Norms also after attention and after the feed-forward part, before their results are added."""
    input_norms: bool = setting(True)
    """Norms before attention and before the feed-forward part; false needs sandwich_norms."""
    parallel_residual: bool = setting(False)
    """Attention and the feed-forward part both read the block's input, and both results are added to it."""
    bias: str = setting("all", choices=("all", "qkv", "none"))
    """Which matrices of a block have a bias; qkv: only those of queries, keys and values."""
    tied: bool = setting(True)
    """Whether the embedding table is also the output matrix."""
    scaled_embeddings: bool = setting(False)
    """Multiply the embeddings of tokens by sqrt(hidden)."""
    logit_cap: float = setting(0.0, least=0.0)
    """Soft limit of the logits: cap x tanh(logit / cap); 0: none."""
    vocab: int = setting(2048, least=2)
    """Number of token ids. The table is padded to a multiple of vocab_multiple; padded ids never appear."""
    vocab_multiple: int = setting(VOCAB_MULTIPLE, least=1)
    """Rows of the table on each tensor parallel rank are a multiple of this; 1 only pads to equal parts."""
    ffn: int = setting(0, least=0)
    """Width inside the feed-forward layer; 0 means 4 x hidden, with swiglu 8/3 x hidden rounded up to 64."""
    swiglu: bool = setting(False)
    """Use a gated feed-forward layer, silu(gate) x up, instead of GELU; `activation` is then unused."""
    gate: str = setting("silu", choices=GATES)
    """With swiglu: the function of the gate. clamped: gate x sigmoid(1.702 x gate) x (1 + up), with gate at most 7 and
    up between -7 and 7."""
    experts: int = setting(0, least=0)
    """Number of experts, of which a router chooses top_k for each token; 0: one feed-forward layer for all tokens.
    `ffn` is the width of each."""
    top_k: int = setting(2, least=1)
    """With experts: number of experts per token."""
    renormalize: bool = setting(True)
    """With experts: whether the probabilities of the chosen experts are scaled to a sum of 1."""
    scoring: str = setting("softmax", choices=("softmax", "sigmoid"))
    """With experts: how a router's results become scores: of all experts together, or of each for itself."""
    router_bias: bool = setting(False)
    """With experts: experts are chosen by their score plus a bias, which is no part of their weight. The optimizer
    lowers the bias of experts with more than an even share of the tokens and raises the others'."""
    expert_groups: int = setting(1, least=1)
    """With experts: groups of neighbouring experts; a token's experts are in `top_groups` of them."""
    top_groups: int = setting(1, least=1)
    """With expert_groups: how many groups a token uses: those with the highest score, with sigmoid those with the
    highest sum of two scores."""
    routed_scale: float = setting(1.0, above=0.0)
    """With experts: factor of the weights of the chosen experts."""
    dense_layers: int = setting(0, least=0)
    """With experts: the number of first layers without experts."""
    expert_bias: bool = setting(False)
    """With experts: whether the matrices of the router and of the experts have biases."""
    dense_ffn: int = setting(0, least=0)
    """With dense_layers: the width of their feed-forward layers."""
    shared_ffn: int = setting(0, least=0)
    """With experts: width of a shared expert that every token passes through; 0: none."""
    capacity: float = setting(0.0, least=0.0)
    """With experts: limit of tokens of an expert in a micro-batch, as a multiple of an even share; later tokens are
    dropped. 0 drops none."""
    aux_loss: float = setting(0.01, least=0.0)
    """With experts: weight of the load-balancing loss, which reported losses do not include."""
    dropout: float = setting(0.0, least=0.0, below=1.0)
    """Probability of dropping an activation, in training only."""
    attention_dropout: float = setting(0.0, least=0.0, below=1.0)
    """Probability of dropping an attention probability, in training only. Above 0, NPUs store all
    scores.
    """
    label_smoothing: float = setting(0.0, least=0.0, below=1.0)
    """Fraction of each target's probability that is spread evenly over the vocabulary, in training only."""
    activation: str = setting("gelu_tanh", choices=("gelu_tanh", "gelu"))
    """gelu_tanh is what GPT-2 was trained with; gelu is the exact form."""
    eps: float = setting(1e-5, above=0.0)
    """Added to the variance by norms."""
    init_std: float = setting(0.02, above=0.0)
    """Standard deviation of the initial weights; the two projections into the residual stream use it / sqrt(2 x
    layers).
    """

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
        return self.head_dim or self.hidden // self.heads

    @cached_property
    def attention(self) -> Heads:
        """Return the sizes of attention."""
        if self.kv_rank:
            return Latent(
                self.hidden,
                self.heads,
                self.heads,
                self.head_size + self.rope_dim,
                self.bias,
                rotary=self.rotary,
                dropout=self.attention_dropout,
                rank=self.kv_rank,
                q_rank=self.q_rank,
                turned=self.rope_dim,
                value=self.value_dim,
            )
        return Heads(
            self.hidden,
            self.heads,
            self.groups,
            self.head_size,
            self.bias,
            ("all" if self.qk_norm_whole else "heads") if self.qk_norm else "",
            self.rotary,
            self.attention_dropout,
            self.window,
            causal=self.kind != "glm",
            scaled=self.attention_scale > 0,
            cap=self.attention_cap,
            sinks=self.sinks,
        )

    @cached_property
    def each_layer(self) -> tuple[ModelConfig, ...]:
        """Return the config of each layer, in which that is decided which differs between layers."""
        made: dict[object, ModelConfig] = {}
        return tuple(
            made.setdefault(key, self.decided(*key)) for key in map(self._differences, range(self.layers))
        )

    def kinds_of_layers(self) -> Iterator[tuple[ModelConfig, int]]:
        """Yield the config of each kind of layer, and how many layers are of it; a config may claim any number."""
        period = math.lcm(len(self.rotated) or 1, len(self.windowed) or 1)
        for first in range(min(period, self.layers)):
            rotated, windowed, _ = self._differences(first)
            ends = (min(self.dense_layers, self.layers), self.layers)
            dense, alike = (max(0, -(-(end - first) // period)) for end in ends)
            for is_dense, count in ((True, dense), (False, alike - dense)):
                if count:
                    yield self.decided(rotated, windowed, is_dense), count

    def _differences(self, layer: int) -> tuple[bool, bool, bool]:
        """Return whether a layer rotates, whether it has the window, and whether it has no experts."""
        rotated, windowed = (
            not cycle or cycle[layer % len(cycle)] > 0 for cycle in (self.rotated, self.windowed)
        )
        return rotated, windowed, layer < self.dense_layers

    def decided(self, rotated: bool = True, windowed: bool = True, dense: bool = False) -> ModelConfig:
        """Return the config of a layer that rotates or not, with the window or without, with experts or `dense`."""
        if not (self.rotated or self.windowed or self.dense_layers):
            return self
        experts: dict[str, int | bool] = {"dense_layers": 0, "dense_ffn": 0}
        if dense:
            experts |= {
                "experts": 0,
                "shared_ffn": 0,
                "router_bias": False,
                "expert_bias": False,
                "ffn": self.dense_ffn,
            }
        rope = self.rope
        if windowed and self.window_base:
            rope = RopeConfig(self.window_base, rope.part, rope.interleaved)
        return replace(
            self,
            rotary=self.rotary and rotated,
            rope=rope,
            window=self.window if windowed else 0,
            rotated=(),
            windowed=(),
            window_base=0.0,
            **experts,  # type: ignore[arg-type]
        )

    @cached_property
    def router(self) -> TopK:
        """Return the sizes of the router of experts."""
        return TopK(self.hidden, self.experts, self.top_k, self.router_bias + self.expert_bias)

    @property
    def rotary_size(self) -> int:
        """Return how many numbers of a head are rotated."""
        return self.rope_dim if self.kv_rank else int(self.head_size * self.rope.part)

    @property
    def context(self) -> int:
        """Return the longest sequence for the model."""
        return self.positions or self.sequence

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
        """Return the rows of the token table on `tensor` tensor parallel ranks together, with padding."""
        unit = self.vocab_multiple * tensor
        return -(-self.vocab // unit) * unit

    @property
    def norm_width(self) -> int:
        """Return the parameters of one norm of the residual stream."""
        return NORMS[self.norm].parameters(self.hidden)

    @property
    def norms(self) -> int:
        """Return the norms of the residual stream in one block."""
        return (2 if self.input_norms else 0) + (2 if self.sandwich_norms else 0)

    def _feed_forward(self, experts: int) -> int:
        """Return the numbers of the feed-forward matrices, with so many experts."""
        shared = self.shared_ffn * (3 if self.swiglu else 2)
        width = self.up_width + self.inner
        return self.hidden * (experts * width + shared if self.experts else width)

    def matrix_parameters(self) -> int:
        """Return the numbers of a block's matrices, which tensor parallel ranks divide."""
        return self.attention.matrices + self._feed_forward(self.experts)

    def used_matrix_parameters(self) -> int:
        """Return the numbers of a block's matrices that are used for one token."""
        return self.attention.matrices + self.router.parameters + self._feed_forward(self.top_k)

    def divided_parameters(self) -> int:
        """Return the parameters of a block that tensor parallel ranks divide: matrices, and biases of their columns."""
        bias = self.up_width if self.bias == "all" and not self.experts else 0
        of_experts = self.experts * (self.up_width + self.hidden) if self.expert_bias else 0
        return self.attention.divided + self._feed_forward(self.experts) + bias + of_experts

    def layer_parameters(self) -> int:
        """Return the parameters of one block."""
        bias = self.hidden if self.bias == "all" and not self.experts else 0
        router, own = self.router.parameters, self.attention.parameters - self.attention.divided
        return self.divided_parameters() + own + bias + router + self.norms * self.norm_width

    def parameters(self) -> int:
        """Return the parameters of the model, without the padding of the vocabulary."""
        tables = self.vocab * (1 if self.tied else 2) + self.position_tables * self.position_rows
        layers = sum(layer.layer_parameters() * count for layer, count in self.kinds_of_layers())
        return tables * self.hidden + layers + self.norm_width

    def active_parameters(self) -> int:
        """Return the parameters that a token uses: all but those of experts that are not chosen for it."""
        return self.parameters() - sum(
            count * (layer.matrix_parameters() + layer.router.parameters - layer.used_matrix_parameters())
            for layer, count in self.kinds_of_layers()
        )
