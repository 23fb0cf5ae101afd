"""Show the plan of a training: layout, memory, time, stages, the layouts that `auto` tried, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from clusterctl.cli.views import facts, table
from clusterctl.text import (
    count,
    duration,
    escape_controls,
    plural,
    size,
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


def training(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Everything beside the plan's first lines."""
    if "time" not in summary:
        return
    yield facts(
        [*_layout_facts(summary), *_memory_facts(summary), *_time_facts(summary), *_checkpoint_facts(summary)]
    )
    if summary.get("rehearsed"):
        yield facts(_rehearsed(summary["rehearsed"]))
    if len(summary["stages"]) > 1:
        yield Text("")
        yield from _stages(summary)
    chosen = summary.get("chosen")
    if chosen:
        yield Text(
            f"\nauto tried {chosen['tried']} layouts, {chosen['illegal']} of them not legal; the best:"
        )
        yield _layouts(chosen["best"])
        losing = chosen["losing"][:LOSING]
        if losing:
            yield Text("\nwhy others lose:")
            yield table([*CUTS, "BECAUSE"], [[*_cuts(one), one["why"]] for one in losing], right=RIGHT)


def verdict(summary: Mapping[str, Any]) -> str:
    """Return whether the training fits its devices, in one line; empty where their memory is not known."""
    if summary.get("fits") is None:
        return ""
    need, room = summary["memory_per_device_bytes"]["total"], summary["usable_memory_bytes"]
    source = summary["hardware"]["sources"]["memory"]
    return f"{'fits' if summary['fits'] else 'does not fit'}: {size(need)} of {size(room)} usable ({source})"


def notes(summary: Mapping[str, Any]) -> list[str]:
    """What is allowed, and surely not meant."""
    return [escape_controls(str(note)) for note in summary.get("notes", ())]


def _layout_facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    parallel, layout = summary["parallel"], summary["layout"]
    ways = [_layout({**layout, **parallel}), f"zero {summary['zero']}"]
    ways += ["offload"] * bool(summary["offload"])
    yield "layout", ", ".join([*ways, f"recompute {summary['recompute']}"])
    micros, data = summary["accumulation"], layout["data"]
    each = f"{_micros(micros)} of {summary['micro_batch']}" + f" on each of {data} data parallel ranks" * (
        data > 1
    )
    bubble = f"; the bubble is {summary['bubble']:.0%} of the work" if summary["bubble"] else ""
    yield "batch", f"{plural(summary['micro_batch'] * data * micros, 'sample')} a step: {each}{bubble}"


def _micros(number: int) -> str:
    return f"{number} micro-batch" + ("es" if number > 1 else "")


def _memory_facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    need, whole = summary["memory_per_device_bytes"], summary["memory_of_a_device_bytes"]
    stage = summary["stages"][summary["highest_stage"]]
    of = f" of {size(whole)} ({need['total'] / whole:.0%})" if whole else ""
    where = f" of stage {summary['highest_stage']}" if len(summary["stages"]) > 1 else ""
    yield "memory", f"{size(need['total'])}{of} a device; highest in {MOMENTS[stage['moment']]}{where}"
    yield "", ", ".join(f"{name} {size(need[name])}" for name in need if need[name] and name != "total")
    most = stage["most_activations"]
    if most > need["activations"]:
        yield "", f"activations at most {size(most)}, at another moment"
    if summary["memory_of_the_node_bytes"]:
        yield (
            "",
            f"the optimizer takes {size(summary['memory_of_the_node_bytes'])} of the node's memory a device",
        )


def _time_facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    hardware, time = summary["hardware"], summary["time"]
    whole = duration(time["in_all"])
    rate = count(time["tokens_per_second"])
    yield "time", f"about {time['seconds']:.3g} s a step, {rate} tokens/s, {whole} in all"
    shares = sorted(((time[name] / time["seconds"], words) for name, words in PARTS.items()), reverse=True)
    yield "", ", ".join(f"{words} {share:.0%}" for share, words in shares if share >= 0.005)
    told = summary["tflops_per_device"]
    for name, reached in told.items():
        if name == "hardware" and reached == told["model"]:
            # Nothing is recomputed.
            continue
        share = reached / hardware["tflops"]
        each = f"{summary['flops_per_token'][name] / 1e9:,.4g} GFLOP a token, {summary['conventions'][name]}"
        yield "rate", f"{reached:.3g} TFLOP/s a device, {share:.0%} of peak: {each}"
    yield from (("device", text) for text in _device(hardware))


