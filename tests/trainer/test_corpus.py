from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainer.corpus import describe, entropy, read_texts
from trainer.errors import DataError
from trainer.indexed import Writer, open_corpus, token_type

# Documents [[1,2,3]], [[4,5],[6]], [[7,8,9,10]] in u16, as Megatron's own builder writes them.
BIN = bytes.fromhex("0100020003000400050006000700080009000a00")
IDX = bytes.fromhex(
    "4d4d494449445800000100000000000000080400000000000000040000000000000003000000020000000100000004000000"
    "000000000000000006000000000000000a000000000000000c00000000000000"
    "0000000000000000010000000000000003000000000000000400000000000000"
)


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    with Writer(tmp_path / "golden", np.uint16) as writer:
        for document in ([[1, 2, 3]], [[4, 5], [6]], [[7, 8, 9, 10]]):
            writer.add_document(document)
    return tmp_path / "golden"


def test_a_pair_is_written_byte_for_byte_as_megatron_does(golden: Path) -> None:
    assert golden.with_suffix(".bin").read_bytes() == BIN
    assert golden.with_suffix(".idx").read_bytes() == IDX
    assert sorted(path.name for path in golden.parent.iterdir()) == ["golden.bin", "golden.idx"]


def test_what_was_written_is_read_back(golden: Path) -> None:
    corpus = open_corpus(golden)
    assert corpus.tokens.tolist() == list(range(1, 11))
    assert (corpus.lengths.tolist(), corpus.offsets.tolist()) == ([3, 2, 1, 4], [0, 3, 5, 6])
    assert corpus.documents == 3
    shown = describe(golden)
    assert (shown["tokens"], shown["largest_id"], shown["longest"]) == (10, 10, 4)
    assert shown["unigram_entropy_nats"] == pytest.approx(np.log(10))


@pytest.mark.parametrize(
    ("ending", "damage", "says"),
    [
        (".bin", lambda content: content[:-2], "has 18 bytes, but its index counts 10 tokens"),
        (".bin", lambda content: content + b"\0\0", "has 22 bytes"),
        (".idx", lambda content: content[:-1], "marks need"),
        (".idx", lambda content: b"TNTIDY\0\0" + content[8:], "not an MMIDIDX index"),
        (".idx", lambda content: content[:17] + b"\x07" + content[18:], "no tokens"),
        (".idx", lambda content: content[:17] + b"\x63" + content[18:], "token type 99"),
        (".idx", lambda content: content[:34] + b"\xff\xff\xff\xff" + content[38:], "negative length"),
        (".idx", lambda content: content[:50] + b"\x02" + content[51:], "not the sums"),
        (".idx", lambda content: content[:-8] + b"\x09" + content[-7:], "do not rise"),
        (".idx", lambda content: b"", "not an MMIDIDX"),
    ],
)
def test_a_damaged_pair_is_refused_in_words(golden: Path, ending: str, damage: object, says: str) -> None:
    file = golden.with_suffix(ending)
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DataError, match=says):
        open_corpus(golden)


def test_uncounted_end_of_document_tokens_are_noticed(tmp_path: Path) -> None:
    with Writer(tmp_path / "defect", np.uint16) as writer:
        writer.add_document([[1, 2]])
    with (tmp_path / "defect.bin").open("ab") as stream:
        stream.write(b"\0\0")  # what a known tool does: the token is written and not counted
    with pytest.raises(DataError, match="has 6 bytes, but its index counts 2 tokens"):
        open_corpus(tmp_path / "defect")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.idx: no such file"):
        open_corpus(tmp_path / "none")


def test_a_build_that_fails_leaves_the_old_pair_and_no_trace(golden: Path) -> None:
    with pytest.raises(RuntimeError), Writer(golden, np.uint16) as writer:
        writer.add_document([[1]])
        raise RuntimeError
    assert golden.with_suffix(".bin").read_bytes() == BIN
    assert sorted(path.name for path in golden.parent.iterdir()) == ["golden.bin", "golden.idx"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "a"', "not a line of JSON"),
        (b'{"body": "a"}', "no text under 'text' .there is: body."),
        (b'["a"]', "there is: list"),
        (b'{"text": 3}', "no text under"),
        (b"\xff\xfe", "not a line of JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, line: bytes, says: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"in\.jsonl:3: .*{says}"):
        list(read_texts([file]))


def test_json_lines_give_documents_and_a_text_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n{"body": "y"}\n')
    (tmp_path / "b.txt").write_text("one\n\ntwo\n")
    assert list(read_texts([tmp_path / "a.jsonl"], "body")) == ["x", "y"]
    assert list(read_texts([tmp_path / "b.txt"])) == ["one\n\ntwo\n"]


def test_two_bytes_a_token_where_the_vocabulary_allows_it() -> None:
    assert token_type(65499) is np.uint16 and token_type(65500) is np.int32


def test_the_entropy_of_even_tokens_is_the_logarithm_of_their_number() -> None:
    assert entropy(np.array([5, 5, 0, 5, 5])) == pytest.approx(np.log(4))
