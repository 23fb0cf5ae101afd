"""Compare uploads and downloads with boto3's own: `python -m bench.provision.store [--megabytes 400] [--runs 3]`.

The store is a small server from the tests, in a process of its own on loopback; both sides use parts of 16 MiB and
eight threads. Ours also hashes each part twice (MD5 for the store, SHA-256 for the list), and verifies each part of a
download.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.field import in_turn, read_options, spread, timed
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
    options = read_options(__doc__, megabytes=400, runs=3)
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
    back = folder / "back"

    def fetched() -> float:
        shutil.rmtree(back, ignore_errors=True)
        return timed(lambda: store.download(sent[-1], access.address, str(back)))

    theirs = partial(client.upload_file, str(source), "bucket", "theirs", Config=how)
    fetch = partial(client.download_file, "bucket", "theirs", str(folder / "theirs"), Config=how)
    ways: dict[str, Callable[[], float]] = {
        "upload, boto3's upload_file": lambda: timed(theirs),
        "upload, ours": lambda: timed(lambda: sent.append(store.upload(files, access.address))),
        "download, boto3's download_file": lambda: timed(fetch),
        "download and verify, ours": fetched,
    }
    for name, times in in_turn(ways, runs).items():
        print(f"{name}: {spread([megabytes / seconds for seconds in times], '.0f')} MB/s")


if __name__ == "__main__":
    sys.exit(main())
