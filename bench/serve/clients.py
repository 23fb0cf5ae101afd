"""Clients of different lengths over HTTP, compared with the same texts in one batch without a server."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from bench.serve.decode import CONFIG, Now, prompts, run
from trainer.generate.network import Network

CLIENTS = 16


def orders(clients: int) -> list[tuple[list[int], int]]:
    """Return prompts of 16 to 256 ids with 16 to 76 tokens to write."""
    return [(ids[: 16 + 16 * at], 16 + 4 * at) for at, ids in enumerate(prompts(clients, 256))]


def ideal(network: Network, clock: Now) -> float:
    """Return the seconds of the batch without HTTP."""
    began, clocks = run(network, [(ids, count) for ids, count in orders(CLIENTS)], clock)
    return max(entry.times[-1] for entry in clocks) - began


def over_http(port: int) -> Iterator[dict[str, Any]]:
    """Yield the seconds of all clients together, and the seconds until the first token of a prompt of 512."""
    first = first_token(port)
    began = time.perf_counter()
    threads = [threading.Thread(target=ask, args=(port, ids, count)) for ids, count in orders(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield {"figure": f"{CLIENTS} clients over HTTP", "seconds": time.perf_counter() - began}
    yield {"figure": "first token of 512 over HTTP", "seconds": first}


def ask(port: int, ids: list[int], count: int) -> None:
    """Get one whole text."""
    body = {"prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    answer = ask_body(port, body)
    assert answer["usage"]["completion_tokens"] == count, answer


def first_token(port: int) -> float:
    """Return the seconds from sending a prompt of 512 to its first token: the best of three."""
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
