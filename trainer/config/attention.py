"""The sizes of attention, from which parameters, adapters, plans, caches and conversions follow. Loads no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

# Bytes of an fp32 number.
WIDE = 4


class AttentionCore(enum.Enum):
    """How attention is computed, which decides what it keeps for the backward pass."""

    KERNEL = "kernel"
    """A kernel that recomputes the scores in the backward pass and keeps none."""
    PRODUCTS = "products"
    """Two products over all queries, which keep all probabilities."""


@dataclass(frozen=True)
class Share:
    """What a rank computes of a micro-batch."""

    samples: int
    length: int
    """Tokens of a sample on this rank."""
    width: int
    """Bytes per number in matrix products."""
    kind: str
    """The kind of device, which decides the kernels."""
    core: AttentionCore
    tensor: int
    """Ranks that divide the heads."""
    context: int
    """Ranks that divide the samples; keys are of whole samples."""


@dataclass(frozen=True)
class Heads:
    """Attention with one matrix for queries, keys and values; each group of queries shares its keys and values."""

    hidden: int
    heads: int
    groups: int
    """Heads of keys and values."""
    size: int
    """Width of a head."""
    bias: str = "all"
    norms: str = ""
    """The norms of queries and keys: of each of the `heads`, or of `all` together; "": none."""
    rotary: bool = False
    dropout: float = 0.0
    window: int = 0
    causal: bool = True
    scaled: bool = False
    """Whether queries are multiplied by a factor, which makes a copy of them."""
    sinks: bool = False
    """Whether each head has a score without a value."""
    cap: float = 0.0
    """The soft limit of scores; 0: none."""

    @property
    def normed(self) -> bool:
        return bool(self.norms)

    @property
    def plain(self) -> bool:
        """Return whether no kernel computes these scores, so that torch's products do."""
        return self.cap > 0 or self.sinks

    @property
    def width(self) -> int:
        """Return the width of all queries together, which is that of the result."""
        return self.heads * self.size

    @property
    def keys(self) -> int:
        """Return the width of all keys together, which is that of all values."""
        return self.groups * self.size

    @property
    def counts(self) -> dict[str, int]:
        """Return the numbers that tensor parallel ranks must divide, by key of the config."""
        return {"heads": self.heads} | ({} if self.groups == self.heads else {"query_groups": self.groups})

    @property
    def sections(self) -> dict[str, int]:
        """Return the outputs of the first matrix: the width of each section."""
        return {"q": self.width, "k": self.keys, "v": self.keys}

    @property
    def outputs(self) -> int:
        """Return the outputs of the first matrix together."""
        return self.width + 2 * self.keys

    @property
    def matrices(self) -> int:
        """Return the numbers of both matrices."""
        return self.hidden * (self.outputs + self.width)

    @property
    def divided(self) -> int:
        """Return the parameters that tensor parallel ranks divide: matrices, biases, and norms of all heads."""
        norms = self.width + self.keys if self.norms == "all" else 0
        norms += self.heads if self.sinks else 0
        return self.matrices + norms + (self.outputs if self.bias != "none" else 0)

    @property
    def parameters(self) -> int:
        """Return all parameters."""
        norms = 2 * self.size if self.norms == "heads" else 0
        return self.divided + (self.hidden if self.bias == "all" else 0) + norms

    def part(self, ranks: int) -> Heads:
        """Return the heads of one of `ranks` tensor parallel ranks."""
        return replace(self, heads=self.heads // ranks, groups=self.groups // ranks)

    @property
    def pages(self) -> tuple[int, int, int]:
        """Return the groups of keys in a cache, the width of a key, and that of a value which is part of it, or 0."""
        return self.groups, self.size, 0

    @property
    def cached(self) -> int:
        """Return how many numbers a token has in the cache of a layer."""
        groups, key, shared = self.pages
        return groups * key * (1 if shared else 2)

    def whole_scores(self, sequence: int) -> int:
        """Return the operations per token of the scores of all tokens, and of the values that they weigh."""
        return 4 * sequence * self.width

    def operations(self, sequence: int) -> int:
        """Return the operations per token between the two matrices; a causal token sees half on average."""
        if not self.causal:
            return self.whole_scores(sequence)
        window = min(self.window or sequence, sequence)
        # Twice the mean number of keys per token; the first tokens have fewer than the window.
        keys = (2 * window * sequence - window * window) // sequence
        return 2 * keys * self.width

    def kept(self, share: Share, selective: bool = False) -> int:
        """Return the bytes of the result, and of what is kept for the backward pass after the first matrix.

        `selective`: without the scores, which are computed again.
        """
        tokens = share.samples * share.length
        result, keys, outputs = (
            share.width * tokens * width // share.tensor for width in (self.width, self.keys, self.outputs)
        )
        normed = {"": 0, "heads": (self.heads + self.groups) // share.tensor, "all": 2}[self.norms]
        rows = WIDE * tokens * normed
        # The gathered keys and values of the other ranks.
        always = result + rows + (2 * keys * share.context if share.context > 1 else 0)
        # Inputs are views of the matrix's result, or copies after rotary positions or norms. A CPU rotates in place.
        copies = self.normed or (self.rotary and share.kind != "cpu")
        given = outputs + (keys if copies else 0)
        by_kernel = always + given + (result if copies or self.scaled else 0)
        if selective:
            return by_kernel
        masks = share.length**2 * (1 if self.causal else share.samples)
        # The kernels of a CPU and of CUDA make the mask of dropout again in the backward pass.
        by_products = share.core is not AttentionCore.KERNEL or self.plain
        if not by_products and not (self.dropout and share.kind not in ("cpu", "cuda")):
            sums = WIDE * share.samples * self.heads // share.tensor * share.length
            # Kernels other than the CPU's need a dense mask for all but causal attention.
            masked = (not self.causal or 0 < self.window < share.length) and share.kind != "cpu"
            dense = share.width * masks if masked else 0
            return by_kernel + sums + dense
        scores = share.width * share.samples * (self.heads // share.tensor) * share.context * share.length**2
        # With several samples, or shared keys, the inputs of the products are copied.
        if self.groups != self.heads or share.samples > 1:
            given = 2 * result + (outputs if self.normed else 0)
        # Scaled queries, the mask, and probabilities: with dropout before and after it, and its factors; with a soft
        # limit the tanh of the scores.
        return always + result + given + masks + scores * ((3 if self.dropout else 1) + (self.cap > 0))


@dataclass(frozen=True)
class Latent(Heads):
    """Attention whose keys and values are made of one latent per token; `size` is the width of a query."""

    rank: int = 1
    """Width of a latent of keys and values."""
    q_rank: int = 0
    """Width of a latent of queries; 0: they have none."""
    turned: int = 1
    """Numbers of a query and a key that are rotated; all heads of a key share them."""
    value: int = 1
    """Width of a value."""

    @property
    def width(self) -> int:
        return self.heads * self.value

    @property
    def plain(self) -> bool:
        return True

    @property
    def outputs(self) -> int:
        return self.heads * (2 * self.size - self.turned + self.value)

    @property
    def divided(self) -> int:
        """Return the parameters that tensor parallel ranks divide: the matrices of heads."""
        of_queries = (self.q_rank or self.hidden) * self.heads * self.size
        made = self.rank * self.heads * (self.size - self.turned + self.value)
        return of_queries + made + self.width * self.hidden

    @property
    def matrices(self) -> int:
        return self.divided + self.hidden * (self.q_rank + self.rank + self.turned)

    @property
    def parameters(self) -> int:
        return self.matrices + self.q_rank + self.rank

    @property
    def pages(self) -> tuple[int, int, int]:
        return 1, self.rank + self.turned, self.rank

    def part(self, ranks: int) -> Latent:
        return replace(self, heads=self.heads // ranks, groups=self.groups // ranks)

    def whole_scores(self, sequence: int) -> int:
        return 2 * sequence * self.heads * (self.size + self.value)

    def operations(self, sequence: int) -> int:
        return self.whole_scores(sequence) // 2
