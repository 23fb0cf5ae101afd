"""Clients with texts of different lengths over HTTP, compared with the same texts in one batch without a server."""

from __future__ import annotations

import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.serve.decode import CONFIG, Now, prompts, run
from bench.serve.hostile import random_checkpoint, served
from trainer.generate.network import Network

CLIENTS = 16


def orders(clients: int) -> list[tuple[list[int], int]]:
    """Return prompts of 16 to 256 ids, each with the number of tokens to generate (16 to 76)."""
    return [(ids[: 16 + 16 * at], 16 + 4 * at) for at, ids in enumerate(prompts(clients, 256))]


def ideal(network: Network, clock: Now) -> float:
    """Return the seconds of the same texts in one batch without HTTP."""
    began, clocks = run(network, [(ids, count) for ids, count in orders(CLIENTS)], clock)
    return max(entry.times[-1] for entry in clocks) - began


def in_turn(network: Network, kind: str, threads: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Start a server; yield the seconds of one batch without it and of its clients, and their ratio, by rounds."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = random_checkpoint(Path(folder), CONFIG)
        with served(checkpoint, "--weights", kind, "--threads", str(threads)) as (url, _, _):
            port = urlsplit(url).port or 0
            yield {"figure": "first token of 512 over HTTP", "seconds": first_token(port)}
            ratios = []
            for number in range(rounds):
                alone, together = ideal(network, time.perf_counter), over_http(port, number)
                ratios.append(together / alone)
                yield {"figure": f"{CLIENTS} clients", "batch": alone, "http": together, "ratio": ratios[-1]}
            yield {"figure": f"{CLIENTS} clients, median", "ratio": statistics.median(ratios)}


def over_http(port: int, number: int) -> float:
    """Return the seconds of all clients together; each round has other prompts, so that no prefix is kept."""
    texts = [([(token + number) % CONFIG.vocab for token in ids], count) for ids, count in orders(CLIENTS)]
    threads = [threading.Thread(target=ask, args=(port, ids, count)) for ids, count in texts]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def ask(port: int, ids: list[int], count: int) -> None:
    """Request one text and read it to its end."""
    body = {"prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    answer = ask_body(port, body)
    assert answer["usage"]["completion_tokens"] == count, answer


def first_token(port: int) -> float:
    """Return the seconds from sending a prompt of 512 tokens to the first new token: the best of three."""
    best = float("inf")
    for number in range(3):
        ids = [(7 * at + number) % CONFIG.vocab for at in range(512)]
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        ask_body(port, body)
        best = min(best, time.perf_counter() - began)
    return best


def ask_body(port: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    return answer
