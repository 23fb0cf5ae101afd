"""Suggest the next commands for a run, and describe the effect of `resume`."""

from __future__ import annotations

from clusterctl.jobs.phase import Phase
from clusterctl.report.summary import RunSummary
from clusterctl.text import plural

# Ranks whose logs are suggested together.
MOST_RANKS = 64


def resume_text(summary: RunSummary) -> str:
    """Return a description of what `clusterctl resume` would do with an ended training; "" if nothing can be
    resumed.
    """
    if not summary.trains or summary.phase not in (Phase.STOPPED, Phase.FAILED, Phase.LOST):
        return ""
    if summary.program:
        return "starts the command again; whether it continues from a checkpoint of its own is up to it"
    if summary.steps_done is None:
        return "starts the training from its beginning: no step was finished"
    if summary.checkpoint is None:
        return f"starts again from step 1: no checkpoint was saved; {plural(summary.steps_done, 'step')} lost"
    step = summary.checkpoint.step
    lost = max(summary.steps_done - step, 0)
    repeated = f"; {plural(lost, 'step')} repeated" if lost else "; nothing is repeated"
    return f"continues after step {step}{repeated}"


def nothing_left(summary: RunSummary) -> str:
    """Return a text saying that a finished training has no steps left; "" if steps are left."""
    if not summary.trains or summary.phase is not Phase.FINISHED or not summary.steps_done:
        return ""
    if summary.steps and summary.steps_done < summary.steps:
        return ""
    return f"nothing is left to do: all {summary.steps_done:,} steps of {summary.run} are done"


def next_commands(summary: RunSummary) -> list[str]:
    """Return commands to continue with, the most useful first."""
    run = summary.run
    if not summary.is_final:
        return [f"clusterctl attach {run}", f"clusterctl status {run}", f"clusterctl stop {run}"]
    commands = []
    if summary.phase is not Phase.FINISHED:
        commands += [f"clusterctl resume {run}", f"clusterctl logs show {run} --errors"]
    if summary.checkpoint and summary.checkpoint.here:
        commands.append(f"clusterctl generate {run} --prompt '...'")
    if summary.trains and summary.steps_done:
        commands.append(f"clusterctl report {run} -o report.html")
    else:
        every = f" --rank 0-{summary.ranks - 1}" if 1 < summary.ranks <= MOST_RANKS else ""
        commands.append(f"clusterctl logs show {run}{every}")
    return commands
