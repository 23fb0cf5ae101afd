"""Wrong options and files of `serve`: all are named before the model is loaded."""

from __future__ import annotations

import socket
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
        ["--request-timeout: nan is not a number (0.1 to 1,000,000)"],
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
    assert main(["serve", "--checkpoint", str(tmp_path), "--port", "0", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("error: ") == len(problems) and all(problem in err for problem in problems), err


def test_an_address_that_cannot_be_used_is_named_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("0123456789")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        # The folder has no checkpoint: loading it would be another error.
        assert main(["serve", "--checkpoint", str(tmp_path), "--port", port, "--batch", "0"]) == 2
        err = capsys.readouterr().err
    assert f"127.0.0.1:{port}: Address already in use" in err and "use another --port" in err
    assert "--batch: 0 is too small" in err and err.count("error: ") == 2
    # An address for documentation, which no machine has.
    elsewhere = ["--host", "203.0.113.5", "--port", "0", "--api-key-file", str(tmp_path / "key")]
    assert main(["serve", "--checkpoint", str(tmp_path), *elsewhere]) == 2
    err = capsys.readouterr().err
    assert "203.0.113.5:0: Cannot assign requested address" in err and "use another --host" in err
    unknown = ["--host", "x" * 70, "--port", "0", "--api-key-file", str(tmp_path / "key")]
    assert main(["serve", "--checkpoint", str(tmp_path), *unknown]) == 2
    assert f"--host {'x' * 70}: " in capsys.readouterr().err


def test_a_damaged_config_of_a_tokenizer_has_no_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer_config.json").write_text("[" * 5000 + "]" * 5000)
    assert main(["serve", "--checkpoint", str(tmp_path), "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "--host 0.0.0.0 is reachable" in capsys.readouterr().err
