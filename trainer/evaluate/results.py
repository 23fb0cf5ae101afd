"""The result of an evaluation as a file, and the saved scores of an unfinished evaluation."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from clusterctl.wire.results import Figure
from trainer.errors import InputError
from trainer.evaluate.request import Score
from trainer.files import replace_file

FORMAT = 1


@dataclass(frozen=True)
class Source:
    """The checkpoint, the data and all settings that determine a result."""

    task: str
    convention: str
    checkpoint: str
    step: int
    checkpoint_sha256: str
    """The hash of the manifest, which contains the hashes of all files."""
    data: str
    data_sha256: str
    tokenizer_sha256: str
    options: Mapping[str, object]


@dataclass(frozen=True)
class Result:
    """The result of one task."""

    source: Source
    metrics: Mapping[str, Figure]
    documents: int
    truncated: int
    """The number of documents whose context was cut on the left."""
    tokens: int
    """The number of tokens that the model read."""
    seconds: float

    def as_json(self) -> dict[str, object]:
        """Return the result as a JSON object."""
        return {
            "format": FORMAT,
            **asdict(self.source),
            "metrics": {name: asdict(figure) for name, figure in self.metrics.items()},
            "documents": self.documents,
            "truncated": self.truncated,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }


def write_result(folder: Path, key: str, result: Result) -> Path:
    """Write a result into a folder and return its file; a repeated evaluation overwrites its older result."""
    file = folder / f"{result.source.task}-step-{result.source.step:08d}-{key[:12]}.json"
    replace_file(file, (json.dumps(result.as_json(), indent=1) + "\n").encode())
    return file


class Progress:
    """Scores of finished requests in a file, so that a killed evaluation can continue."""

    def __init__(self, folder: Path, key: str, rank: int) -> None:
        """`key` identifies the evaluation; each rank writes its own file and reads the files of all ranks."""
        self._folder, self._key = folder, key
        self._file = folder / f".unfinished-{key}-{rank}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._stream = self._file.open("a", encoding="ascii")
        except OSError as error:
            raise InputError(f"{folder}: {error.strerror}", "give a folder to --output") from None

    def read(self, requests: int) -> dict[int, Score]:
        """Return the saved scores by request index; a truncated line is ignored."""
        scores = {}
        for file in sorted(self._folder.glob(f".unfinished-{self._key}-*.jsonl")):
            for line in file.read_text(encoding="ascii", errors="replace").splitlines():
                try:
                    index, likelihood, greedy = json.loads(line)
                    if 0 <= index < requests:
                        scores[int(index)] = Score(float(likelihood), bool(greedy))
                except (ValueError, TypeError, OverflowError, RecursionError):
                    continue
        return scores

    def add(self, scores: Mapping[int, Score]) -> None:
        """Append the scores of one batch."""
        lines = (json.dumps([index, score.log_likelihood, score.greedy]) for index, score in scores.items())
        # After a truncated line, start on a new line.
        self._stream.write("\n" + "\n".join(lines) + "\n")
        self._stream.flush()

    def remove(self) -> None:
        """Delete this rank's file, because the result is complete."""
        self._file.unlink(missing_ok=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
