"""Find the backend of a run, of a node, or of this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

from clusterctl.backends.backend import Backend

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.jobs.run_folder import RunDir

# The folder of each backend with the file in the folders of its runs, and with the variables of which its jobs have
# one. A backend is loaded when one of these is found.
RECORDS = {"slurm": "slurm.json", "pods": "kubernetes.json"}
OF_JOBS = {"slurm": ("SLURM_JOB_NODELIST", "SLURM_NODELIST")}
SSH = Backend()


@cache
def named(name: str) -> Backend:
    """Return a backend by its name."""
    return cast(Backend, import_module(f"clusterctl.backends.{name}.backend").BACKEND)


def of_run(run: RunDir) -> Backend:
    """Return the backend that starts the ranks of a run."""
    return next((named(name) for name, file in RECORDS.items() if (run.root / file).exists()), SSH)


def of_node(node: Node) -> Backend:
    """Return the backend whose job holds a node; SSH if none does."""
    name, colon, _ = node.allocation.partition(":")
    # Older records have only the number of a job, which was Slurm's.
    return named(name if colon else "slurm") if node.allocation else SSH


def job_of(node: Node) -> str:
    """Return the number of the job that holds a node."""
    return node.allocation.rpartition(":")[2]


def by_backend(runs: Iterable[RunDir]) -> list[tuple[Backend, list[RunDir]]]:
    """Return the submitted runs of each backend."""
    found: dict[Backend, list[RunDir]] = {}
    for run in runs:
        found.setdefault(of_run(run), []).append(run)
    return [(backend, own) for backend, own in found.items() if backend is not SSH]


def around(variables: Mapping[str, str]) -> Backend | None:
    """Return the backend whose job this process is part of; None outside of a job."""
    found = [name for name, marks in OF_JOBS.items() if any(variables.get(mark) for mark in marks)]
    return named(found[0]) if found else None
