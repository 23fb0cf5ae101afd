"""What a manifest, or the journal of a conversion, records of one file."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.checkpoint.names import Held


@dataclass(frozen=True)
class SavedFile:
    """The size of a file, its hash, and the tensors in it."""

    bytes: int
    sha256: str
    """Of a file with tensors: of its header, which holds the hashes of the data; of any other file: of all of it."""
    holds: Held | None = None
    """The boxes of tensors in it; None for a file without tensors, and in format 1."""

    def as_json(self) -> dict[str, object]:
        document: dict[str, object] = {"bytes": self.bytes, "sha256": self.sha256}
        return document if self.holds is None else {**document, "holds": self.holds}
