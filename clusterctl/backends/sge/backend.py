"""Grid Engine's words for the states of a job, its batch file, and its hosts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import ClassVar
from xml.etree import ElementTree

from clusterctl.backends.hosts import HostsQueue, chosen, job_name, lines_of, seconds
from clusterctl.backends.queue import Entry
from clusterctl.backends.steps import Starter
from clusterctl.environment import environment
from clusterctl.errors import UsageError, WorkFailed
from clusterctl.jobs.parts.platforms import SgeOptions
from clusterctl.jobs.run_folder import RunDir

# A batch file that ends with this code goes back into the queue under its number.
BACK = 99
# qacct's codes of `failed`: a limit of time or memory, and a job that a signal ended.
LIMIT, SIGNALLED = "37", "100"


class Qrsh(Starter):
    """Tasks of a Grid Engine job; each host takes as many at a time as the job has slots there."""

    title = "Grid Engine"
    hint = "see `qconf -sp NAME`: the parallel environment needs control_slaves TRUE"
    variables: ClassVar[Mapping[str, str | Sequence[str]]] = {
        "node": "HOSTNAME",
        "launcher": (),
        "job": ("SGE_ROOT", "SGE_CELL", "SGE_QMASTER_PORT", "SGE_EXECD_PORT"),
        "task": ("SGE_", "QRSH_", "PE_", "OMPI_"),
    }

    def argv(self, job: str, nodes: Sequence[str], *own: str) -> list[str]:
        # qrsh gives its words to a shell.
        return ["qrsh", "-inherit", "-V", *nodes, shlex.join(own)]

    def environment(self) -> dict[str, str]:
        return environment()


class Sge(HostsQueue):
    """Runs that a Grid Engine job starts."""

    name = "sge"
    part = SgeOptions
    way = "qrsh"
    waiting = ("qw", "hqw", "Rq", "hRq", "Eqw")
    active = ("r", "t", "Rr", "Rt", "s", "S", "T", "ts", "tS", "dr", "dt", "dRr", "Rs", "RS", "RT")
    ends: ClassVar[Mapping[str, str]] = {
        "LIMIT": "Grid Engine ended the job at a limit",
        "KILLED": "Grid Engine deleted the job, or a limit ended it",
        "CANCELLED": "the Grid Engine job was deleted",
        "FAILED": "the batch file of the Grid Engine job failed",
    }
    says: ClassVar[Mapping[str, str]] = {
        "qw": "waiting",
        "hqw": "held",
        "Rq": "waiting again",
        "hRq": "held",
        "Eqw": "in an error state, and will not start",
    }
    choose_nodes = "sge: {nodes: 4}, or extra: [-q all.q@node1]"
    cancelled = "CANCELLED"
    failed = "FAILED"
    starter = Qrsh()

    def header(self, name: str, options: SgeOptions, log: str) -> list[str]:
        # -notify: SIGUSR2 comes before SIGKILL.
        lines = [f"-N {job_name(name, 100)}", "-S /bin/bash", "-cwd", "-V", "-j y", f"-o {log}", "-notify"]
        lines.append(f"-r {'y' if options.requeue else 'n'}")
        if options.pe:
            lines.append(f"-pe {options.pe} {options.nodes * options.slots}")
        if options.time:
            lines.append(f"-l h_rt={seconds(options.time)}")
        lines += chosen(("-q", options.queue), ("-P", options.project), ("-l", options.resources))
        return [f"#$ {line}" for line in (*lines, *options.extra)]

    def test(self, batch_file: str) -> str:
        try:
            return " ".join(self.ask("qsub", "-w", "v", text=batch_file).split())
        except WorkFailed as refused:
            remedy = "change the job's `sge` part; `qhost` and `qconf -spl` show what the cluster has"
            raise UsageError(f"Grid Engine refuses the job: {refused.message}", remedy) from None

    def submit(self, batch_file: str) -> int:
        return int(self.ask("qsub", "-terse", text=batch_file).split()[-1].partition(".")[0])

    def entries(self) -> Mapping[int, Entry]:
        jobs = ElementTree.fromstring(self.ask("qstat", "-xml")).iter("job_list")
        found = {int(job.findtext("JB_job_number", "0")): job.findtext("state", "") for job in jobs}
        return {
            number: Entry(state, self._why(number) if state.startswith("E") else "")
            for number, state in found.items()
        }

    def _why(self, job: int) -> str:
        """Return why a job is in an error state and will not start."""
        answer = re.search(r"^error reason\s+\d+:\s*(.+)", self.ask("qstat", "-j", str(job)), re.MULTILINE)
        return f"{answer[1].strip()}; `qmod -cj {job}` clears it" if answer else ""

    def ended(self, job: int) -> Entry:
        try:
            facts = dict(re.findall(r"^(\w+) +(\S+)", self.ask("qacct", "-j", str(job)), re.MULTILINE))
        except (UsageError, WorkFailed):
            return Entry("UNKNOWN")
        if facts.get("failed", "0") != "0":
            return Entry(
                {LIMIT: "LIMIT", SIGNALLED: "KILLED"}.get(facts["failed"], f"failed {facts['failed']}")
            )
        return Entry("DONE" if facts.get("exit_status") == "0" else self.failed)

    def requeue(self, run: RunDir, job: str) -> int:
        """Put the job back, or submit it again: one with several hosts may never start then (seen with 8.1.9)."""
        return BACK if self.options(run.read_record().job).nodes == 1 else super().requeue(run, job)

    def job_here(self, variables: Mapping[str, str]) -> str:
        return (
            variables.get("JOB_ID", "") if variables.get("PE_HOSTFILE") or variables.get("SGE_ROOT") else ""
        )

    def hosts(self, variables: Mapping[str, str]) -> list[str]:
        file = variables.get("PE_HOSTFILE", "")
        if not file:
            return [variables.get("HOSTNAME", "localhost")]
        # A host has a line for each of its queues.
        lines = lines_of("PE_HOSTFILE", file)
        return list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))


BACKEND = Sge()
