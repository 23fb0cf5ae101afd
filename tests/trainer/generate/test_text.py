from __future__ import annotations

import random
from pathlib import Path

import pytest

from trainer.corpus.tokenizer import Tokenizer, train_tokenizer
from trainer.generate.text import Detokenizer, StopTexts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file: Path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    train_tokenizer(iter(["hello world, hello words " * 20]), 280, file)
    return Tokenizer.load(file)


def test_a_character_is_never_split(tokenizer: Tokenizer) -> None:
    text = "hello 日本語 words 🎉🎉 naïve \N{REPLACEMENT CHARACTER} end " * 5
    ids = tokenizer.encode(text)
    # Most characters take several tokens here.
    assert len(ids) > len(text)
    decode = Detokenizer(tokenizer)
    pieces = [decode.push(number) for number in ids]
    assert "".join([*pieces, decode.end()]) == text
    whole = set(text)
    assert all(set(piece) <= whole for piece in pieces)


def test_any_ids_add_up_to_their_text(tokenizer: Tokenizer) -> None:
    for seed in range(30):
        ids = random.Random(seed).choices(range(tokenizer.vocab), k=120)
        decode = Detokenizer(tokenizer)
        pieces = [decode.push(number) for number in ids]
        assert "".join([*pieces, decode.end()]) == tokenizer.decode(ids)


def test_text_stops_before_the_first_stop_text_however_it_arrives() -> None:
    text = "one two STO STOP three END"
    for size in (1, 2, 5, 100):
        stops = StopTexts(("END", "STOP"))
        passed = "".join(stops.push(text[i : i + size]) for i in range(0, len(text), size))
        assert passed == "one two STO " and stops.found == "STOP"
    stops = StopTexts(("END", "STOP"))
    assert stops.push("a ST") == "a " and stops.push("AND E") == "STAND " and stops.end() == "E"
