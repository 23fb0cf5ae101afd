from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cases
from tests.support import weights
from tests.support.attacked_server import Campaign, complaints, run
from tests.support.attacks import KINDS
from tests.trainer.serve.conftest import MODEL, Server

Start = Callable[..., AbstractContextManager[Server]]
LONG = {"prompt": "one two", "max_tokens": 240, "ignore_eos": True, "stream": True}


def opened(server: Server, body: dict[str, Any] | None = None) -> socket.socket:
    """A connection that has sent a request for a completion."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    if body is not None:
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
    return connection


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_client_that_leaves_frees_its_pages(server: Server) -> None:
    pages = server.figure("pages")
    for stream in (True, False):
        connection = opened(server, {**LONG, "n": 8, "stream": stream})
        until(lambda: server.figure("running") == 8)
        before = server.figure("generated_tokens_total")
        connection.close()
        until(lambda: server.figure("running") == 0)
        assert server.figure("free_pages") == pages
        # It ended because the client left, not because the texts were complete.
        assert server.figure("generated_tokens_total") - before < 8 * 240


def test_a_full_queue_is_answered_with_429_and_others_go_on(serving: Start, model: Path) -> None:
    with serving(model, "--batch", "2", "--queue", "1") as server:
        busy = [opened(server, LONG) for _ in range(3)]
        until(lambda: server.figure("running") + server.figure("waiting") == 3)
        status, answer = server.ask("POST", "/v1/completions", {"prompt": "one"})
        assert status == 429 and answer["error"]["code"] == "queue_full"
        assert server.ask("GET", "/health")[0] == 200
        for connection in busy:
            connection.close()
        until(lambda: server.figure("running") == 0)
        assert server.ask("POST", "/v1/completions", {"prompt": "one", "max_tokens": 2})[0] == 200


def test_sigterm_finishes_what_runs_and_takes_nothing_new(serving: Start, model: Path) -> None:
    with serving(model) as server:
        found = list[Any]()
        fields = {"prompt": "one two", "max_tokens": 200, "ignore_eos": True}
        client = threading.Thread(target=lambda: found.append(server.ask("POST", "/v1/completions", fields)))
        client.start()
        until(lambda: server.figure("running") == 1)
        server.process.send_signal(signal.SIGTERM)
        client.join(60)
        status, answer = found[0]
        assert status == 200 and answer["usage"]["completion_tokens"] == 200
        assert server.process.wait(30) == 0


def test_connections_above_the_limit_are_refused_and_counted(serving: Start, model: Path) -> None:
    with serving(model, "--connections", "5") as server:
        idle = [opened(server) for _ in range(4)]
        time.sleep(0.2)
        with opened(server) as fifth, opened(server) as sixth:
            assert sixth.recv(100).startswith(b"HTTP/1.1 503")
            fifth.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert fifth.recv(100).startswith(b"HTTP/1.1 200")
        for connection in idle:
            connection.close()
        until(lambda: server.figure("refused_connections_total") >= 1)


def test_a_connection_that_sends_nothing_is_closed(server: Server) -> None:
    with opened(server) as silent, opened(server) as slow:
        began = time.monotonic()
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX: ")
        for connection in (silent, slow):
            connection.settimeout(30)
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        assert time.monotonic() - began < 25
    assert server.figure("slow_connections_total") >= 2


def test_broken_requests_do_not_disturb_a_stream(server: Server) -> None:
    expected = server.complete(prompt="one two", max_tokens=100, seed=5, ignore_eos=True)["choices"][0][
        "text"
    ]
    found = list[str]()

    def client() -> None:
        events = server.events("/v1/completions", prompt="one two", max_tokens=100, seed=5, ignore_eos=True)
        found.append("".join(event["choices"][0]["text"] for event in events))

    thread = threading.Thread(target=client)
    thread.start()
    broken = (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n",
        b"\x00" * 100,
    )
    for content in broken * 3:
        with opened(server) as connection:
            connection.settimeout(15)
            # The server may close before it has read everything.
            with suppress(OSError):
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
    thread.join(60)
    assert found == [expected]


def test_a_client_that_does_not_read_delays_nobody(server: Server) -> None:
    with opened(server, {**LONG, "n": 64, "logprobs": 100}) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        until(lambda: server.figure("running") > 0)
        began = time.monotonic()
        server.complete(prompt="one", max_tokens=2)
        assert time.monotonic() - began < 30
    until(lambda: server.figure("running") == 0, 60)


def test_an_answer_that_is_not_read_takes_no_place_of_others(serving: Start, model: Path) -> None:
    # Twelve texts with log probabilities are more than the kernel's buffers take.
    body = {**LONG, "n": 12, "logprobs": 100}
    with serving(model, "--batch", "8", "--queue", "4") as server, opened(server, body) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        until(lambda: server.figure("generated_tokens_total") >= 12 * 240, 120)
        until(lambda: server.figure("running") + server.figure("waiting") == 0)
        assert server.ask("POST", "/v1/completions", {"prompt": "one", "max_tokens": 2})[0] == 200


def test_hostile_requests_of_every_kind_and_held_connections_disturb_nobody(
    serving: Start, model: Path, tmp_path: Path, cases: Cases
) -> None:
    """`-s --cases 10000` prints the figures of so many requests next to a thousand held connections."""
    requests = [number for number, _ in cases(3 * len(KINDS))]
    few = len(requests) < 1000
    if not few:
        # Of 3M parameters.
        shape = replace(MODEL, layers=4, hidden=256, heads=4)
        large = weights.checkpoint(tmp_path / "large", shape, weights.random_state(shape))
        model = Path(shutil.copy(model / "tokenizer.json", large)).parent
    with serving(model) as server:
        campaign = Campaign("127.0.0.1", server.port, server.process.pid)
        figures = asyncio.run(run(campaign, requests, 20 if few else 1000, 50, 0.3 if few else 10.0))
        print(json.dumps(figures, indent=2))
        assert figures["hostile_requests"] == len(requests)
        assert figures["wrong_texts"] == figures["failures"] == 0
        assert {"before", "during"} <= set(campaign.waits)
        until(lambda: server.figure("running") == 0)
        assert server.figure("free_pages") == server.figure("pages")
        # Broken requests and clients that leave are no failures of the server.
        assert complaints(server.lines) == [], "".join(server.lines)


def test_a_request_that_is_not_http_gets_an_error_in_openais_shape(server: Server) -> None:
    with opened(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n")
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.split()[1:2] == [b"400"], answer
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["type"] == "invalid_request_error" and "Content-Length" in error["message"]


def test_a_header_that_is_too_long_gets_431(server: Server) -> None:
    status, answer = server.ask("GET", "/health", headers={"X": "a" * 10_000})
    assert status == 431 and "8190" in answer["error"]["message"]


def test_a_compressed_body_is_not_decompressed(server: Server) -> None:
    import gzip

    body = gzip.compress(json.dumps({"prompt": "one", "max_tokens": 1}).encode())
    status, answer = server.ask("POST", "/v1/completions", body, {"Content-Encoding": "gzip"})
    assert status == 400 and "not UTF-8" in answer["error"]["message"]


def test_many_unknown_fields_are_counted_and_few_are_named(server: Server) -> None:
    names = {f"{'long' * 100}{number}": 1 for number in range(200)}
    status, answer = server.ask("POST", "/v1/completions", {"prompt": "one", **names})
    message = answer["error"]["message"]
    assert status == 400 and "190 more unknown fields" in message and len(message) < 2000


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    from types import SimpleNamespace

    from trainer.errors import InputError
    from trainer.generate.decoder import Decoder

    def encode(text: str) -> list[int]:
        assert len(text) <= 2 * 8 * 10
        return [len(word) for word in text.split()]

    decoder = object.__new__(Decoder)
    decoder.tokenizer = SimpleNamespace(encode=encode, longest=10, eod=0)  # type: ignore[assignment]
    decoder.prefix = ()
    decoder.network = SimpleNamespace(config=SimpleNamespace(context=8, vocab=20))  # type: ignore[assignment]
    with pytest.raises(
        InputError, match="has 20000 characters, but the model's context is 8 tokens of at most 10 bytes"
    ):
        decoder.ids_of("a b " * 5000)
    assert decoder.ids_of("a bb " * 4000, truncate=True) == [1, 2] * 4


def test_requests_share_the_memory_for_large_bodies_and_log_probabilities() -> None:
    pytest.importorskip("aiohttp")
    from aiohttp.test_utils import make_mocked_request

    from trainer.serve.faults import ApiError
    from trainer.serve.service import Budget

    budget, (first, second) = Budget(100), [make_mocked_request("GET", "/") for _ in range(2)]
    budget.take(first, 60)
    with pytest.raises(ApiError) as full:
        budget.take(second, 60)
    assert full.value.status == 503
    budget.take(second, 40)
    with pytest.raises(ApiError) as impossible:
        budget.take(second, 61)
    assert impossible.value.status == 400
    budget.release(first)
    budget.take(second, 60)
    budget.release(second)
    assert budget.used == 0


def test_log_probabilities_beyond_the_memory_are_refused(serving: Start, model: Path) -> None:
    # 128 texts of 240 tokens with 101 log probabilities take 1.2 GB.
    fields = {"prompt": "one", "n": 128, "max_tokens": 240, "ignore_eos": True, "logprobs": 100}
    with serving(model) as server:
        status, answer = server.ask("POST", "/v1/completions", fields)
        assert status == 400 and "bytes of memory" in answer["error"]["message"]
        assert server.ask("POST", "/v1/completions", {**fields, "n": 1})[0] == 200


def test_a_failure_of_a_handler_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("aiohttp")
    from types import SimpleNamespace

    from aiohttp import web

    from trainer.serve import app
    from trainer.serve.metrics import Metrics
    from trainer.serve.service import Budget

    async def fails(_: web.Request) -> web.StreamResponse:
        raise KeyError("a mistake of ours")

    service: Any = SimpleNamespace(metrics=Metrics(), budget=Budget(10), api_key="")
    matched = SimpleNamespace(route=SimpleNamespace(resource=None))
    request: Any = SimpleNamespace(match_info=matched, headers={}, path="/x", host="x")
    with caplog.at_level(logging.ERROR):
        answer: Any = asyncio.run(app._middleware(service)(request, fails))  # type: ignore[arg-type]
    assert answer.status == 500 and json.loads(answer.body)["error"]["type"] == "server_error"
    assert "a mistake of ours" in caplog.text and service.metrics.answers["other", 500] == 1
