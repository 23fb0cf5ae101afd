"""PBS's words for the states of a job, its batch file, and its hosts (OpenPBS and PBS Professional)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

from clusterctl.backends.hosts import HostsQueue, chosen, clock, job_name, lines_of
from clusterctl.backends.queue import Entry
from clusterctl.errors import UsageError, WorkFailed
from clusterctl.jobs.parts.platforms import PbsOptions

# From this exit status on, a signal ended the batch file: 256 and its number.
SIGNALLED = 256


class Pbs(HostsQueue):
    """Runs that a PBS job starts."""

    name = "pbs"
    part = PbsOptions
    waiting = ("Q", "H", "W", "T")
    active = ("R", "E", "S", "B", "U")
    ends: ClassVar[Mapping[str, str]] = {
        "KILLED": "PBS deleted the job, or a limit ended it",
        "CANCELLED": "the PBS job was deleted",
        "FAILED": "the batch file of the PBS job failed",
    }
    says: ClassVar[Mapping[str, str]] = {
        "Q": "queued",
        "H": "held",
        "W": "waiting for its time",
        "T": "moved",
    }
    choose_nodes = "pbs: {nodes: 4}, or resources: host=node1"
    cancelled = "CANCELLED"
    failed = "FAILED"

    def header(self, name: str, options: PbsOptions, log: str) -> list[str]:
        chunk = ":".join(part for part in (f"{options.nodes}", options.resources) if part)
        # One chunk on each host; mpiprocs lists each host once in the node file.
        lines = [f"-N {job_name(name, 15)}", "-V", "-j oe", f"-o {log}", f"-l select={chunk}:mpiprocs=1"]
        lines += ["-l place=scatter", f"-r {'y' if options.requeue else 'n'}"]
        if options.time:
            lines.append(f"-l walltime={clock(options.time)}")
        lines += chosen(("-q", options.queue), ("-P", options.project))
        return [f"#PBS {line}" for line in (*lines, *options.extra)]

    def submit(self, batch_file: str) -> int:
        return int(self.ask("qsub", text=batch_file).strip().partition(".")[0])

    def entries(self) -> Mapping[int, Entry]:
        return self._jobs("qstat", "-f", "-F", "json")

    def _jobs(self, *words: str) -> dict[int, Entry]:
        jobs = json.loads(self.ask(*words)).get("Jobs", {})
        return {int(name.partition(".")[0]): _entry(facts) for name, facts in jobs.items() if "[" not in name}

    def ended(self, job: int) -> Entry:
        try:
            return self._jobs("qstat", "-x", "-f", "-F", "json", str(job)).get(job, Entry("UNKNOWN"))
        except (UsageError, WorkFailed, ValueError):
            return Entry("UNKNOWN")

    def job_here(self, variables: Mapping[str, str]) -> str:
        return variables.get("PBS_JOBID", "").partition(".")[0]

    def hosts(self, variables: Mapping[str, str]) -> list[str]:
        lines = lines_of("PBS_NODEFILE", variables["PBS_NODEFILE"])
        return list(dict.fromkeys(host for line in lines for host in line.split()))


def _entry(facts: Mapping[str, object]) -> Entry:
    """Return the state of a job; F, which a job has at its end, becomes the way in which it ended."""
    state, status = str(facts.get("job_state", "")), facts.get("Exit_status")
    if state in ("F", "X"):
        ended = "UNKNOWN" if not isinstance(status, int) else "DONE" if status == 0 else "FAILED"
        state = "KILLED" if isinstance(status, int) and (status >= SIGNALLED or status < 0) else ended
    return Entry(state, str(facts.get("comment", "")))


BACKEND = Pbs()
