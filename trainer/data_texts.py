"""The texts of inputs one by one, to learn a vocabulary from; the first line that is none is an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer.data_documents import Bad, documents
from trainer.data_inputs import EACH, KINDS, Reader, find_inputs
from trainer.errors import DataError

LARGEST = 2**31  # no id is out of range here: ids are refused as a whole


def texts_of(inputs: Sequence[str], key: str = "text", kind: str = "", each: str = "file") -> Iterator[str]:
    """Every text, in order; ids are refused, since they were tokens before."""
    for name, value, known in (("--format", kind or KINDS[0], KINDS), ("--each", each, EACH)):
        if value not in known:
            raise DataError(f"{name} {value}: is not one of {', '.join(known)}")
    return _texts(Reader(find_inputs(inputs, kind), each), key, each)


def _texts(reader: Reader, key: str, each: str) -> Iterator[str]:
    for part in reader.parts():
        for piece in part.pieces:
            for one in documents(piece, key, each, LARGEST):
                if isinstance(one, Bad):
                    raise DataError(str(one), "mend the line, or name the right one with --key")
                if not isinstance(one, str):
                    raise DataError(
                        f"{piece.name}: holds token ids, not text", "name the key of a text with --key"
                    )
                yield one
