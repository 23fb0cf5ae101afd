"""A build spread over nodes and brought together is the build that one machine makes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from clusterctl.wire.data_requests import BuildRequest, Recipe
from tests.support.building import built, pair_bytes, small_tokenizer, texts_in, verb, write_lines
from tests.trainer.corpus.test_build import many_texts
from trainer.corpus.node_shares import make_shares
from trainer.corpus.shards import merge
from trainer.errors import DataError


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizer(tmp_path_factory.mktemp("words"))


def order(words: Path, output: Path, *inputs: Path, **recipe: Any) -> BuildRequest:
    names = tuple(map(str, inputs))
    made = Recipe(append_eod=True, **recipe)
    return BuildRequest(input=names, tokenizer=words, output=output, recipe=made)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_shares_built_each_by_itself_make_the_same_pair(words: Path, tmp_path: Path, count: int) -> None:
    texts = many_texts(400)
    write_lines(tmp_path / "a.jsonl", [*texts[:310], texts[3]])
    (tmp_path / "b.jsonl.gz").write_bytes(
        gzip.compress(write_lines(tmp_path / "b", texts[300:350]).read_bytes())
    )
    write_lines(tmp_path / "c.jsonl", texts[350:])
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", tmp_path / "c.jsonl"]
    whole = built(tmp_path / "whole", words, *inputs, append_eod=True, dedup=True)
    cut = make_shares(order(words, tmp_path / "out", *inputs, dedup=True), count, tmp_path / "shares")
    prefixes = []
    for number, share in enumerate(cut.shares):
        prefix = tmp_path / "built" / str(number) / "c"
        argv = ["--input", f"{share.folder}/in", "--tokenizer", f"{share.folder}/tokenizer"]
        done = verb("data-build", *argv, "--output", str(prefix), *cut.words, "--json")
        assert done.returncode == 0, done.stderr
        prefixes.append(prefix)
    merge(prefixes, tmp_path / "out", dedup=True)
    assert len(prefixes) == count and pair_bytes(tmp_path / "out") == pair_bytes(tmp_path / "whole")
    told = json.loads((tmp_path / "out.manifest.json").read_text())
    assert told["dropped"] == whole["dropped"] and told["documents"] == whole["documents"]


def test_whole_files_are_not_copied_and_a_cut_one_says_its_line(words: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", many_texts(100))
    (tmp_path / "z.txt").write_text("whole")
    inputs = [tmp_path / "a.jsonl", tmp_path / "z.txt"]
    make_shares(order(words, tmp_path / "out", *inputs), 2, tmp_path / "shares")
    names = sorted(path.name for path in (tmp_path / "shares").glob("*/in/*"))
    assert names[0].startswith("000000-a-from-line-") and names[-1] == "000001-z.txt"
    assert (tmp_path / "z.txt").stat().st_nlink == 2
    second = next((tmp_path / "shares" / "00001" / "in").glob("*from-line*"))
    line = int(second.stem.rsplit("-", 1)[1])
    assert second.read_text().splitlines()[0] == (tmp_path / "a.jsonl").read_text().splitlines()[line - 1]


def test_fewer_files_than_nodes_give_fewer_shares(words: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one document")
    cut = make_shares(order(words, tmp_path / "out", tmp_path / "a.txt"), 4, tmp_path / "shares")
    assert len(cut.shares) == 1
    built(tmp_path / "c", words, f"{cut.shares[0].folder}/in")
    assert texts_in(tmp_path / "c", words) == ["one document"]


def test_what_cannot_be_shared_is_refused(words: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="standard input cannot be cut"):
        make_shares(order(words, tmp_path / "out", Path("-")), 2, tmp_path / "shares")
    write_lines(tmp_path / "in.jsonl", ["a", "b"])
    built(tmp_path / "one", words, tmp_path / "in.jsonl")
    with pytest.raises(DataError, match="does not have the hashes of 2 documents"):
        merge([tmp_path / "one"], tmp_path / "out", dedup=True)
