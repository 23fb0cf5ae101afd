"""What a build on many nodes leaves on them and here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from clusterctl.wire.pair import FileRecord, Manifest
from clusterctl.wire.typed_json import BadValue, decode, encode, parse


@dataclass(frozen=True)
class BuildRecord:
    """What a node built; `key` identifies the inputs and the options."""

    key: str
    manifest: Manifest

    def as_text(self) -> bytes:
        return json.dumps({"key": self.key, "manifest": self.manifest.as_json()}).encode()


@dataclass(frozen=True)
class ShardEntry:
    """A pair that stays on its node."""

    node: str
    prefix: str
    documents: int
    tokens: int
    outputs: Mapping[str, FileRecord]


@dataclass(frozen=True)
class ShardList:
    """The pairs that stay on their nodes, in the order of the inputs; `listing` is the file with this list."""

    listing: str
    format: int
    documents: int
    tokens: int
    token_type: str
    append_eod: bool
    vocab: int
    eod: int | None
    eod_token: str | None
    shards: tuple[ShardEntry, ...]

    def as_text(self) -> str:
        """Return what the file contains."""
        content = {key: value for key, value in encode(self).items() if key != "listing"}
        return json.dumps(content, indent=2) + "\n"


def read_record(text: bytes) -> BuildRecord | None:
    """Return the record of an earlier build, or None if the text is not one."""
    try:
        return decode(BuildRecord, parse(text))
    except BadValue:
        return None
