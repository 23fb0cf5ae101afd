"""Values for the reports of trainer and nodes about pairs of .bin and .idx files in a build on many nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from clusterctl.wire.typed_json import BadValue, decode, encode, parse


@dataclass(frozen=True)
class InputShare:
    """A folder here with the inputs of one node, and their size."""

    folder: Path
    bytes: int


@dataclass(frozen=True)
class InputShares:
    """The inputs divided among nodes, and the options with which each node builds its share."""

    shares: tuple[InputShare, ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class PairFile:
    """Size and hash of one file of a pair."""

    bytes: int | None
    sha256: str


@dataclass(frozen=True)
class PairManifest:
    """The manifest of a pair, which says how it was built."""

    documents: int
    tokens: int
    token_type: str
    append_eod: bool
    vocab: int
    eod: int | None
    eod_token: str | None
    outputs: Mapping[str, PairFile]
    """By ending: bin, idx."""
    answer: Mapping[str, object] = field(default_factory=dict, repr=False)
    """The trainer's own JSON object, with all of the manifest's keys."""


@dataclass(frozen=True)
class BuildRecord:
    """What a node built; `key` identifies the inputs and the options."""

    key: str
    manifest: PairManifest

    def as_text(self) -> bytes:
        return json.dumps({"key": self.key, "manifest": self.manifest.answer}).encode()


@dataclass(frozen=True)
class JoinedPair:
    """The pair that the shards were joined to."""

    prefix: str
    documents: int
    sequences: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class ShardEntry:
    """A pair that stays on its node."""

    node: str
    prefix: str
    documents: int
    tokens: int
    outputs: Mapping[str, PairFile]


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


def read_manifest(text: bytes | str) -> PairManifest:
    """Return the manifest that the trainer printed; raise BadValue for any other text."""
    answer = parse(text)
    return replace(decode(PairManifest, answer), answer=answer)


def read_record(text: bytes) -> BuildRecord | None:
    """Return the record of an earlier build, or None if the text is not one."""
    try:
        found = parse(text)
        record = decode(BuildRecord, found)
    except BadValue:
        return None
    return replace(record, manifest=replace(record.manifest, answer=found["manifest"]))
