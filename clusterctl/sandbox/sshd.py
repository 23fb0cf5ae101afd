"""Nodes that are OpenSSH daemons: find sshd, configure it, start it on a loopback address."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from clusterctl.sandbox import process
from clusterctl.sandbox.layout import Layout, SandboxNode, State

PATHS = "/usr/sbin:/usr/local/sbin:/sbin:/opt/homebrew/sbin:/usr/bin:/usr/local/bin"
NODE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SFTP_SERVERS = (
    "/usr/lib/openssh/sftp-server",
    "/usr/libexec/openssh/sftp-server",
    "/usr/lib/ssh/sftp-server",
    "/usr/libexec/sftp-server",
)
# The empty folder for the unprivileged process of root's sshd; the path is compiled into sshd.
RUN_SSHD = Path("/run/sshd")


def find_sshd() -> str | None:
    """Return the path of sshd, or None. The sbin folders are searched too: PATH of a user often lacks them."""
    return shutil.which("sshd", path=PATHS)


def why_not_root() -> str:
    """Return why root cannot log in with a key, or "": without PAM, sshd refuses an account locked by `!`."""
    if os.geteuid() != 0:
        return ""
    with contextlib.suppress(OSError):
        for line in Path("/etc/shadow").read_text().splitlines():
            if line.startswith("root:!"):
                return "the root account is locked (root:! in /etc/shadow), and sshd refuses it"
    return ""


def environment(layout: Layout, state: State, node: SandboxNode) -> dict[str, str]:
    """Return the environment of a login on a node."""
    found = {
        "PATH": f"{layout.tools(node)}:{NODE_PATH}",
        process.MARKER: f"{layout.id}/{node.name}",
    }
    # In this mode a node has its own /etc/passwd with the home folder, and its own /tmp.
    if state.mode == "namespaces":
        return found
    found["HOME"] = str(layout.home(node))
    if temporary := layout.temporary(node):
        found["TMPDIR"] = str(temporary)
    return found


def daemon_environment(layout: Layout, node: str) -> dict[str, str]:
    """Return the environment of the daemon itself."""
    return {"PATH": NODE_PATH, process.MARKER: f"{layout.id}/{node}"}


def write_config(layout: Layout, state: State, node: SandboxNode, sshd: str) -> Path:
    """Write sshd_config of a node, which accepts one key of one user only; return its path."""
    address, port = ("0.0.0.0", 22) if state.mode == "namespaces" else (node.host, node.port)
    variables = environment(layout, state, node).items()
    lines = [
        f"ListenAddress {address}:{port}",
        f'HostKey "{layout.host_key(node)}"',
        f'AuthorizedKeysFile "{layout.authorized_keys}"',
        f"AllowUsers {state.user}",
        "SetEnv " + " ".join(f'"{key}={value}"' for key, value in variables),
        *POLICY,
    ]
    lines += [f"Subsystem sftp {server}" for server in SFTP_SERVERS if Path(server).exists()][:1]
    # From this version on sshd blocks an address after failed logins, which tests cause.
    if version(sshd) >= (9, 8):
        lines.append("PerSourcePenalties no")
    if state.mode != "namespaces":
        script = layout.tools(node) / "node-shell"
        script.write_text(NODE_SHELL)
        script.chmod(0o755)
        lines.append(f"ForceCommand exec {shlex.quote(str(script))}")
    path = layout.node(node) / "sshd_config"
    path.write_text("\n".join(lines) + "\n")
    return path


POLICY = (
    "AuthenticationMethods publickey",
    "PermitRootLogin prohibit-password",
    "PasswordAuthentication no",
    "KbdInteractiveAuthentication no",
    "UsePAM no",
    # The folders above a sandbox may have any permissions.
    "StrictModes no",
    # spawn.py has recorded the process.
    "PidFile none",
    "UseDNS no",
    "X11Forwarding no",
    "AllowAgentForwarding no",
    "AllowStreamLocalForwarding no",
    # For a node that serves as a gateway.
    "AllowTcpForwarding local",
    "PermitTunnel no",
    "PrintMotd no",
    "PrintLastLog no",
    # The default 10:30:100 drops connections when many arrive together, as in tests.
    "MaxStartups 500",
    "MaxSessions 200",
)

# sshd starts in the home folder of the machine's passwd file; the node has its own.
NODE_SHELL = """\
#!/bin/sh
cd "$HOME" || exit 1
if [ -n "${SSH_ORIGINAL_COMMAND-}" ]; then
    command=$SSH_ORIGINAL_COMMAND
    unset SSH_ORIGINAL_COMMAND
    exec "${SHELL:-/bin/sh}" -c "$command"
fi
exec "${SHELL:-/bin/sh}" -l
"""


def version(sshd: str) -> tuple[int, int]:
    """Return the version of OpenSSH; old daemons print it with an error about -V."""
    done = subprocess.run([sshd, "-V"], capture_output=True, text=True, check=False, timeout=60)
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", done.stdout + done.stderr)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def start(layout: Layout, state: State, node: SandboxNode) -> None:
    """Start the daemon of a node on its loopback address and port."""
    sshd = find_sshd()
    # choose_mode() has checked this.
    assert sshd is not None
    file = write_config(layout, state, node, sshd)
    process.start(
        layout.record(node.name),
        node.name,
        [sshd, "-D", "-e", "-f", str(file)],
        daemon_environment(layout, node.name),
        layout.log(node.name),
    )


def lease_run_folder(layout: Layout) -> None:
    """Make the folder that root's sshd needs, unless it exists; a file in it records that this sandbox uses it."""
    if os.geteuid() != 0 or (RUN_SSHD.is_dir() and not _leases()):
        return
    while True:
        RUN_SSHD.mkdir(mode=0o755, parents=True, exist_ok=True)
        # `down` of another sandbox may have removed it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            (RUN_SSHD / f"clusterctl-{layout.id}").touch(mode=0o600)
            return


def end_lease(layout: Layout) -> None:
    """Remove the folder of `lease_run_folder`, unless another sandbox or any sshd needs it."""
    lease = RUN_SSHD / f"clusterctl-{layout.id}"
    if os.geteuid() != 0 or not lease.exists():
        return
    lease.unlink()
    if not process.named("sshd"):
        # It is not empty if another sandbox uses it.
        with contextlib.suppress(OSError):
            RUN_SSHD.rmdir()


def _leases() -> list[Path]:
    return list(RUN_SSHD.glob("clusterctl-*"))
