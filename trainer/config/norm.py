"""The kinds of norms: what follows from a kind for the config, the plan and other programs. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.attention import WIDE


@dataclass(frozen=True)
class NormKind:
    """One kind of norm of the residual stream; its layer is in `trainer.model.norm`."""

    megatron: str = ""
    """Megatron's `normalization`; "": Megatron does not have it."""
    bias: bool = False
    """Whether it has a bias next to its weight."""
    statistics: int = 1
    """The fp32 numbers of a row that the backward pass needs."""
    widened: bool = False
    """Whether autocast gives it inputs of fp32."""
    decoded: bool = False
    """Whether the compiled decoder of a CPU has it."""

    def parameters(self, width: int) -> int:
        """Return the parameters of a norm of rows of `width` numbers."""
        return width * (2 if self.bias else 1)

    def kept(self, rows: int, width: int, size: int, cast: bool) -> int:
        """Return the bytes kept for the backward pass; `size`: bytes of an input's number, `cast`: under autocast."""
        return rows * (width * (WIDE if cast and self.widened else size) + WIDE * self.statistics)


NORMS: dict[str, NormKind] = {
    "layer": NormKind("LayerNorm", bias=True, statistics=2, widened=True, decoded=True),
    "rms": NormKind("RMSNorm", decoded=True),
    "rms_offset": NormKind(),
}
