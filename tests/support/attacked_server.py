"""Hostile requests and held connections at a server, next to well-behaved clients.

The well-behaved clients send requests before, during and after the attack; each must always get the same text.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from bench.field import status_of
from tests.support.attacks import HELD, KINDS, attack, hold, request

CLIENTS = 4
HELD_SHARES = (30, 20, 20, 28, 2)
"""How many of 100 held connections are of each kind in `HELD`."""


@dataclass
class Campaign:
    """A server under attack, and the observations."""

    host: str
    port: int
    process: int
    phase: str = "before"
    over: bool = False
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    waits: dict[str, list[float]] = field(default_factory=dict)
    wrong: int = 0
    turned_away: int = 0
    peak: int = 0
    held: int = 0
    most_held: int = 0

    async def ask(self, body: object) -> bytes:
        """Return the answer to a normal request."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(request("POST", "/v1/completions", json.dumps(body).encode()))
            return await asyncio.wait_for(reader.read(-1), 120)
        finally:
            writer.close()

    async def attack(self, number: int) -> None:
        """Send hostile request `number`."""
        kinds = list(KINDS)
        kind, draw = kinds[number % len(kinds)], random.Random(number)
        counts = self.outcomes.setdefault(kind, Counter())
        try:
            answer = await attack(self.host, self.port, KINDS[kind](draw), 3.0)
            counts[_status(answer)] += 1
        except (OSError, asyncio.TimeoutError) as error:
            counts[type(error).__name__] += 1

    async def hold(self, number: int) -> None:
        """Keep one connection open until the end; reopen it whenever the server closes it."""
        kind = random.Random(number).choices(HELD, HELD_SHARES)[0]
        while not self.over:
            self.held += 1
            self.most_held = max(self.most_held, self.held)
            with suppress(OSError):
                await hold(self.host, self.port, kind, lambda: self.over)
            self.held -= 1
            await asyncio.sleep(0.5)

    async def behave(self, number: int) -> None:
        """Request the same text again and again until the end."""
        body = {"prompt": "one two", "max_tokens": 16, "seed": number, "temperature": 1.0}
        expected = text_of(await self.ask(body))
        while not self.over:
            began, phase = time.monotonic(), self.phase
            try:
                answer = await self.ask(body)
            except (OSError, asyncio.TimeoutError):
                self.wrong += 1
                continue
            if _status(answer) in ("429", "503"):
                self.turned_away += 1
            else:
                self.waits.setdefault(phase, []).append(time.monotonic() - began)
                self.wrong += text_of(answer) != expected
            # Pause like a program that processes each text.
            await asyncio.sleep(0.05)

    def watch(self) -> None:
        """Record the peak memory until the end."""
        while not self.over:
            self.peak = max(self.peak, status_of(self.process, "VmRSS") // 1024)
            time.sleep(0.05)


def _status(answer: bytes) -> str:
    found = re.match(rb"HTTP/1\.[01] (\d{3}) ", answer)
    return found[1].decode() if found else "no answer"


def text_of(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    if _status(head) != "200":
        return f"refused: {head[:60]!r}"
    text: str = json.loads(body)["choices"][0]["text"]
    return text


async def run(
    campaign: Campaign, requests: Sequence[int], connections: int, at_once: int, quiet: float
) -> dict[str, object]:
    """Run the campaign and return its results; `quiet`: seconds before and after the attack."""
    before, began = status_of(campaign.process, "VmRSS") // 1024, time.monotonic()
    watcher = threading.Thread(target=campaign.watch, daemon=True)
    watcher.start()
    clients = [asyncio.create_task(campaign.behave(number)) for number in range(CLIENTS)]
    await asyncio.sleep(quiet)
    campaign.phase, attacked = "during", time.monotonic()
    held = [asyncio.create_task(campaign.hold(number)) for number in range(connections)]
    await asyncio.sleep(min(2.0, quiet))
    gate, done = asyncio.Semaphore(at_once), 0

    async def send(number: int) -> None:
        nonlocal done
        async with gate:
            await campaign.attack(number)
            done += 1

    await asyncio.gather(*(send(number) for number in requests))
    seconds = time.monotonic() - attacked
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    await asyncio.sleep(min(2.0, quiet))
    campaign.phase = "after"
    await asyncio.sleep(quiet)
    campaign.over = True
    await asyncio.gather(*clients)
    watcher.join()
    return {
        "hostile_requests": done,
        "held_connections": campaign.most_held,
        "attack_seconds": round(seconds, 1),
        "seconds": round(time.monotonic() - began, 1),
        "waits": {phase: _summary(waits) for phase, waits in campaign.waits.items()},
        "wrong_texts": campaign.wrong,
        "turned_away": campaign.turned_away,
        "memory_mib": {
            "before": before,
            "peak": campaign.peak,
            "after": status_of(campaign.process, "VmRSS") // 1024,
        },
        "failures": sum(counts[status] for counts in campaign.outcomes.values() for status in ("500", "502")),
        "outcomes": {kind: dict(counts.most_common(6)) for kind, counts in campaign.outcomes.items()},
    }


def _summary(waits: list[float]) -> dict[str, float]:
    ordered = sorted(waits)
    middle, late = ordered[len(ordered) // 2], ordered[len(ordered) * 95 // 100]
    return {
        "texts": len(ordered),
        "median": round(middle, 3),
        "95%": round(late, 3),
        "longest": round(ordered[-1], 3),
    }


def complaints(lines: list[str]) -> list[str]:
    """Return the lines of a server's output that a hostile request must never cause."""
    return [line.rstrip() for line in lines if re.search(r"Traceback|Error|Exception|never awaited", line)]
