"""A passphrase is requested once for all nodes, and never shown."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusterctl.ssh.test_ssh import SSHD, Server, start

# One sshd as four nodes.
ADDRESSES = [f"127.0.0.{number}" for number in range(1, 5)]
pytestmark = pytest.mark.skipif(SSHD is None, reason="no sshd on this machine")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    found = start(tmp_path / "sshd", "\n".join(f"ListenAddress {one}" for one in ADDRESSES[1:]))
    yield found
    found.process.terminate()
    found.process.wait()


def test_a_passphrase_is_asked_at_the_terminal_once_for_all_nodes_and_not_shown(
    server: Server, tmp_path: Path
) -> None:
    key = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "open sesame", "-f", str(key)], check=True)
    (server.folder / "authorized").write_text(key.with_suffix(".pub").read_text())
    shown_key = (server.folder / "host.pub").read_text()
    recorded = "".join(f"[{one}]:{server.port} {shown_key}" for one in ADDRESSES)
    (tmp_path / "known_hosts").write_text(recorded)
    rows = [f"  node{place}: {{host: {one}, port: {server.port}}}" for place, one in enumerate(ADDRESSES)]
    head = (
        f"name: locked\nknown_hosts: ./known_hosts\ndefaults: {{key: {key}, devices: 1, kind: cpu}}\nnodes:"
    )
    (tmp_path / "cluster.yaml").write_text("\n".join([head, *rows]) + "\n")
    ours, theirs = pty.openpty()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SSH_", "CLUSTERCTL_"))}
    running = subprocess.Popen(
        [sys.executable, "-m", "clusterctl", "exec", "all", "--", "echo", "in"],
        cwd=tmp_path,
        env={**kept, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
        stdin=theirs,
        stderr=theirs,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(theirs)
    try:
        said = _until(ours, b"Passphrase for")
        os.write(ours, b"open sesame\n")
        assert running.stdout is not None
        shown = running.stdout.read()
        assert running.wait(60) == 0
        said += _rest(ours)
    finally:
        running.kill()
        running.wait()
        os.close(ours)
    assert shown.count(b"in\n") == 4 and said.count(b"Passphrase for") == 1 and b"sesame" not in said


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _until(terminal: int, mark: bytes) -> bytes:
    said = b""
    deadline = time.monotonic() + 60
    while mark not in said:
        assert time.monotonic() < deadline, said
        try:
            said += os.read(terminal, 4096)
        except OSError:
            raise AssertionError(said.decode(errors="replace")) from None
    # Getpass empties what was typed before it asks.
    time.sleep(0.3)
    return said


def _rest(terminal: int) -> bytes:
    said = b""
    try:
        while data := os.read(terminal, 4096):
            said += data
    except OSError:
        # Linux reports a closed other end in this way.
        pass
    return said
