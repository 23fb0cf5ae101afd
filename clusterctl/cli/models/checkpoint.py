"""`checkpoint list`, `info`, `verify`, `diff`, `pull` and `prune`: the checkpoints of a run or a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.backends import backend as backends
from clusterctl.cli import options, screen
from clusterctl.cli.declared import flag, option
from clusterctl.errors import FindingsError, UsageError
from clusterctl.text import escape_controls, plural, size

if TYPE_CHECKING:
    from clusterctl.checkpoints.checkpoint import CheckpointList
    from clusterctl.checkpoints.diff import Side
    from clusterctl.jobs.run_folder import RunDir

Where = Annotated[str, typer.Argument(metavar="RUN|DIR", help="A run, or a folder with checkpoints.")]
Step = Annotated[
    int | None,
    typer.Option(
        "--step", min=0, metavar="N", help="The checkpoint of this step. Default: the newest complete."
    ),
]


@contextmanager
def found_at(where: str) -> Iterator[CheckpointList]:
    """Yield the checkpoints of a run, with connections to its nodes open, or those of a folder."""
    from clusterctl.checkpoints import find

    if find.is_folder(where):
        yield find.of_folder(Path(where))
        return
    run = options.run_with_results(where, trains=True)
    if not backends.of_run(run).reaches_nodes:
        yield in_store(run)
        return
    with options.connected_to(run) as connections:
        found = find.of_run(run, connections)
        for node, reason in found.unreachable.items():
            screen.log(f"{node} is not reachable: {reason}", "yellow")
        yield found


def in_store(run: RunDir) -> CheckpointList:
    """Return the checkpoints of a run in pods: only those in its store are reached from here."""
    from clusterctl.checkpoints.store_holder import of_store
    from clusterctl.checkpoints.stored import access_of

    record = run.read_record()
    access = access_of(record.job, record.folder_name)
    if access is None:
        problem = f"{run.run_id} runs in pods, whose disks are not reached from here"
        raise UsageError(problem, "give the job an object store: train: {save: {to: s3://BUCKET/FOLDER}}")
    return of_store(run.run_id, access)


def list_(where: Where = "last", *, as_json: options.Json = False) -> None:
    """List the checkpoints of a run or folder, newest first, with their health and where they are."""
    from clusterctl.cli.views import checkpoints

    with found_at(where) as found:
        if as_json:
            return screen.show_json(checkpoints.list_json(found))
        if not found.checkpoints and found.unreachable:
            found.chosen(None)
        if not found.checkpoints:
            return screen.log(f"{found.source} has no checkpoints yet")
        screen.show(checkpoints.list_table(found))


def info(where: Where = "last", step: Step = None, *, as_json: options.Json = False) -> None:
    """Show the size, layout, step, loss, tokens, age and health of a checkpoint, and where each file is."""
    from clusterctl.cli.views import checkpoints

    with found_at(where) as found:
        checkpoint = found.chosen(step)
        manifest = checkpoint.manifest() if checkpoint.readable else None
        if as_json:
            return screen.show_json(checkpoints.info_json(checkpoint, manifest, found.latest))
        screen.show(*checkpoints.info(checkpoint, manifest, found.latest))


def verify(
    where: Where = "last",
    step: Step = None,
    *,
    every: bool = flag("Verify every checkpoint, not only one.", "--all"),
    as_json: options.Json = False,
) -> None:
    """Compare every file of a checkpoint with its hashes, on the nodes that hold it; damaged files and tensors are
    named, and the exit code is 1."""
    from clusterctl.checkpoints.verify import verify as verified
    from clusterctl.cli.views import checkpoints
    from clusterctl.cli.views.progress_bar import bar

    if every and step is not None:
        raise UsageError("--all and --step exclude each other", "leave one of them out")
    with found_at(where) as found, bar("verify") as drawn:
        chosen = found.checkpoints if every else [found.chosen(step)]
        results = []
        for checkpoint in chosen:
            results.append(verified(checkpoint, checkpoints.counters(drawn, checkpoint)))
    if as_json:
        screen.show_json(
            {"ok": all(result.ok for result in results), "checkpoints": [r.as_json() for r in results]}
        )
    else:
        for result in results:
            screen.show(screen.safe(checkpoints.verified_text(result)))
    bad = [result for result in results if not result.ok]
    if bad:
        names = ", ".join(result.checkpoint.name for result in bad)
        raise FindingsError(
            f"{found.source}: damaged or incomplete: {names}",
            "a resume skips such checkpoints and uses an older one; see `clusterctl checkpoint list`",
        )


def pull(
    where: Where = "last",
    step: Step = None,
    output: Path | None = option(
        "The checkpoint's folder here. Default: in the run's folder.", "--output", "-o", metavar="DIR"
    ),
    *,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Fetch a checkpoint from the nodes that have its files, each file once, and verify every byte."""
    from clusterctl.checkpoints import find
    from clusterctl.checkpoints.pull import plan_pull
    from clusterctl.checkpoints.pull import pull as fetch
    from clusterctl.cli.views.progress_bar import bar

    if output is not None and not output.name:
        raise UsageError(f"-o {str(output)!r}: does not name a folder", "as in -o best")
    with found_at(where) as found:
        checkpoint = found.chosen(step)
        if output is None:
            if find.is_folder(where):
                raise UsageError(f"{where} is on this machine", "name the folder of the copy: -o DIR")
            output = options.run_with_results(where, trains=True).checkpoints / checkpoint.name
        made = plan_pull(checkpoint, checkpoint.manifest(), output.absolute())
        if not dry_run:
            with bar("pull") as drawn:
                fetch(made, drawn.of)
    if as_json:
        return screen.show_json({"dry_run": dry_run, **made.as_json()})
    verb = "would fetch" if dry_run else "fetched and verified"
    for part in made.fetches:
        files = plural(len(part.names), "file")
        screen.write(f"{verb} {files} ({size(part.bytes)}) from {part.holding.holder.name}\n")
    screen.write(
        escape_controls(f"{made.dest}: step {checkpoint.step}, {size(checkpoint.facts.bytes)}") + "\n"
    )


