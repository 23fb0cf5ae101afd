"""Messages between ranks without a collective: a disk may be slow, and collectives have a timeout."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from trainer.errors import TrainingFailed
from trainer.parallel.group import Group

# Seconds between two reads of the board: a fraction of the wait so far, longer with many ranks, whose reads add up.
SOONEST, LATEST, SHARE = 0.002, 0.2, 0.05


class Board:
    """Entries that every rank can post and read, in the key-value store of the rendezvous."""

    def __init__(self, group: Group, name: str) -> None:
        self.rank, self.world = group.rank, group.world
        self.writer = f"rank {group.rank}" + (f" on {group.node}" if group.node else "")
        self._store, self._name = group.store, name
        self.stale: list[str] = []
        """Entries of the last save, which rank 0 removes once every rank has begun the next one."""
        # A single rank needs no store.
        self._own: dict[str, bytes] = {}

    def post(self, key: str, value: Any) -> None:
        content = json.dumps(value).encode()
        if self._store is None:
            self._own[key] = content
        else:
            self._store.set(f"{self._name}/{key}", content)

    def take(self, keys: Sequence[str]) -> list[Any]:
        """Return the entries under these keys once all are posted, without a time limit."""
        if self._store is None:
            return [json.loads(self._own[key]) for key in keys]
        full, began = [f"{self._name}/{key}" for key in keys], time.monotonic()
        soonest = min(LATEST, SOONEST * (1 + self.world / 16))
        try:
            while not self._store.check(full):
                time.sleep(min(max(soonest, SHARE * (time.monotonic() - began)), LATEST))
            return [json.loads(content) for content in self._store.multi_get(full)]
        except RuntimeError as error:
            # torch's network errors are RuntimeErrors.
            problem = f"the checkpoint lost contact with rank 0: {str(error).splitlines()[0]}"
            raise TrainingFailed(problem) from None

    def remove(self, keys: Sequence[str]) -> None:
        """Remove entries that all ranks have read."""
        for key in keys:
            if self._store is None:
                self._own.pop(key, None)
            else:
                self._store.delete_key(f"{self._name}/{key}")

    def agree(self, key: str, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Return the result of `decide`, which rank 0 calls with all ranks' values. For all ranks together, without a
        time limit.

        Every rank sends its value and receives one answer, so the traffic grows with the number of ranks, not with its
        square.
        """
        self.post(f"{key}/{self.rank}", value)
        if self.rank == 0:
            keys = [f"{key}/{rank}" for rank in range(self.world)]
            decision = decide(self.take(keys))
            self.remove(keys)
            self.post(key, decision)
        return self.take([key])[0]
