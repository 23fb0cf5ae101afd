"""Clients with texts of different lengths over HTTP, compared with the same texts in one batch without a server."""

from __future__ import annotations

import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.serve.decode import CONFIG, Now, prompts, run
from trainer.generate.network import Network

CLIENTS = 16


@contextmanager
def served(folder: Path, *options: str) -> Iterator[int]:
    """Serve a checkpoint with random weights; yield the port."""
    from tests.support import weights
    from trainer.corpus.tokenizer import train_tokenizer

    weights.checkpoint(folder / "random", CONFIG, weights.random_state(CONFIG))
    text = "one two three four five six seven eight nine ten. " * 12
    train_tokenizer(iter([text] * 12), 300, folder / "random" / "tokenizer.json")
    words = [sys.executable, "-m", "trainer", "serve", "--port", "0", "--checkpoint", str(folder / "random")]
    with subprocess.Popen([*words, *options], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = (re.search(r"serving .* at http://[^ ]*:(\d+) ", line) for line in process.stdout)
            port = next((int(each[1]) for each in found if each), 0)
            if not port:
                raise SystemExit("the server did not start")
            # Nothing else may fill the pipe.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield port
        finally:
            process.terminate()


def orders(clients: int) -> list[tuple[list[int], int]]:
    """Return prompts of 16 to 256 ids, each with the number of tokens to generate (16 to 76)."""
    return [(ids[: 16 + 16 * at], 16 + 4 * at) for at, ids in enumerate(prompts(clients, 256))]


def ideal(network: Network, clock: Now) -> float:
    """Return the seconds of the same texts in one batch without HTTP."""
    began, clocks = run(network, [(ids, count) for ids, count in orders(CLIENTS)], clock)
    return max(entry.times[-1] for entry in clocks) - began


def in_turn(network: Network, kind: str, threads: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Start a server; yield the seconds of one batch without it and of its clients, and their ratio, by rounds."""
    options = ("--weights", kind, "--threads", str(threads))
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), *options) as port:
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
