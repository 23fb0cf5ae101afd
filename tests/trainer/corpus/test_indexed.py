from __future__ import annotations

import struct
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from trainer.corpus.indexed import Writer, open_corpus, token_type
from trainer.corpus.info import describe
from trainer.errors import DataError

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
    assert (shown.tokens, shown.largest_id, shown.longest) == (10, 10, 4)
    assert shown.unigram_entropy_nats == pytest.approx(np.log(10))


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
        # What a known tool does: the token is written and not counted.
        stream.write(b"\0\0")
    with pytest.raises(DataError, match="has 6 bytes, but its index counts 2 tokens"):
        open_corpus(tmp_path / "defect")


def test_what_a_killed_writer_left_goes_with_the_next_one(tmp_path: Path) -> None:
    code = (
        "import os, sys, numpy; from pathlib import Path; from trainer.corpus.indexed import Writer\n"
        "with Writer(Path(sys.argv[1]), numpy.uint16) as writer:\n"
        "    writer.add_document([[1, 2]]); os.kill(os.getpid(), 9)"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], check=False)
        assert len(list(tmp_path.iterdir())) == 3
    with Writer(tmp_path / "c", np.uint16) as writer, Writer(tmp_path / "c-1", np.uint16) as other:
        writer.add_document([[1]])
        other.add_document([[2]])
    assert {path.name for path in tmp_path.iterdir()} == {"c.bin", "c.idx", "c-1.bin", "c-1.idx"}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.idx: no such file"):
        open_corpus(tmp_path / "none")


def test_a_build_that_fails_leaves_the_old_pair_and_no_trace(golden: Path) -> None:
    with pytest.raises(RuntimeError, match="in the middle"), Writer(golden, np.uint16) as writer:
        writer.add_document([[1]])
        raise RuntimeError("in the middle")
    assert golden.with_suffix(".bin").read_bytes() == BIN
    assert sorted(path.name for path in golden.parent.iterdir()) == ["golden.bin", "golden.idx"]


def test_two_bytes_a_token_where_the_vocabulary_allows_it() -> None:
    assert token_type(65499) is np.uint16 and token_type(65500) is np.int32


def old_pair(prefix: Path, documents: list[list[list[int]]], width: int = 2) -> None:
    """As the lazy and cached builders of old write it: fairseq's TNTIDX."""
    rows = [row for document in documents for row in document]
    code = {2: 8, 4: 4}[width]
    marks = np.cumsum([0, *map(len, documents)])
    offsets = np.cumsum([0, *map(len, rows)])
    head = b"TNTIDX\0\0" + struct.pack("<QQQQQQ", 1, code, width, len(rows), len(rows), len(marks))
    body = [np.arange(len(rows) + 1), offsets, np.array([len(row) for row in rows]), marks]
    prefix.with_suffix(".idx").write_bytes(head + b"".join(one.astype("<i8").tobytes() for one in body))
    tokens = np.array([token for row in rows for token in row], f"<u{width}")
    prefix.with_suffix(".bin").write_bytes(tokens.tobytes())


def test_the_older_kind_of_index_is_read(tmp_path: Path) -> None:
    old_pair(tmp_path / "old", [[[1, 2, 3]], [], [[4, 5], [6]], [[7, 8, 9, 10]]])
    corpus = open_corpus(tmp_path / "old")
    assert corpus.tokens.tolist() == list(range(1, 11))
    assert (corpus.lengths.tolist(), corpus.offsets.tolist()) == ([3, 2, 1, 4], [0, 3, 5, 6])
    assert [corpus.document(n).tolist() for n in range(4)] == [[1, 2, 3], [], [4, 5, 6], [7, 8, 9, 10]]


def test_a_damaged_older_index_is_refused_in_words(tmp_path: Path) -> None:
    old_pair(tmp_path / "old", [[[1, 2, 3]]])
    whole = (tmp_path / "old.idx").read_bytes()
    for damage, says in ((whole[:-8], "marks need"), (whole[:24] + b"\x04" + whole[25:], "not plain rows")):
        (tmp_path / "old.idx").write_bytes(damage)
        with pytest.raises(DataError, match=says):
            open_corpus(tmp_path / "old")


def test_documents_are_added_one_by_one_or_many_at_a_time_alike(tmp_path: Path) -> None:
    random = np.random.RandomState(3)
    documents = [[random.randint(0, 999, random.randint(1, 9)).tolist() for _ in range(random.randint(0, 4))]
                 for _ in range(200)]  # fmt: skip
    with Writer(tmp_path / "one", np.int32) as writer:
        for document in documents:
            writer.add_document(document)
    rows = [row for document in documents for row in document]
    with Writer(tmp_path / "many", np.int32) as writer:
        writer.add(
            np.array([*chain(*rows)]), [len(row) for row in rows], [len(document) for document in documents]
        )
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"one{ending}").read_bytes() == (tmp_path / f"many{ending}").read_bytes()
    corpus = open_corpus(tmp_path / "one")
    assert [corpus.document(n).tolist() for n in range(200)] == [
        [*chain(*document)] for document in documents
    ]


def test_an_id_that_the_type_cannot_hold_is_refused_and_not_wrapped(tmp_path: Path) -> None:
    for wrong in (65536, -1):
        with (
            pytest.raises(DataError, match=f"token id {wrong} does not fit uint16"),
            Writer(tmp_path / "c", np.uint16) as out,
        ):
            out.add_document([[1, wrong]])
    assert not list(tmp_path.iterdir())


def test_a_multimodal_index_has_one_byte_more_a_sequence(golden: Path) -> None:
    idx = golden.with_suffix(".idx")
    idx.write_bytes(idx.read_bytes() + bytes(4))
    assert open_corpus(golden).lengths.tolist() == [3, 2, 1, 4]


@pytest.mark.parametrize("vocab", [300, 65499, 65500])
def test_megatrons_own_builder_writes_the_same_bytes(tmp_path: Path, vocab: int) -> None:
    """Where its package is installed; `bench/corpus/build.py` holds a whole build to it."""
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    random = np.random.RandomState(7)
    documents = [[random.randint(0, vocab, random.randint(1, 40)).tolist() for _ in range(random.randint(0, 4))]
                 for _ in range(120)]  # fmt: skip
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "t.bin"), dtype=theirs.DType.optimal_dtype(vocab))
    with Writer(tmp_path / "o", token_type(vocab)) as writer:
        for document in documents:
            builder.add_document([*chain(*document)], [len(row) for row in document])
            writer.add_document(document)
    builder.finalize(str(tmp_path / "t.idx"))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"o{ending}").read_bytes() == (tmp_path / f"t{ending}").read_bytes()
    there = theirs.IndexedDataset(str(tmp_path / "o"))
    assert len(there) == sum(map(len, documents))
