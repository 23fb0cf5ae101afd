"""What a program writes to a relative path: where the end of a launch says, and at home after `pull RUN`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.live.conftest import Shell

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

PROGRAM = """
import os, pathlib
last = pathlib.Path("last.txt")
print("found", last.read_text() if last.exists() else "nothing", flush=True)
run, attempt = os.environ["CLUSTERCTL_RUN_DIR"].replace("/", "_"), os.environ["CLUSTERCTL_ATTEMPT"]
pathlib.Path("ready-" + run + attempt + "-" + os.environ["RANK"]).touch()
while len(list(pathlib.Path(".").glob("ready-" + run + attempt + "-*"))) < 2:
    pass
last.write_text(attempt)
"""


def test_what_a_program_wrote_is_named_pulled_and_found_by_a_resume(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "write.py").write_text(PROGRAM)
    done = shell("launch", "--code", "code", "--", "python", "write.py")
    assert done.returncode == 0, done.stderr
    assert "found nothing" in done.stdout and "found 1" not in done.stdout
    words = "".join(done.stderr.split())
    assert "work/write-" in words and "fetchwhatwaswrittenthere:clusterctlpullwrite-" in words
    pulled = shell("pull", "last", "home")
    assert pulled.returncode == 0, pulled.stderr
    found = sorted(str(path.relative_to(tmp_path / "home")) for path in (tmp_path / "home").rglob("*.txt"))
    assert found == ["node1/last.txt", "node2/last.txt"]
    assert not list((tmp_path / "home").rglob("write.py"))
    again = shell("resume", "last")
    assert again.returncode == 0, again.stderr
    assert "found 1" in again.stdout
    kept = [shell("launch", "--keep-workdir", "--code", "code", "--", "python", "write.py") for _ in range(2)]
    assert ["found 1" in one.stdout for one in kept] == [False, True]
