"""Corpora as a job names them -> samples -> batches by the number of samples consumed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from trainer.config.data import DataConfig, Source
from trainer.corpus.indexed import Writer, bin_path, idx_path, manifest_path, write_index
from trainer.errors import DataError
from trainer.samples.cache import IndexCache
from trainer.samples.dataset import Batches, Data, Share


def counting(folder: Path, lengths: list[int], name: str = "counting", first: int = 0) -> str:
    """Documents whose tokens count up through the corpus, so that each token identifies its position."""
    start = first
    with Writer(folder / name, np.int32) as writer:
        for length in lengths:
            writer.add_document([list(range(start, start + length))])
            start += length
    return str(folder / name)


def test_an_empty_split_says_how_many_documents_it_takes(tmp_path: Path) -> None:
    prefix = counting(tmp_path, [50] * 5)
    with pytest.raises(
        DataError,
        match="valid part of split '949,50,1' has no tokens: there are 5 documents; it takes at least 10",
    ):
        Data(DataConfig(prefix), 16).samples("valid", 8)
    with pytest.raises(DataError, match="its share is 0"):
        Data(DataConfig(prefix, split="1,0,0"), 16).samples("valid", 8)


def test_a_part_shorter_than_one_sample_is_explained(tmp_path: Path) -> None:
    prefix = counting(tmp_path, [5] * 10)
    with pytest.raises(
        DataError, match="valid part of split '80,20' has 10 tokens: less than one sample, which is 17"
    ):
        Data(DataConfig(prefix, split="80,20"), 16).samples("valid", 1)
    with pytest.raises(DataError, match="counting: it has 50 tokens: less than one sample, which is 65"):
        Data(DataConfig(train=(Source(prefix),)), 64).samples("train", 1)


def test_the_faults_of_all_corpora_are_told_at_once(tmp_path: Path) -> None:
    good = counting(tmp_path, [30] * 10)
    Path(counting(tmp_path, [30] * 10, "cut") + ".bin").write_bytes(b"x")
    named = (good, str(tmp_path / "cut"), str(tmp_path / "gone"))
    with pytest.raises(DataError) as caught:
        Data(DataConfig(blend=tuple(Source(one, 1.0) for one in named)), 8)
    assert [line.split(":")[0].rpartition("/")[2] for line in caught.value.message.splitlines()] == [
        "cut.bin",
        "gone.idx",
        "gone.bin",
    ]


def test_more_than_one_epoch_of_corpora_without_weights_is_refused(tmp_path: Path) -> None:
    prefixes = [counting(tmp_path, [40] * n, f"c{n}") for n in (4, 1)]
    data = Data(DataConfig(blend=tuple(Source(one) for one in prefixes), split="1"), 10)
    assert len(data.samples("train", 18)) == 18
    with pytest.raises(
        DataError, match="2 corpora for train have 18 samples in total, but 19 are needed"
    ) as caught:
        data.samples("train", 19)
    assert "weight" in caught.value.hint


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_global_batch_is_the_same_samples_on_any_number_of_ranks(ranks: int) -> None:
    shares = [Share(micro_batch=2, global_batch=16, data_rank=rank, data=ranks) for rank in range(ranks)]
    got = sorted(k for share in shares for micro in share.samples_of(32) for k in micro)
    assert got == list(range(32, 48))
    assert all(len(share.samples_of(32)) == 8 // ranks for share in shares)


def test_batches_have_one_token_more_than_the_sequence(tmp_path: Path) -> None:
    data = Data(DataConfig(counting(tmp_path, [30] * 10), split="1", seed=5), 7)
    batches = Batches(data.samples("train", 32), Share(micro_batch=2, global_batch=8))
    assert [micro.shape for (micro,) in batches.at(8)] == [(2, 8)] * 4
    assert len(list(batches.first(3))) == 3


def test_it_is_said_where_no_compiled_code_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data(DataConfig(counting(tmp_path, [30] * 10), split="1"), 7)
    monkeypatch.setattr("native.samples.sample_index.why_not", lambda: "it was not compiled here")
    assert data.notes == ["note: samples are read by NumPy, not by compiled code: it was not compiled here"]


@pytest.mark.parametrize("weights", [None, (3.0, 1.0)])
def test_the_tokens_of_a_step_do_not_depend_on_the_number_of_ranks(
    tmp_path: Path, weights: tuple[float, float] | None
) -> None:
    prefixes = [counting(tmp_path, [45] * 12, name, first) for name, first in (("a", 0), ("b", 10_000))]
    sources = tuple(Source(*pair) for pair in zip(prefixes, weights or (None, None), strict=True))
    whole = Data(DataConfig(blend=sources, split="1"), 8).samples("train", 96)
    seen = []
    for ranks, micro in ((1, 2), (2, 4), (4, 2), (8, 2), (1, 16)):
        read = []
        # Each step by a process of its own: nothing is carried over.
        for consumed in range(0, 96, 16):
            shares = [Share(micro, 16, rank, ranks) for rank in range(ranks)]
            rows = [
                row
                for share in shares
                for (part,) in Batches(whole, share).at(consumed)
                for row in part.tolist()
            ]
            read.append(sorted(map(tuple, rows)))
        seen.append(read)
    assert all(read == seen[0] for read in seen)
    assert len({row for step in seen[0] for row in step}) == 96


def long_corpus(folder: Path, last: int) -> Path:
    """Return a corpus of 2^26 + 9 tokens, a sparse file of zeros whose last token is `last`."""
    prefix = folder / "long"
    count = (1 << 26) + 9
    with Writer(prefix, np.uint16) as writer:
        writer.add_document([[0]])
    with bin_path(prefix).open("r+b") as file:
        file.truncate(2 * count)
        file.seek(2 * (count - 1))
        file.write(int(last).to_bytes(2, "little"))
    lengths = io.BytesIO(np.array([count], np.int32).tobytes())
    marks = io.BytesIO(np.array([1], np.int64).tobytes())
    for stream in (lengths, marks):
        stream.seek(0, io.SEEK_END)
    with idx_path(prefix).open("wb") as index:
        write_index(index, np.dtype(np.uint16), lengths, marks)
    return prefix


def test_the_largest_id_of_a_corpus_of_any_length_is_found_and_kept(tmp_path: Path) -> None:
    prefix = long_corpus(tmp_path, 777)
    config = DataConfig(prefix=str(prefix))
    for built in (1, 0):
        cache = IndexCache(tmp_path / "cache")
        assert Data(config, 16, cache).largest_ids() == {str(prefix): 777}
        assert cache.built == built
    with bin_path(prefix).open("r+b") as file:
        file.write((999).to_bytes(2, "little"))
    assert Data(config, 16, IndexCache(tmp_path / "cache")).largest_ids() == {str(prefix): 999}


def test_the_largest_id_that_a_build_recorded_is_taken_unless_the_file_has_another_size(
    tmp_path: Path,
) -> None:
    prefix = long_corpus(tmp_path, 5)
    size = bin_path(prefix).stat().st_size
    for recorded, expected in ((size, 4321), (size + 2, 5)):
        output = {"bytes": recorded, "sha256": "0" * 64}
        manifest = {"vocab": 5000, "largest_id": 4321, "outputs": {"bin": output}}
        manifest_path(prefix).write_text(json.dumps(manifest))
        assert Data(DataConfig(prefix=str(prefix)), 16).largest_ids() == {str(prefix): expected}
