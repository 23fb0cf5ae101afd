"""SSH by paramiko; this folder is the only place that knows it. Importing the folder itself does not load
it."""

from __future__ import annotations

from clusterctl.ssh.known import KnownHosts as KnownHosts
from clusterctl.ssh.transport import SshTransport as SshTransport
from clusterctl.ssh.transport import transport_of as transport_of
