"""A server of a small model with random weights, as a process."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import weights
from trainer.corpus.tokenizer import train_tokenizer

TEXT = "one two three four five six seven eight nine ten. " * 12
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
MODEL = replace(weights.GPT, hidden=64, sequence=256, vocab=300, init_std=0.2)


@dataclass
class Server:
    """A running server."""

    port: int
    process: subprocess.Popen[str]
    lines: list[str]

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return status and document of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, content, headers or {})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        is_json = (answer.getheader("Content-Type") or "").startswith("application/json")
        return answer.status, json.loads(text) if is_json and text else text.decode()

    def complete(self, **fields: Any) -> dict[str, Any]:
        """Return the answer of /v1/completions, which must be one."""
        status, answer = self.ask("POST", "/v1/completions", fields)
        assert status == 200, answer
        return dict(answer)

    def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the events of a streamed answer."""
        status, text = self.ask("POST", path, {**fields, "stream": True})
        assert status == 200, text
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def figure(self, name: str) -> float:
        """Return a figure of /metrics."""
        status, text = self.ask("GET", "/metrics")
        found = re.search(rf"^clusterctl_serve_{name} (\S+)$", text, re.MULTILINE)
        assert status == 200 and found, text
        return float(found[1])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer and a chat template."""
    folder: Path = tmp_path_factory.mktemp("served") / "small"
    weights.checkpoint(folder, MODEL, weights.random_state(MODEL))
    train_tokenizer(iter([TEXT] * 12), 300, folder / "tokenizer.json")
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[Server]:
    pytest.importorskip("aiohttp")
    words = [sys.executable, "-m", "trainer", "serve", "--checkpoint", str(folder), "--port", "0", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    assert process.stdout is not None
    lines = list[str]()
    try:
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"serving .* at http://[^ ]*:(\d+) ", line):
                # Nothing else may fill the pipe.
                threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True).start()
                yield Server(int(found[1]), process, lines)
                break
        else:
            raise AssertionError("".join(lines))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            process.kill()


@pytest.fixture(scope="session")
def serving() -> Callable[..., AbstractContextManager[Server]]:
    """A function that starts a server."""
    return started


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    with started(model, "--request-timeout", "60", "--max-body", "100000") as found:
        yield found
