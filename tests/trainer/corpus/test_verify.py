from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.building import SAYINGS, built, pair_bytes, small_tokenizer, verb, write_lines
from trainer.corpus.indexed import Writer, manifest_path, open_corpus
from trainer.corpus.info import Epochs, describe, histogram, token_count
from trainer.corpus.shards import merge, shard_name, split
from trainer.corpus.tokenizer import Tokenizer, single_file, train_tokenizer
from trainer.corpus.verify import other_tokenizer, repair, verify
from trainer.errors import DataError, InputError

DOCUMENTS = [[[5, 6, 7]], [[8], [9, 10]], [], [[11] * 40], [[12, 13]]]


def written(prefix: Path, documents: list[list[list[int]]], dtype: Any = np.uint16) -> Path:
    with Writer(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def ended(documents: list[list[list[int]]], end: int) -> list[list[list[int]]]:
    return [[*document[:-1], [*document[-1], end]] if document else [] for document in documents]


def with_defect(prefix: Path, documents: list[list[list[int]]], end: int = 0) -> Path:
    """As a known preprocessor leaves it: the ends of documents in .bin, and not counted in .idx."""
    written(prefix, documents)
    whole = written(prefix.with_name("whole"), ended(documents, end))
    os.replace(whole.with_name("whole.bin"), prefix.with_name(prefix.name + ".bin"))
    return prefix


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built corpus with its manifest, `c`, and the tokenizer."""
    folder: Path = tmp_path_factory.mktemp("verify")
    words = small_tokenizer(folder)
    write_lines(folder / "in.jsonl", SAYINGS * 5)
    built(folder / "c", words, folder / "in.jsonl", append_eod=True)
    return folder


@pytest.fixture
def pair(material: Path, tmp_path: Path) -> Path:
    for ending in ("bin", "idx", "manifest.json"):
        (tmp_path / f"c.{ending}").write_bytes((material / f"c.{ending}").read_bytes())
    return tmp_path / "c"


def test_a_good_pair_has_no_findings(pair: Path, material: Path) -> None:
    looked = verify(pair)
    assert looked.findings == () and looked.checked == ("index", "manifest", "ids")
    assert (looked.documents, looked.largest_id) == (15, int(open_corpus(pair).tokens.max()))


def other(pair: Path) -> Path:
    """Another corpus of the same form, byte for byte as long."""
    content = bytearray(pair.with_name("c.bin").read_bytes())
    content[10:12] = b"\x07\x00" if content[10:12] != b"\x07\x00" else b"\x08\x00"
    pair.with_name("o.bin").write_bytes(bytes(content))
    return pair.with_name("o.bin")


def test_a_swapped_or_changed_file_is_known_by_its_hash(pair: Path) -> None:
    os.replace(other(pair), pair.with_name("c.bin"))
    assert [one.what.split(": ")[1] for one in verify(pair).findings] == ["is not the file that was built"]
    assert verify(pair, hashes=False).findings == ()


def test_everything_that_is_wrong_is_told_at_once(pair: Path) -> None:
    index = bytearray(pair.with_name("c.idx").read_bytes())
    # The first length.
    index[34] ^= 1
    # The last mark.
    index[-8] ^= 1
    pair.with_name("c.idx").write_bytes(bytes(index))
    told = "\n".join(one.what for one in verify(pair).findings)
    for part in ("not the sums of its lengths", "do not rise", "but its index counts", "its hash differs"):
        assert part in told


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("c.bin", lambda data: data[:-3], "but its index counts"),
        ("c.idx", lambda data: data[:-3], "marks need"),
        ("c.idx", lambda data: b"", "not an MMIDIDX"),
        ("c.manifest.json", lambda data: b"{}", "not a manifest"),
        ("c.manifest.json", lambda data: data[:50], "not a manifest"),
        (
            "c.manifest.json",
            lambda data: data.replace(b'"vocab": 300', b'"vocab": 20'),
            "but the vocabulary has 20",
        ),
    ],
)
def test_each_damage_is_found(pair: Path, name: str, change: Any, says: str) -> None:
    file = pair.with_name(name)
    file.write_bytes(change(file.read_bytes()))
    looked = verify(pair)
    assert looked.findings and any(says in one.what for one in looked.findings)
    done = verb("data-verify", str(pair))
    assert done.returncode == 1 and says in done.stdout.decode() and done.stderr == b""


def test_a_pair_may_be_named_by_its_files(pair: Path) -> None:
    done = verb("data-verify", *map(str, sorted(pair.parent.iterdir())))
    assert done.returncode == 0 and done.stdout.decode().count("good") == 1


def test_ids_are_held_against_a_vocabulary_that_is_named(tmp_path: Path) -> None:
    written(tmp_path / "c", DOCUMENTS)
    assert not verify(tmp_path / "c", vocab=14).findings
    assert "token id 13" in verify(tmp_path / "c", vocab=13).findings[0].what
    written(tmp_path / "n", [[[3, -2]]], np.int32)
    assert "token id -2" in verify(tmp_path / "n").findings[0].what
    written(tmp_path / "e", [[], []])
    assert "has no tokens" in verify(tmp_path / "e").findings[0].what
    assert "no such file" in verify(tmp_path / "none").findings[0].what


# -- repair


@pytest.mark.parametrize("end", [0, 50256])
def test_uncounted_ends_are_found_and_counted_exactly(tmp_path: Path, end: int) -> None:
    prefix = with_defect(tmp_path / "c", DOCUMENTS, end)
    assert any("clusterctl data repair" in one.remedy for one in verify(prefix).findings)
    before = pair_bytes(prefix)
    assert repair(prefix, dry_run=True).repaired is False and pair_bytes(prefix) == before
    answer = repair(prefix)
    assert (answer.tokens_before, answer.tokens, answer.end_of_document) == (48, 52, end)
    assert pair_bytes(prefix) == pair_bytes(written(tmp_path / "right", ended(DOCUMENTS, end)))
    assert (tmp_path / "c.idx.before").read_bytes() == before[1]
    assert verify(prefix).findings == () and repair(prefix).why == "there is nothing to repair"


def test_a_repair_can_leave_the_pair_as_it_is(tmp_path: Path) -> None:
    prefix = with_defect(tmp_path / "c", DOCUMENTS)
    before = pair_bytes(prefix)
    repair(prefix, tmp_path / "new" / "d")
    assert pair_bytes(prefix) == before
    assert pair_bytes(tmp_path / "new" / "d") == pair_bytes(written(tmp_path / "right", ended(DOCUMENTS, 0)))


def test_a_repair_copies_to_a_disk_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    prefix = with_defect(tmp_path / "c", DOCUMENTS)
    before = pair_bytes(prefix)
    repair(prefix, tmp_path / "new" / "d")
    assert pair_bytes(prefix) == before
    assert pair_bytes(tmp_path / "new" / "d") == pair_bytes(written(tmp_path / "right", ended(DOCUMENTS, 0)))
    repair(prefix)
    assert (tmp_path / "c.idx.before").read_bytes() == before[1]


def test_what_cannot_be_proved_is_not_repaired(tmp_path: Path) -> None:
    prefix = with_defect(tmp_path / "c", DOCUMENTS)
    content = np.fromfile(tmp_path / "c.bin", np.uint16)
    # One document ends otherwise.
    content[3] = 99
    content.tofile(tmp_path / "c.bin")
    before = pair_bytes(prefix)
    with pytest.raises(DataError, match="cannot be reconstructed"):
        repair(prefix)
    cut = written(tmp_path / "cut", DOCUMENTS)
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:-4])
    with pytest.raises(DataError, match="cannot be reconstructed"):
        repair(cut)
    assert pair_bytes(prefix) == before


# -- split and merge


def documents_of(prefix: Path) -> list[list[int]]:
    corpus = open_corpus(prefix)
    return [corpus.document(number).tolist() for number in range(corpus.documents)]


@pytest.mark.parametrize("parts", [1, 2, 3, 15])
def test_shards_joined_are_the_corpus_again(pair: Path, parts: int) -> None:
    made = split(pair, pair.with_name("s"), parts=parts)
    names = [shard_name(pair.with_name("s"), number, parts) for number in range(parts)]
    assert [one.prefix for one in made] == [str(name) for name in names]
    sizes = [one.tokens for one in made]
    assert min(one.documents for one in made) > 0 and max(sizes) < 2 * sum(sizes) / parts + 200
    merge(names, pair.with_name("m"))
    assert pair_bytes(pair.with_name("m")) == pair_bytes(pair)
    assert all(verify(name).findings == () for name in [*names, pair.with_name("m")])
    assert json.loads(manifest_path(names[0]).read_text())["vocab"] == 300


def test_shares_are_cut_as_the_trainer_cuts_them(pair: Path) -> None:
    made = split(pair, pair.with_name("s"), fractions="80,20,0")
    assert [(one.prefix.rsplit("-", 1)[1], one.documents) for one in made] == [
        ("train", 12),
        ("valid", 3),
    ]
    assert documents_of(pair.with_name("s-train")) + documents_of(pair.with_name("s-valid")) == documents_of(
        pair
    )


def test_documents_of_many_sequences_and_empty_ones_survive(tmp_path: Path) -> None:
    written(tmp_path / "c", DOCUMENTS)
    split(tmp_path / "c", tmp_path / "s", parts=4)
    merge([shard_name(tmp_path / "s", number, 4) for number in range(4)], tmp_path / "m")
    assert pair_bytes(tmp_path / "m") == pair_bytes(tmp_path / "c")


def test_the_older_kind_of_pair_is_converted_by_a_merge(tmp_path: Path) -> None:
    from tests.trainer.corpus.test_indexed import old_pair

    old_pair(tmp_path / "old", DOCUMENTS, width=4)
    merge([tmp_path / "old"], tmp_path / "new")
    assert pair_bytes(tmp_path / "new") == pair_bytes(written(tmp_path / "right", DOCUMENTS, np.int32))


def test_what_does_not_belong_together_is_not_merged(pair: Path, tmp_path: Path) -> None:
    written(tmp_path / "wide", DOCUMENTS, np.int32)
    with pytest.raises(DataError) as caught:
        merge([pair, tmp_path / "wide", tmp_path / "none"], tmp_path / "m")
    assert (
        "wide: holds int32, but" in caught.value.message and "none.idx: no such file" in caught.value.message
    )
    text = manifest_path(pair).read_text()
    for ending in ("bin", "idx"):
        pair.with_name(f"d.{ending}").write_bytes(pair.with_name(f"c.{ending}").read_bytes())
    digest = json.loads(text)["tokenizer"]["sha256"]
    manifest_path(pair.with_name("d")).write_text(text.replace(digest, "0" * 64))
    with pytest.raises(DataError, match="was made with the tokenizer 000000000000, but"):
        merge([pair, pair.with_name("d")], tmp_path / "m")
    with pytest.raises(DataError, match="is one of the pairs to merge"):
        merge([pair], pair, overwrite=True)


def test_splits_that_make_no_sense_are_refused(pair: Path) -> None:
    out = pair.with_name("s")
    for options in ({}, {"parts": 2, "fractions": "1,1"}, {"parts": 16}, {"parts": -1}, {"fractions": "a"},
                    {"fractions": "0,0"}, {"fractions": "1,2,3,4"}, {"fractions": "-1,2"}):  # fmt: skip
        with pytest.raises(DataError, match=r"has 15 documents|one to three shares|give either"):
            split(pair, out, **options)  # type: ignore[arg-type]
    split(pair, out, parts=2)
    with pytest.raises(DataError, match="exists already"):
        split(pair, out, parts=2)
    split(pair, out, parts=2, overwrite=True)


# -- info


def test_info_tells_lengths_samples_and_epochs(pair: Path, material: Path) -> None:
    found = describe(pair, samples=2, budget=10 * len(open_corpus(pair).tokens))
    assert (found.documents, found.eod, found.ends_in, found.vocab) == (15, 0, 0, 300)
    assert found.epochs and found.epochs.epochs == 10
    assert [one.text[:11] for one in found.samples] == ["the cat sat", "One. Two! T"]
    assert sum(one.documents for one in found.document_lengths) == 15
    done = verb("data-info", str(pair), "--tokens", "2.5B", "--tokenizer", str(material / "tokenizer.json"))
    text = done.stdout.decode()
    for part in (
        "documents   15",
        "2,500,000,000 tokens are",
        "the end of a document",
        "the cat sat",
        "####",
    ):
        assert part in text
    assert json.loads(verb("data-info", str(pair), "--json").stdout)["tokens"] == found.tokens


def test_info_of_a_corpus_without_a_manifest_or_without_tokens(tmp_path: Path) -> None:
    written(tmp_path / "c", DOCUMENTS)
    found = describe(tmp_path / "c", samples=2, budget=5)
    assert (found.empty_documents, found.ends_in, found.samples) == (1, None, ())
    written(tmp_path / "e", [[], []])
    assert describe(tmp_path / "e", budget=5).epochs == Epochs(5, None)


def test_another_tokenizer_than_the_datas_own_is_refused(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    words = small_tokenizer(tmp_path / "t", 290)
    with pytest.raises(DataError, match="is not the tokenizer that encoded"):
        describe(pair, words, samples=1)


def test_lengths_fall_into_powers_of_two() -> None:
    shown = histogram(np.array([0, 1, 2, 3, 4, 1024, 1023]))
    assert [(one.first, one.below, one.documents) for one in shown if one.documents] == [
        (0, 1, 1), (1, 2, 1), (2, 4, 2), (4, 8, 1), (512, 1024, 1), (1024, 2048, 1)]  # fmt: skip


def test_budgets_are_read_as_people_write_them() -> None:
    for text, number in (
        ("2.5B", 2_500_000_000),
        ("300e9", 300 * 10**9),
        ("1_000", 1000),
        ("26T", 26 * 10**12),
    ):
        assert token_count(text) == number
    for text in ("many", "", "-", "nan"):
        with pytest.raises(InputError, match=r"--tokens .*is not a number of tokens"):
            token_count(text)


def test_data_are_bound_to_the_tokenizer_that_encoded_them(tmp_path: Path) -> None:
    words = small_tokenizer(tmp_path)
    prefix = tmp_path / "c"
    built(prefix, words, write_lines(tmp_path / "in.jsonl", SAYINGS * 5))
    assert verify(prefix, tokenizer=Tokenizer.load(words)).findings == ()
    # The same tokenizer in another form of its files.
    train_tokenizer(iter(SAYINGS), 300, tmp_path / "pair")
    (tmp_path / "pair/tokenizer.json").unlink()
    assert other_tokenizer(prefix, Tokenizer.load(tmp_path / "pair")) is None
    assert single_file(tmp_path / "pair", tmp_path / "whole").read_bytes() != words.read_bytes()
    assert other_tokenizer(prefix, Tokenizer.load(tmp_path / "whole")) is None
    # Another one, under the recorded name too.
    train_tokenizer(iter(["the mat; café"] * 9), 280, tmp_path / "other.json")
    (finding,) = verify(prefix, tokenizer=Tokenizer.load(tmp_path / "other.json")).findings
    assert "is not the tokenizer that encoded" in finding.what
    words.write_bytes((tmp_path / "other.json").read_bytes())
    assert "is not the tokenizer that encoded" in verify(prefix).findings[0].what
    assert verify(prefix, hashes=False).findings == ()


def test_a_tokenizer_is_not_overwritten_by_another(tmp_path: Path) -> None:
    texts = write_lines(tmp_path / "in.jsonl", SAYINGS * 5)
    words = ["tokenizer-train", "--input", str(texts), "--output", str(tmp_path / "tokenizer.json")]
    assert verb(*words, "--vocab-size", "300").returncode == 0
    before = (tmp_path / "tokenizer.json").read_bytes()
    # The same once more changes nothing.
    assert verb(*words, "--vocab-size", "300").returncode == 0
    refused = verb(*words, "--vocab-size", "280")
    assert refused.returncode == 2 and b"another tokenizer is there" in refused.stderr
    assert (tmp_path / "tokenizer.json").read_bytes() == before
    assert verb(*words, "--vocab-size", "280", "--replace").returncode == 0
    assert (tmp_path / "tokenizer.json").read_bytes() != before
