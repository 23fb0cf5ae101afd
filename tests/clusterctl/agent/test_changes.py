"""Waiting for files to change."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from clusterctl.agent.ranks.changes import Changes


@pytest.fixture
def changes() -> Changes:
    made = Changes()
    if made._descriptor < 0:
        pytest.skip("the system gives no inotify")
    return made


def after(seconds: float, work: object) -> None:
    threading.Timer(seconds, work).start()  # type: ignore[arg-type]


def test_a_written_a_new_and_a_renamed_file_end_the_wait(tmp_path: Path, changes: Changes) -> None:
    (tmp_path / "log").touch()
    assert changes.watch([str(tmp_path)])
    for work in (
        lambda: (tmp_path / "log").write_bytes(b"a line\n"),
        lambda: (tmp_path / "new").touch(),
        lambda: os.replace(tmp_path / "new", tmp_path / "state"),
    ):
        assert not changes.wait(0.05)
        after(0.2, work)
        began = time.monotonic()
        assert changes.wait(30.0) and time.monotonic() - began < 15.0
        # What a later wait would still see of the same change.
        time.sleep(0.1)
        changes.wait(0.0)
    changes.close()


def test_a_folder_that_is_missing_is_not_watched(tmp_path: Path, changes: Changes) -> None:
    later = tmp_path / "later"
    assert not changes.watch([str(tmp_path), str(later)])
    later.mkdir()
    assert changes.watch([str(tmp_path), str(later)])
    changes.close()


def test_without_inotify_the_wait_is_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    changes = Changes()
    assert not changes.watch([str(tmp_path)])
    began = time.monotonic()
    assert not changes.wait(0.1)
    assert time.monotonic() - began >= 0.1
    changes.close()
