"""The key `workdir`, and the folder on a node in which the ranks of a program start."""

from __future__ import annotations

import posixpath


def work_folder(run_dir: str, kept_name: str = "") -> str:
    """Return the folder on a node in which the ranks of a program start: one per run, for all nodes on the same disk.

    `run_dir` is the run's folder there. With a name, it is the folder that all runs of a job share.
    """
    runs, run_id = posixpath.split(posixpath.dirname(run_dir))
    return posixpath.join(posixpath.dirname(runs), "work", kept_name or run_id)
