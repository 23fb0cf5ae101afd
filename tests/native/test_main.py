"""`python -m native`, as a user and as `clusterctl doctor` call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from native import registry
from native.__main__ import main
from native.registry import OPS


def test_the_json_report_has_every_op_and_a_reason_for_each_backend(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["device"], [op["op"] for op in report["ops"]]) == ("cpu", list(OPS))
    assert report["torch"].startswith("2.")
    assert all(one["reason"] for op in report["ops"] for one in op["backends"])


def test_the_table_marks_what_auto_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("* " in line for line in lines) == len(OPS)


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("yes", "torch's large buffers come from the pool"),
        (
            "never",
            "torch's large buffers come from glibc's heap, because CLUSTERCTL_NATIVE_POOL is never",
        ),
    ],
)
def test_it_shows_where_large_buffers_come_from(compiled: object, value: str, line: str) -> None:
    # A process has one pool, so each answer needs a process of its own.
    done = subprocess.run(
        [sys.executable, "-m", "native"],
        env={**os.environ, "CLUSTERCTL_NATIVE_POOL": value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == line


def test_without_torch_it_still_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "_torch_fault", lambda: "torch cannot be imported: No module named 'torch'")
    assert main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(op["chosen"] is None for op in report["ops"])
    assert "No module named 'torch'" in report["ops"][0]["backends"][0]["reason"]


def test_a_failed_build_ends_with_1_and_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--compiler", "/nonexistent"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "not built: /nonexistent cannot be run" in err


def test_an_unknown_word_ends_with_2() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bild"])
    assert caught.value.code == 2


def test_it_shows_the_errors_that_are_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--bounds"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [
        "rms_norm",
        "float32",
        "value",
        "within",
        "2e-06,",
        "gradients",
        "within",
        "2e-06",
        "of",
        "the",
        "largest",
    ] in lines
