"""Records of pairs of .bin and .idx files: their manifests, and the answers of the trainer about a build."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clusterctl.wire.typed_json import BadValue, decode, encode, parse


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of an input or an output."""

    bytes: int | None = None
    sha256: str = ""


@dataclass(frozen=True)
class InputRecord:
    """A file that was read, with its size and hash."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer that encoded the texts."""

    path: str
    sha256: str
    fingerprint: str = ""
    """The hash of what decides the ids of a text, the same for every form of its files; "" in older manifests."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known about a pair; None for what a split or merged pair does not have. Files keep this order of keys."""

    format: int = 1
    documents: int = 0
    empty_documents: int | None = None
    sequences: int = 0
    tokens: int = 0
    characters: int | None = None
    bytes: int | None = None
    token_type: str = ""
    unit: str = ""
    append_eod: bool = False
    vocab: int
    largest_id: int | None = None
    eod: int | None = None
    eod_token: str | None = None
    glm: dict[str, int] | None = None
    """GLM's special ids by name, if the tokenizer has all of them."""
    tokenizer: TokenizerRecord | None = None
    dropped: dict[str, int] | None = None
    """Documents that were left out, by reason."""
    bad: tuple[str, ...] = ()
    """The first lines that could not be read."""
    filters: dict[str, object] | None = None
    unigram_entropy_nats: float | None = None
    inputs: tuple[InputRecord, ...] = ()
    outputs: dict[str, FileRecord]
    """By ending: bin, idx."""
    split_from: str | None = None
    documents_from: tuple[int, ...] | None = None
    merged_from: tuple[str, ...] | None = None

    def as_json(self) -> dict[str, object]:
        return {key: value for key, value in encode(self).items() if value is not None or key in _NULLABLE}


# Keys that are written even if their value is null.
_NULLABLE = ("eod", "eod_token", "glm")


def read_manifest(text: bytes | str) -> Manifest:
    """Return the manifest in a text; raise BadValue for a text that is none."""
    given = parse(text)
    if isinstance(given, dict):
        given = {key: value for key, value in given.items() if value is not None}
    manifest = decode(Manifest, given)
    if not manifest.outputs.get("bin", FileRecord()).sha256:
        raise BadValue("the hash of .bin is missing")
    return manifest


@dataclass(frozen=True)
class PairCounts:
    """What a new pair contains."""

    prefix: str
    documents: int
    sequences: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class InputShare:
    """The inputs of one node: the folder on the launching machine, and their number and size."""

    folder: Path
    files: int
    bytes: int


@dataclass(frozen=True)
class InputShares:
    """The inputs of a build divided among nodes, and the options with which each node builds its share."""

    shares: tuple[InputShare, ...]
    words: tuple[str, ...]
