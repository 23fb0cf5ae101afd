"""LSF's words for the states of a job, its batch file, and its hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from clusterctl.backends.hosts import HostsQueue, chosen, job_name, seconds
from clusterctl.backends.queue import Entry
from clusterctl.backends.steps import Starter
from clusterctl.environment import environment
from clusterctl.errors import UsageError, WorkFailed
from clusterctl.jobs.parts.platforms import LsfOptions
from clusterctl.jobs.run_folder import RunDir

FIELDS = "jobid stat exit_reason pend_reason start_time delimiter='|'"


class Blaunch(Starter):
    """Tasks of an LSF job."""

    title = "LSF"
    hint = "see `bjobs -l`: the job may have ended"
    variables: ClassVar[Mapping[str, str | Sequence[str]]] = {
        "node": "HOSTNAME",
        "launcher": ("LSB_SUB_HOST_NOWHERE",),
        "job": ("LSF_ENVDIR", "LSF_BINDIR", "LSF_SERVERDIR", "LSF_LIBDIR", "LSB_JOBID"),
        "task": ("LSB_", "LSF_", "LS_"),
    }

    def argv(self, job: str, nodes: Sequence[str], *own: str) -> list[str]:
        return ["blaunch", "-no-shell", *nodes, *own]

    def environment(self) -> dict[str, str]:
        return environment()


class Lsf(HostsQueue):
    """Runs that an LSF job starts."""

    name = "lsf"
    part = LsfOptions
    way = "blaunch"
    waiting = ("PEND", "PSUSP", "WAIT", "PROV")
    active = ("RUN", "USUSP", "SSUSP", "UNKWN")
    ends: ClassVar[Mapping[str, str]] = {
        "LIMIT": "LSF ended the job at its time limit",
        "MEMORY": "LSF killed the job because its memory ran out",
        "PREEMPTED": "LSF preempted the job for another one",
        "CANCELLED": "the LSF job was killed",
        "EXIT": "the batch file of the LSF job failed",
    }
    choose_nodes = "lsf: {nodes: 4}, or extra: [-m host1]"
    cancelled = "CANCELLED"
    failed = "EXIT"
    deletes = "bkill"
    starter = Blaunch()

    def header(self, name: str, options: LsfOptions, log: str) -> list[str]:
        lines = [f"-J {job_name(name, 100)}", f"-n {options.nodes}", '-R "span[ptile=1]"', f"-o {log}"]
        lines.append("-r" if options.requeue else "-rn")
        if options.time:
            lines.append(f"-W {-(-seconds(options.time) // 60)}")
        lines += chosen(("-q", options.queue), ("-P", options.project), ("-R", options.resources))
        return [f"#BSUB {line}" for line in (*lines, *options.extra)]

    def submit(self, batch_file: str) -> int:
        answer = self.ask("bsub", text=batch_file)
        number = re.search(r"Job <(\d+)>", answer)
        if number is None:
            raise WorkFailed(f"bsub: {' '.join(answer.split())}")
        return int(number[1])

    def entries(self) -> Mapping[int, Entry]:
        return self._jobs()

    def _jobs(self, *chosen: str) -> dict[int, Entry]:
        rows = (
            line.split("|")
            for line in self.ask("bjobs", "-noheader", "-a", "-o", FIELDS, *chosen).splitlines()
        )
        return {int(row[0]): _entry(row) for row in rows if len(row) == 5 and row[0].isdecimal()}

    def ended(self, job: int) -> Entry:
        try:
            return self._jobs(str(job)).get(job, Entry("UNKNOWN"))
        except (UsageError, WorkFailed):
            return Entry("UNKNOWN")

    def requeue(self, run: RunDir, job: str) -> int:
        self.ask("brequeue", job)
        return 0

    def job_here(self, variables: Mapping[str, str]) -> str:
        return variables.get("LSB_JOBID", "")

    def hosts(self, variables: Mapping[str, str]) -> list[str]:
        # `host1 4 host2 4`
        return list(dict.fromkeys(variables["LSB_MCPU_HOSTS"].split()[::2]))


def _entry(row: Sequence[str]) -> Entry:
    """Return the state of a job; EXIT becomes the way in which LSF ended it, if it did."""
    _, state, ended, pending, start = row
    reasons = {"TERM_RUNLIMIT": "LIMIT", "TERM_MEMLIMIT": "MEMORY", "TERM_PREEMPT": "PREEMPTED"}
    reasons |= {"TERM_OWNER": "CANCELLED", "TERM_ADMIN": "CANCELLED", "TERM_FORCE_OWNER": "CANCELLED"}
    if state == "EXIT":
        return Entry(next((word for text, word in reasons.items() if ended.startswith(text)), state))
    return Entry(state, pending.strip("-"), "", start.strip("-"))


BACKEND = Lsf()
