"""An object store that speaks as much of S3's protocol as an upload and a download need, and fails on request."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEY, SECRET = "TESTKEYID", "very-secret-value"


class ObjectStore:
    """What the store holds; tests read and change it directly."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.buckets = {"bucket"}
        self.requests: list[str] = []
        # After so many parts, parts are refused; None: never.
        self.parts_allowed: int | None = None
        # So many answers with data are cut in the middle.
        self.cuts = 0
        self.refuses_writes = False
        # It gives a range of an object, and more bytes without end.
        self.is_endless = False
        # So many bodies lose a bit on the way here.
        self.damages = 0
        # Called before an object or a part is kept.
        self.before_write: Callable[[], object] = lambda: None
        self.url = ""
        self.change = threading.Lock()


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Yield a store that listens on a port of this machine."""
    store = ObjectStore()

    class Handler(_Handler):
        state = store

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    store.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: ObjectStore
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        data = self._body()
        if not self._allowed():
            return
        with self.state.change:
            damaged = self.state.damages > 0
            self.state.damages -= damaged
        if damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        md5 = self.headers.get("Content-MD5")
        if md5 and base64.b64decode(md5) != hashlib.md5(data).digest():
            return self._error(400, "BadDigest")
        if self.headers["X-Amz-Content-SHA256"] != hashlib.sha256(data).hexdigest():
            return self._error(400, "XAmzContentSHA256Mismatch")
        self.state.before_write()
        tag = hashlib.md5(data).hexdigest()
        with self.state.change:
            if self.state.refuses_writes:
                return self._error(403, "AccessDenied")
            if "uploadId" in self.query:
                if self.state.parts_allowed is not None:
                    if self.state.parts_allowed <= 0:
                        return self._error(403, "AccessDenied")
                    self.state.parts_allowed -= 1
                self.state.uploads[self.query["uploadId"]][1][int(self.query["partNumber"])] = data
            else:
                self.state.objects[self.key] = data
        self._answer(200, b"", ETag=f'"{tag}"')

    def do_POST(self) -> None:
        body = self._body()
        if not self._allowed():
            return
        with self.state.change:
            if "uploads" in self.query:
                name = f"upload{len(self.state.requests)}"
                self.state.uploads[name] = (self.key, {})
                return self._xml(
                    f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
                )
            key, parts = self.state.uploads.pop(self.query["uploadId"])
            assert body.count(b"<Part>") == len(parts)
            self.state.objects[key] = b"".join(parts[number] for number in sorted(parts))
        self._xml("<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")

    def do_DELETE(self) -> None:
        if self._allowed():
            self.state.objects.pop(self.key, None)
            self._answer(204, b"")

    def do_GET(self) -> None:
        if not self._allowed():
            return
        if "uploads" in self.query:
            found = [
                (name, key) for name, (key, _) in self.state.uploads.items() if key.startswith(self._prefix())
            ]
            rows = "".join(
                f"<Upload><Key>{escape(k)}</Key><UploadId>{n}</UploadId></Upload>" for n, k in found
            )
            return self._xml(f"<ListMultipartUploadsResult>{rows}</ListMultipartUploadsResult>")
        if "uploadId" in self.query:
            parts = self.state.uploads[self.query["uploadId"]][1]
            rows = "".join(
                f"<Part><PartNumber>{n}</PartNumber><Size>{len(d)}</Size><ETag>{hashlib.md5(d).hexdigest()}</ETag></Part>"
                for n, d in sorted(parts.items())
            )
            return self._xml(f"<ListPartsResult><IsTruncated>false</IsTruncated>{rows}</ListPartsResult>")
        if not self.key:
            return self._list()
        data = self.state.objects.get(self.key)
        if data is None:
            return self._error(404, "NoSuchKey")
        self._give(data)

    def _give(self, data: bytes) -> None:
        start, stop, status, more = 0, len(data), 200, {}
        if asked := self.headers.get("Range"):
            first, last = asked.removeprefix("bytes=").split("-")
            start, stop, status = int(first), min(int(last or len(data)) + 1, len(data)), 206
            more = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        part = data[start:stop]
        if self.state.is_endless:
            self._head(status, 1 << 50, ETag='"x"', **more)
            self.close_connection = True
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(part)
            return
        with self.state.change:
            cut = self.state.cuts > 0 and len(part) > 1000
            self.state.cuts -= cut
        if not cut:
            return self._answer(status, part, ETag='"x"', **more)
        self._head(status, len(part), ETag='"x"', **more)
        self.wfile.write(part[: len(part) // 2])
        self.close_connection = True

    def _list(self) -> None:
        prefix, delimiter = self._prefix(), self.query.get("delimiter", "")
        folders, rows = set(), ""
        for key, data in sorted(self.state.objects.items()):
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                tag = hashlib.md5(data).hexdigest()
                rows += (
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>{tag}</ETag></Contents>"
                )
        rows += "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)
        )
        self._xml(f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>")

    def _prefix(self) -> str:
        return self.query.get("prefix", "")

    def _allowed(self) -> bool:
        parts = urlsplit(self.path)
        self.query = {
            name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()
        }
        bucket, _, self.key = unquote(parts.path).lstrip("/").partition("/")
        with self.state.change:
            self.state.requests.append(f"{self.command} {self.path}")
        if bucket not in self.state.buckets:
            self._error(404, "NoSuchBucket")
        elif f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            self._error(403, "InvalidAccessKeyId")
        else:
            return True
        return False

    def _body(self) -> bytes:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        assert "aws-chunked" not in self.headers.get("Content-Encoding", "")
        return data

    def _xml(self, text: str) -> None:
        self._answer(200, f'<?xml version="1.0"?>{text}'.encode(), **{"Content-Type": "application/xml"})

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _answer(self, status: int, data: bytes, **headers: str) -> None:
        self._head(status, len(data), **headers)
        self.wfile.write(data)

    def _head(self, status: int, size: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(size), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """Print nothing."""
