"""Choose the nodes of a job: those of the inventory, or in a pod those of its platform."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.cli import options, screen
from clusterctl.cli.launch.job_request import JobRequest
from clusterctl.cli.launch.node_choice import Choice
from clusterctl.client.attempts import Target
from clusterctl.errors import UsageError

if TYPE_CHECKING:
    from clusterctl.jobs.job import Job


def target_of(request: JobRequest, choice: Choice, job: Job, *, waits: bool) -> Target:
    """Return the job and nodes of a command line; with `waits`, wait until the platform has completed its rank
    table.
    """
    place = options.place_here() if request.cluster is None else None
    if place is None:
        chosen, spares = choice.of(job)
        return Target(job, chosen, spares)
    from clusterctl.backends.pods import pod

    if request.nodes or request.exclude or request.include:
        problem = f"{place.platform.title} has chosen the nodes, and each starts its own ranks"
        raise UsageError(problem, "leave out --nodes, --exclude and --include, or name an inventory: -c FILE")
    part = pod.part_of(place, job, _tell, waits=waits)
    return Target(pod.adapted(job, _tell), part.whole, part=part)


def _tell(phase: str, text: str) -> None:
    screen.log(f"{phase}: {text}")
