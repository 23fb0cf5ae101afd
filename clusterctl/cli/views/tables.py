"""Turn values into tables and texts; nothing here prints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from clusterctl.backends.backend import job_of, of_node
from clusterctl.cli.views.fitting import FittingTable
from clusterctl.text import (
    count,
    device_text,
    duration,
    epochs,
    escape_controls,
    plural,
)
from clusterctl.wire.contract import METRICS_FILE

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.jobs.plan import Plan
    from clusterctl.jobs.run_lines import Metric
    from clusterctl.logs.lines import LogLine
    from clusterctl.ranktable.api import RankTable
    from clusterctl.runs.causes.cause import Cause
    from clusterctl.runs.overview import TrainProgress
    from clusterctl.wire.train_summary import TrainSummary

# Number of root causes below a list of runs; `status` shows that of one run.
CAUSES = 5
PHASE_STYLE = {
    "running": "cyan",
    "starting": "cyan",
    "finished": "green",
    "failed": "bold red",
    "stopped": "yellow",
    "lost": "bold red",
}


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: Sequence[str] = (),
    drop: Sequence[str] = (),
    cut: Sequence[str] = (),
) -> Table:
    """Return a plain table without frames, like those of kubectl and docker.

    On a narrow terminal, cells of the columns `cut` are cut in the middle, then the columns `drop` are left out.
    """
    drawn = FittingTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    drawn.drop, drawn.cut = drop, cut
    for name in columns:
        drawn.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*[cell if isinstance(cell, Text) else Text(escape_controls(str(cell))) for cell in row])
    return drawn


def nodes_table(
    cluster: Cluster, ways: Mapping[str, str] | None = None, reported: Mapping[str, str] | None = None
) -> Table:
    """Return a table of the nodes; `ways` (the SSH client of each node) and `reported` devices add columns."""
    rows = []
    for node in cluster.nodes:
        user = f"{node.user}@" if node.user else ""
        where = f"{user}{node.host}" + (f":{node.port}" if node.port != 22 else "")
        where = f"{of_node(node).way}, job {job_of(node)}" if node.allocation else where
        wide = (
            [] if ways is None else [node.interface or "", node.python, node.workdir, ways.get(node.name, "")]
        )
        chips = [] if reported is None else [reported.get(node.name, "")]
        rows.append([node.name, where, node.address, _devices(node), *chips, *wide])
    names = ["NODE", "SSH", "ADDRESS", "DEVICES", *([] if reported is None else ["REPORTED"])]
    heads = names + ([] if ways is None else ["INTERFACE", "PYTHON", "WORKDIR", "BY"])
    return table(heads, rows, drop=("BY", "INTERFACE", "PYTHON", "ADDRESS"), cut=("PYTHON", "WORKDIR"))


def _devices(node: Node) -> str:
    """Return the devices of a node and their kind, with ? for what the inventory does not name."""
    names = "?" if node.is_asked else device_text(node.devices)
    return f"{names} {'?' if node.is_asked and 'kind' in node.unnamed else node.kind}"


def plan_table(plan: Plan) -> Table:
    """Return a table of the ranks on each node."""
    # Imported here, because other tables do not need the modules of jobs.
    from clusterctl.jobs.job import devices_on

    rows = []
    for node in plan.nodes:
        ranks = [process.rank for process in node.processes]
        shown = f"[{ranks[0]},{ranks[-1] + 1})" if ranks else "none"
        devices = f"{device_text(devices_on(plan.job, node.node))} {node.node.kind}"
        rows.append([node.node.name, node.node.address, devices, shown])
    return table(["NODE", "ADDRESS", "DEVICES", "RANKS"], rows)


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and texts; long texts are wrapped in their column."""
    drawn = Table.grid(padding=(0, 1, 0, 0))
    # The longest name, `checkpoints`: the tables of a plan then stand in one line.
    drawn.add_column(min_width=11, no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, text in rows:
        drawn.add_row(name, Text(text))
    return drawn


def plan_facts(plan: Plan, summary: TrainSummary | None) -> Group:
    """Return the first lines of a plan: ranks, model, steps, corpora."""
    who = f"{plural(plan.world_size, 'rank')} on {plural(len(plan.nodes), 'node')}"
    head = Text(f"{plan.job.name}: {who}, master {plan.master_address}")
    return Group(head, facts(_plan_facts(plan, summary)))


def _plan_facts(plan: Plan, summary: TrainSummary | None) -> Iterator[tuple[str, str]]:
    if plan.job.command:
        yield "command", escape_controls(" ".join(plan.job.command))
    if plan.job.per_node:
        yield "starts", "one process per node" + _filled(plan)
    if plan.job.forward:
        yield "forward", f"{', '.join(plan.job.forward)} (values from this shell)"
    if summary:
        learned = summary.trained_parameters
        some = f", of which {count(learned)} are learned" if learned != summary.parameters else ""
        yield "model", f"{count(summary.parameters)} parameters{some}"
        tokens = f"{count(summary.tokens_total)} tokens ({count(summary.tokens_per_step)} per step)"
        steps = f"{plural(summary.steps, 'step')}, {tokens}"
        yield "training", steps + (f", {epochs(summary.epochs)}" if summary.epochs else "")
        for use in summary.corpora if len(summary.corpora) > 1 else ():
            name = escape_controls(use.prefix.rpartition("/")[2])
            yield (
                "corpus",
                f"{use.share:.1%} {name}: {epochs(use.epochs)} of {count(use.tokens)} tokens",
            )


def _filled(plan: Plan) -> str:
    """Return which options of a launcher are filled in on the first node."""
    from clusterctl.jobs.job_check import launcher_shapes
    from clusterctl.jobs.launchers.fill import additions

    if not plan.job.fills_launcher:
        return ""
    shapes = launcher_shapes(plan.job, plan.cluster, plan.facts.master_port, "HOSTFILE")
    added = additions(plan.job.command, shapes[0])
    return f", with {' '.join(added)} (on the first node)" if added else ""


def loss_curve(
    points: Sequence[tuple[float, float]],
    marks: Sequence[tuple[float, float]] = (),
    width: int = 72,
    height: int = 12,
) -> Text:
    """Return a plot of the loss in Braille dots, eight per character; `marks` (evaluations) are circles."""
    if not points:
        return Text("no steps yet")
    everything = [*points, *marks]
    low, high = min(y for _, y in everything), max(y for _, y in everything)
    first, last = min(x for x, _ in everything), max(x for x, _ in everything)
    high = high if high > low else low + 1.0
    last = last if last > first else first + 1.0
    columns, rows = max(8, width - 9), height
    dots = [[0] * columns for _ in range(rows)]
    bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

    def dot_of(x: float, y: float) -> tuple[int, int]:
        """Return the row and column of the dot of a point."""
        across = int((x - first) / (last - first) * (columns * 2 - 1))
        return int((high - y) / (high - low) * (rows * 4 - 1)), across

    for x, y in points:
        down, across = dot_of(x, y)
        dots[down // 4][across // 2] |= bits[down % 4][across % 2]
    cells = [[chr(0x2800 + dot) if dot else " " for dot in row] for row in dots]
    for x, y in marks:
        down, across = dot_of(x, y)
        cells[down // 4][across // 2] = "o"
    text = Text()
    for row, line in enumerate(cells):
        label = (
            f"{high - (high - low) * row / (rows - 1):7.3f} " if row % 3 == 0 or row == rows - 1 else " " * 8
        )
        text.append(label, style="dim").append("|", style="dim").append(
            "".join(line).rstrip() + "\n", style="cyan"
        )
    text.append(" " * 8 + "+" + "-" * columns + "\n", style="dim")
    left, right = f"step {first:g}", f"step {last:g}"
    text.append(" " * 9 + left + " " * max(1, columns - len(left) - len(right)) + right, style="dim")
    return text


# The first words of the trainer's notes about newer checkpoints that it did not load.
PASSED_OVER = "passed over a checkpoint"
# The names of backends in messages.
BACKENDS = {"reference": "plain torch"}


def start_text(start: Metric) -> str:
    """Return the first lines of a training: size, engine, and the backend of each op."""
    facts = start.facts
    parts = [] if start.parameters is None else [f"{count(start.parameters)} parameters"]
    if "engine" in facts:
        parts.append(f"{facts['engine']} engine, zero {facts.get('zero')}, {facts.get('precision')}")
    parts += [f"from step {start.step}"] if start.step else []
    text = ", ".join(parts) or "begins"
    served: dict[str, list[str]] = {}
    native = facts.get("native")
    for choice in native if isinstance(native, list) else ():
        if isinstance(choice, dict):
            served.setdefault(str(choice.get("backend")), []).append(str(choice.get("op")))
    most = max(served, key=lambda backend: len(served[backend]), default="")
    listed = [
        f"{BACKENDS.get(backend, backend)} for "
        + (f"{len(names)} ops" if backend == most and len(names) > 3 else ", ".join(names))
        for backend, names in served.items()
    ]
    ops = "; ".join(listed)
    notes = facts.get("notes")
    passed = (
        [str(note) for note in notes if str(note).startswith(PASSED_OVER)] if isinstance(notes, list) else []
    )
    rows = [f"{'kernels':<10} {ops}"] * bool(ops) + [f"{'checkpoint':<10} {note}" for note in passed]
    return "\n".join([text, *rows])


def step_text(metric: Metric, left: float | None) -> str:
    """Return the progress line of a training: step, loss, tokens/s, time left."""
    parts = [f"step {metric.step}" + ("" if metric.steps is None else f"/{metric.steps}")]
    if metric.loss is not None:
        parts.append(f"loss {metric.loss:.4f}")
    elif metric.diverged:
        parts.append("loss not finite")
    if metric.grad_norm is not None:
        parts.append(f"grad {metric.grad_norm:.2f}")
    if metric.tokens_per_second:
        parts.append(f"{count(metric.tokens_per_second)} tokens/s")
    elif isinstance(rate := metric.facts.get("samples_per_second"), (int, float)) and rate > 0:
        parts.append(f"{rate:.4g} samples/s")
    if left is not None:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


@dataclass(frozen=True)
class ListedRun:
    """One run of the list of runs; values that it does not have yet are ""."""

    run: str
    phase: str
    started: str
    """The local time of its start, `2026-11-21 17:42:03`."""
    ranks: int = 0
    nodes: int = 0
    step: int | str = ""
    loss: str = ""
    cause: str = ""
    """Why it failed, or waits."""
    folder: str = ""


def runs_table(rows: Sequence[ListedRun]) -> Table:
    """Return a table of runs, newest first. Ids are never wrapped; columns for steps appear only if a run has steps."""
    steps = [name for name in ("step", "loss") if any(str(getattr(row, name)) for row in rows)]
    cells = [
        [
            row.run,
            Text(row.phase, style=PHASE_STYLE.get(row.phase, "")),
            row.ranks,
            row.nodes,
            *(getattr(row, name) for name in steps),
            # Without the year, so that a row with an id of 21 characters fits into 80 columns.
            row.started[5:],
        ]
        for row in rows
    ]
    names = ["RUN", "PHASE", "RANKS", "NODES", *(name.upper() for name in steps), "STARTED"]
    drawn = table(names, cells, right=["RANKS", "STEP", "LOSS"], drop=("NODES", "STARTED", "RANKS"))
    # The other columns are wrapped first; if that is not enough, the last one is cut off.
    drawn.columns[0].no_wrap = True
    drawn.columns[0].min_width = max((len(row.run) for row in rows), default=0)
    return drawn


def causes_text(rows: Sequence[ListedRun]) -> Text:
    """Return the root causes of the newest failed runs; they are too long for a column of the table."""
    text = Text()
    for row in [row for row in rows if row.cause][:CAUSES]:
        text.append(f"\n{row.run}: ", style="bold").append(escape_controls(row.cause))
    return text


def cause_text(cause: Cause) -> Text:
    """Return the evidence for a root cause; the cause itself is printed after it, as the error."""
    text = Text()
    for line in cause.tail:
        text.append(f"  | {escape_controls(line)}\n", style="dim")
    for line in cause.kernel:
        text.append(f"  kernel: {escape_controls(line)}\n")
    text.append(f"  log: {cause.log}")
    if cause.folder:
        text.append(f"\n  run: {cause.folder}")
    if cause.others:
        text.append(f"\n  {cause.others}")
    return text


COLOURS = (
    "cyan",
    "green",
    "yellow",
    "magenta",
    "blue",
    "bright_cyan",
    "bright_green",
    "bright_yellow",
    "bright_magenta",
    "bright_blue",
)


def log_line(line: LogLine) -> Text:
    """Return a log line; the prefix has a colour that depends on the rank."""
    return log_prefix(line.node, line.rank).append_text(log_text(line))


def log_prefix(node: str, rank: int) -> Text:
    """Return the prefix `node:rank` in the colour of the rank."""
    return Text(f"{node}:{rank} ", style=COLOURS[rank % len(COLOURS)])


def log_text(line: LogLine) -> Text:
    """Return the text of a log line without the prefix."""
    style = "red" if line.stream == "err" and line.is_error else ""
    return Text(escape_controls(line.text), style=style)


def commands_table(plan: Plan) -> Table:
    """Return a table of the exact command of each rank."""
    rows = [
        [process.rank, node.node.name, process.cwd, shlex.join(process.argv)]
        for node in plan.nodes
        for process in node.processes
    ]
    return table(["RANK", "NODE", "FOLDER", "COMMAND"], rows, right=["RANK"])


def rank_table(value: RankTable) -> Table:
    """Return a rank table for people."""
    rows = [
        [device.rank_id, server.server_id, device.device_id, device.device_ip]
        for server in value.servers
        for device in server.devices
    ]
    return table(["RANK", "NODE", "DEVICE", "DEVICE ADDRESS"], rows, right=["RANK", "DEVICE"])


def demo_facts(progress: TrainProgress, entropy: float) -> Text:
    """Return the loss before and after the training, compared with guessing by token frequency."""
    text = Text()
    if progress.evals:
        (first, before), (last, after) = progress.evals[0], progress.evals[-1]
        text.append(
            f"validation loss {before:.3f} at step {first:g}, {after:.3f} at step {last:g}", style="bold"
        )
        text.append(f" (guessing by token frequency alone: {entropy:.3f})\n")
    if progress.last and progress.last.tokens_per_second:
        ranks = progress.start.facts.get("world", "?")
        text.append(f"{count(progress.last.tokens_per_second)} tokens/s on {ranks} ranks")
    return text


def generated(prompt: str, text: str) -> Text:
    """Return a prompt and the text that a model generated after it."""
    rest = re.sub(r"\n\s*\n\s*", "\n\n", text[len(prompt) :] if text.startswith(prompt) else text)
    shown = "\n".join("  " + escape_controls(line) for line in rest.splitlines())
    return Text.assemble(
        "\ngenerated from the checkpoint:\n",
        ("  " + escape_controls(prompt), "bold"),
        (shown.removeprefix("  "), "green"),
    )


def demo_end(folder: Path, run: Path, checkpoint: Path, activate: str, *, keep: bool, seconds: float) -> Text:
    """Return where the results of the demo are, and commands to try next, after `activate` if it is not empty."""
    lines = [
        f"\ndone in {duration(seconds)}; all files are in {folder}",
        f"  logs        {run}/attempts/1/logs",
        f"  metrics     {run}/{METRICS_FILE}",
        f"  checkpoint  {checkpoint}",
        f"  report      {run}/report.html",
        "  cluster     "
        + (
            "still up: sandbox/cluster.yaml" if keep else "stopped; `clusterctl demo --keep` keeps it running"
        ),
        "try next:",
        f"  cd {folder.name}",
        *([f"  {activate}"] if activate else []),
        "  clusterctl generate last --prompt 'A class definition'",
        "  clusterctl serve last",
        "  clusterctl eval last --task ppl --split valid --data data/pydoc_text_document",
        "  clusterctl logs show last",
        "  clusterctl ranktable check rank_table.json",
        "  clusterctl help",
    ]
    return Text("\n".join(lines))
