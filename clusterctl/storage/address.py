"""Addresses in object stores: `s3://bucket/prefix` and `obs://bucket/prefix`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from clusterctl.wire.fields import Checked, Problem, setting

SCHEMES = ("s3", "obs")
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
# Keys that every store accepts: without control characters and without empty or relative parts.
KEY = re.compile(r"[^\x00-\x1f\x7f\\]{0,900}\Z")


@dataclass(frozen=True)
class StoreOptions(Checked):
    """How an object store is reached: the job's `storage` part."""

    endpoint: str = setting("")
    """The store's URL. Default: $AWS_ENDPOINT_URL_S3, $AWS_ENDPOINT_URL, for obs:// $OBS_ENDPOINT; else Amazon's."""
    region: str = setting("")
    """The region. Default: $AWS_REGION, $AWS_DEFAULT_REGION."""
    credentials: str = setting("")
    """A file with access keys in the form of ~/.aws/credentials, which only you may be able to read. Default: the
    environment, else that file, else the nodes' own. Keys are never recorded."""

    def problems(self) -> Iterator[Problem]:
        if self.endpoint and (fault := endpoint_fault(self.endpoint))[0]:
            yield "endpoint", *fault


@dataclass(frozen=True)
class Address:
    """A folder or object in an object store."""

    scheme: str
    bucket: str
    prefix: str = ""

    def __truediv__(self, name: str) -> Address:
        return Address(self.scheme, self.bucket, f"{self.prefix}/{name}" if self.prefix else name)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def is_address(text: object) -> bool:
    """Return whether a text is meant as an address in an object store."""
    return isinstance(text, str) and text.partition("://")[0].lower() in SCHEMES and "://" in text


def address_fault(text: str) -> tuple[str, str]:
    """Return the fault of an address and the remedy; ("", "") for a valid one."""
    scheme, _, rest = text.partition("://")
    bucket, _, prefix = rest.partition("/")
    form = "write s3://BUCKET/FOLDER or obs://BUCKET/FOLDER"
    if scheme not in SCHEMES:
        return f"{scheme[:20]!r} is not an object store", form
    if "@" in bucket or ":" in bucket:
        # The text is not repeated: it may hold a key.
        return (
            "an address holds no credentials or ports",
            "set AWS_ACCESS_KEY_ID, or `storage: {credentials: FILE}`",
        )
    if not BUCKET.match(bucket):
        return f"{bucket[:64]!r} is not the name of a bucket", form
    parts = prefix.rstrip("/").split("/") if prefix.rstrip("/") else []
    if (
        any(part in ("", ".", "..") for part in parts)
        or not KEY.match(prefix)
        or "?" in prefix
        or "#" in prefix
    ):
        return f"{prefix[:80]!r} is not a path in a bucket", form
    return "", ""


def parse_address(text: str) -> Address:
    """Return a checked address."""
    scheme, _, rest = text.partition("://")
    bucket, _, prefix = rest.partition("/")
    return Address(scheme, bucket, prefix.rstrip("/"))


def endpoint_fault(url: str) -> tuple[str, str]:
    """Return the fault of an endpoint's URL, and the remedy."""
    remedy = "as in https://obs.cn-north-4.myhuaweicloud.com"
    try:
        parts = urlsplit(url)
        port_is_sound = parts.port is None or parts.port > 0
    except ValueError:
        return "it is not a URL", remedy
    if parts.username or parts.password or "@" in parts.netloc:
        return "it holds credentials", "set AWS_ACCESS_KEY_ID, or `storage: {credentials: FILE}`"
    sound = parts.scheme in ("http", "https") and parts.hostname and port_is_sound and parts.path in ("", "/")
    if not sound or parts.query or parts.fragment:
        return f"{url[:80]!r} is not an http or https URL of a server", remedy
    return "", ""
