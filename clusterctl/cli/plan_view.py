"""What a plan says of a training: time and rates, stages, what `auto` tried, and what is surely not meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from clusterctl.sanitize import escape_controls
from clusterctl.views import table
from clusterctl.words import count, duration, size

LOSING = 8  # kinds of layouts that lose, below the best five
PARTS = {
    "compute": "computation",
    "tensor": "tensor parallel exchanges",
    "pipeline": "between stages",
    "bubble": "bubble",
    "data": "data parallel exchanges",
    "update": "optimizer",
}


def training(summary: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Everything beside the plan's first lines."""
    if "time" not in summary:
        return
    yield Text("\n".join(_facts(summary)))
    if summary.get("rehearsed"):
        yield Text(_rehearsed(summary["rehearsed"]))
    if len(summary["stages"]) > 1:
        yield Text("")
        yield _stages(summary)
    chosen = summary.get("chosen")
    if chosen:
        yield Text(
            f"\nauto tried {chosen['tried']} layouts, of which {chosen['illegal']} are not legal; the best:"
        )
        yield _layouts(chosen["best"])
        losing = chosen["losing"][:LOSING]
        if losing:
            yield Text("why others lose:\n" + "\n".join(f"  {_layout(one)}: {one['why']}" for one in losing))


def notes(summary: Mapping[str, Any]) -> list[str]:
    """What is allowed, and surely not meant."""
    return [escape_controls(str(note)) for note in summary.get("notes", ())]


def _facts(summary: Mapping[str, Any]) -> Iterator[str]:
    hardware, time = summary["hardware"], summary["time"]
    parallel = summary["parallel"]
    ways = [f"zero {summary['zero']}", f"recompute {summary['recompute']}"]
    ways += [f"interleave {parallel['interleave']}"] * (parallel["interleave"] > 1)
    ways += ["sequence parallel"] * bool(parallel["sequence"])
    bubble = f", the bubble {summary['bubble']:.0%} of the work" if summary["bubble"] else ""
    micros = summary["accumulation"]
    yield f"layout   {', '.join(ways)}; {micros} micro-batch{'es' * (micros > 1)} a step{bubble}"
    if summary["memory_of_a_device_bytes"]:
        total = summary["memory_per_device_bytes"]["total"]
        whole = summary["memory_of_a_device_bytes"]
        yield f"room     {total / whole:.0%} of {size(whole)} a device ({hardware['sources']['memory']})"
    whole_time = duration(time["seconds"] * summary["steps"])
    rate = count(time["tokens_per_second"])
    yield f"time     about {time['seconds']:.3g} s a step, {rate} tokens/s, {whole_time} in all"
    shares = sorted(((time[name] / time["seconds"], words) for name, words in PARTS.items()), reverse=True)
    yield "         " + ", ".join(f"{words} {share:.0%}" for share, words in shares if share >= 0.005)
    for name, reached in summary["tflops_per_device"].items():
        share = reached / hardware["tflops"]
        yield f"rate     {reached:.3g} TFLOP/s a device, {share:.0%} of peak ({summary['conventions'][name]})"
    peak = f"{hardware['tflops']:g} TFLOP/s ({hardware['sources']['tflops']})"
    usual = f"{hardware['efficiency']:.0%} of it in matrix products ({hardware['sources']['efficiency']})"
    links = f"{hardware['node_gbytes']:g} GB/s within a node, {hardware['net_gbytes']:g} between"
    yield f"device   {peak}; {usual}; {links} ({hardware['sources']['net_gbytes']})"


def _rehearsed(done: Mapping[str, Any]) -> str:
    """What a rank did here, beside what the plan counts for it."""
    agree = "as planned" if done["parameters"] == done["planned_parameters"] else "NOT as planned"
    said = ", ".join(f"{times} {name}" for name, times in sorted(done["exchanges"].items())) or "no exchange"
    return (
        f"rehearsed one rank of {done['ranks']}, {done['layers']} layers, in {done['seconds']:.1f} s: "
        f"{count(done['parameters'])} numbers ({agree}), {done['operations']} operations, {said}; "
        f"at its highest {size(done['peak_bytes'])}, the plan counts {size(done['planned_bytes'])}"
    )


def _stages(summary: Mapping[str, Any]) -> RenderableType:
    rows = []
    for number, stage in enumerate(summary["stages"]):
        first, end = stage["ranks"]
        layers = " ".join(f"[{start},{stop})" for start, stop in stage["layers"])
        need = stage["memory"]
        rows.append(
            [
                number,
                f"[{first},{end})",
                layers,
                count(stage["parameters_per_rank"]),
                size(need["activations"]),
                size(need["total"]),
            ]
        )
    right = ["STAGE", "PARAMETERS", "ACTIVATIONS", "MEMORY"]
    return table(["STAGE", "RANKS", "LAYERS", "PARAMETERS", "ACTIVATIONS", "MEMORY"], rows, right=right)


def _layouts(best: list[Mapping[str, Any]]) -> RenderableType:
    rows = [
        [
            _layout(one),
            one["zero"],
            one["recompute"],
            size(one["memory"]),
            f"{one['seconds']:.3g} s",
            count(one["tokens_per_second"]),
            "" if one["served"] else "no engine yet",
        ]
        for one in best
    ]
    names = ["LAYOUT", "ZERO", "RECOMPUTE", "MEMORY", "STEP", "TOKENS/S", ""]
    return table(names, rows, right=["ZERO", "MEMORY", "STEP", "TOKENS/S"])


def _layout(one: Mapping[str, Any]) -> str:
    text = f"data {one['data']} x tensor {one['tensor']} x pipeline {one['pipeline']}"
    text += f" x interleave {one['interleave']}" if one["interleave"] > 1 else ""
    return text + (" + sequence" if one["sequence"] else "")
