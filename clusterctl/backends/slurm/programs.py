"""Ask Slurm's own programs: submit, query and cancel jobs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from clusterctl.errors import UsageError, WorkFailed

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
