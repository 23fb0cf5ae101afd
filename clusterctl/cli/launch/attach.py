"""`attach`, and the command of a run's controller: follow or control a run that was started before."""

from __future__ import annotations

from typing import Annotated

import typer

from clusterctl.cli import options, screen
from clusterctl.cli.launch.run import (
    conclude,
    follow_to_the_end,
    put_in_charge,
    warn_about_missing_variables,
)
from clusterctl.interrupts import EXIT_INTERRUPTED


def attach(
    run: options.RunName = "last",
    *,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Start a new controller, even if the old one is still running."),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing; wait for the end of the run.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Follow an active run; Ctrl-C leaves it running. If its controller died, a new one is started."""
    from clusterctl.runs import in_charge
    from clusterctl.runs.overview import read_progress
    from clusterctl.runs.state import read_state

    found = options.run_named(run)
    trains = found.read_record().job.train is not None
    if take_over:
        in_charge.end(found)
    state = read_state(found) if found.controller() is None and found.phase().is_final else None
    if state is not None:
        # The end is recorded here: no node is contacted.
        conclude(found, state, as_json=as_json, quiet=quiet)
        return
    with options.connected_to(found) as connections:
        if found.controller() is None and not found.phase().is_final:
            screen.log(f"{found.run_id} has no controller; starting a new one")
            warn_about_missing_variables(found)
            put_in_charge(found)
        known = found.written_metrics()
        try:
            follow_to_the_end(
                found,
                connections,
                stop_on_interrupt=False,
                trains=trains,
                quiet=quiet,
                as_json=as_json,
                known=known,
                progress=read_progress(found.metric_lines()) if trains else None,
            )
        except KeyboardInterrupt:
            # The run is not interrupted, only this command.
            again = f"clusterctl attach {found.run_id}"
            screen.log(f"the run continues; {again} follows it again, clusterctl stop {found.run_id} ends it")
            raise typer.Exit(EXIT_INTERRUPTED) from None


def control(run: options.RunName) -> None:
    """Control a run until its end. `launch`, `resume` and `attach` start this command."""
    from clusterctl.memory import use_one_arena
    from clusterctl.runs import in_charge

    use_one_arena()
    found = options.run_named(run)
    with options.connected_to(found) as connections:
        in_charge.serve(found, connections, lambda: screen.write(in_charge.READY.decode()))
