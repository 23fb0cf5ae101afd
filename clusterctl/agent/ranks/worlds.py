"""Compare the number of ranks that formed a group with the plan: launchers that a rank starts.

A launcher that was not seen in the command starts a group on every node, or for every rank: each group trains alone,
and all of them end well. Only the processes show it.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import os
from typing import Dict, Iterator, List, Mapping, Optional, Tuple

from clusterctl.agent.processes import text_of

# Seconds between two looks while a program starts, and for how long that is.
CLOSE_LOOK, STARTING = 0.2, 3.0
# Factor by which the pauses grow after that, and the longest one in seconds.
LONGER, LONGEST = 1.5, 60.0
# Variables by which a launcher tells its ranks who they are.
NUMBERS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "RANK_ID", "MS_NODE_ID",
    "PADDLE_TRAINER_ID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK",
)  # fmt: skip
# Variables in which launchers pass on the number of ranks: MPI's, and those of the others.
OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# Files that Open MPI maps when a program sets it up; a library that is only loaded maps none of them.
OF_ONE = ("/sm_segment.", "/vader_segment.", "/mca_ess_singleton.so")
OF_OTHERS = ("WORLD_SIZE", "MS_WORKER_NUM", "PADDLE_TRAINERS_NUM")


class Worlds:
    """Looks at the processes below the ranks of this node."""

    def __init__(
        self, sizes: List[int], launchers: Mapping[str, List[str]], now: float, alone: bool = False
    ) -> None:
        """`sizes` are those that a group may have; without any, no rank may start one of the `launchers`.

        Without launchers nothing is compared. `alone`: a rank that sets up MPI would be alone in its group.
        """
        self.sizes, self.launchers, self.alone = sizes, launchers, alone
        self.began = self.next = now
        self.pause = CLOSE_LOOK

    def wait(self, most: float, now: float) -> float:
        """Return the seconds until the next look, at most `most`."""
        return most if not self.launchers else max(0.01, min(most, self.next - now))

    def find(self, pids: Mapping[int, int], now: float) -> Optional[Dict[str, object]]:
        """Return the rank whose group has another size than planned, with the reason; `pids` are those of the ranks."""
        if not self.launchers or now < self.next:
            return None
        if now - self.began > STARTING:
            self.pause = min(self.pause * LONGER, LONGEST)
        self.next = now + self.pause
        for rank, pid in pids.items():
            if self.alone and any(mark in text_of(f"/proc/{pid}/maps") for mark in OF_ONE):
                return {"rank": rank, "world": "set up MPI without mpirun, and is rank 0 of 1"}
            for launcher, size in self._groups(pid):
                if not self.sizes:
                    return {"rank": rank, "world": "started the launcher %s itself" % launcher}
                if size is not None and size not in self.sizes:
                    planned = " or ".join(map(str, self.sizes))
                    words = "%s formed a group of %d, and the run has %s ranks" % (launcher, size, planned)
                    return {"rank": rank, "world": words}
        return None

    def _groups(self, rank: int) -> "Iterator[Tuple[str, Optional[int]]]":
        """Yield the launchers of a rank, and for each of their ranks the size of its group."""
        below: List[Tuple[int, str, Dict[str, str]]] = [(rank, "", {})]
        for pid, above, variables in below:
            launcher = self._launcher(pid)
            if launcher:
                yield launcher, None
                above, variables = launcher, _variables(pid)
            elif above:
                own = _variables(pid)
                if any(own.get(name) != variables.get(name) for name in NUMBERS):
                    names = (
                        (*OF_MPI, *OF_OTHERS) if (own.keys() - variables.keys()) & set(OF_MPI) else OF_OTHERS
                    )
                    yield above, next((int(own[name]) for name in names if own.get(name, "").isdigit()), None)
                    continue
            # The list grows while it is walked: this visits every generation.
            below.extend((child, above, variables) for child in _children(pid))

    def _launcher(self, pid: int) -> str:
        """Return the name of the launcher that a process is; an empty text for any other."""
        words = text_of(f"/proc/{pid}/cmdline").split("\0")
        index = 0
        if os.path.basename(words[0]).startswith("python"):
            index = 1
            while words[index : index + 1] and words[index].startswith("-"):
                index += 1
        named = words[index] if index < len(words) else ""
        # A script of Python without a folder in its name is one of the current folder.
        if index and "/" not in named and not words[index - 1].endswith("m"):
            return ""
        name = os.path.basename(named)
        verbs = self.launchers.get(name)
        if verbs is None or (verbs and words[index + 1 : index + 2] not in [[verb] for verb in verbs]):
            return ""
        return str(name)


def _variables(pid: int) -> Dict[str, str]:
    entries = text_of(f"/proc/{pid}/environ").split("\0")
    return dict(entry.partition("=")[::2] for entry in entries if "=" in entry)


def _children(pid: int) -> List[int]:
    """Return the children of a process, which any of its threads may have started."""
    folder = f"/proc/{pid}/task"
    try:
        threads = os.listdir(folder)
    except OSError:
        return []
    return [int(child) for thread in threads for child in text_of(f"{folder}/{thread}/children").split()]
