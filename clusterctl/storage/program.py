"""Move files between a machine and an object store: runs on nodes, with boto3 and without the rest of this package.

The order comes as JSON on standard input, keys included, so that no process list and no file has them. Each line of
the output is JSON: `{"bytes": N}` for progress, and at the end `{"result": ...}` or `{"refused": ..., "hint": ...}`.

An object of more than one piece is sent in parts of one piece, and continues after an interruption with the parts
that the store has. A download writes each piece to its place and verifies it; pieces that an earlier attempt left are
hashed, not fetched again.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

# Called with the number of bytes that were moved.
Report = Callable[[int], None]
# Bytes of a piece; larger for files that would have more than 9,000: S3 allows 10,000 parts.
PIECE, MOST_PIECES = 16 << 20, 9_000
THREADS = 8
# Files that are moved at the same time; their parts share the threads.
FILES = 4
# Bytes that are read, hashed and written at once.
BLOCK = 1 << 20
# How often a part is sent that arrives damaged, and the error codes of stores for this.
MOST_SENDS = 3
DAMAGED = ("BadDigest", "XAmzContentSHA256Mismatch")
# Objects whose text is read whole.
MOST_TEXT = 256 << 20
PARTIAL = ".part"
NO_LIBRARY = "install clusterctl's extra `storage` (boto3) there: see `clusterctl nodes setup`"
REFUSALS = {
    "NoSuchBucket": "create the bucket, or correct its name",
    "AccessDenied": "these keys may not do that there: check the policy of the bucket",
    "InvalidAccessKeyId": "the store does not know this key: check AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "the secret is wrong: check AWS_SECRET_ACCESS_KEY, and the clock of the node",
    "ExpiredToken": "get new temporary keys",
    "RequestTimeTooSkewed": "the clock of the node is wrong: run an NTP client",
    "QuotaExceeded": "the store is full: free some space there",
    "BadDigest": "bytes change on the way to the store: check the network and the memory of the node",
    "XAmzContentSHA256Mismatch": "bytes change on the way to the store: check the network and the memory of the node",
}


class Refused(Exception):
    """The store or the disk refused a request; the text has the reason and a remedy."""

    def __init__(self, text: str, hint: str = "", code: str = "") -> None:
        super().__init__(text)
        self.hint, self.code = hint, code


def main() -> int:
    """Carry out one order; return the exit code."""
    order = json.loads(sys.stdin.buffer.readline())
    with contextlib.suppress(OSError):
        # Lower the priority: the training goes first.
        os.nice(10)
    turn = threading.Lock()

    def report(count: int) -> None:
        with turn:
            sys.stdout.write(json.dumps({"bytes": count}) + "\n")
            sys.stdout.flush()

    try:
        answer: dict[str, Any] = {"result": carry_out(order, report)}
    except Refused as refused:
        answer = {"refused": str(refused), "hint": refused.hint}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    return 1 if "refused" in answer else 0


def carry_out(order: dict[str, Any], report: Report, opened: Store | None = None) -> dict[str, Any]:
    """Return the result of an order; raise Refused with the problem and its location.

    `opened` is the store of an earlier order: opening a store takes as long as sending some megabytes.
    """
    store = opened or open_store(order)
    actions: dict[str, Callable[[], Any]] = {
        "probe": lambda: store.probe(order["key"]),
        "upload": lambda: {"files": store.upload(order["files"], report)},
        "publish": lambda: store.publish(order["objects"]),
        "texts": lambda: {"texts": [store.read(key) for key in order["keys"]]},
        "names": lambda: store.names(order["prefix"], order["delimiter"]),
        "download": lambda: store.download(order["files"], report),
    }
    return actions[order["action"]]() or {}


def open_store(order: dict[str, Any]) -> Store:
    """Return the store of an order."""
    return Store(order["store"], patient=order["action"] != "probe")


class Store:
    """One bucket."""

    def __init__(self, how: dict[str, Any], patient: bool = True) -> None:
        try:
            import boto3
            import botocore.config
            import botocore.exceptions
        except ImportError as problem:
            raise Refused(f"{sys.executable}: {problem}", NO_LIBRARY) from None
        self._errors = botocore.exceptions
        self._bucket, self._scheme = how["bucket"], how["scheme"]
        key, secret, token = how["keys"] or (None, None, None)
        # Many stores that speak S3's protocol refuse its newer checksums. The signature of each request covers the
        # SHA-256 of its body instead, so that a store detects bytes that were damaged in transit.
        self._settings: dict[str, Any] = {
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "connect_timeout": 10 if patient else 5,
            "read_timeout": 60 if patient else 10,
            "retries": {"mode": "standard", "max_attempts": 6 if patient else 2},
            "max_pool_connections": 2 * THREADS,
            "s3": {"payload_signing_enabled": True},
        }
        if how["endpoint"] and self._scheme == "s3":
            self._settings["s3"]["addressing_style"] = "path"
        try:
            config = botocore.config.Config(**self._settings)
            self._client: Any = boto3.session.Session().client(
                "s3",
                endpoint_url=how["endpoint"] or None,
                region_name=how["region"] or "us-east-1",
                aws_access_key_id=key,
                aws_secret_access_key=secret,
                aws_session_token=token or None,
                config=config,
            )
        except (botocore.exceptions.BotoCoreError, ValueError) as problem:
            raise Refused(
                f"{self._scheme}://{self._bucket}: {problem}", "check `storage` in the job"
            ) from None
        # The hash that a thread's last part was signed with.
        self._signed = threading.local()
        self._client.meta.events.register("before-send.s3.UploadPart", self._note_hash)

    def _note_hash(self, request: Any, **_: object) -> None:
        value = request.headers.get("X-Amz-Content-SHA256", "")
        self._signed.hash = value.decode() if isinstance(value, bytes) else value

    @contextlib.contextmanager
    def _at(self, key: str) -> Iterator[None]:
        """Raise the library's errors with the object they concern, and a remedy."""
        where = f"{self._scheme}://{self._bucket}/{key}"
        try:
            yield
        except self._errors.ClientError as problem:
            error = problem.response.get("Error", {})
            code = str(error.get("Code", "?"))
            status = problem.response.get("ResponseMetadata", {}).get("HTTPStatusCode", "?")
            text = f"{where}: the store refuses {problem.operation_name}: {code} (HTTP {status})"
            raise Refused(
                text, REFUSALS.get(code, "see the store's documentation for this code"), code
            ) from None
        except self._errors.NoCredentialsError:
            hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or `storage: {credentials: FILE}`"
            raise Refused(f"{where}: there are no keys for it", hint) from None
        except (self._errors.BotoCoreError, self._errors.HTTPClientError) as problem:
            hint = "check `storage: {endpoint: URL}`, the network and the proxy of the node"
            raise Refused(f"{where}: the store cannot be reached: {problem}", hint, "unreachable") from None

    # ---- small objects

    def probe(self, key: str) -> None:
        """Write, read and delete a small object; raise Refused if the store does not allow that."""
        self.put(key, b"clusterctl")
        found = self.read(key)
        with self._at(key):
            self._client.delete_object(Bucket=self._bucket, Key=key)
        if found != "clusterctl":
            raise Refused(f"{self._scheme}://{self._bucket}/{key}: it returns other bytes than were written")

    def put(self, key: str, data: bytes) -> None:
        with self._at(key):
            self._client.put_object(Bucket=self._bucket, Key=key, Body=data, ContentMD5=_md5(data))

    def publish(self, objects: list[dict[str, Any]]) -> None:
        """Write small objects in order; the last one marks the others as complete."""
        for entry in objects:
            self.put(entry["key"], entry["text"].encode())

    def read(self, key: str) -> str | None:
        """Return the text of an object, None if there is none."""
        try:
            with self._at(key):
                answer = self._client.get_object(Bucket=self._bucket, Key=key)
                if answer.get("ContentLength", 0) > MOST_TEXT:
                    raise Refused(f"{key}: has {answer['ContentLength']} bytes, too many for a list")
                return str(answer["Body"].read(MOST_TEXT).decode("utf-8", "replace"))
        except Refused as refused:
            if refused.code in ("NoSuchKey", "404"):
                return None
            raise

    def names(self, prefix: str, delimiter: str) -> dict[str, Any]:
        """Return the folders below a prefix, and the sizes and ETags of its objects."""
        found: dict[str, Any] = {"folders": [], "sizes": {}, "tags": {}}
        with self._at(prefix):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=prefix, Delimiter=delimiter):
                found["folders"] += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
                for entry in page.get("Contents", ()):
                    found["sizes"][entry["Key"]] = entry["Size"]
                    found["tags"][entry["Key"]] = entry["ETag"].strip('"')
        return found

    # ---- uploads

    def upload(self, files: list[dict[str, Any]], report: Report) -> dict[str, Any]:
        """Send files; return for each name its size, and the hash of each piece."""
        with _pool(THREADS) as pool, _pool(FILES) as outer:

            def send(number: int) -> dict[str, Any]:
                return self._upload(files[number]["path"], files[number]["key"], report, pool)

            sent = _all(outer, send, range(len(files)))
        return {files[number]["name"]: answer for number, answer in enumerate(sent)}

    def _upload(self, path: str, key: str, report: Report, pool: ThreadPoolExecutor) -> dict[str, Any]:
        handle = _open(path, os.O_RDONLY)
        try:
            size = os.fstat(handle).st_size
            piece = piece_of(size)
            ranges = [(start, min(piece, size - start)) for start in range(0, size, piece)] or [(0, 0)]
            if len(ranges) == 1:
                data = _pread(handle, path, 0, size)
                self.put(key, data)
                report(size)
                hashes = [hashlib.sha256(data).hexdigest()]
            else:
                hashes = self._send_parts(handle, path, key, ranges, report, pool)
            if os.fstat(handle).st_size != size:
                raise Refused(
                    f"{path}: changed while it was sent", "it is sent again with the next checkpoint"
                )
        finally:
            os.close(handle)
        return {"bytes": size, "piece": piece, "pieces": hashes}

    def _send_parts(
        self,
        handle: int,
        path: str,
        key: str,
        ranges: list[tuple[int, int]],
        report: Report,
        pool: ThreadPoolExecutor,
    ) -> list[str]:
        upload, present = self._begin(key)

        def send(number: int) -> tuple[str, str]:
            start, count = ranges[number - 1]
            data = _pread(handle, path, start, count)
            stored, tag = present.get(number, (-1, ""))
            if stored == count and tag == hashlib.md5(data).hexdigest():
                digest = hashlib.sha256(data).hexdigest()
            else:
                digest, tag = self._send_part(key, upload, number, data)
            report(count)
            return digest, tag

        sent = _all(pool, send, range(1, len(ranges) + 1))
        parts = [{"PartNumber": number, "ETag": tag} for number, (_, tag) in enumerate(sent, 1)]
        with self._at(key):
            self._client.complete_multipart_upload(
                Bucket=self._bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
            )
        return [digest for digest, _ in sent]

    def _send_part(self, key: str, upload: str, number: int, data: bytes) -> tuple[str, str]:
        """Send a part; return its SHA-256, with which the library has signed it, and the store's tag."""
        place = {"Bucket": self._bucket, "Key": key, "UploadId": upload, "PartNumber": number}
        for attempt in range(MOST_SENDS):
            self._signed.hash = ""
            try:
                with self._at(key):
                    answer = self._client.upload_part(**place, Body=data)
                break
            except Refused as refused:
                if refused.code not in DAMAGED or attempt + 1 == MOST_SENDS:
                    raise
        digest: str = self._signed.hash
        if len(digest) != 64:
            digest = hashlib.sha256(data).hexdigest()
        return digest, answer["ETag"].strip('"')

    def _begin(self, key: str) -> tuple[str, dict[int, tuple[int, str]]]:
        """Return the upload of an interrupted attempt with its parts, or a new one."""
        with self._at(key):
            found = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=key).get("Uploads", ())
            for upload in found:
                if upload["Key"] != key:
                    continue
                present: dict[int, tuple[int, str]] = {}
                pages = self._client.get_paginator("list_parts")
                for page in pages.paginate(Bucket=self._bucket, Key=key, UploadId=upload["UploadId"]):
                    for part in page.get("Parts", ()):
                        present[part["PartNumber"]] = (part["Size"], part["ETag"].strip('"'))
                return upload["UploadId"], present
            return self._client.create_multipart_upload(Bucket=self._bucket, Key=key)["UploadId"], {}

    # ---- downloads

    def download(self, files: list[dict[str, Any]], report: Report) -> dict[str, Any]:
        """Fetch objects to files; return how many bytes were fetched, and how many were there already."""
        total = {"fetched": 0, "present": 0}
        with _pool(THREADS) as pool, _pool(FILES) as outer:

            def fetch(number: int) -> tuple[int, int]:
                return self._download(files[number], report, pool)

            for fetched, present in _all(outer, fetch, range(len(files))):
                total["fetched"] += fetched
                total["present"] += present
        return total

    def _download(self, entry: dict[str, Any], report: Report, pool: ThreadPoolExecutor) -> tuple[int, int]:
        path, key, size = os.path.expanduser(entry["path"]), entry["key"], entry["bytes"]
        piece, hashes = entry["piece"], entry["pieces"]
        aside = path + PARTIAL
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        except OSError as problem:
            raise Refused(
                f"{problem.filename}: {problem.strerror}", "check the folder and its permissions"
            ) from None
        whole = os.path.isfile(path) and os.path.getsize(path) == size
        if whole and not hashes:
            # Without hashes, the name of the folder shows that the store has the same objects as before.
            report(size)
            return 0, size
        handle = _open(path if whole else aside, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(handle, size)

            def fetch(number: int) -> int:
                start = number * piece
                count = int(min(piece, size - start))
                wanted = hashes[number] if hashes else ""
                if wanted and _holds(handle, path, start, count, wanted):
                    report(count)
                    return 0
                digest = self._fetch(key, handle, path, (start, count, size))
                if wanted and digest != wanted:
                    text = f"{self._scheme}://{self._bucket}/{key}: bytes from {start} differ from their hash"
                    raise Refused(text, "the object was changed or damaged in the store: upload it again")
                report(count)
                return count

            fetched: int = sum(_all(pool, fetch, range(-(-size // piece))))
            os.fsync(handle)
        finally:
            os.close(handle)
        if not whole:
            os.replace(aside, path)
        return fetched, size - fetched

    def _fetch(self, key: str, handle: int, path: str, where: tuple[int, int, int]) -> str:
        """Write a piece of an object to its place, and return its SHA-256; a broken connection is tried again.

        `where` is the piece's first byte, its number of bytes, and that of the whole object.
        """
        for attempt in range(4):
            with self._at(key):
                try:
                    return self._copy(key, handle, path, where)
                except (self._errors.IncompleteReadError, self._errors.HTTPClientError, OSError):
                    if attempt == 3:
                        raise
        raise AssertionError("the last attempt returns or raises")

    def _copy(self, key: str, handle: int, path: str, where: tuple[int, int, int]) -> str:
        start, count, size = where
        last = start + count
        answer = self._client.get_object(Bucket=self._bucket, Key=key, Range=f"bytes={start}-{last - 1}")
        digest = hashlib.sha256()
        with contextlib.closing(answer["Body"]) as body:
            found = answer.get("ContentRange", "").rpartition("/")[2] or "an unknown number of"
            if found != str(size):
                raise Refused(
                    f"{key}: has {found} bytes in the store, {size} were expected", "upload it again"
                )
            # Not more than the piece, whatever the store sends.
            while start < last:
                data = body.read(min(BLOCK, last - start))
                if not data:
                    raise Refused(
                        f"{self._scheme}://{self._bucket}/{key}: ends before byte {last}", "try again later"
                    )
                digest.update(data)
                _pwrite(handle, path, data, start)
                start += len(data)
        return digest.hexdigest()


def piece_of(size: int) -> int:
    """Return the bytes of a piece of a file."""
    mega = 1 << 20
    return max(PIECE, -(-size // MOST_PIECES // mega) * mega)


def _pool(threads: int) -> ThreadPoolExecutor:
    # Imported here, because a controller loads this module but usually moves no files itself.
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(threads)


def _all(pool: ThreadPoolExecutor, work: Callable[[int], Any], numbers: range) -> list[Any]:
    """Return the results in order; after the first failure no further one is started."""
    failed = threading.Event()

    def guarded(number: int) -> Any:
        if failed.is_set():
            return None
        try:
            return work(number)
        except BaseException:
            failed.set()
            raise

    futures = [pool.submit(guarded, number) for number in numbers]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def _open(path: str, flags: int) -> int:
    try:
        return os.open(os.path.expanduser(path), flags | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        raise Refused(f"{path}: {problem.strerror}", "check the file and its permissions") from None


def _pread(handle: int, path: str, start: int, count: int) -> bytes:
    parts, at = [], start
    while at < start + count:
        try:
            data = os.pread(handle, start + count - at, at)
        except OSError as problem:
            raise Refused(f"{path}: {problem.strerror}", "check the disk") from None
        if not data:
            raise Refused(
                f"{path}: became shorter while it was read", "it is sent again with the next checkpoint"
            )
        parts.append(data)
        at += len(data)
    return b"".join(parts)


def _holds(handle: int, path: str, start: int, count: int, wanted: str) -> bool:
    """Return whether a piece of a file has a hash; a part that was never written is not read."""
    try:
        if os.lseek(handle, start, os.SEEK_DATA) >= start + count:
            return False
    except OSError as problem:
        if problem.errno == errno.ENXIO:
            # Nothing was written from there to the end.
            return False
    return hashlib.sha256(_pread(handle, path, start, count)).hexdigest() == wanted


def _pwrite(handle: int, path: str, data: bytes, start: int) -> None:
    view = memoryview(data)
    try:
        while view:
            count = os.pwrite(handle, view, start)
            view, start = view[count:], start + count
    except OSError as problem:
        raise Refused(
            f"{path}: {problem.strerror}", "free some space there; the next attempt continues"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
