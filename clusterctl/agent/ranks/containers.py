"""Remove the containers of an attempt's ranks: a runtime's daemon keeps them when only its client was killed.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

from typing import Any, Dict, List

from clusterctl.agent.spawn import command, environment

# Seconds that a runtime may take to remove the containers of a node.
LIMIT = 60.0


def removals(spec: Dict[str, Any]) -> List[List[str]]:
    """Return the commands that remove the containers of an attempt; one command for those of one runtime."""
    merged: Dict[str, List[str]] = {}
    for rank in spec.get("ranks") or ():
        words = [str(word) for word in rank.get("remove") or ()]
        if words:
            merged.setdefault(words[0], words[:-1]).append(words[-1])
    return list(merged.values())


def remove(spec: Dict[str, Any]) -> str:
    """Remove what is left of the containers; return why that failed, or "".

    A container that is gone already is no failure.
    """
    problems: List[str] = []
    wanted = removals(spec)
    if not wanted:
        return ""
    # Imported here, because it takes 9 ms of CPU that most attempts do not need.
    import subprocess

    for argv in wanted:
        try:
            done = subprocess.run(
                command(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment({}),
                timeout=LIMIT,
            )
        except (OSError, subprocess.SubprocessError) as problem:
            problems.append("{}: {}".format(argv[0], problem))
            continue
        lines = done.stderr.decode("utf-8", "replace").splitlines()
        problems += [line for line in lines if done.returncode and "no such container" not in line.lower()]
    return "; ".join(problems)[:300]
