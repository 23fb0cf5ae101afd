"""Ask Slurm's own programs: submit, query and cancel jobs."""

from __future__ import annotations

import shutil
import subprocess

from clusterctl.errors import UsageError, WorkFailed

# Seconds for an answer of slurmctld, which may be busy.
ANSWER_LIMIT = 60.0


def is_installed() -> bool:
    """Return whether Slurm's programs are here."""
    return shutil.which("srun") is not None


def hides_devices() -> bool:
    """Return whether the cluster hides from a job the devices that it was not given, so that its own count from 0."""
    return "ConstrainDevices = yes" in " ".join(run("scontrol", "show", "config").split())


def run(*words: str, text: str | None = None) -> str:
    """Return what one of Slurm's programs prints; raise WorkFailed with its message if it fails."""
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"there is no `{words[0]}` here",
            "use a login node of the Slurm cluster, or install Slurm's clients",
        )
    try:
        done = subprocess.run(
            words, input=text, capture_output=True, text=True, check=False, timeout=ANSWER_LIMIT
        )
    except subprocess.TimeoutExpired:
        raise WorkFailed(
            f"{words[0]}: no answer within {ANSWER_LIMIT:g} s", "is slurmctld running?"
        ) from None
    if done.returncode:
        raise WorkFailed(f"{words[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def submit(batch_file: str) -> int:
    """Submit a batch file; return the id of the job."""
    return int(run("sbatch", "--parsable", text=batch_file).strip().partition(";")[0])
