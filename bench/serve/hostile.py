"""`python -m bench.serve.hostile --url URL`: hostile requests and idle connections against a running server.

While they run, well-behaved clients ask for texts; each must get the text that it got before. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit


@dataclass
class Campaign:
    """A server under attack, and what came of it."""

    host: str
    port: int
    deadline: float
    outcomes: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    wrong: int = 0

    async def send(self, content: bytes, seconds: float = 20.0, read: bool = True) -> bytes:
        """Send bytes on a connection of their own; return the answer up to its end."""
        reader, writer = await asyncio.wait_for(asyncio.open_connection(self.host, self.port), seconds)
        try:
            writer.write(content)
            await asyncio.wait_for(writer.drain(), seconds)
            return await asyncio.wait_for(reader.read(-1), seconds) if read else b""
        finally:
            writer.close()

    async def ask(self, body: object, path: str = "/v1/completions", method: str = "POST") -> bytes:
        return await self.send(request(method, path, json.dumps(body).encode()), 120)

    async def attack(self, seed: int) -> None:
        """Send one hostile request."""
        try:
            answer = await self.send(hostile(random.Random(seed)), read=seed % 4 != 0)
            self.outcomes[answer.split(b"\r\n", 1)[0].decode("latin-1")[:40] or "no answer"] += 1
        except (OSError, asyncio.TimeoutError) as error:
            self.outcomes[type(error).__name__] += 1

    async def behave(self, number: int) -> None:
        """Ask for the same text until the end."""
        body = {"prompt": "one two", "max_tokens": 16, "seed": number, "temperature": 1.0}
        expected = text_of(await self.ask(body))
        while time.monotonic() < self.deadline:
            began = time.monotonic()
            answer = await self.ask(body)
            if b" 429 " in answer.split(b"\r\n", 1)[0] or b" 503 " in answer.split(b"\r\n", 1)[0]:
                await asyncio.sleep(0.2)
                continue
            self.waits.append(time.monotonic() - began)
            self.wrong += text_of(answer) != expected


def request(method: str, path: str, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
    )
    return head.encode() + body


def text_of(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        return f"refused: {head[:60]!r}"
    text: str = json.loads(body)["choices"][0]["text"]
    return text


def hostile(draw: random.Random) -> bytes:
    """Return one hostile request."""
    noise = draw.randbytes(draw.randrange(1, 3000))
    value = draw.choice([None, -1, 10**30, "x" * 5000, [], [[]], {}, True, float("inf"), "\ud800", [10**9]])
    name = draw.choice(
        ["prompt", "max_tokens", "temperature", "n", "stop", "logit_bias", "logprobs", "stream", "seed"]
    )
    body = json.dumps({"prompt": "one", "max_tokens": 4, name: value}).encode()
    path = draw.choice(["/v1/completions", "/v1/chat/completions", "/api", "/tokenize", "/detokenize", "/x"])
    long = json.dumps(
        {"prompt": "one", "max_tokens": 200, "stream": True, "n": 4, "ignore_eos": True}
    ).encode()
    return draw.choice(
        [
            noise,
            b"GET /" + noise + b" HTTP/1.1\r\n\r\n",
            request("POST", path, noise),
            request("POST", path, body),
            request(draw.choice(["PUT", "DELETE", "PATCH"]), path, body),
            request("POST", path, body[: len(body) // 2], len(body) * 2),
            request("POST", path, b"[" * 50_000),
            request("POST", path, b'{"a":' * 5_000),
            request("POST", path, b"", draw.choice([-1, 10**12, 5])),
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + noise,
            b"GET / HTTP/1.1\r\n" + b"X-%d: y\r\n" % draw.randrange(9) * draw.randrange(500) + b"\r\n",
            # Leaves in the middle of a long stream.
            request("POST", "/v1/completions", long)[:-1] + b"}",
        ]
    )


def memory_of(process: int) -> int:
    """Return the resident memory of a process in MiB; 0 if it is not known."""
    with suppress(OSError):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS")), 0)
    return 0


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Run the campaign and return its figures."""
    address = urlsplit(arguments.url)
    campaign = Campaign(
        address.hostname or "127.0.0.1", address.port or 8000, time.monotonic() + arguments.seconds
    )
    before, began = memory_of(arguments.pid), time.monotonic()
    idle = [await asyncio.open_connection(campaign.host, campaign.port) for _ in range(arguments.connections)]
    clients = [asyncio.create_task(campaign.behave(number)) for number in range(4)]
    gate, done = asyncio.Semaphore(arguments.at_once), 0

    async def attack(number: int) -> None:
        nonlocal done
        async with gate:
            if time.monotonic() < campaign.deadline:
                await campaign.attack(number)
                done += 1

    await asyncio.gather(*(attack(number) for number in range(arguments.requests)))
    campaign.deadline = min(campaign.deadline, time.monotonic() + 2)
    await asyncio.gather(*clients)
    for _, writer in idle:
        writer.close()
    healthy = b" 200 " in (await campaign.send(request("GET", "/health", b"")))[:20]
    waits = sorted(campaign.waits)
    return {
        "hostile_requests": done,
        "idle_connections": len(idle),
        "seconds": round(time.monotonic() - began, 1),
        "healthy": healthy,
        "served": len(waits),
        "wrong": campaign.wrong,
        "median_wait": round(waits[len(waits) // 2], 2) if waits else None,
        "longest_wait": round(waits[-1], 2) if waits else None,
        "memory_before_mib": before,
        "memory_after_mib": memory_of(arguments.pid),
        "outcomes": dict(campaign.outcomes.most_common(12)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serve.hostile", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--pid", type=int, default=0, help="of the server, for its memory")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=1_000)
    parser.add_argument("--at-once", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=600.0)
    found = asyncio.run(run(parser.parse_args()))
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    sys.exit(0 if found["healthy"] and not found["wrong"] and found["served"] else 1)


if __name__ == "__main__":
    main()
