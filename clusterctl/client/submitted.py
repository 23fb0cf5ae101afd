"""Runs that a batch system or a platform starts: their recorded state, and whether their nodes can be reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from clusterctl.backends import backend as backends
from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs.state import read_state


def refresh(run: RunDir) -> None:
    """Update the recorded state of a submitted run; without an answer it stays as it is."""
    with suppress(ClusterctlError):
        backends.of_run(run).refresh([run])


def refresh_all(runs: Sequence[RunDir], note: Callable[[str], object]) -> None:
    """Update the recorded states of the submitted runs, and say which batch system did not answer."""
    for backend, own in backends.by_backend(runs):
        try:
            backend.refresh(own)
        except ClusterctlError as error:
            note(f"{backend.title} could not be queried: {error.message}")


def require_nodes(run: RunDir) -> None:
    """Raise a UsageError if a run still waits for its nodes, or if this machine cannot reach them."""
    if run.phase() is Phase.PENDING:
        state = read_state(run)
        why = state.verdict if state else ""
        raise UsageError(f"{run.run_id} has no nodes yet: {why}", f"clusterctl status {run.run_id}")
    if not backends.of_run(run).reaches_nodes:
        hint = "status, logs and stop work from here; kubectl exec opens a shell in a pod"
        raise UsageError(f"{run.run_id} runs in pods, which cannot be logged in to", hint)
