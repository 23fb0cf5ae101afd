"""srun starts a task on each node of an allocation at once."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import ClassVar

from clusterctl.backends.steps import Starter
from clusterctl.environment import environment
from clusterctl.transport.pipe import START_LIMIT

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
