"""`checkpoint list`, `info`, `verify`, `diff`, `pull` and `prune`: the checkpoints of a run or a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import options, screen
from clusterctl.errors import Found as SomethingFound

if TYPE_CHECKING:
    from clusterctl.checkpoints.find import Found

Where = Annotated[str, typer.Argument(metavar="RUN|DIR", help="A run, or a folder with checkpoints.")]
Step = Annotated[
    int | None,
    typer.Option(
        "--step", min=0, metavar="N", help="The checkpoint of this step. Default: the newest complete."
    ),
]


@contextmanager
def found_at(where: str) -> Iterator[Found]:
    """Yield the checkpoints of a run, with connections to its nodes open, or those of a folder."""
    from clusterctl.checkpoints import find

    if find.is_folder(where):
        yield find.of_folder(Path(where))
        return
    run = options.run_named(where)
    with options.connected_to(run) as connections:
        found = find.of_run(run, connections)
        for node, reason in found.unreachable.items():
            screen.log(f"{node} is not reachable: {reason}", "yellow")
        yield found


def list_(where: Where = "last", *, as_json: options.Json = False) -> None:
    """List the checkpoints of a run or folder, newest first, with their health and where they are."""
    from clusterctl.cli import checkpoint_view

    with found_at(where) as found:
        if as_json:
            return screen.show_json(checkpoint_view.list_json(found))
        if not found.checkpoints:
            return screen.log(f"{found.source} has no checkpoints yet")
        screen.show(checkpoint_view.list_table(found))


def info(where: Where = "last", step: Step = None, *, as_json: options.Json = False) -> None:
    """Show the size, layout, step, loss, tokens, age and health of a checkpoint, and where each file is."""
    from clusterctl.cli import checkpoint_view

    with found_at(where) as found:
        checkpoint = found.chosen(step)
        holding = next((holding for holding in checkpoint.holdings if holding.entry.digest), None)
        manifest = holding.holder.manifest(holding.entry.path) if holding else {}
        if as_json:
            return screen.show_json(checkpoint_view.info_json(checkpoint, manifest, found.latest))
        screen.show(*checkpoint_view.info(checkpoint, manifest, found.latest))


def verify(
    where: Where = "last",
    step: Step = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Verify every checkpoint, not only one.")] = False,
    as_json: options.Json = False,
) -> None:
    """Compare every file of a checkpoint with its hashes, on the nodes that hold it; damaged files and tensors are
    named, and the exit code is 1."""
    from clusterctl.checkpoints.verify import verify as verified
    from clusterctl.cli import checkpoint_view
    from clusterctl.cli.progress_bar import bar

    with found_at(where) as found, bar("verify") as drawn:
        chosen = found.checkpoints if every else [found.chosen(step)]
        results = []
        for checkpoint in chosen:
            results.append(verified(checkpoint, checkpoint_view.counters(drawn, checkpoint)))
    if as_json:
        screen.show_json(
            {"ok": all(result.ok for result in results), "checkpoints": [r.as_json() for r in results]}
        )
    else:
        for result in results:
            screen.show(screen.safe(checkpoint_view.verified_text(result)))
    bad = [result for result in results if not result.ok]
    if bad:
        names = ", ".join(result.checkpoint.name for result in bad)
        raise SomethingFound(
            f"{found.source}: damaged or incomplete: {names}",
            "a resume passes such checkpoints over and uses an older one; see `clusterctl checkpoint list`",
        )
