"""Download a file over HTTP: continue after an interruption, verify the hash, and then move the file to its place."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from email.message import Message
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from clusterctl.errors import UsageError, WorkFailed
from clusterctl.files import replace_file
from clusterctl.text import size as size_text
from clusterctl.wire.typed_json import BadValue, decode, parse

PIECE = 1 << 20
# Seconds before each further attempt after one without a new byte; the download fails after the last.
PAUSES = (0.5, 2.0, 5.0, 10.0)
# Seconds without data after which an attempt fails.
SILENCE = 60.0
# Where hashes of downloads are recorded, next to the files.
RECORD = "fetched.json"
HASHES = {32: "md5", 40: "sha1", 64: "sha256"}
MOST_SUMS = 4 << 20
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Wanted:
    """What is downloaded, and where it goes."""

    url: str
    target: Path
    digest: str = ""
    """MD5, SHA-1 or SHA-256 in hex; "" if none is known."""
    proxy: str = ""
    accept_changed: bool = False


@dataclass(frozen=True)
class Recorded:
    """What is recorded about a downloaded file."""

    url: str
    sha256: str
    bytes: int
    time: float = 0.0
    pinned: bool = False
    """Whether the hash was known before the download."""


@dataclass(frozen=True)
class Result:
    """What a download did."""

    path: str
    sha256: str
    bytes: int
    fetched: int
    """Bytes that this call downloaded."""
    pinned: bool
    unchanged: bool
    seconds: float


@dataclass(frozen=True)
class _Partial:
    """The URL, the version tag and the size of the file that an interrupted download began."""

    url: str
    tag: str = ""
    size: int = -1


def check_proxy(proxy: str) -> None:
    """Raise UsageError unless a proxy is an address that can be used."""
    try:
        parts = urlsplit(proxy)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        sound = False
    if not sound:
        # The address is not shown, because it may contain a password.
        raise UsageError("--proxy is not an http or https URL", "as in http://proxy.example:3128")


def check_url(url: str) -> None:
    """Raise UsageError unless a URL can be downloaded and shown."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        sound, parts = False, urlsplit("")
    if not sound or re.search(r"[\x00-\x20\x7f]", url):
        raise UsageError(
            f"{url[:100]!r} is not an http or https URL", "name a URL, or a name of `data fetch --list`"
        )
    if "@" in parts.netloc:
        raise UsageError(
            "a URL with a password is not fetched: it would be recorded", "use a URL without user@"
        )


def file_name(url: str) -> str:
    """Return the name of the file that a URL ends with."""
    name = unquote(urlsplit(url).path.rstrip("/").rpartition("/")[2])
    if not re.fullmatch(r"[^/\x00-\x1f\x7f\\]{1,200}", name) or name.startswith("."):
        raise UsageError(f"{url}: does not end in a file name", "name the file: -o FILE")
    return name


def fetch(wanted: Wanted, progress: Progress = lambda done, total: None) -> Result:
    """Download a file unless it exists already; raise WorkFailed if it cannot be downloaded or has a wrong hash."""
    check_url(wanted.url)
    began = time.monotonic()
    known = read_record(wanted.target)
    expected = wanted.digest.lower()
    if expected and (len(expected) not in HASHES or not re.fullmatch("[0-9a-f]+", expected)):
        raise UsageError(
            f"{wanted.digest[:80]!r} is not an MD5, SHA-1 or SHA-256", "write 32, 40 or 64 hex digits"
        )
    if wanted.target.is_file():
        # A file of an earlier download is verified by the hash that was recorded then.
        again = expected or (known.sha256 if known else "")
        if again and digest_of(wanted.target, HASHES[len(again)]) == again:
            sha256 = again if len(again) == 64 else digest_of(wanted.target)
            size = wanted.target.stat().st_size
            _record(wanted, Recorded(wanted.url, sha256, size, time.time(), bool(expected)))
            return Result(str(wanted.target), sha256, size, 0, bool(expected), True, time.monotonic() - began)
        if not known:
            remedy = "remove it, or name another one with -o"
            raise UsageError(f"{wanted.target}: exists, and is not known to be {wanted.url}", remedy)
    download = _Download(wanted, progress)
    aside, fetched = download.run()
    # The download is complete, even if its hash should be wrong: there is nothing to continue.
    download.forget()
    sha256 = digest_of(aside)
    _verify(wanted, expected, sha256, aside, known)
    os.replace(aside, wanted.target)
    size = wanted.target.stat().st_size
    _record(wanted, Recorded(wanted.url, sha256, size, time.time(), bool(expected)))
    return Result(str(wanted.target), sha256, size, fetched, bool(expected), False, time.monotonic() - began)


