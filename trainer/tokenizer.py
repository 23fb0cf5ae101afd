"""Byte-level BPE as GPT-2 has it: trained here or loaded from a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from trainer.errors import DataError, InputError
from trainer.files import replace_file, sha256

END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCAB = 256 + 1  # every byte, and the end of a document


class Tokenizer:
    """Text <-> token ids. `eod` is the tokenizer's own end-of-document id."""

    def __init__(self, inner: tokenizers.Tokenizer, eod: int) -> None:
        self._inner = inner
        self.eod = eod

    @property
    def vocab(self) -> int:
        """Ids run over [0, vocab)."""
        return max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        if not path.is_file():
            raise DataError(
                f"{path}: no such tokenizer", "train one with `tokenizer-train`, or check the path"
            )
        inner = tokenizers.Tokenizer.from_str(_checked(path))
        eod = inner.token_to_id(END_OF_DOCUMENT)
        if eod is None:
            raise DataError(
                f"{path}: has no {END_OF_DOCUMENT} token", "train a tokenizer with `tokenizer-train`"
            )
        return cls(inner, eod)

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            encoding.ids for encoding in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=True))


def _checked(path: Path) -> str:
    """The text of a tokenizer.json, its parts seen to be there: the library raises nothing but Exception."""
    try:
        text = path.read_text(encoding="utf-8")
        model = json.loads(text)["model"]
        sound = isinstance(model["vocab"], dict) and isinstance(model["merges"], list)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path}: not a tokenizer.json ({type(error).__name__}: {error})") from None
    if not sound:
        raise DataError(f"{path}: not a tokenizer.json of the BPE kind")
    return text


def train_tokenizer(texts: Iterator[str], vocab: int, output: Path) -> dict[str, object]:
    """Learn a vocabulary from texts; writes `output`, and `<output>.info.json` with the eod id."""
    if vocab < SMALLEST_VOCAB:
        raise InputError(
            f"a vocabulary of {vocab} is too small", f"use at least {SMALLEST_VOCAB}: 256 bytes and the end"
        )
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(output, inner.to_str().encode())
    info = {
        "vocab": inner.get_vocab_size(),
        "asked_vocab": vocab,
        "sha256": sha256(output),
        "eod": inner.token_to_id(END_OF_DOCUMENT),
    }
    replace_file(output.with_name(output.name + ".info.json"), json.dumps(info, indent=2).encode() + b"\n")
    return {"output": str(output), **info}
