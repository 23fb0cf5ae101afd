"""Wrong options and files of `serve`: all are named before the model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.__main__ import main

CASES = [
    (
        ("--host", "0.0.0.0", "--chat-template", "tpl"),
        ["--host 0.0.0.0 is reachable", "tpl:1: not a jinja template"],
    ),
    (
        ("--api-key-file", "binary", "--chat-template", "binary"),
        ["--api-key-file binary: not UTF-8 at byte 0", "binary: "],
    ),
    (
        ("--api-key-file", "none", "--drain", "2e6", "--batch", "0"),
        ["--api-key-file none: No such file", "--drain", "--batch"],
    ),
    (("--chat-template", "folder"), ["folder: Is a directory"]),
    (
        ("--request-timeout", "nan"),
        ["--request-timeout is nan; more than 0 and at most 1,000,000 are needed"],
    ),
]


@pytest.mark.parametrize(("words", "problems"), CASES)
def test_all_errors_are_named_before_the_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    problems: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tpl").write_text("{% for x in")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "folder").mkdir()
    assert main(["serve", "--checkpoint", str(tmp_path), *words]) == 2
    err = capsys.readouterr().err
    assert err.count("error: ") == len(problems) and all(problem in err for problem in problems), err


def test_a_damaged_config_of_a_tokenizer_has_no_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[" * 5000 + "]" * 5000)
    assert main(["serve", "--checkpoint", str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "--host 0.0.0.0 is reachable" in capsys.readouterr().err
