"""The result of a command on a node, however it was run."""

from __future__ import annotations

from dataclasses import dataclass

# Seconds that a connection may take to end after it was closed.
END_LIMIT = 10.0


@dataclass(frozen=True)
class Completed:
    """The result of a command on a node."""

    exit_code: int | None
    """None if a signal ended it."""
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def code(self) -> int:
        """Return the exit code as a shell reports it: 128+n for signal n, 124 for a timeout."""
        if self.timed_out:
            return 124
        return self.exit_code if self.exit_code is not None else 128 + (self.signal or 0)

    @property
    def text(self) -> str:
        """Return stdout as text; bytes that are not UTF-8 become surrogates."""
        return self.stdout.decode("utf-8", "surrogateescape")

    @property
    def error_text(self) -> str:
        return self.stderr.decode("utf-8", "surrogateescape")
