"""`demo`: train a small model on a sandbox cluster and generate text from it."""

from __future__ import annotations

import os
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.cli import choices, options, screen
from clusterctl.cli.declared import flag, option
from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.jobs.run_folder import RunDir
    from clusterctl.runs.overview import TrainProgress
    from clusterctl.sandbox.cluster import Sandbox
    from clusterctl.sandbox.demo import BuiltData

PROMPT = "A class definition is"


def demo(
    directory: Path = option(
        "The folder of the demo.", "--dir", default=Path("clusterctl-demo"), metavar="FOLDER"
    ),
    steps: int = option("Train for N steps.", default=300, min=1, metavar="N"),
    mode: str = option(
        "Mode of the sandbox: auto, namespaces, loopback or embedded.", default="auto", metavar="MODE"
    ),
    *,
    keep: bool = flag("Keep the sandbox cluster running at the end."),
) -> None:
    """Take one full tour in a minute or two: start two nodes on this machine, build a rank table and a corpus, train a
    small GPT on four ranks, and generate text from its checkpoint."""
    from clusterctl.sandbox import demo as stages

    began = time.monotonic()
    stages.ready()
    directory = directory.resolve()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"--dir {directory}: is a file, not a folder", "name another folder") from None
    # Every command that the demo shows can then be run in this folder.
    os.chdir(directory)
    with ExitStack() as cleaning:
        sandbox = _sandbox(directory, mode, keep=keep, cleaning=cleaning)
        cluster = _cluster(sandbox)
        _rank_table(cluster)
        built = _data(directory)
        run, progress = _train(cluster, stages.write_job(directory / "job.yaml", steps))
        _result(run, progress, built.unigram_entropy_nats)
    _next(directory, run, keep=keep, seconds=time.monotonic() - began)


def _heading(number: int, text: str) -> None:
    from rich.text import Text

    screen.show(Text(f"\n[{number}/6] {text}", style="bold"))


def _sandbox(directory: Path, mode: str, *, keep: bool, cleaning: ExitStack) -> Sandbox:
    from clusterctl.sandbox import cluster as sandbox

    _heading(1, "Start a cluster on this machine: clusterctl sandbox up -n 2 --devices 2")
    folder = directory / "sandbox"
    if folder.exists():
        sandbox.down(folder)
    if not keep:
        cleaning.callback(sandbox.down, folder)
    started = sandbox.up(folder, nodes=2, devices=2, mode=mode)
    file = started.cluster_file.relative_to(directory)
    screen.show(screen.safe(f"{len(started.nodes)} nodes are up (mode {started.mode}); see {file}"))
    return started


def _cluster(sandbox: Sandbox) -> Cluster:
    from clusterctl.cli.views import tables
    from clusterctl.inventory import cluster as inventory_cluster

    cluster = inventory_cluster.load(sandbox.cluster_file)
    screen.show(tables.nodes_table(cluster))
    return cluster


def _rank_table(cluster: Cluster) -> None:
    from clusterctl.cli.views import tables
    from clusterctl.files import replace_file
    from clusterctl.hostfile import formats
    from clusterctl.ranktable import from_nodes

    _heading(2, "Build a rank table from the nodes' answers: clusterctl ranktable build")
    with choices.connected(cluster) as connections:
        table = from_nodes.build_from_nodes(cluster, connections).table
    replace_file(Path("rank_table.json"), table.render())
    text = formats.deepspeed(cluster)
    replace_file(Path("hostfile"), text)
    screen.show(tables.rank_table(table))
    screen.show(
        screen.safe(
            "hostfile (clusterctl hostfile build): "
            + "; ".join(line for line in text.splitlines() if line and not line.startswith("#"))
        )
    )


def _data(directory: Path) -> BuiltData:
    from clusterctl import text as clusterctl_text
    from clusterctl.sandbox import demo as stages

    _heading(3, "Build training data: Python's language reference as .bin/.idx files")
    path, data = directory / "corpus.jsonl", directory / "data"
    corpus = stages.write_corpus(path)
    vocab = stages.train_tokenizer(path, data / "tokenizer.json")
    built = stages.build_data(path, data / "tokenizer.json", data / "pydoc_text_document")
    raw = f"{corpus.documents} documents, {clusterctl_text.count(corpus.characters)} characters"
    facts = f"{raw} -> {clusterctl_text.count(built.tokens)} tokens (BPE vocabulary of {vocab})"
    entropy = (
        f"unigram entropy {built.unigram_entropy_nats:.3f} nats: the loss of guessing by frequency alone"
    )
    screen.show(screen.safe(facts), screen.safe(entropy))
    return built


def _train(cluster: Cluster, job_file: Path) -> tuple[RunDir, TrainProgress]:
    from clusterctl.cli.launch.plan import show_plan
    from clusterctl.cli.launch.run import follow_to_the_end, phases
    from clusterctl.client.attempts import Launch, Target
    from clusterctl.jobs import job as jobs
    from clusterctl.jobs.run_folder import new_run
    from clusterctl.runs.overview import read_progress

    _heading(4, "Show the plan: clusterctl plan job.yaml")
    job = jobs.load(job_file)
    chosen = cluster.select(job.nodes)
    show_plan(chosen, job)
    _heading(5, "Train on the nodes: clusterctl launch job.yaml")
    with choices.connected(chosen) as connections:
        run = new_run(job.name, options.runs_folder())
        with phases(connections) as log:
            Launch(run, Target(job, chosen), None, checks=False).start(connections, log)
        follow_to_the_end(run, connections, stop_on_interrupt=True, outlives_terminal=False)
    return run, read_progress(run.metric_lines())


def _result(run: RunDir, progress: TrainProgress, entropy: float) -> None:
    from clusterctl.cli.models.place import folder_of
    from clusterctl.cli.views import tables
    from clusterctl.sandbox import demo as stages

    _heading(6, "Show the result")
    width = min(screen.out_console().width, 80)
    screen.show(tables.loss_curve(progress.losses, progress.evals, width=width - 1))
    screen.show(tables.demo_facts(progress, entropy))
    checkpoint = folder_of(str(run.checkpoints))
    screen.show(tables.generated(PROMPT, stages.generate(checkpoint, PROMPT)))
    if len(progress.evals) < 2 or progress.evals[-1][1] >= entropy:
        screen.log(
            "the validation loss is not below the unigram entropy: train for more steps",
            "yellow",
        )


def _next(directory: Path, run: RunDir, *, keep: bool, seconds: float) -> None:
    from clusterctl.cli.models.place import folder_of
    from clusterctl.cli.views import tables
    from clusterctl.files import replace_file
    from clusterctl.report.page import page

    replace_file(run.root / "report.html", page(run))
    checkpoint = folder_of(str(run.checkpoints)).relative_to(directory)
    root = run.root.relative_to(directory)
    script = Path(sys.prefix, "bin", "activate")
    # `make demo` runs the program of an environment that the shell does not use yet.
    activate = f". {script}" if script.exists() and shutil.which("clusterctl") is None else ""
    screen.show(tables.demo_end(directory, root, checkpoint, activate, keep=keep, seconds=seconds))
