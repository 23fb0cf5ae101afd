"""Show the plan of a training: layout, memory, time, stages, the layouts that `auto` tried, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from clusterctl.cli.views.tables import facts, table
from clusterctl.text import (
    count,
    escape_controls,
    plural,
    short_time,
    size,
)

if TYPE_CHECKING:
    from clusterctl.wire.train_summary import (
        CandidateLayout,
        Hardware,
        LayoutSizes,
        ParallelSettings,
        Rehearsal,
        StagePlan,
        TrainSummary,
    )

# Kinds of layouts that lose, below the best five.
LOSING = 8
PARTS = {
    "compute": "computation",
    "tensor": "tensor parallel exchanges",
    "pipeline": "between stages",
    "bubble": "bubble",
    "data": "data parallel exchanges",
    "update": "optimizer",
}
CUTS = ("DATA", "TENSOR", "PIPELINE", "ZERO")
RIGHT = ("DATA", "MEMORY", "STEP", "TOKENS/S")
MOMENTS = {
    "loss": "the loss",
    "head": "the backward pass of the vocabulary's matrix",
    "layer": "a layer's backward pass",
    "embedding": "the backward pass of the embedding",
    "update": "the update",
}
FIGURES = {
    "memory": "{:g} GB",
    "tflops": "{:g} TFLOP/s",
    "efficiency": "{:.0%} of them in matrix products",
    "node_gbytes": "{:g} GB/s within a node",
    "net_gbytes": "{:g} GB/s between nodes",
}


def training(summary: TrainSummary, rehearsal: Rehearsal | None = None) -> Iterator[RenderableType]:
    """Yield everything after the first lines of a plan."""
    yield facts(
        [*_layout_facts(summary), *_memory_facts(summary), *_time_facts(summary), *_checkpoint_facts(summary)]
    )
    if rehearsal:
        yield facts(_rehearsed(rehearsal))
    if len(summary.stages) > 1:
        yield Text("")
        yield from _stages(summary)
    chosen = summary.chosen
    if chosen:
        yield Text(f"\nauto tried {chosen.tried} layouts, {chosen.illegal} of them invalid; the best ones:")
        yield _layouts(chosen.best)
        losing = chosen.losing[:LOSING]
        if losing:
            yield Text("\nwhy other layouts are worse:")
            yield table([*CUTS, "BECAUSE"], [[*_cuts(layout), layout.why] for layout in losing], right=RIGHT)


def verdict(summary: TrainSummary) -> str:
    """Return whether the training fits its devices, in one line; empty where their memory is not known."""
    room = summary.usable_memory_bytes
    if summary.fits is None or room is None:
        return ""
    need, source = summary.memory_per_device_bytes["total"], summary.hardware.sources["memory"]
    return f"{'fits' if summary.fits else 'does not fit'}: {size(need)} of {size(room)} usable ({source})"


def notes(summary: TrainSummary) -> list[str]:
    """Return notes about settings that are valid but probably not intended."""
    return [escape_controls(note) for note in summary.notes]


def _layout_facts(summary: TrainSummary) -> Iterator[tuple[str, str]]:
    layout = summary.layout
    ways = [_layout(layout, summary.parallel), f"zero {summary.zero}"]
    ways += ["offload"] * summary.offload
    yield "layout", ", ".join([*ways, f"recompute {summary.recompute}"])
    micros, data = summary.accumulation, layout.data
    each = (
        f"{plural(micros, 'micro-batch', 'es')} of {summary.micro_batch}"
        + f" on each of {data} data parallel ranks" * (data > 1)
    )
    bubble = f"; the bubble is {summary.bubble:.0%} of the work" if summary.bubble else ""
    yield "batch", f"{plural(summary.micro_batch * data * micros, 'sample')} per step: {each}{bubble}"


def _memory_facts(summary: TrainSummary) -> Iterator[tuple[str, str]]:
    need, whole = summary.memory_per_device_bytes, summary.memory_of_a_device_bytes
    stage = summary.stages[summary.highest_stage]
    of = f" of {size(whole)} ({need['total'] / whole:.0%})" if whole else ""
    where = f" of stage {summary.highest_stage}" if len(summary.stages) > 1 else ""
    yield "memory", f"{size(need['total'])}{of} per device; highest in {MOMENTS[stage.moment]}{where}"
    yield "", ", ".join(f"{name} {size(need[name])}" for name in need if need[name] and name != "total")
    most = stage.most_activations
    if most > need["activations"]:
        yield "", f"activations take up to {size(most)} at another time of the step"
    if summary.memory_of_the_node_bytes:
        yield (
            "",
            f"the optimizer takes {size(summary.memory_of_the_node_bytes)} of host memory per device",
        )
    if summary.offload_disk_bytes:
        yield "", f"offload takes up to {size(summary.offload_disk_bytes)} of each node's disk (nvme_path)"


def _time_facts(summary: TrainSummary) -> Iterator[tuple[str, str]]:
    hardware, time = summary.hardware, summary.time
    whole = short_time(time.in_all)
    rate = count(time.tokens_per_second)
    yield "time", f"about {short_time(time.seconds)} per step, {rate} tokens/s, {whole} in total"
    shares = sorted(
        ((getattr(time, name) / time.seconds, label) for name, label in PARTS.items()), reverse=True
    )
    yield "", ", ".join(f"{label} {share:.0%}" for share, label in shares if share >= 0.005)
    rates = summary.tflops_per_device
    for name, reached in rates.items():
        if name == "hardware" and reached == rates["model"]:
            # Nothing is recomputed.
            continue
        share = f"{reached / hardware.tflops:.0%} of peak"
        yield "rate", f"{reached:.3g} TFLOP/s per device ({share}), {summary.conventions[name]}"
    yield from (("device", text) for text in _device(hardware))


def _checkpoint_facts(summary: TrainSummary) -> Iterator[tuple[str, str]]:
    cost = summary.checkpoints
    stall = f"; training waits {short_time(cost.stall_seconds)}"
    share = f" ({cost.stall_share:.2%} of the time)" if cost.stall_share else ""
    seconds = f"about {short_time(cost.seconds)} at {cost.disk_gbytes:g} GB/s a node{stall}{share}"
    yield "checkpoints", f"{size(cost.bytes)} each, at most {cost.kept} on disk; {seconds}"
    copies = f"; copies take {size(cost.staging_bytes)} of its memory" if cost.staging_bytes else ""
    yield "", f"a node writes up to {size(cost.node_bytes)}{copies}"
    disk = "on the shared disk" if cost.shared else "on a node's disk"
    each = f", with {cost.copies} copies of every file" if cost.copies > 1 else ""
    yield "", f"all of them take up to {size(cost.disk_bytes)} {disk}{each}"


def _device(hardware: Hardware) -> Iterator[str]:
    """Yield the figures of a device, grouped by their source."""
    by_source: dict[str, list[str]] = {}
    for name, label in FIGURES.items():
        if figure := getattr(hardware, name):
            by_source.setdefault(hardware.sources[name], []).append(label.format(figure))
    for source, figures in by_source.items():
        yield f"{source}: {', '.join(figures)}"


def _rehearsed(done: Rehearsal) -> Iterator[tuple[str, str]]:
    """Yield what a rank did on this machine, compared with the plan."""
    agree = "as planned" if done.parameters == done.planned_parameters else "NOT as planned"
    exchanges = ", ".join(f"{times} {name}" for name, times in sorted(done.exchanges.items()))
    layers = plural(done.layers, "layer")
    yield (
        "rehearsal",
        f"one rank of {done.ranks}, {layers}, built and run for one step here in {done.seconds:.1f} s",
    )
    yield "", f"{count(done.parameters)} parameters ({agree})"
    yield "", f"{done.operations} operations, {exchanges or 'no exchange'}"
    yield "", f"peak memory {size(done.peak_bytes)}; planned {size(done.planned_bytes)}"


def _stages(summary: TrainSummary) -> Iterator[RenderableType]:
    """Yield a table of the stages; of pieces at equal distances only the first."""
    stages, apart = summary.stages, layers_between_pieces(summary.stages)
    if apart:
        yield Text(f"{len(stages[0].layers)} pieces per stage, {apart} layers apart; the first pieces:")
    rows = []
    for number, stage in enumerate(stages):
        first, end = stage.ranks
        need = stage.memory
        rows.append(
            [
                number,
                f"[{first},{end})",
                " ".join(f"[{start},{stop})" for start, stop in stage.layers[: 1 if apart else None]),
                count(stage.parameters_per_rank),
                size(need["weights"] + need["gradients"] + need["optimizer"]),
                size(stage.most_activations),
                size(need["total"]),
                stage.moment,
            ]
        )
    names = ["STAGE", "RANKS", "LAYERS", "PARAMS", "STATE", "ACTIVATIONS", "HIGHEST", "IN"]
    yield table(names, rows, right=["STAGE", "PARAMS", "STATE", "ACTIVATIONS", "HIGHEST"])


def layers_between_pieces(stages: Sequence[StagePlan]) -> int:
    """Return the layers from each piece of a stage to its next one, or 0 if the distances differ."""
    steps = {
        end - start
        for stage in stages
        for piece, following in pairwise(stage.layers)
        for start, end in zip(piece, following, strict=True)
    }
    return steps.pop() if len(steps) == 1 else 0


def _layouts(best: Sequence[CandidateLayout]) -> RenderableType:
    rows = [
        [
            *_cuts(layout),
            layout.recompute,
            size(layout.memory),
            f"{layout.seconds:.3g} s",
            count(layout.tokens_per_second),
        ]
        for layout in best
    ]
    return table([*CUTS, "RECOMPUTE", "MEMORY", "STEP", "TOKENS/S"], rows, right=RIGHT)


def _cuts(layout: CandidateLayout) -> list[object]:
    """Return how a layout divides the model, as columns."""
    tensor = f"{layout.tensor}" + " sequence" * layout.sequence
    pipeline = f"{layout.pipeline}" + (f" x {layout.interleave}" if layout.interleave > 1 else "")
    return [layout.data, tensor, pipeline, f"{layout.zero}" + " offload" * layout.offload]


def _layout(layout: LayoutSizes, parallel: ParallelSettings) -> str:
    sizes = {"data": layout.data, "tensor": layout.tensor, "pipeline": layout.pipeline}
    sizes["interleave"] = parallel.interleave
    text = " x ".join(f"{kind} {ranks}" for kind, ranks in sizes.items() if ranks > 1) or "one rank"
    return text + (" + sequence" if parallel.sequence else "")
