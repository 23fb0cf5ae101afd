"""Paramiko is loaded late and lean: once a connection is open, and without invoke."""

from __future__ import annotations

import subprocess
import sys

LATE = """
import sys
import clusterctl.ssh.transport
from clusterctl.ssh.load_paramiko import load_paramiko
assert "paramiko" not in sys.modules, "the transport loads paramiko before a connection is open"
load_paramiko()
import clusterctl.ssh.login, clusterctl.ssh.program, clusterctl.ssh.session
assert "invoke" not in sys.modules, "paramiko has loaded invoke"
"""


def test_the_transport_loads_paramiko_only_when_asked_and_without_invoke() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
