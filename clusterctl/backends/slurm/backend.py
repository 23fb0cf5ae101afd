"""Slurm's words for the states of a job, its batch file, and its nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from clusterctl.backends.backend import Platform, job_of
from clusterctl.backends.queue import Entry, Queue, imagined_nodes
from clusterctl.backends.slurm import allocation, programs
from clusterctl.backends.slurm.programs import Srun
from clusterctl.backends.steps import StepTransport
from clusterctl.environment import environment
from clusterctl.errors import UsageError, WorkFailed
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.parts.platforms import SlurmOptions
from clusterctl.jobs.run_folder import RunDir
from clusterctl.transport.fanout import Transport

# Slurm's name for the signal that makes a run save and wait for nodes again.
EARLY_SIGNAL = "USR1"
ENDS = {
    "TIMEOUT": "Slurm ended the job at its time limit",
    "DEADLINE": "Slurm ended the job at its deadline",
    "PREEMPTED": "Slurm preempted the job for another one",
    "NODE_FAIL": "a node of the Slurm job failed",
    "BOOT_FAIL": "a node of the Slurm job did not boot",
    "CANCELLED": "the Slurm job was cancelled",
    "OUT_OF_MEMORY": "Slurm killed the job because its memory ran out",
    "FAILED": "the batch file of the Slurm job failed",
}
# What slurmstepd writes to the log when Slurm ends a job, and what `submit start` does before it requeues one.
STEPD = {
    "PREEMPTION": ENDS["PREEMPTED"],
    "TIME LIMIT": ENDS["TIMEOUT"],
    "NODE FAILURE": ENDS["NODE_FAIL"],
}
PUT_BACK = re.compile(
    rf"CANCELLED AT \S+ DUE TO (?P<stepd>{'|'.join(STEPD)})|^(?P<ours>[a-z ]+); Slurm job \d+ waits",
    re.MULTILINE,
)


class Slurm(Queue):
    """Runs that a Slurm job starts."""

    name = "slurm"
    part = SlurmOptions
    way = "srun"
    platform = Platform(
        "slurm",
        "Slurm",
        ("SLURM_JOB_ID",),
        ("SLURM_NODEID",),
        count=("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
        peers=("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        devices=("SLURM_GPUS_ON_NODE",),
        reaches_others=True,
        folds=True,
    )
    waiting = (
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_HOLD",
        "REQUEUE_FED",
        "SPECIAL_EXIT",
        "RESV_DEL_HOLD",
    )
    active = ("RUNNING", "COMPLETING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "STOPPED", "RESIZING")
    ends: ClassVar[Mapping[str, str]] = ENDS
    choose_nodes = "slurm: {nodes: 4}, or exclude"
    cancelled = "CANCELLED"
    failed = "FAILED"

    def imagined(self, options: SlurmOptions) -> Cluster:
        name, _, rest = options.gres.partition(":")
        count = rest.rpartition(":")[2]
        kind = allocation.KINDS.get(name.lower(), "cpu")
        return imagined_nodes(self.name, options.nodes, kind, int(count) if count.isdecimal() else 1)

    def header(self, name: str, options: SlurmOptions, log: str) -> list[str]:
        """Return the options of sbatch; one agent runs on each node and starts the ranks itself."""
        lines = [f"--job-name={name}", f"--nodes={options.nodes}", "--ntasks-per-node=1"]
        if options.cpus:
            lines.append(f"--cpus-per-task={options.cpus}")
        for key in ("partition", "account", "qos", "gres", "constraint", "reservation", "exclude", "time"):
            if value := getattr(options, key):
                lines.append(f"--{key}={value}")
        lines += [f"--output={log}", "--open-mode=append"]
        lines.append("--requeue" if options.requeue else "--no-requeue")
        if options.signal:
            # B: without it, only the steps get the signal, not the program of this file.
            lines.append(f"--signal=B:{EARLY_SIGNAL}@{options.signal}")
        return [f"#SBATCH {line}" for line in (*lines, *options.extra)]

    def test(self, batch_file: str) -> str:
        return programs.refuse_impossible(batch_file)

    def submit(self, batch_file: str) -> int:
        return int(programs.run("sbatch", "--parsable", text=batch_file).strip().partition(";")[0])

    def entries(self) -> Mapping[int, Entry]:
        text = programs.run("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r|%N|%S")
        rows = (line.strip().split("|") for line in text.splitlines())
        return {int(job): Entry(*rest) for job, *rest in rows if job.isdecimal() and len(rest) == 4}

    def ended(self, job: int) -> Entry:
        """Return a job as the accounting has it, if the cluster keeps one."""
        try:
            text = programs.run("sacct", "--noheader", "--allocations", f"--jobs={job}", "--format=State%20")
        except (UsageError, WorkFailed):
            return Entry("UNKNOWN")
        # `CANCELLED by 1000`
        words = text.split()
        return Entry(words[0].rstrip("+")) if words else Entry("UNKNOWN")

    def cancel(self, job: int) -> None:
        programs.run("scancel", str(job))

    def requeue(self, run: RunDir, job: str) -> int:
        programs.run("scontrol", "requeue", job)
        return 0

    def end_of(self, job: str) -> str:
        try:
            text = programs.run("scontrol", "show", "job", job, "--oneliner")
        except (UsageError, WorkFailed):
            return ""
        facts = {key: text.partition(f" {key}=")[2].partition(" ")[0] for key in ("JobState", "Reason")}
        return "TIMEOUT" if facts["Reason"] == "TimeLimit" else facts["JobState"]

    def starts(self, variables: Mapping[str, str]) -> int:
        return int(variables.get("SLURM_RESTART_COUNT") or 0)

    def put_back(self, text: str) -> str:
        found = list(PUT_BACK.finditer(text))
        return (found[-1]["ours"] or STEPD[found[-1]["stepd"]]) if found else ""

    def allocated(self, variables: Mapping[str, str], kind: str) -> Cluster:
        return allocation.named(variables, kind)

    def described(self, cluster: Cluster) -> Cluster:
        return allocation.described(cluster)

    def transport(self, nodes: Sequence[Node]) -> Transport:
        return StepTransport(Srun(), nodes)

    def begin(self, transport: Transport) -> None:
        assert isinstance(transport, StepTransport)
        transport.begin()

    def terminal(self, node: Node, command: str) -> list[str]:
        shell = ["--pty", environment().get("SHELL", "/bin/sh"), "-l"]
        return Srun().argv(job_of(node), [node.host], *(["/bin/sh", "-c", command] if command else shell))

    def ask_for(self, kind: str) -> str:
        return f"gres: {'gpu' if kind == 'cuda' else kind}:N"


BACKEND = Slurm()
