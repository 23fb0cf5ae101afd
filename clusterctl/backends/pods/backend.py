"""Runs in pods: their state, logs and end come from the API server; nobody logs in to their nodes."""

from __future__ import annotations

from collections.abc import Sequence

from clusterctl.backends.backend import Backend, Ending
from clusterctl.backends.pods import pod_runs
from clusterctl.errors import UsageError
from clusterctl.jobs.run_folder import RunDir


class Pods(Backend):
    """Runs whose pods a Kubernetes cluster starts."""

    name = "pods"
    reaches_nodes = False
    records_all = True

    def refresh(self, runs: Sequence[RunDir]) -> None:
        for run in runs:
            pod_runs.refresh(run)

    def ending(self, run: RunDir, grace: float | None) -> Ending:
        submitted = pod_runs.read_pods(run)
        if submitted is None:
            raise UsageError(f"{run.run_id}: its {self.record} cannot be read", "kubectl delete job NAME")

        def end() -> tuple[str, list[str]]:
            deleted = pod_runs.delete(run)
            return f"deleted {', '.join(deleted) or 'nothing'}", deleted

        return Ending(f"delete {submitted.describe()}", end)

    def fetch_logs(self, run: RunDir) -> None:
        pod_runs.fetch_logs(run)


BACKEND = Pods()
