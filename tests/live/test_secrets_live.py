"""One job with every kind of secret: clusterctl writes and prints none of them, and passes none as an argument."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.live.conftest import Shell
from tests.support.object_store import KEY, SECRET, object_store

pytestmark = [pytest.mark.live, pytest.mark.timeout(200)]
pytest.importorskip("boto3", reason="boto3 is not installed: the extra `storage`")

API_KEY, WORD, TOKEN = "sk-c1f7e0a9d2", "hunter2-of-the-ranks", "T0K3N-of-the-webhook"
SECRETS = (KEY, SECRET, API_KEY, WORD, TOKEN)
PROGRAM = """
import os, time
assert os.environ["API_KEY"].startswith("sk-") and os.environ["WORD"].startswith("hunter2")
print("rank", os.environ["RANK"], "has its secrets", flush=True)
time.sleep(1)
"""
JOB = """
name: secrets
command: [python, train.py]
code: code
data: s3://bucket/data
forward: [API_KEY, WORD, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY]
storage: {{endpoint: "{store}"}}
notify: "{hook}"
kubernetes: {{nodes: 2, image: registry.example/train:1, secret: hub}}
slurm: {{nodes: 2, time: 10}}
"""


@contextmanager
def webhook() -> Iterator[tuple[str, list[str]]]:
    """Yield an address with a token, and the paths that were called."""
    called: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            called.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook/{TOKEN}", called
        server.shutdown()
        thread.join()


@contextmanager
def arguments() -> Iterator[set[bytes]]:
    """Yield the set of arguments that processes of this machine have while the block runs."""
    seen: set[bytes] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            for entry in Path("/proc").iterdir():
                if entry.name.isdecimal():
                    try:
                        seen.add((entry / "cmdline").read_bytes())
                    except OSError:
                        continue

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def test_no_secret_is_written_printed_or_passed_as_an_argument(
    shell: Shell, cluster_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(PROGRAM)
    secret = {"API_KEY": API_KEY, "WORD": WORD, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    printed: list[str] = []

    def typed(*words: str, code: int = 0) -> str:
        done = shell(*words, **secret)
        assert done.returncode == code, done.stdout + done.stderr
        printed.append(done.stdout + done.stderr)
        return printed[-1]

    with object_store() as store, webhook() as (hook, called), arguments() as passed:
        store.objects["data/part.txt"] = b"some data"
        job = tmp_path / "job.yaml"
        job.write_text(JOB.format(store=store.url, hook=hook))
        typed("plan", "job.yaml")
        typed("doctor", "job.yaml", "-v")
        assert "has its secrets" in typed("launch", "job.yaml")
        # The webhook was called with its token, which only the launching process knows.
        assert called == [f"/hook/{TOKEN}"]
        typed("status", "last", "--json")
        typed("report", "last", "-o", "report.html")
        assert "try: notify: $NAME" in typed("submit", "slurm", "job.yaml", "--print", code=2)
        typed("submit", "slurm", "job.yaml", "--print", "--set", "notify=$HOOK")
        typed("submit", "k8s", "job.yaml", "--print", "--kind", "jobset")
        typed("bundle", "--code", "code", "-o", "site.tar")
    texts = {"output": "\n".join(printed).encode(), "arguments": b"\n".join(passed)}
    for folder in (tmp_path, cluster_file.parent):
        files = (path for path in folder.rglob("*") if path.is_file() and path != job)
        texts |= {str(path): path.read_bytes() for path in files}
    assert any(name.endswith("run.json") for name in texts) and any(name.endswith(".html") for name in texts)
    found = [(name, word) for name, text in texts.items() for word in SECRETS if word.encode() in text]
    assert not found
