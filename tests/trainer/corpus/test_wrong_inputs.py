"""Wrong options and files of `data`: each ends with 2, names its place, and writes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.building import SAYINGS, built, small_tokenizer, write_lines
from trainer.__main__ import main

DEEP = '{"a":' * 3000 + "1" + "}" * 3000
BUILD = "--input in.txt --tokenizer tokenizer.json --output out"
# Arguments without their files, and what the errors say. `@` stands for an empty word.
LINES = [
    (
        "data-build --input @ --tokenizer @ --output @ --workers x",
        [
            "--input: is empty",
            "--tokenizer: is empty",
            "--output: is empty",
            "--workers: 'x' is not a whole number",
        ],
    ),
    (f"data-build {BUILD}/", ["--output: out/ is a folder; add the name of the pair, as in out/corpus"]),
    ("data-build --input in.txt --tokenizer deep.json --output out", ["deep.json: not a tokenizer.json"]),
    ("data-build --input in.txt --tokenizer sp.model --output out", ["sp.model: a SentencePiece model"]),
    ("data-build --input in.txt --tokenizer pair/vocab.json --output out", ["vocab.json: not a vocabulary"]),
    ("data-build --input pipe --tokenizer tokenizer.json --output out", ["pipe: a pipe or device"]),
    ("data-verify @", ["prefix: is empty"]),
    ("data-info @", ["prefix: is empty"]),
    ("data-repair @", ["prefix: is empty"]),
    ("data-merge @ --output out", ["prefix: is empty"]),
    ("data-split pair/c --output out --split nan,1,1", ["--split nan,1,1: must be one to three shares"]),
    ("data-split pair/c --output out --split 1e400,1", ["--split 1e400,1: must be one to three shares"]),
    ("data-merge pair/c --output in.txt/x", ["in.txt: is a file, not a folder"]),
    (
        "tokenizer-train --input in.txt --vocab-size 300 --output in.txt/t.json",
        ["in.txt: is a file, not a folder"],
    ),
    ("data-verify pair/c --vocab 0", ["--vocab: 0 is too small (1 or more)"]),
    ("data-info pair/c --samples -1", ["--samples: -1 is too small (0 or more)"]),
    ("data-split in --output out --parts 0", ["--parts: 0 is too small (1 or more)"]),
    ("data-split in --output out --parts -2", ["--parts: -2 is too small (1 or more)"]),
    ("tokenizer-train --input empty.txt --vocab-size 300 --output out.json", ["no document with text"]),
    ("tokenizer-train --input blank.txt --vocab-size 300 --output out.json", ["no document with text"]),
    ("tokenizer-glm --tokenizer deep.json --output out.json", ["deep.json: not a tokenizer.json"]),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tokenizer = small_tokenizer(tmp_path)
    (tmp_path / "in.txt").write_text("a text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "deep.json").write_text(DEEP)
    (tmp_path / "sp.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>\x15\xff\xfe")
    (tmp_path / "pair").mkdir()
    built(tmp_path / "pair" / "c", tokenizer, write_lines(tmp_path / "pair" / "c.jsonl", SAYINGS))
    (tmp_path / "pair" / "vocab.json").write_text(DEEP)
    (tmp_path / "pair" / "merges.txt").write_text("")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("line", "problems"), LINES, ids=[line for line, _ in LINES])
def test_a_wrong_command_line_names_all_its_errors_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], line: str, problems: list[str]
) -> None:
    before = sorted(folder.rglob("*"))
    words = ["" if word == "@" else word for word in line.split()]
    try:
        code = main(["--called", "clusterctl data", *words])
    except SystemExit as ended:
        code = int(str(ended.code))
    err = capsys.readouterr().err
    assert code == 2 and "  try: " in err, err
    assert err.count("error: ") == len(problems) and all(problem in err for problem in problems), err
    assert sorted(folder.rglob("*")) == before


def test_pipes_in_a_folder_of_inputs_are_not_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a text")
    os.mkfifo(folder / "texts" / "b.txt")
    assert main(["data-build", "--input", "texts", "--tokenizer", "tokenizer.json", "--output", "out"]) == 0
    assert "out: 1 document" in capsys.readouterr().out