def prune(
    where: Where = "last",
    last: int | None = option("Keep the newest N checkpoints.", "--keep-last", min=1, metavar="N"),
    every: int = option(
        "Keep those whose step is a multiple of N.", "--keep-every", default=0, min=0, metavar="N"
    ),
    best: int = option(
        "Keep the N with the lowest evaluation loss.", "--keep-best", default=0, min=0, metavar="N"
    ),
    *,
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    as_json: options.Json = False,
) -> None:
    """Delete old checkpoints of a run on its nodes and here, or of a folder. The newest complete checkpoint stays, and
    so does one that is being read or copied."""
    from clusterctl.checkpoints.prune import Keep
    from clusterctl.checkpoints.prune import prune as remove
    from clusterctl.cli.views import checkpoints

    if last is None and not every and not best:
        raise UsageError(
            "no option says which checkpoints to keep",
            "as in --keep-last 2, with --keep-every and --keep-best",
        )
    keep = Keep(last or 1, every, best)
    with found_at(where) as found:
        results = remove(found, keep, dry_run=True)
        gone = [result for result in results if not result.kept]
        if not dry_run and gone:
            if not screen.ask(f"delete {plural(len(gone), 'checkpoint')} of {found.source}?", yes=yes):
                problem = f"{plural(len(gone), 'checkpoint')} would be deleted"
                raise UsageError(problem, "--yes deletes them, --dry-run lists them")
            results = remove(found, keep, dry_run=False)
    if as_json:
        return screen.show_json({"dry_run": dry_run, "checkpoints": [result.as_json() for result in results]})
    for result in results:
        screen.write(escape_controls(checkpoints.pruned_line(result, dry_run=dry_run)) + "\n")
    gone = [result for result in results if not result.kept]
    verb = "would delete" if dry_run else "deleted"
    freed = size(sum(result.bytes for result in gone))
    screen.log(f"{verb} {plural(len(gone), 'checkpoint')}, {freed}; kept {len(results) - len(gone)}")


def diff(
    first: Annotated[str, typer.Argument(metavar="RUN[:STEP]|DIR", help="A run, or a checkpoint's folder.")],
    second: Annotated[str, typer.Argument(metavar="RUN[:STEP]|DIR", help="What it is compared with.")],
    *,
    as_json: options.Json = False,
) -> None:
    """Show which tensors of two checkpoints differ, and by how much. The nodes that have the files compare them; the
    exit code is 1 if any tensor differs."""
    from clusterctl.cli.models.checkpoint_diff import compared
    from clusterctl.cli.views import checkpoints

    with side_at(first) as one_side, side_at(second) as other_side:
        result = compared(one_side, other_side)
    if as_json:
        screen.show_json(checkpoints.diff_json(result))
    else:
        screen.show(*checkpoints.diff(result))
    if not result.equal:
        raise FindingsError(f"{first} and {second} differ")


@contextmanager
def side_at(where: str) -> Iterator[Side]:
    """Yield the checkpoint that one argument of `diff` names."""
    from clusterctl.checkpoints.diff import Side
    from clusterctl.checkpoints.find import is_folder

    name, colon, step = where.rpartition(":")
    named = colon and step.isascii() and step.isdecimal() and not is_folder(where)
    with found_at(name if named else where) as found:
        checkpoint = found.chosen(int(step) if named else None)
        run = None if is_folder(where) else options.run_with_results(name if named else where, trains=True)
        code = run.read_record().code_paths if run else {}
        yield Side(checkpoint, checkpoint.manifest(), code)
