"""Hostile clients: what each kind sends, and how it disconnects."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

PATHS = ("/v1/completions", "/v1/chat/completions", "/api", "/tokenize", "/detokenize", "/x", "/metrics", "/")
NAMES = (
    *("prompt", "max_tokens", "temperature", "top_p", "top_k", "n"),
    *("best_of", "stop", "logit_bias", "logprobs", "stream", "seed"),
    *("echo", "model", "messages", "beam_width", "no_repeat_ngram_size", "stream_options"),
    *("stop_token_ids", "length_penalty", "prompts", "tokens", "tokens_to_generate"),
)
VALUES = (
    None, -1, 0, 2**63, 10**30, -(10**30), 1e308, float("inf"), float("nan"), True, "x" * 5000, "\ud800", "\x00",
    [], [[]], [[[]]], [None], [10**9], [-1], ["", ""], {}, {"a": {}}, [0] * 5000, ["one"] * 200,
)  # fmt: skip


@dataclass(frozen=True)
class Attack:
    """Bytes to send on a new connection."""

    parts: tuple[bytes, ...]
    pause: float = 0.0
    """Seconds between two parts."""
    closes_half: bool = False
    """Whether the client closes its sending side and then reads."""
    resets: bool = False
    """Whether it resets the connection after its last part, without reading."""
    reads: int = -1
    """How many bytes of the answer it reads before it disconnects; -1: all."""


def request(method: str, path: str, body: bytes, length: int | None = None) -> bytes:
    """Return a request whose header announces `length` bytes, by default the length of the body."""
    size = len(body) if length is None else length
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
    )
    return head.encode() + body


def _post(draw: random.Random, body: bytes, length: int | None = None) -> bytes:
    path = draw.choice(PATHS[:5])
    return request("PUT" if path == "/api" else "POST", path, body, length)


def _stream(draw: random.Random) -> bytes:
    body = {"prompt": "one", "max_tokens": 200, "stream": True, "n": draw.choice((1, 4)), "ignore_eos": True}
    return request("POST", "/v1/completions", json.dumps(body).encode())


def _noise(draw: random.Random, most: int = 3000) -> bytes:
    return draw.randbytes(draw.randrange(1, most))


def _binary(draw: random.Random) -> Attack:
    noise = _noise(draw)
    return Attack((draw.choice([noise, b"GET /" + noise + b" HTTP/1.1\r\n\r\n", _post(draw, noise)]),))


def _broken_json(draw: random.Random) -> Attack:
    whole = json.dumps({"prompt": "one", "max_tokens": 4, "stop": ["a"]}).encode()
    deep = draw.choice([b"[" * 50_000, b'{"a":' * 5_000, b"-" * 9_000, b"1" * 20_000, b'"\\ud800' * 90, b""])
    return Attack((_post(draw, draw.choice([whole[: draw.randrange(len(whole))], whole + b"}", deep])),))


def _wrong_types(draw: random.Random) -> Attack:
    wrong = {draw.choice(NAMES): draw.choice(VALUES) for _ in range(draw.randrange(1, 4))}
    return Attack((_post(draw, json.dumps({"prompt": "one", "max_tokens": 4, **wrong}).encode()),))


def _unknown_fields(draw: random.Random) -> Attack:
    names = {f"{draw.choice(NAMES)}{number}": number for number in range(draw.choice((1, 5, 300)))}
    return Attack((_post(draw, json.dumps({"prompt": "one", **names}).encode()),))


def _huge_body(draw: random.Random) -> Attack:
    size = draw.choice((3 << 20, 5 << 20, 12 << 20))
    text = b'{"prompt": "' + b"one " * (size // 4) + b'"}'
    if draw.random() < 0.5:
        return Attack((_post(draw, text),))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%s\r\n" % (len(text) // 8, text[: len(text) // 8])
    return Attack((head, *[chunk] * 8, b"0\r\n\r\n"))


def _wrong_length(draw: random.Random) -> Attack:
    body = b'{"prompt": "one"}'
    sent = _post(draw, body, draw.choice((-1, 10**12, 10**30, 3, len(body) * 2)))
    return Attack((sent,), closes_half=draw.random() < 0.5)


def _slow_body(draw: random.Random) -> Attack:
    body = json.dumps({"prompt": "one two", "max_tokens": 2}).encode()
    sent = _post(draw, body)
    cut = len(sent) - len(body)
    return Attack((sent[:cut], *(bytes([byte]) for byte in sent[cut : cut + 20])), pause=0.1)


def _half_closed(draw: random.Random) -> Attack:
    whole = draw.choice([_stream(draw), b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /hea", b""])
    return Attack((whole,), closes_half=True)


def _leaves_stream(draw: random.Random) -> Attack:
    return Attack((_stream(draw),), reads=draw.choice((0, 1, 400)), resets=draw.random() < 0.5)


def _leaves_text(draw: random.Random) -> Attack:
    body = {"prompt": "one", "max_tokens": 200, "n": 2, "ignore_eos": True}
    return Attack((_post(draw, json.dumps(body).encode()),), pause=0.05, reads=0, resets=True)


def _header_flood(draw: random.Random) -> Attack:
    lines = [
        b"X-%d: y\r\n" % draw.randrange(9) * draw.randrange(5000),
        b"X: " + b"y" * draw.choice((9_000, 200_000)) + b"\r\n",
        b"".join(b"N%d: y\r\n" % number for number in range(20_000)),
        b"Content-Length: 5\r\n" * 40,
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    ]
    return Attack((b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + draw.choice(lines) + b"\r\n",))


def _wrong_method(draw: random.Random) -> Attack:
    method, path = draw.choice(("PUT", "DELETE", "PATCH", "TRACE", "x" * 90)), draw.choice(PATHS)
    long = "/" + "a" * draw.choice((100, 9_000, 90_000))
    odd = draw.choice((path, long, "*", "//", "/%00", "/..%2f", "http://[::1", "/?" + "a=b&" * 900))
    return Attack((request(method, odd, b'{"prompt": "one"}'),))


def _bad_chunks(draw: random.Random) -> Attack:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    odd = [_noise(draw), b"zz\r\n", b"ffffffffffffffff\r\nx", b"1" * 9_000, b"5;" + b"a" * 9_000]
    return Attack((head + draw.choice(odd),))


def _compressed(draw: random.Random) -> Attack:
    """Return a body that expands to 64 MB when it is decompressed."""
    body = _COMPRESSED if draw.random() < 0.8 else _noise(draw)
    head = f"Host: x\r\nConnection: close\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    return Attack((f"POST {draw.choice(PATHS[:5])} HTTP/1.1\r\n{head}".encode() + body,))


_COMPRESSED = gzip.compress(b'{"prompt": "' + b"a" * (64 << 20) + b'"}')


def _pipelined(draw: random.Random) -> Attack:
    body = b'{"prompt": "one", "max_tokens": 1}'
    single = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    return Attack((single * draw.randrange(2, 40),), reads=200)


KINDS: Mapping[str, Callable[[random.Random], Attack]] = {
    "binary": _binary,
    "broken JSON": _broken_json,
    "wrong types": _wrong_types,
    "unknown fields": _unknown_fields,
    "huge body": _huge_body,
    "wrong length": _wrong_length,
    "slow body": _slow_body,
    "half closed": _half_closed,
    "leaves a stream": _leaves_stream,
    "leaves a text": _leaves_text,
    "header flood": _header_flood,
    "wrong method or path": _wrong_method,
    "bad chunks": _bad_chunks,
    "compressed": _compressed,
    "pipelined": _pipelined,
}


async def attack(host: str, port: int, own: Attack, seconds: float) -> bytes:
    """Run one attack; return up to `reads` bytes of the answer, received within `seconds`."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), seconds)
    try:
        for part in own.parts:
            writer.write(part)
            await asyncio.wait_for(writer.drain(), seconds)
            await asyncio.sleep(own.pause)
        if own.closes_half:
            writer.write_eof()
        return await asyncio.wait_for(reader.read(own.reads), seconds) if own.reads else b""
    except ConnectionError:
        # The server may answer and close before it has read everything.
        with suppress(ConnectionError, asyncio.TimeoutError):
            return await asyncio.wait_for(reader.read(100), 1)
        return b""
    finally:
        if own.resets:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


HELD = ("silent", "slow head", "slow body", "idle after an answer", "reads nothing")


async def hold(host: str, port: int, kind: str, until: Callable[[], bool]) -> None:
    """Occupy a connection in one of the ways `HELD` until the server closes it."""
    reader, writer = await asyncio.open_connection(host, port, limit=1024)
    try:
        if kind == "slow head":
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: ")
        elif kind == "slow body":
            writer.write(request("POST", "/v1/completions", b'{"prompt": "', 1000))
        elif kind == "idle after an answer":
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        elif kind == "reads nothing":
            body = {"prompt": "one", "max_tokens": 200, "logprobs": 50, "ignore_eos": True, "stream": True}
            writer.write(request("POST", "/v1/completions", json.dumps(body).encode()))
        while not until():
            if kind.startswith("slow"):
                writer.write(b"y")
            if kind == "reads nothing":
                await asyncio.sleep(1)
                if writer.transport.is_closing():
                    return
                continue
            try:
                if not await asyncio.wait_for(reader.read(1000), 1):
                    return
            except asyncio.TimeoutError:
                pass
    except ConnectionError:
        pass
    finally:
        writer.close()
