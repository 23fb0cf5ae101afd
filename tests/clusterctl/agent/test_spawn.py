"""Programs in sessions of their own: environment, output, signals, and why one cannot start."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.agent import spawn

PATH = {b"PATH": b"/nonexistent:/usr/bin:/bin"}


def run(argv: list[bytes], folder: Path, env: dict[bytes, bytes] = PATH) -> tuple[int | None, str]:
    with (folder / "output").open("wb") as file:
        process = spawn.start(argv, env, file.fileno(), file.fileno())
        code = process.wait()
    assert process.poll() == process.returncode == code
    return code, (folder / "output").read_text()


def test_a_program_has_its_environment_its_output_and_an_empty_input(tmp_path: Path) -> None:
    code, output = run(
        [b"sh", b"-c", b"cat; echo $A; echo error >&2; exit 3"], tmp_path, {**PATH, b"A": b"b"}
    )
    assert (code, output) == (3, "b\nerror\n")


def test_a_program_leads_a_session_and_ignores_no_signal_of_python(tmp_path: Path) -> None:
    _, output = run([b"sh", b"-c", b"echo $$; cat /proc/self/stat; cat /proc/self/status"], tmp_path)
    pid, stat, *status = output.splitlines()
    assert stat.rpartition(")")[2].split()[3] == pid
    (ignored,) = (int(line.split()[1], 16) for line in status if line.startswith("SigIgn"))
    # SIGPIPE, which Python ignores.
    assert not ignored >> 12 & 1


def test_the_end_by_a_signal_is_a_negative_code(tmp_path: Path) -> None:
    assert run([b"sh", b"-c", b"kill -9 $$"], tmp_path)[0] == -9


def test_a_program_inherits_no_other_file(tmp_path: Path) -> None:
    with (tmp_path / "open").open("wb") as other:
        _, output = run([b"sh", b"-c", b"ls -l /proc/$$/fd"], tmp_path)
        assert other.name not in output


@pytest.mark.parametrize(
    ("argv", "kind"),
    [(b"nope", FileNotFoundError), (b"/nope", FileNotFoundError), (b"/tmp", PermissionError)],
)
def test_a_program_that_cannot_be_started_raises_the_kernels_reason(
    argv: bytes, kind: type[OSError], tmp_path: Path
) -> None:
    with pytest.raises(kind, match=f"b'{argv.decode()}'"):
        run([argv], tmp_path)


def test_a_file_of_that_name_that_cannot_run_does_not_hide_a_later_one(tmp_path: Path) -> None:
    for name, mode in (("first", 0o644), ("second", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tool").write_text("#!/bin/sh\necho here\n")
        (tmp_path / name / "tool").chmod(mode)
    path = f"{tmp_path}/first:{tmp_path}/second:/bin".encode()
    assert run([b"tool"], tmp_path, {b"PATH": path}) == (0, "here\n")
