"""The sizes of attention, from which parameters, adapters, plans, caches and conversions follow. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    normed: bool = False
    """Whether each head's query and key have norms."""
    window: int = 0
    causal: bool = True

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
        """Return the parameters that tensor parallel ranks divide: matrices, and the bias of the first one."""
        return self.matrices + (self.outputs if self.bias != "none" else 0)

    @property
    def parameters(self) -> int:
        """Return all parameters."""
        return (
            self.divided + (self.hidden if self.bias == "all" else 0) + (2 * self.size if self.normed else 0)
        )

    def part(self, ranks: int) -> Heads:
        """Return the heads of one of `ranks` tensor parallel ranks."""
        return replace(self, heads=self.heads // ranks, groups=self.groups // ranks)

    def cached(self, layers: int) -> int:
        """Return how many numbers a token has in the cache of `layers` layers."""
        return 2 * layers * self.keys

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
