"""Divide the world into pipeline x data x tensor parallel ranks, and find a rank's place. Only arithmetic, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How the ranks divide the work; tensor parallel ranks are neighbours, pipeline stages farthest apart.

    rank = tensor_place + tensor * (data_place + data * pipeline_place), the order of Megatron and DeepSpeed.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    """Context parallel size: so many neighbouring data parallel ranks divide the tokens of each sample."""

    @property
    def readers(self) -> int:
        """Return how many groups of ranks read different samples."""
        return self.data // self.context

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline

    @classmethod
    def of(cls, world: int, tensor: int = 1, pipeline: int = 1, context: int = 1) -> Layout:
        """Return the layout of `world` ranks; data parallel is the rest after tensor and pipeline."""
        if world % (tensor * pipeline):
            raise ValueError(f"{world} ranks are not divisible by tensor {tensor} x pipeline {pipeline}")
        if world // (tensor * pipeline) % context:
            raise ValueError(
                f"{world // (tensor * pipeline)} data parallel ranks are not divisible by context {context}"
            )
        return cls(world // (tensor * pipeline), tensor, pipeline, context)

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return the (pipeline, data, tensor) place of a rank."""
        return rank // (self.tensor * self.data), rank // self.tensor % self.data, rank % self.tensor

    def rank(self, pipeline: int, data: int, tensor: int) -> int:
        """Return the rank at a place."""
        return tensor + self.tensor * (data + self.data * pipeline)

    def as_json(self) -> dict[str, int]:
        sizes = {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}
        return {**sizes, "context": self.context} if self.context > 1 else sizes


def piece_layers(layers: int, pieces: int, given: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the layers of each piece of a pipeline.

    If they do not divide evenly, pieces in the middle get one more, because the first piece also has the embedding and
    the last one the output matrix.
    """
    if given:
        return given
    least, over = divmod(layers, pieces)
    first = (pieces - over) // 2
    return tuple(least + (first <= i < first + over) for i in range(pieces))


@dataclass(frozen=True)
class Piece:
    """Consecutive layers on a rank, and whether they include the beginning or the end of the model."""

    layers: range
    first: bool = True
    last: bool = True


def pieces_of(
    layers: int, stage: int = 0, stages: int = 1, interleave: int = 1, given: tuple[int, ...] = ()
) -> tuple[Piece, ...]:
    """Return the pieces of a model that a stage holds; by default the whole model."""
    sizes = piece_layers(layers, stages * interleave, given)
    return tuple(
        Piece(range(sum(sizes[:at]), sum(sizes[: at + 1])), at == 0, at == len(sizes) - 1)
        for at in stage_pieces(stage, stages, interleave)
    )


def stage_pieces(stage: int, stages: int, interleave: int) -> tuple[int, ...]:
    """Return the numbers of a stage's pieces, `stages` apart, so that a micro-batch visits the stages in turn."""
    return tuple(stage + stages * i for i in range(interleave))


def accumulation(global_batch: int, micro_batch: int, data: int) -> int:
    """Return how many micro-batches each rank adds up per step; the division is exact in a checked config."""
    return global_batch // (micro_batch * data)


def nearest_batches(global_batch: int, micro_batch: int, data: int) -> tuple[int, int]:
    """Return the nearest global batches, below and above, that are multiples of micro batch x data parallel."""
    unit = micro_batch * data
    below = max(unit, global_batch // unit * unit)
    return below, max(unit, -(-global_batch // unit) * unit)
