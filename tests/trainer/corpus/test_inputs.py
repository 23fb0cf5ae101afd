from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.building import SAYINGS, built, small_tokenizer, texts_in, write_lines
from trainer.corpus.indexed import open_corpus
from trainer.corpus.inputs import Reader, cut, find_inputs
from trainer.errors import DataError


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizer(tmp_path_factory.mktemp("words"))


def zst(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    packed: bytes = zstandard.ZstdCompressor().compress(data)
    return packed


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zst}


@pytest.mark.parametrize("ending", PACKERS)
def test_packed_json_lines_give_what_plain_ones_give(words: Path, tmp_path: Path, ending: str) -> None:
    plain = write_lines(tmp_path / "in.jsonl", SAYINGS, "body").read_bytes()
    half = plain.index(b"\n") + 1
    # Two streams in one file, as pbzip2 writes.
    packed = PACKERS[ending](plain[:half]) + PACKERS[ending](plain[half:])
    (tmp_path / f"in.jsonl{ending}").write_bytes(packed)
    built(tmp_path / "out", words, tmp_path / f"in.jsonl{ending}", key="body")
    assert texts_in(tmp_path / "out", words) == SAYINGS
    (tmp_path / f"cut.jsonl{ending}").write_bytes(packed[:-9])
    with pytest.raises(DataError, match="cannot be read to its end"):
        built(tmp_path / "cut", words, tmp_path / f"cut.jsonl{ending}", key="body")


def test_a_block_ends_where_the_bytes_say_however_they_are_read() -> None:
    data = b"".join(b"%d " % n * (n % 13) + b"\n" for n in range(400))
    seen = []
    for step in (1, 7, 64, 10**6):
        stream = io.BytesIO(data)
        seen.append(list(cut(lambda size, s=stream, n=step: s.read(min(size, n)), (b"\n",), 256, 4096)))  # type: ignore[misc]
    assert seen[0] == seen[1] == seen[2] == seen[3]
    blocks = seen[0]
    assert b"".join(block for block, _, _ in blocks) == data and len(blocks) > 20
    assert [line for _, line, _ in blocks] == [1 + data[:at].count(b"\n") for at in
                                               np.cumsum([0, *(len(b) for b, _, _ in blocks)])[:-1]]  # fmt: skip


def test_a_line_that_is_too_long_is_passed_over_and_the_next_ones_are_numbered_right() -> None:
    data = b"a\nb\n" + b"x" * 5000 + b"\nlast\nend"
    for step in (3, 10**6):
        stream = io.BytesIO(data)
        found = list(cut(lambda size, s=stream, n=step: s.read(min(size, n)), (b"\n",), 64, 1000))  # type: ignore[misc]
        assert [bad for _, _, bad in found if bad] == ["longer than 1000 bytes"]
        assert next(line for _, line, bad in found if bad) in (1, 3)
        assert found[-1][0] == b"last\nend" and found[-1][1] == 4


