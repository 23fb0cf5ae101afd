from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.corpus import build_corpus, open_corpus
from trainer.errors import DataError, InputError
from trainer.tokenizer import Tokenizer, train_tokenizer

# The real GPT-2 vocabulary is not ours to ship; it is compared with where it lies beside the repository.
GPT2 = Path(__file__).resolve().parents[3] / "shared" / "data" / "gpt2-tokenizer.json"
TEXTS = ["the cat sat on the mat; " * 20, "naïve café, 中文, \U0001f600 and\ttabs\n" * 10]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    train_tokenizer(iter(TEXTS), 300, path)
    return path


def test_any_text_survives_encoding(words: Path) -> None:
    tokenizer = Tokenizer.load(words)
    for text in (*TEXTS, " leading", "never seen: Ωß\x00", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_many(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_the_end_of_a_document_is_recorded_beside_the_tokenizer(words: Path) -> None:
    info = json.loads(words.with_name("tokenizer.json.info.json").read_text())
    tokenizer = Tokenizer.load(words)
    assert info["eod"] == tokenizer.eod and info["vocab"] == tokenizer.vocab <= 300


def test_training_again_gives_the_same_file(words: Path, tmp_path: Path) -> None:
    train_tokenizer(iter(TEXTS), 300, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == words.read_bytes()


def test_a_vocabulary_without_room_for_every_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="256 is too small"):
        train_tokenizer(iter(TEXTS), 256, tmp_path / "small.json")


@pytest.mark.parametrize(
    "content", ["", "{}", '{"model": 3}', '{"model": {"vocab": [], "merges": []}}', "\x00"]
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(DataError, match="not a tokenizer"):
        Tokenizer.load(tmp_path / "bad.json")


def test_a_corpus_is_built_with_its_end_of_document_tokens_counted(words: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(words)
    summary = build_corpus(["", *TEXTS], tokenizer, tmp_path / "out" / "c_text_document", append_eod=True)
    corpus = open_corpus(tmp_path / "out" / "c_text_document")
    assert (summary["documents"], summary["empty_documents"]) == (2, 1)
    assert summary["tokens"] == len(corpus.tokens) == corpus.lengths.sum()
    ends = corpus.offsets + corpus.lengths - 1
    assert corpus.tokens[ends].tolist() == [tokenizer.eod] * 2
    assert 0 < summary["unigram_entropy_nats"] < 6


def test_an_input_without_text_is_refused(words: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no document with text"):
        build_corpus(["", ""], Tokenizer.load(words), tmp_path / "empty", append_eod=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not GPT2.exists(), reason="the real GPT-2 tokenizer is not beside the repository")
def test_the_real_gpt2_vocabulary_gives_its_known_ids() -> None:
    tokenizer = Tokenizer.load(GPT2)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert (tokenizer.vocab, tokenizer.eod) == (50257, 50256)
