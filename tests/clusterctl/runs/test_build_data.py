"""A spread build's parts that need no node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.runs.prepare.build_data import (
    BuildOutput,
    Built,
    _alone,
    _left,
    as_named_here,
    value_of,
)
from clusterctl.runs.prepare.built_pair import BuildRecord, read_record
from clusterctl.wire.pair import FileRecord, read_manifest


def test_a_second_build_of_one_output_is_refused_and_the_first_leaves_nothing(tmp_path: Path) -> None:
    with _alone(tmp_path / ".c.spread") as work:
        (work / "shares").mkdir()
        with (
            pytest.raises(UsageError, match="another build of the same output"),
            _alone(tmp_path / ".c.spread"),
        ):
            pass
    assert not list(tmp_path.iterdir())
    with _alone(tmp_path / ".c.spread"):
        pass


def test_a_bad_line_of_a_share_is_told_as_the_user_knows_it() -> None:
    for there, here in (
        ("/x/in/000000-a-from-line-600.jsonl:2: not JSON", "a.jsonl:601: not JSON"),
        ("/x/in/000012-b.jsonl.gz:7: not UTF-8: x", "b.jsonl.gz:7: not UTF-8: x"),
        ("/x/in/000001-wiki_00:7: no", "wiki_00:7: no"),
        ("3 bad lines so far", "3 bad lines so far"),
    ):
        assert as_named_here(there) == here


def test_the_value_of_an_option_is_found_in_both_ways_of_writing_it() -> None:
    assert value_of(["--input", "a", "--output", "x"], "--output") == "x"
    assert value_of(["--output=y=z"], "--output") == "y=z"
    assert value_of(["--output"], "--output") is None


def test_progress_is_passed_on_and_all_else_kept_however_it_is_cut() -> None:
    said = b"goes on after 3 parts\nprogress 10 1\nprogress 250 7\nerror: no\n"
    for step in (1, 5, 1000):
        seen: list[tuple[int, int]] = []
        told = BuildOutput(200, lambda done, total, seen=seen: seen.append((done, total)))  # type: ignore[misc]
        for at in range(0, len(said), step):
            told.take("stderr", said[at : at + step])
        told.take("stdout", b"{}")
        assert seen[-1] == (200, 200) and told.text("stdout") == "{}"
        assert told.text("stderr") == "goes on after 3 parts\nerror: no\n"


MANIFEST = {
    "prefix": "/n/c",
    "format": 1,
    "documents": 3,
    "tokens": 70,
    "token_type": "uint16",
    "append_eod": True,
    "vocab": 512,
    "eod": None,
    "eod_token": None,
    "outputs": {"bin": {"bytes": 140, "sha256": "ab"}, "idx": {"bytes": 9, "sha256": "cd"}},
}


def test_the_record_of_a_build_keeps_every_key_of_the_manifest_and_damage_means_a_new_build() -> None:
    manifest = read_manifest(json.dumps(MANIFEST))
    assert manifest.outputs["idx"] == FileRecord(9, "cd")
    text = BuildRecord("k", manifest).as_text()
    recorded = json.loads(text)["manifest"]
    assert {**MANIFEST, **recorded} == {"prefix": "/n/c", **recorded}
    assert read_record(text) == BuildRecord("k", manifest)
    for damaged in (text[:-3], b"[]", b'{"key": "k"}', text.replace(b'"documents": 3', b'"documents": true')):
        assert read_record(damaged) is None


def test_the_list_of_shards_has_the_keys_of_its_format_and_not_its_own_place(tmp_path: Path) -> None:
    built = [Built(f"node{n}", f"/w/{n}", read_manifest(json.dumps(MANIFEST)), False) for n in (1, 2)]
    listing = _left(built, tmp_path / "data" / "wiki")
    assert listing.listing == str(tmp_path / "data" / "wiki.shards.json")
    shard = {"prefix": "/w/1/c", "documents": 3, "tokens": 70, "outputs": MANIFEST["outputs"]}
    content = json.loads(Path(listing.listing).read_text())
    assert content == {
        "format": 1,
        "documents": 6,
        "tokens": 140,
        "token_type": "uint16",
        "append_eod": True,
        "vocab": 512,
        "eod": None,
        "eod_token": None,
        "shards": [{"node": "node1", **shard}, {"node": "node2", **shard, "prefix": "/w/2/c"}],
    }
    assert list(content)[:4] == ["format", "documents", "tokens", "token_type"]