def test_a_line_beyond_the_limit_is_a_bad_line_of_the_build(
    words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.corpus.inputs.Reader.__init__.__defaults__", ("file", 4096, 20_000))
    write_lines(tmp_path / "in.jsonl", ["short", "x" * 50_000, "after it"])
    with pytest.raises(DataError, match=r"in\.jsonl:2: longer than 20000 bytes"):
        built(tmp_path / "out", words, tmp_path / "in.jsonl")
    manifest = built(tmp_path / "out", words, tmp_path / "in.jsonl", max_bad=1)
    assert texts_in(tmp_path / "out", words) == ["short", "after it"] and manifest["dropped"]["bad"] == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "a"', "not a line of JSON"),
        (b'{"body": "a"}', "no text under 'text' .there is: body."),
        (b'["a"]', "the line is a list"),
        (b'{"text": 3}', "it is a int"),
        (b'{"text": [1, "a"]}', "it is a list"),
        (b'{"text": [1, 300]}', "token id 300 is not in the vocabulary"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair, .ud800"),
        (b"[" * 100_000, "not a line of JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(words: Path, tmp_path: Path, line: bytes, says: str) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "more"}\n')
    with pytest.raises(DataError, match=rf"in\.jsonl:3: .*{says}"):
        built(tmp_path / "out", words, file)
    manifest = built(tmp_path / "out", words, file, max_bad=1)
    assert manifest["dropped"]["bad"] == 1 and "in.jsonl:3: " in manifest["bad"][0]
    assert texts_in(tmp_path / "out", words) == ["good", "more"]


def test_files_globs_folders_and_what_they_hold(words: Path, tmp_path: Path) -> None:
    (tmp_path / "AA").mkdir()
    (tmp_path / "AB").mkdir()
    (tmp_path / "AA" / "wiki_00").write_text(
        '<doc id="1" url="u" title="T">\nT\n\nFish &amp; chips\n</doc>\n<doc id="2">\nb\n</doc>\n'
    )
    write_lines(tmp_path / "AB" / "wiki_00", ["json of the extractor"])
    (tmp_path / "AB" / ".hidden").write_text("no")
    (tmp_path / "b.txt").write_text("one\n\ntwo\nthree\n")
    names = [str(tmp_path / "A[AB]"), str(tmp_path / "*.txt")]
    assert [one.kind for one in find_inputs(names)] == ["wikiextractor", "jsonl", "text"]
    built(tmp_path / "out", words, *names)
    assert texts_in(tmp_path / "out", words) == [
        "T\n\nFish & chips",
        "b",
        "json of the extractor",
        "one\n\ntwo\nthree\n",
    ]
    for each, texts in (("line", ["one", "two", "three"]), ("paragraph", ["one", "two\nthree"])):
        built(tmp_path / each, words, tmp_path / "b.txt", each=each)
        assert texts_in(tmp_path / each, words) == texts


def test_all_inputs_that_are_not_there_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        find_inputs([str(tmp_path / "none.jsonl"), str(tmp_path / "*.jsonl")])
    assert "none.jsonl: no such file" in caught.value.message and "and no match" in caught.value.message
    write_lines(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(DataError, match="is named twice"):
        find_inputs([str(tmp_path / "a.jsonl"), str(tmp_path / "*.jsonl")])
    (tmp_path / "tokens.bin").write_bytes(b"\1\0\2\0")
    with pytest.raises(DataError, match=r"tokens\.bin: binary data, such as a \.bin of tokens"):
        find_inputs([str(tmp_path / "tokens.bin")])
    assert find_inputs([str(tmp_path / "tokens.bin")], "text")[0].kind == "text"


def test_one_json_array_is_told_from_lines(words: Path, tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text('[\n{"text": "a"},\n{"text": "b"}\n]\n')
    with pytest.raises(DataError, match="is one JSON array") as caught:
        built(tmp_path / "out", words, tmp_path / "in.json")
    assert "jq -c" in caught.value.hint


def test_many_small_files_share_a_part(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"{number:02}.txt").write_text("word " * number)
    parts = list(Reader(find_inputs([str(tmp_path)])).parts())
    # The empty one has nothing to read.
    assert [len(part.pieces) for part in parts] == [49]


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "in.jsonl", SAYINGS * 20)
    parts = Reader(find_inputs([str(file)]), size=512).parts()
    next(parts)
    with file.open("a") as stream:
        stream.write('{"text": "more"}\n')
    os.utime(file, ns=(1, 1))
    with pytest.raises(DataError, match="changed while it was read"):
        list(parts)


def test_lists_of_ids_pass_as_they_are(words: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "ids.jsonl", [[1, 2, 3], [], [299]], "input_ids")
    built(tmp_path / "out", words, tmp_path / "ids.jsonl", key="input_ids", append_eod=True)
    corpus = open_corpus(tmp_path / "out")
    assert [corpus.document(n).tolist() for n in range(3)] == [[1, 2, 3, 0], [], [299, 0]]


# -- GLM's caches


def lazy(folder: Path, documents: list[list[int]], listing: Any = None, as_bytes: bool = False) -> Path:
    folder.mkdir()
    (folder / "text").write_bytes(np.array([*chain(*documents)], "<i4").tobytes())
    lengths = [len(one) * (4 if as_bytes else 1) for one in documents]
    (folder / "text.len.pkl").write_bytes(pickle.dumps(lengths if listing is None else listing))
    return folder


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_cache_of_glm_is_read(words: Path, tmp_path: Path, as_bytes: bool) -> None:
    documents = [[5, 6, 7], [], [8], [9] * 5000]
    lazy(tmp_path / "pile.lazy", documents, as_bytes=as_bytes)
    built(tmp_path / "out", words, tmp_path / "pile.lazy")
    corpus = open_corpus(tmp_path / "out")
    assert [corpus.document(n).tolist() for n in range(4)] == documents


class Calls:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/a-pickle-that-ran",)


@pytest.mark.parametrize("listing", [Calls(), {"a": 1}, [1, "x"], [-3, 6], [[1, 2]], "text", [2**70]])
def test_a_pickle_of_anything_but_lengths_is_refused_and_not_run(
    words: Path, tmp_path: Path, listing: Any
) -> None:
    lazy(tmp_path / "bad.lazy", [[1, 2, 3]], listing)
    with pytest.raises(DataError, match="not a plain list of lengths"):
        built(tmp_path / "out", words, tmp_path / "bad.lazy")
    assert not Path("/tmp/a-pickle-that-ran").exists()


def test_a_cache_whose_lengths_are_of_another_text_is_refused(words: Path, tmp_path: Path) -> None:
    lazy(tmp_path / "bad.lazy", [[1, 2, 3]], [2])
    with pytest.raises(DataError, match="has 12 bytes, but its lengths count 2 tokens"):
        built(tmp_path / "out", words, tmp_path / "bad.lazy")


# -- Parquet


def test_a_column_of_parquet_is_read_by_its_key(words: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = pyarrow.table({"id": [1, 2, 3], "text": ["one", None, "three"], "ids": [[1], [2, 3], []]})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=2)
    with pytest.raises(DataError, match="row group 0, row 2: not a text but a NoneType"):
        built(tmp_path / "out", words, tmp_path / "in.parquet")
    built(tmp_path / "out", words, tmp_path / "in.parquet", max_bad=1)
    assert texts_in(tmp_path / "out", words) == ["one", "three"]
    built(tmp_path / "ids", words, tmp_path / "in.parquet", key="ids")
    assert [open_corpus(tmp_path / "ids").document(n).tolist() for n in range(3)] == [[1], [2, 3], []]
    with pytest.raises(DataError, match="no column 'body'; there is: id, text, ids"):
        built(tmp_path / "none", words, tmp_path / "in.parquet", key="body")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(DataError, match="not a Parquet file"):
        built(tmp_path / "none", words, tmp_path / "bad.parquet")


def test_standard_input_is_known_by_its_first_bytes(words: Path, tmp_path: Path) -> None:
    from tests.support.building import verb

    text = "".join(json.dumps({"text": one}) + "\n" for one in SAYINGS).encode()
    for name, data in (("lines", text), ("text", b"just a text")):
        done = verb(
            "data-build",
            "--input",
            "-",
            "--tokenizer",
            str(words),
            "--output",
            str(tmp_path / name),
            stdin=data,
        )
        assert done.returncode == 0, done.stderr
    assert texts_in(tmp_path / "lines", words) == SAYINGS
    assert texts_in(tmp_path / "text", words) == ["just a text"]
