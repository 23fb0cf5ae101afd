"""Downloads from a server that breaks connections, changes files, lies, and refuses."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from clusterctl.downloads import fetch as fetching
from clusterctl.downloads.fetch import Wanted, check_url, fetch, file_name, published_hash
from clusterctl.downloads.names import NAMES
from clusterctl.errors import UsageError, WorkFailed

DATA = os.urandom(3_000_000)
SHA256 = hashlib.sha256(DATA).hexdigest()


class Server(ThreadingHTTPServer):
    """What it gives, and how it fails."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.data = DATA
        self.tag = '"one"'
        # Bytes after which each of the next answers breaks; an empty list: none does.
        self.breaks: list[int] = []
        self.status = 0
        self.ranges = True
        self.asked: list[str] = []
        self.proxied: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/corpus.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        if self.path.startswith("http://"):
            server.proxied.append(self.path)
        asked = self.headers.get("Range", "")
        server.asked.append(asked)
        if server.status:
            self.send_response(server.status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data, start = server.data, 0
        if asked and server.ranges and self.headers.get("If-Range") == server.tag:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - start))
        if server.tag:
            self.send_header("ETag", server.tag)
        self.end_headers()
        stop = start + server.breaks.pop(0) if server.breaks else len(data)
        self.wfile.write(data[start:stop])

    def log_message(self, *words: object) -> None:
        """Print nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(fetching, "PAUSES", (0.01, 0.01))
    monkeypatch.setenv("no_proxy", "")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    made = Server()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_broken_connections_are_continued_where_they_broke(server: Server, tmp_path: Path) -> None:
    server.breaks = [1_000_000, 0, 500_000, 700_000]
    seen: list[tuple[int, int]] = []
    done = fetch(Wanted(server.url, tmp_path / "x", SHA256), lambda count, total: seen.append((count, total)))
    assert (tmp_path / "x").read_bytes() == DATA and done.fetched == len(DATA) and done.pinned
    assert server.asked == ["", "bytes=1000000-", "bytes=1000000-", "bytes=1500000-", "bytes=2200000-"]
    assert names(tmp_path) == ["fetched.json", "x"] and seen[-1] == (len(DATA), len(DATA))
    again = fetch(Wanted(server.url, tmp_path / "x", SHA256))
    assert again.unchanged and len(server.asked) == 5


def test_a_download_that_was_given_up_continues_in_the_next_command(server: Server, tmp_path: Path) -> None:
    server.breaks = [1_000_000, 0, 0, 0, 0, 0]
    with pytest.raises(WorkFailed, match="the connection ended too early; 1 MB were downloaded") as raised:
        fetch(Wanted(server.url, tmp_path / "x"))
    assert "the same command continues" in raised.value.hint and not (tmp_path / "x").exists()
    server.breaks, server.asked = [], []
    done = fetch(Wanted(server.url, tmp_path / "x"))
    assert server.asked == ["bytes=1000000-"] and done.fetched == len(DATA) - 1_000_000
    assert done.sha256 == SHA256 and not done.pinned


def test_a_file_that_changed_in_between_begins_anew(server: Server, tmp_path: Path) -> None:
    server.breaks = [1_000_000, 0, 0, 0, 0]
    with pytest.raises(WorkFailed, match="the connection ended too early"):
        fetch(Wanted(server.url, tmp_path / "x"))
    server.breaks, server.tag, server.data = [], '"two"', b"other" * 1000
    assert fetch(Wanted(server.url, tmp_path / "x")).bytes == 5000
    assert (tmp_path / "x").read_bytes() == b"other" * 1000


@pytest.mark.parametrize(("tag", "ranges"), [("", True), ('"one"', False)])
def test_a_server_without_ranges_or_tags_still_gives_a_whole_file(
    server: Server, tmp_path: Path, tag: str, ranges: bool
) -> None:
    server.tag, server.ranges, server.breaks = tag, ranges, [1_000_000]
    assert fetch(Wanted(server.url, tmp_path / "x", SHA256)).sha256 == SHA256


def test_another_hash_is_refused_and_nothing_is_kept(server: Server, tmp_path: Path) -> None:
    md5 = hashlib.md5(DATA).hexdigest()
    assert fetch(Wanted(server.url, tmp_path / "good", md5)).pinned
    with pytest.raises(WorkFailed, match=f"has sha1 .*, it should have {'0' * 40}"):
        fetch(Wanted(server.url, tmp_path / "x", "0" * 40))
    assert names(tmp_path) == ["fetched.json", "good"]
    with pytest.raises(UsageError, match="is not an MD5, SHA-1 or SHA-256"):
        fetch(Wanted(server.url, tmp_path / "x", "abc"))


def test_the_first_hash_of_an_unpinned_file_is_recorded_and_holds(server: Server, tmp_path: Path) -> None:
    fetch(Wanted(server.url, tmp_path / "x"))
    record = json.loads((tmp_path / "fetched.json").read_text())["x"]
    assert (record["sha256"], record["pinned"], record["url"]) == (SHA256, False, server.url)
    (tmp_path / "x").unlink()
    server.data, server.tag = b"replaced", '"two"'
    with pytest.raises(WorkFailed, match=f"the first download had {SHA256}") as raised:
        fetch(Wanted(server.url, tmp_path / "x"))
    assert "--accept-changed" in raised.value.hint and not (tmp_path / "x").exists()
    assert fetch(Wanted(server.url, tmp_path / "x", accept_changed=True)).bytes == 8
    # A file that was damaged here is fetched again.
    (tmp_path / "x").write_bytes(b"damaged!")
    assert fetch(Wanted(server.url, tmp_path / "x")).fetched == 8
    # A file that is not ours stays.
    (tmp_path / "own").write_text("mine")
    with pytest.raises(UsageError, match="own: exists, and is not known to be"):
        fetch(Wanted(server.url, tmp_path / "own"))
    assert (tmp_path / "own").read_text() == "mine"


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (403, 1), (503, 3)])
def test_a_refusal_is_named_at_once_and_a_busy_server_is_asked_again(
    server: Server, tmp_path: Path, status: int, tries: int
) -> None:
    server.status = status
    with pytest.raises(WorkFailed, match=str(status) if status < 500 else "Service Unavailable"):
        fetch(Wanted(server.url, tmp_path / "x"))
    assert len(server.asked) == tries and not (tmp_path / "x").exists()


def test_a_proxy_is_used(server: Server, tmp_path: Path) -> None:
    there = "http://corpora.example/file.bin"
    proxy = server.url.removesuffix("/corpus.bin")
    assert fetch(Wanted(there, tmp_path / "x", SHA256, proxy=proxy)).sha256 == SHA256
    assert server.proxied == [there]


def test_a_published_list_of_hashes_is_read(server: Server) -> None:
    digest = "a" * 40
    server.data = f"{digest}  enwiki-20260101-pages-articles.xml.bz2\n{'b' * 40}  other\n".encode()
    assert published_hash(server.url, "enwiki-latest-pages-articles.xml.bz2") == digest
    assert published_hash(server.url, "nothing") == ""
    server.status = 404
    assert published_hash(server.url, "other") == ""


@pytest.mark.parametrize(
    "url", ["ftp://a/b", "http://", "file:///etc/passwd", "http://u:pass@h/x", "http://a b/"]
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(UsageError) as raised:
        check_url(url)
    assert "pass" not in str(raised.value).replace("passwd", "").replace("password", "")


def test_names_and_file_names() -> None:
    assert file_name("https://example.org/a/b%20c.json?x=1") == "b c.json"
    for wrong in ("https://example.org/", "https://example.org/.hidden", "https://example.org/a%2fb/..%2f"):
        with pytest.raises(UsageError, match="does not end in a file name"):
            file_name(wrong)
    for named in NAMES.values():
        check_url(named.url)
        assert len(named.sha256) in (0, 64)
