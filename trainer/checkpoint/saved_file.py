"""The entry of one file in a manifest or in the journal of a conversion."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.checkpoint.names import Held


@dataclass(frozen=True)
class SavedFile:
    """The size of a file, its hash, and the tensors in it."""

    bytes: int
    sha256: str
    """For a file with tensors, the hash of its header, which contains the hashes of the data; for any other file, of
    its content.
    """
    holds: Held | None = None
    """The boxes of tensors in the file; None for a file without tensors, and in format 1."""

    def as_json(self) -> dict[str, object]:
        document: dict[str, object] = {"bytes": self.bytes, "sha256": self.sha256}
        return document if self.holds is None else {**document, "holds": self.holds}
