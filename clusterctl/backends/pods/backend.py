"""Runs in pods: their state, logs and end come from the API server; nobody logs in to their nodes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from clusterctl.backends.backend import KNOWN, Backend, Ending
from clusterctl.backends.pods.kube_api import JobApi, KubernetesError, PodState, cause_of, connect
from clusterctl.backends.pods.request import PodRequest, imagined
from clusterctl.backends.queue import write_waiting
from clusterctl.errors import ClusterctlError, UsageError
from clusterctl.files import replace_file
from clusterctl.jobs.job import Job
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs.state import RunState, write_state
from clusterctl.wire.typed_json import BadValue, decode, encode

# The phase of a run for each phase of a pod.
PHASES = {
    "Pending": Phase.PENDING,
    "Running": Phase.RUNNING,
    "Succeeded": Phase.FINISHED,
    "Failed": Phase.FAILED,
}
DELETED = "deleted"
RECORD = KNOWN["pods"].record


@dataclass(frozen=True)
class PodJob:
    """The object of a run, in kubernetes.json of its folder."""

    kind: str
    namespace: str
    name: str
    submitted: float
    ended: str = ""
    """`done`, `failed` or `deleted`; "" until it is known."""

    def api(self) -> JobApi:
        """Return the object in the cluster that kubectl uses here."""
        return JobApi(connect(), self.kind, self.namespace, self.name)

    def describe(self) -> str:
        """Return kind and name for people."""
        return f"{self.kind} {self.name} in namespace {self.namespace}"


def read_pods(run: RunDir) -> PodJob | None:
    """Return the submitted job of a run; None for a run that was not submitted to Kubernetes."""
    try:
        return decode(PodJob, run.read_json(run.root / RECORD))
    except (BadValue, UsageError):
        return None


def write_submitted(run: RunDir, job: Job, request: PodRequest) -> None:
    """Record a run that has just been submitted."""
    submitted = PodJob(request.kind, request.options.namespace, request.name, time.time())
    write_waiting(run, job, imagined(request.options), f"{submitted.describe()} was submitted")
    # The log files of the pods are those of the first attempt; the platform starts the others.
    run.write_record(replace(run.read_record(), attempt=1))
    run.write_json(run.root / RECORD, encode(submitted))


def refresh(run: RunDir) -> None:
    """Update the recorded state of a run from its pods; if the cluster does not answer, nothing changes."""
    submitted = read_pods(run)
    if submitted is None or submitted.ended:
        return
    with contextlib.suppress(ClusterctlError):
        api = submitted.api()
        try:
            outcome, reason = api.ended()
        except KubernetesError as error:
            if error.status != 404:
                raise
            _end(
                run, submitted, DELETED, RunState(Phase.STOPPED, {}, verdict="it was deleted in the cluster")
            )
            return
        pods = api.pods()
        state = _state(run, submitted, pods, outcome, reason)
        if outcome:
            _keep_logs(run, api, pods)
            _end(run, submitted, outcome, state)
        else:
            write_state(run, state)


def _state(run: RunDir, submitted: PodJob, pods: list[PodState], outcome: str, reason: str) -> RunState:
    names = run.read_record().cluster.names
    phases = {name: PHASES.get(pod.phase, Phase.LOST) for name, pod in zip(names, pods, strict=False)}
    if outcome:
        failed = outcome == "failed"
        verdict = cause_of(pods, reason) if failed else ""
        return RunState(Phase.FAILED if failed else Phase.FINISHED, phases, verdict=verdict)
    stuck = next((pod for pod in pods if pod.fatal), None)
    if stuck is None and Phase.RUNNING in phases.values():
        return RunState(Phase.RUNNING, phases)
    waiting = stuck or next((pod for pod in pods if pod.phase == "Pending"), None)
    why = f": {waiting.describe()}" if waiting else ""
    return RunState(Phase.PENDING, phases, verdict=f"{submitted.describe()} is pending{why}")


def _end(run: RunDir, submitted: PodJob, outcome: str, state: RunState) -> None:
    write_state(run, state)
    run.add_event("ended", phase=state.phase, verdict=state.verdict)
    run.write_json(run.root / RECORD, encode(replace(submitted, ended=outcome)))


def _keep_logs(run: RunDir, api: JobApi, pods: list[PodState]) -> None:
    ranks = run.read_record().ranks
    for (node, numbers), pod in zip(ranks.items(), pods, strict=False):
        lines = api.log_lines(pod.name, "")
        if lines:
            file = run.log(node, numbers[0], "out")
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, "".join(f"{text}\n" for _, text in lines))


class Pods(Backend):
    """Runs whose pods a Kubernetes cluster starts."""

    name = "pods"
    reaches_nodes = False
    records_all = True

    def refresh(self, runs: Sequence[RunDir]) -> None:
        for run in runs:
            refresh(run)

    def ending(self, run: RunDir, grace: float | None) -> Ending:
        submitted = read_pods(run)
        if submitted is None:
            raise UsageError(f"{run.run_id}: its {self.record} cannot be read", "kubectl delete job NAME")

        def end() -> tuple[str, list[str]]:
            """Fetch the logs of a run, then delete its job and all objects created for it."""
            api = submitted.api()
            _keep_logs(run, api, api.pods())
            deleted = api.delete()
            if not submitted.ended:
                _end(run, submitted, DELETED, RunState(Phase.STOPPED, {}, verdict="stopped by clusterctl"))
            return f"deleted {', '.join(deleted) or 'nothing'}", deleted

        return Ending(f"delete {submitted.describe()}", end)

    def fetch_logs(self, run: RunDir) -> None:
        """Copy the logs of the pods into the run's folder, one file per pod."""
        submitted = read_pods(run)
        if submitted is not None and not submitted.ended:
            api = submitted.api()
            _keep_logs(run, api, api.pods())


BACKEND = Pods()