def _verify(wanted: Wanted, expected: str, sha256: str, aside: Path, known: Recorded | None) -> None:
    """Remove a file and raise WorkFailed if it does not have the hash that it should have."""
    found = sha256 if len(expected) in (0, 64) else digest_of(aside, HASHES[len(expected)])
    if expected and found != expected:
        aside.unlink()
        text = f"{wanted.url}: has {HASHES[len(expected)]} {found}, it should have {expected}"
        raise WorkFailed(
            text, "it was changed or damaged in transit, and was deleted; try again, or use another mirror"
        )
    if (
        not expected
        and known
        and known.url == wanted.url
        and known.sha256 != sha256
        and not wanted.accept_changed
    ):
        aside.unlink()
        text = f"{wanted.url}: has SHA-256 {sha256}, the first download had {known.sha256}"
        raise WorkFailed(text, "if the file was replaced on purpose: --accept-changed")


class _Download:
    """One download: its partial file, and the attempts to complete it."""

    def __init__(self, wanted: Wanted, progress: Progress) -> None:
        self._wanted, self._progress = wanted, progress
        self._aside = wanted.target.with_name(f".{wanted.target.name}.part")
        self._note = wanted.target.with_name(f".{wanted.target.name}.part.json")
        proxies = {"http": wanted.proxy, "https": wanted.proxy} if wanted.proxy else None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _SafeRedirects())

    def run(self) -> tuple[Path, int]:
        """Return the complete file and the number of bytes downloaded; repeat attempts as long as bytes arrive."""
        try:
            self._wanted.target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise UsageError(f"{problem.filename}: {problem.strerror}", "name another folder: -o") from None
        begun = before = self._present()
        fruitless = 0
        while True:
            try:
                return self._attempt(begun)
            except (urllib.error.URLError, http.client.HTTPException, OSError) as problem:
                self._refuse(problem)
                present = self._present()
                fruitless = 0 if present > before else fruitless + 1
                before = present
                if fruitless > len(PAUSES):
                    text = f"{self._wanted.url}: {_reason(problem)}; {size_text(present)} were downloaded"
                    hint = (
                        "check the network and the proxy ($https_proxy, --proxy); the same command continues"
                    )
                    raise WorkFailed(text, hint) from None
                time.sleep(PAUSES[max(0, fruitless - 1)] if fruitless else 0.0)

    def forget(self) -> None:
        """Remove the note about the partial file."""
        self._note.unlink(missing_ok=True)

    def _attempt(self, begun: int) -> tuple[Path, int]:
        start, note = self._present(), self._read_note()
        if note.url != self._wanted.url or not note.tag:
            # It is not known whether the bytes here belong to the same file.
            start = 0
        if 0 <= note.size == start and note.url == self._wanted.url and note.tag:
            return self._aside, start - min(begun, start)
        headers = {"User-Agent": "clusterctl", "Accept-Encoding": "identity"}
        if start:
            headers |= {"Range": f"bytes={start}-", "If-Range": note.tag}
        request = urllib.request.Request(self._wanted.url, headers=headers)
        with self._opener.open(request, timeout=SILENCE) as answer:
            if answer.status != 206 or _first_byte(answer.headers) != start:
                start = 0
            length = answer.headers.get("Content-Length", "")
            total = start + int(length) if length.isdecimal() else -1
            self._require_room(total - start)
            self._write_note(_tag(answer.headers), total)
            count = self._copy(answer, start, total)
        if total >= 0 and count != total:
            raise http.client.IncompleteRead(b"", total - count)
        return self._aside, max(count - begun, 0) if start else count

    def _copy(self, answer: Any, start: int, total: int) -> int:
        """Append the received data to the partial file; return its new size."""
        with self._open_at(start) as file:
            count = start
            while data := answer.read(PIECE):
                try:
                    file.write(data)
                except OSError as problem:
                    text = f"{self._aside}: {problem.strerror}"
                    raise WorkFailed(text, "free some space; the same command continues") from None
                count += len(data)
                self._progress(count, total)
            file.flush()
            os.fsync(file.fileno())
        return count

    def _open_at(self, start: int) -> IO[bytes]:
        try:
            file = os.fdopen(os.open(self._aside, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        except OSError as problem:
            raise UsageError(f"{problem.filename}: {problem.strerror}", "name another folder: -o") from None
        file.truncate(start)
        file.seek(start)
        return file

    def _refuse(self, problem: Exception) -> None:
        """Raise WorkFailed for an error that would not change with another attempt."""
        if isinstance(problem, urllib.error.HTTPError):
            code = problem.code
            if code == 416:
                # The bytes here belong to another file.
                self._aside.unlink(missing_ok=True)
                self.forget()
            elif code not in (408, 425, 429) and code < 500:
                hint = "correct the URL" if code in (404, 410) else "the server may require a login"
                raise WorkFailed(f"{self._wanted.url}: HTTP {code} {problem.reason}", hint) from None

    def _require_room(self, wanted: int) -> None:
        free = shutil.disk_usage(self._wanted.target.parent).free
        if wanted > free:
            text = (
                f"{self._wanted.target.parent}: {size_text(free)} free, {size_text(wanted)} more are needed"
            )
            raise WorkFailed(
                text, "free some space, or name another folder with -o; the same command continues"
            )

    def _present(self) -> int:
        return self._aside.stat().st_size if self._aside.exists() else 0

    def _read_note(self) -> _Partial:
        try:
            return decode(_Partial, parse(self._note.read_bytes()))
        except (OSError, BadValue):
            return _Partial("")

    def _write_note(self, tag: str, size: int) -> None:
        replace_file(self._note, json.dumps(asdict(_Partial(self._wanted.url, tag, size))))


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but not from https to http."""

    def redirect_request(
        self, request: urllib.request.Request, file: IO[bytes], code: int, text: str, headers: Any, url: str
    ) -> urllib.request.Request | None:
        if request.full_url.startswith("https:") and not url.startswith("https:"):
            raise WorkFailed(
                f"{request.full_url}: redirects to an unencrypted address", "name another mirror"
            )
        return super().redirect_request(request, file, code, text, headers, url)


def _first_byte(headers: Message) -> int:
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", ""))
    return int(found[1]) if found else -1


def _tag(headers: Message) -> str:
    """Return a value that changes with the file: a strong ETag, else the modification date."""
    tag = str(headers.get("ETag", ""))
    return tag if tag and not tag.startswith("W/") else str(headers.get("Last-Modified", ""))


def _reason(problem: Exception) -> str:
    if isinstance(problem, http.client.IncompleteRead):
        return "the connection ended too early"
    reason = getattr(problem, "reason", None) or problem
    return str(getattr(reason, "strerror", None) or reason)


# ---- hashes


def digest_of(path: Path, kind: str = "sha256") -> str:
    """Return the hash of a file."""
    with path.open("rb") as file:
        found = hashlib.new(kind)
        while data := file.read(PIECE):
            found.update(data)
    return found.hexdigest()


def published_hash(sums: str, file: str, proxy: str = "") -> str:
    """Return the hash of a file in a list such as SHA1SUMS; "" if the list lacks it or cannot be downloaded.

    Dates in names are ignored: the list of the newest dump names its files with its date.
    """
    proxies = {"http": proxy, "https": proxy} if proxy else None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _SafeRedirects())
    try:
        with opener.open(sums, timeout=SILENCE) as answer:
            text = str(answer.read(MOST_SUMS), "utf-8", "replace")
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return ""
    wanted = re.sub(r"-(latest|\d{8})-", "-", file)
    for line in text.splitlines():
        digest, _, name = line.strip().partition(" ")
        if re.sub(r"-(latest|\d{8})-", "-", name.strip().lstrip("*")) == wanted and len(digest) in HASHES:
            return str(digest.lower())
    return ""


def read_record(target: Path) -> Recorded | None:
    """Return what RECORD, next to a file, says about it; None if it says nothing."""
    return _records(target).get(target.name)


def _records(target: Path) -> dict[str, Recorded]:
    try:
        return decode(_Records, {"files": parse((target.parent / RECORD).read_bytes())}).files
    except OSError:
        return {}
    except BadValue as problem:
        raise UsageError(f"{target.parent / RECORD}: damaged: {problem}", "remove it") from None


@dataclass(frozen=True)
class _Records:
    files: dict[str, Recorded]


def _record(wanted: Wanted, recorded: Recorded) -> None:
    records = _records(wanted.target)
    before = records.get(wanted.target.name)
    if before is not None and replace(before, time=0.0) == replace(recorded, time=0.0):
        return
    files = {name: asdict(item) for name, item in {**records, wanted.target.name: recorded}.items()}
    replace_file(wanted.target.parent / RECORD, json.dumps(files, indent=1, sort_keys=True) + "\n")
