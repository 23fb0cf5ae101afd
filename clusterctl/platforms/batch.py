"""Write the batch file of a job for Slurm."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from clusterctl.jobs.parts.slurm import SlurmOptions

# Slurm's name for the signal that makes a run save and wait for nodes again.
EARLY_SIGNAL = "USR1"


def batch_file(name: str, options: SlurmOptions, log: str, command: Sequence[str]) -> str:
    """Return a batch file that runs `command` on the first node of the allocation; `log` receives its output."""
    header = [f"#SBATCH {line}" for line in _options(name, options, log)]
    body = ["set -eu", *options.setup, f"exec {shlex.join(command)}"]
    return "\n".join(["#!/bin/bash", *header, "", *body]) + "\n"


def _options(name: str, options: SlurmOptions, log: str) -> Iterator[str]:
    """Yield the options of sbatch; one agent runs on each node and starts the ranks itself."""
    yield f"--job-name={name}"
    yield f"--nodes={options.nodes}"
    yield "--ntasks-per-node=1"
    if options.cpus:
        yield f"--cpus-per-task={options.cpus}"
    for key in ("partition", "account", "qos", "gres", "constraint", "reservation", "exclude", "time"):
        if value := getattr(options, key):
            yield f"--{key}={value}"
    yield f"--output={log}"
    yield "--open-mode=append"
    yield "--requeue" if options.requeue else "--no-requeue"
    if options.signal:
        # B: without it, only the steps get the signal, not the program of this file.
        yield f"--signal=B:{EARLY_SIGNAL}@{options.signal}"
    yield from options.extra