def _checkpoint_facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    cost = summary["checkpoints"]
    stall = f", {duration(cost['stall_seconds'])} of them without training"
    seconds = f"about {duration(cost['seconds'])} at {cost['disk_gbytes']:g} GB/s a node{stall}"
    yield "checkpoints", f"{size(cost['bytes'])} each, at most {cost['kept']} on disk; {seconds}"
    copies = f"; copies take {size(cost['staging_bytes'])} of its memory" if cost["staging_bytes"] else ""
    yield "", f"a node writes up to {size(cost['node_bytes'])}{copies}"


def _device(hardware: Mapping[str, Any]) -> Iterator[str]:
    """Yield the figures of a device, grouped by their source."""
    by_source: dict[str, list[str]] = {}
    for name, words in FIGURES.items():
        if hardware[name]:
            by_source.setdefault(hardware["sources"][name], []).append(words.format(hardware[name]))
    for source, figures in by_source.items():
        yield f"{source}: {', '.join(figures)}"


def _rehearsed(done: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a rank did here, beside what the plan counts for it."""
    agree = "as planned" if done["parameters"] == done["planned_parameters"] else "NOT as planned"
    said = ", ".join(f"{times} {name}" for name, times in sorted(done["exchanges"].items())) or "no exchange"
    layers = plural(done["layers"], "layer")
    yield (
        "rehearsal",
        f"one rank of {done['ranks']}, {layers}, built and stepped here in {done['seconds']:.1f} s",
    )
    yield "", f"{count(done['parameters'])} numbers ({agree}), {done['operations']} operations, {said}"
    yield "", f"at its highest {size(done['peak_bytes'])}; the plan counts {size(done['planned_bytes'])}"


def _stages(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Who holds which layers; of pieces that are equally far apart the first alone."""
    stages, apart = summary["stages"], _apart(summary["stages"])
    if apart:
        yield Text(f"{len(stages[0]['layers'])} pieces a stage, {apart} layers apart; the first ones:")
    rows = []
    for number, stage in enumerate(stages):
        first, end = stage["ranks"]
        need = stage["memory"]
        rows.append(
            [
                number,
                f"[{first},{end})",
                " ".join(f"[{start},{stop})" for start, stop in stage["layers"][: 1 if apart else None]),
                count(stage["parameters_per_rank"]),
                size(need["weights"] + need["gradients"] + need["optimizer"]),
                size(stage["most_activations"]),
                size(need["total"]),
                stage["moment"],
            ]
        )
    names = ["STAGE", "RANKS", "LAYERS", "PARAMS", "STATE", "ACTIVATIONS", "HIGHEST", "IN"]
    yield table(names, rows, right=["STAGE", "PARAMS", "STATE", "ACTIVATIONS", "HIGHEST"])


def _apart(stages: Sequence[Mapping[str, Any]]) -> int:
    """Layers from each piece of a stage to its next, where that is the same everywhere; else 0."""
    steps = {
        end - start
        for stage in stages
        for one, other in pairwise(stage["layers"])
        for start, end in zip(one, other, strict=True)
    }
    return steps.pop() if len(steps) == 1 else 0


def _layouts(best: list[Mapping[str, Any]]) -> RenderableType:
    rows = [
        [
            *_cuts(one),
            one["recompute"],
            size(one["memory"]),
            f"{one['seconds']:.3g} s",
            count(one["tokens_per_second"]),
        ]
        for one in best
    ]
    return table([*CUTS, "RECOMPUTE", "MEMORY", "STEP", "TOKENS/S"], rows, right=RIGHT)


def _cuts(one: Mapping[str, Any]) -> list[object]:
    """How the ranks divide the model, in columns."""
    tensor = f"{one['tensor']}" + " sequence" * bool(one["sequence"])
    pipeline = f"{one['pipeline']}" + (f" x {one['interleave']}" if one["interleave"] > 1 else "")
    return [one["data"], tensor, pipeline, f"{one['zero']}" + " offload" * bool(one["offload"])]


def _layout(one: Mapping[str, Any]) -> str:
    kinds = ("data", "tensor", "pipeline", "interleave")
    text = " x ".join(f"{kind} {one[kind]}" for kind in kinds if one[kind] > 1) or "one rank"
    return text + (" + sequence" if one["sequence"] else "")
