"""`data` and `tensorboard`: commands of the trainer, run in a separate process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import choices, options, screen
from clusterctl.cli.declared import argument, flag, option
from clusterctl.errors import UsageError
from clusterctl.wire.arguments import arguments_of
from clusterctl.wire.contract import METRICS_FILE
from clusterctl.wire.requests import TensorboardOptions, TensorboardRequest

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster


def forward(called: str, verb: str, arguments: list[str]) -> None:
    """Run a command of the trainer; exit with its exit code."""
    from clusterctl.jobs.ask_trainer import trainer_start

    argv, variables = trainer_start(["--called", f"clusterctl {called}", verb, *arguments])
    code = waited(argv, variables, held=True)
    if code == 0 and {"-h", "--help"} & set(arguments):
        _show_examples(called)
    raise typer.Exit(code if code >= 0 else 128 - code)


def _show_examples(called: str) -> None:
    """Write the examples of a command after the help of the trainer."""
    from clusterctl.cli.examples import examples

    lines = examples(called)
    screen.write("\nExamples:\n" * bool(lines) + "".join(f"  {line}\n" for line in lines))


def waited(argv: Sequence[str], variables: Mapping[str, str] | None = None, *, held: bool = False) -> int:
    """Return the exit code of a process, which gets the signals that would end this one and ends in its own time.

    `held`: it starts with these signals blocked, so that none comes while Python starts, and unblocks them itself.
    """
    started = list[subprocess.Popen[bytes]]()

    def pass_on(number: int, _: object) -> None:
        if not started:
            raise SystemExit(128 + number)
        # The terminal sends Ctrl-C to both.
        if number != signal.SIGINT or not sys.stdin.isatty():
            started[0].send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers if held else ())
        try:
            started.append(subprocess.Popen(argv, env=variables))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return started[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def build(
    context: typer.Context,
    on: str | None = option("Build on these nodes in parallel.", metavar="SET"),
    *,
    leave: bool = flag("With --on: leave the .bin/.idx pairs on the nodes."),
    cluster: options.ClusterFile = None,
) -> None:
    """Build Megatron's .bin and .idx files, with a manifest, from JSON lines, text, wiki dumps and more."""
    if on is None or "--help" in context.args or "-h" in context.args:
        if leave and on is None:
            raise UsageError("--leave needs --on", "name the nodes, for example --on node[1-4]")
        forward("data build", "data-build", context.args)
    else:
        _build_on(choices.cluster_of(cluster, on), list(context.args), leave=leave)


def _build_on(chosen: Cluster, arguments: list[str], *, leave: bool) -> None:
    """Build on several nodes; the result at --output equals a build on one machine."""
    from clusterctl.cli.views.progress_bar import bar
    from clusterctl.runs.prepare.build_data import spread, value_of
    from clusterctl.runs.prepare.built_pair import ShardList
    from clusterctl.wire.typed_json import encode

    output = value_of(arguments, "--output")
    if output is None:
        raise UsageError("--output PREFIX is missing", "see `clusterctl data build --help`")
    if not output or output.endswith("/"):
        problem = f"{output} is a folder" if output else "is empty"
        raise UsageError(f"--output: {problem}", f"add the name of the pair, as in {output}corpus")
    with choices.connected(chosen) as connections, bar("build") as drawn:
        made = spread(chosen, connections, arguments, Path(output), leave, _log_phase, drawn.of)
    if "--json" in arguments:
        return screen.show_json(encode(made))
    for shard in made.shards if isinstance(made, ShardList) else ():
        screen.show(screen.safe(f"{shard.node}:{shard.prefix}: {shard.tokens:,} tokens"))
    result = made.listing if isinstance(made, ShardList) else made.prefix
    screen.show(screen.safe(f"{result}: {made.documents:,} documents, {made.tokens:,} tokens"))


def _log_phase(phase: str, text: str) -> None:
    screen.log(f"{phase:9} {text}")


def scatter(
    shards: Annotated[
        list[str], typer.Argument(metavar="SHARD...", help="Prefixes of the shards, or their files.")
    ],
    to: Annotated[
        str, typer.Option(metavar="NODE_PATH", callback=options.OfNodePath, help="The folder on each node.")
    ],
    selection: options.NodeOptions,
    *,
    replace: bool = flag(options.REPLACE),
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Distribute the shards of a corpus over nodes in turn: the first shard to the first node, and so on."""
    from clusterctl.cli.nodes.push import show_pushed
    from clusterctl.cli.views.progress_bar import bar
    from clusterctl.transfer import scatter as transfer_scatter

    chosen = selection.chosen()
    folder, portions = transfer_scatter.portions(chosen, shards)
    if dry_run:
        rows = [{"node": portion.node.name, "to": to, "shards": list(portion.shards)} for portion in portions]
        lines = [f"{portion.node.name}: {', '.join(portion.shards)} -> {to}\n" for portion in portions]
        return screen.show_json(rows) if as_json else screen.write("".join(lines))
    with choices.connected(chosen) as connections, bar("push") as drawn:
        outcomes = transfer_scatter.scatter(folder, portions, to, connections, drawn.of, replace)
    show_pushed(outcomes, as_json)


def tensorboard(
    target: TensorboardOptions,
    where: str = argument("A run, or a folder with metrics.jsonl.", default="last", metavar="RUN|DIR"),
) -> None:
    """Write the metrics of a training as TensorBoard files, with Megatron's tags. TensorBoard need not be installed."""
    folder = (
        Path(where)
        if (Path(where) / METRICS_FILE).is_file()
        else options.run_with_results(where, trains=True).progress
    )
    request = TensorboardRequest(run=folder, output=target.output)
    forward("tensorboard", "tensorboard", arguments_of(request))
