"""Compare uploads and downloads with boto3's own: `python -m bench.provision.store [--megabytes 400] [--runs 3]`.

The store is a small server from the tests, in a process of its own on loopback; both sides use parts of 16 MiB and
eight threads. Ours also hashes each part twice (MD5 for the store, SHA-256 for the list), and verifies each part of a
download.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from clusterctl.storage.address import parse_address
from clusterctl.storage.client import StoredFile, here
from clusterctl.storage.credentials import Access
from clusterctl.storage.program import PIECE, THREADS
from tests.support.object_store import KEY, SECRET

SERVE = """
import sys
from tests.support.object_store import object_store
with object_store() as store:
    print(store.url, flush=True)
    sys.stdin.read()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400, help="400")
    parser.add_argument("--runs", type=int, default=3, help="3")
    options = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None and server.stdin is not None
    url = server.stdout.readline().strip()
    try:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            measure(Path(folder), url, options.megabytes, options.runs)
    finally:
        server.stdin.close()
        server.wait()
    return 0


def measure(folder: Path, url: str, megabytes: int, runs: int) -> None:
    """Print the rates of both sides, which take turns."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    source = folder / "source"
    with source.open("wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(1_000_000))
    settings = Config(
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"},
        max_pool_connections=2 * THREADS,
    )
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        config=settings,
    )
    how = TransferConfig(multipart_threshold=PIECE, multipart_chunksize=PIECE, max_concurrency=THREADS)
    access = Access(parse_address("s3://bucket/ours"), url, "", (KEY, SECRET, ""))
    store, files = here(access), {"source": str(source)}
    sent: list[dict[str, StoredFile]] = []
    rows: dict[str, list[float]] = {}
    for number in range(runs):
        note(
            rows,
            "upload, boto3's upload_file",
            lambda: client.upload_file(str(source), "bucket", "theirs", Config=how),
        )
        note(rows, "upload, ours", lambda: sent.append(store.upload(files, access.address)))
        target = folder / f"back{number}"
        note(
            rows,
            "download, boto3's download_file",
            lambda: client.download_file("bucket", "theirs", str(folder / "theirs"), Config=how),
        )
        fetch = partial(store.download, sent[-1], access.address, str(target))
        note(rows, "download and verify, ours", fetch)
        (target / "source").unlink()
    for name, times in rows.items():
        rates = sorted(megabytes / seconds for seconds in times)
        print(f"{name}: {statistics.median(rates):.0f} MB/s ({rates[0]:.0f} to {rates[-1]:.0f})")


def note(rows: dict[str, list[float]], name: str, work: Callable[[], object]) -> None:
    began = time.monotonic()
    work()
    rows.setdefault(name, []).append(time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
