"""`data`, `checkpoint`, `generate`: the trainer's own verbs, run in a process of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterctl.cli import options, screen
from clusterctl.contract import METRICS_FILE
from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster


def forward(called: str, verb: str, words: list[str]) -> None:
    """Hand over to the trainer; its words and exit code are ours."""
    import subprocess
    import sys

    from clusterctl.settings import environment

    code = subprocess.call(
        [sys.executable, "-m", "trainer", "--called", f"clusterctl {called}", verb, *words], env=environment()
    )
    raise typer.Exit(code if code >= 0 else 128 - code)


def build(
    context: typer.Context,
    on: Annotated[str | None, typer.Option("--on", metavar="SET", help="Spread it over these nodes.")] = None,
    leave: Annotated[bool, typer.Option("--leave", help="With --on: the pairs stay on their nodes.")] = False,
    cluster: options.ClusterFile = None,
) -> None:
    """JSON lines, text, wiki dumps and more to Megatron's .bin and .idx, with a manifest."""
    if on is None or "--help" in context.args or "-h" in context.args:
        if leave and on is None:
            raise UsageError("--leave is for builds on nodes", "name them with --on, as in --on node[1-4]")
        forward("data build", "data-build", context.args)
    else:
        _build_on(options.cluster_of(cluster, on), list(context.args), leave)


def _build_on(chosen: Cluster, words: list[str], leave: bool) -> None:
    """A build spread over nodes; what is at --output is what one machine would build."""
    from clusterctl.cli.progress_bar import bar
    from clusterctl.runs.build_data import spread, value_of

    output = value_of(words, "--output")
    if output is None:
        raise UsageError("--output PREFIX is missing", "see `clusterctl data build --help`")
    with options.connected(chosen) as connections, bar("build") as drawn:
        answer = spread(chosen, connections, words, Path(output), leave, _say_phase, drawn.of)
    if "--json" in words:
        return screen.show_json(answer)
    for one in answer.get("shards", ()):
        screen.show(screen.safe(f"{one['node']}:{one['prefix']}: {one['tokens']:,} tokens"))
    where = answer.get("listing") or answer["prefix"]
    screen.show(screen.safe(f"{where}: {answer['documents']:,} documents, {answer['tokens']:,} tokens"))


def _say_phase(phase: str, what: str) -> None:
    screen.log(f"{phase:9} {what}")


def scatter(
    shards: Annotated[
        list[str], typer.Argument(metavar="SHARD...", help="Shards' prefixes, or their files.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="NODE_PATH", help="The folder on each node.")],
    cluster: options.ClusterFile = None,
    nodes: options.Nodes = None,
    exclude: options.Exclude = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Also in the place of a folder that no push made, with all in it."),
    ] = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """The shards of a corpus to different nodes: shard 1 to the first, 2 to the second, and so on, again and again."""
    from clusterctl.cli.progress_bar import bar
    from clusterctl.cli.push import show_pushed
    from clusterctl.transfer import scatter as transfer_scatter

    chosen = options.cluster_of(cluster, nodes, exclude)
    folder, given = transfer_scatter.portions(chosen, shards)
    if dry_run:
        rows = [{"node": one.node.name, "to": to, "shards": list(one.shards)} for one in given]
        lines = [f"{one.node.name}: {', '.join(one.shards)} -> {to}\n" for one in given]
        return screen.show_json(rows) if as_json else screen.write("".join(lines))
    with options.connected(chosen) as connections, bar("push") as drawn:
        outcomes = transfer_scatter.scatter(folder, given, to, connections, drawn.of, replace)
    show_pushed(outcomes, as_json)


def verify(
    where: Annotated[
        str, typer.Argument(metavar="RUN|DIR", help="A run, or a checkpoint's folder.")
    ] = "last",
) -> None:
    """Every file of a checkpoint against its hash."""
    forward("checkpoint verify", "checkpoint-verify", [str(checkpoint_of(where))])


def generate(
    where: Annotated[
        str, typer.Argument(metavar="RUN|DIR", help="A run, or a checkpoint's folder.")
    ] = "last",
    prompt: Annotated[
        str,
        typer.Option(
            "--prompt", "-p", help="The text to go on from. A GLM fills in its [MASK], [sMASK] and [gMASK]."
        ),
    ] = "",
    tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="How many tokens at most, in each blank.")
    ] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among the k likeliest; 0 among all.")] = 40,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 1234,
    as_json: options.Json = False,
) -> None:
    """Text from a checkpoint."""
    from clusterctl.jobs.job import ask_trainer

    folder = checkpoint_of(where)
    words = [
        "--prompt",
        prompt,
        "--max-tokens",
        str(tokens),
        "--temperature",
        str(temperature),
        "--top-k",
        str(top_k),
        "--seed",
        str(seed),
    ]
    answer: dict[str, Any] = ask_trainer(["generate", "--checkpoint", str(folder), *words, "--json"])
    if as_json:
        screen.show_json(answer)
    else:
        screen.show(screen.safe(answer["text"]))


def tensorboard(
    where: Annotated[
        str, typer.Argument(metavar="RUN|DIR", help="A run, or a folder with metrics.jsonl.")
    ] = "last",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Instead of the run's own folder.")
    ] = None,
) -> None:
    """A training's metrics as TensorBoard's files, with Megatron's tags; they need no TensorBoard to be made."""
    folder = Path(where) if (Path(where) / METRICS_FILE).is_file() else options.run_named(where).root
    words = ["--output", str(output)] if output else []
    forward("tensorboard", "tensorboard", [str(folder), *words])


def checkpoint_of(where: str) -> Path:
    """A checkpoint's folder, or the newest that a run brought home."""
    if (Path(where) / "manifest.json").is_file():
        return Path(where)
    if Path(where).is_dir() and not (Path(where) / "run.json").is_file():
        raise UsageError(
            f"{where}: no checkpoint: there is no manifest.json in it", "name a step-... folder, or a run"
        )
    run = options.run_named(where)
    found = sorted(path for path in run.checkpoints.glob("step-*") if (path / "manifest.json").is_file())
    if not found:
        first = run.read_record()
        place = next(iter(first["run_dirs"].items()))
        raise UsageError(
            f"{run.run_id} has no checkpoint here",
            f"they lie on {place[0]} in {place[1]}/checkpoints; `collect: [checkpoints]` in a job brings them home",
        )
    return found[-1]
