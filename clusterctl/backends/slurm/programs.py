"""Slurm's own programs: run them, ask whether a job can start, and start tasks on the nodes of an allocation."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import ClassVar

from clusterctl.backends.steps import Starter
from clusterctl.environment import environment
from clusterctl.errors import UsageError, WorkFailed
from clusterctl.transport.pipe import START_LIMIT

# Seconds for an answer of slurmctld, which may be busy.
ANSWER_LIMIT = 60.0
# What Slurm's programs say where no cluster is configured, or its controller is down.
NO_CLUSTER = ("Could not establish a configuration source", "Unable to contact slurm controller")


def is_installed() -> bool:
    """Return whether Slurm's programs are here."""
    return shutil.which("srun") is not None


def hides_devices() -> bool:
    """Return whether the cluster hides from a job the devices that it was not given, so that its own count from 0."""
    return "ConstrainDevices = yes" in " ".join(run("scontrol", "show", "config").split())


def run(*words: str, text: str | None = None) -> str:
    """Return what one of Slurm's programs prints; raise WorkFailed with its message if it fails."""
    return _answer(_started(words), text)


def run_together(*commands: Sequence[str]) -> list[str]:
    """Return what several of Slurm's programs print that run at the same time; each waits for slurmctld."""
    processes = [_started(words) for words in commands]
    return [_answer(process, None) for process in processes]


def _started(words: Sequence[str]) -> subprocess.Popen[str]:
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"there is no `{words[0]}` here",
            "use a login node of the Slurm cluster, or install Slurm's clients",
        )
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _answer(process: subprocess.Popen[str], text: str | None) -> str:
    assert isinstance(process.args, Sequence)
    name = str(process.args[0])
    with process:
        try:
            out, problem = process.communicate(text, ANSWER_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise _silent(name) from None
    if process.returncode:
        raise WorkFailed(f"{name}: {problem.strip() or f'exit code {process.returncode}'}")
    return out


def _silent(program: str) -> WorkFailed:
    return WorkFailed(f"{program}: no answer within {ANSWER_LIMIT:g} s", "is slurmctld running?")


def refuse_impossible(batch_file: str) -> str:
    """Ask Slurm whether a job could ever start, without submitting it; return when and where it would."""
    words = ("sbatch", "--test-only")
    try:
        done = subprocess.run(
            words, input=batch_file, capture_output=True, text=True, check=False, timeout=ANSWER_LIMIT
        )
    except FileNotFoundError:
        raise UsageError("there is no `sbatch` here", "use a login node of the Slurm cluster") from None
    except subprocess.TimeoutExpired:
        raise _silent("sbatch") from None
    answer = (done.stderr.strip().splitlines() or [""])[-1].removeprefix("sbatch: ")
    if done.returncode:
        reason = answer.removeprefix("error: ").removeprefix("fatal: ").removeprefix("allocation failure: ")
        if any(text in answer for text in NO_CLUSTER):
            remedy = "use a login node of the cluster, where `sinfo` shows its nodes; --print needs no Slurm"
            raise UsageError(f"no Slurm cluster answers here: {reason}", remedy)
        raise UsageError(f"Slurm refuses the job: {reason}", f"change the job's `slurm` part; {offer()}")
    return answer


def offer() -> str:
    """Return what the cluster has, for people: the nodes of each partition and their devices."""
    try:
        lines = run("sinfo", "--noheader", "--format=%R: %D nodes of %c cores, gres %G, time %l").splitlines()
    except (UsageError, WorkFailed):
        return "`sinfo` shows the cluster"
    return "the cluster has " + "; ".join(lines[:8])


# Variables of this process's own task or job that would change what srun does.
OPTIONS = "NTASKS NPROCS CPUS_PER_TASK NTASKS_PER_NODE CPU_BIND EXACT EXCLUSIVE DISTRIBUTION MEM_BIND"
MISLEADING = frozenset(f"SLURM_{name}" for name in OPTIONS.split(" "))


class Srun(Starter):
    """Steps of a Slurm job."""

    title = "Slurm"
    together = True
    hint = "see `squeue --me` and `scontrol show job`: the allocation may have ended"
    feed = ("--input=all",)
    variables: ClassVar[Mapping[str, str | Sequence[str]]] = {
        "node": "SLURMD_NODENAME",
        "launcher": ("SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST"),
        "job": (
            "SLURM_JOB_",
            "SLURM_SUBMIT_",
            "SLURM_CONF",
            "SLURM_CLUSTER_NAME",
            "SLURM_RESTART_COUNT",
            "SLURM_TOPOLOGY",
        ),
        "task": ("SLURM_", "SRUN_", "PMI_", "PMIX_", "PMI2_"),
    }

    def argv(self, job: str, nodes: Sequence[str], *own: str) -> list[str]:
        """Return the command of a step that shares everything with the job's others."""
        return [
            "srun",
            "--overlap",
            f"--jobid={job}",
            f"--nodelist={','.join(nodes)}",
            f"--nodes={len(nodes)}",
            f"--ntasks={len(nodes)}",
            "--ntasks-per-node=1",
            # The ranks use all cores and devices of the job, not those of a task.
            "--cpu-bind=none",
            "--mpi=none",
            "--unbuffered",
            # The failure of one node does not end the others.
            "--no-kill",
            "--kill-on-bad-exit=0",
            "--chdir=/",
            "--quiet",
            *own,
        ]

    def environment(self) -> dict[str, str]:
        """Return the environment of srun, which the tasks inherit: such as modules that a batch file has loaded."""
        return {
            name: value
            for name, value in environment().items()
            if name not in MISLEADING and not name.startswith("CLUSTERCTL_")
        }

    def ports(self) -> tuple[int, int]:
        """Return the cluster's SrunPortRange."""
        try:
            done = subprocess.run(
                ["scontrol", "show", "config"],
                capture_output=True,
                text=True,
                timeout=START_LIMIT,
                env=self.environment(),
            )
        except (OSError, subprocess.TimeoutExpired):
            return 0, 0
        found = re.search(r"^SrunPortRange\s*=\s*(\d+)-(\d+)", done.stdout, re.MULTILINE)
        return (int(found[1]), int(found[2])) if found else (0, 0)
