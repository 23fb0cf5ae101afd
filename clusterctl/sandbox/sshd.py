"""Nodes that are OpenSSH daemons of their own: found, configured, started on a loopback address."""

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
# Where root's sshd locks up its unprivileged half; the path is built into it.
RUN_SSHD = Path("/run/sshd")


def find_sshd() -> str | None:
    """The OpenSSH daemon of this machine; sbin is looked into too, which a user's PATH often lacks."""
    return shutil.which("sshd", path=PATHS)


def why_not_root() -> str:
    """Why root could not log in by key here, or "": without PAM, sshd refuses an account locked by `!`."""
    if os.geteuid() != 0:
        return ""
    with contextlib.suppress(OSError):
        for line in Path("/etc/shadow").read_text().splitlines():
            if line.startswith("root:!"):
                return "the root account is locked (root:! in /etc/shadow), and sshd refuses it"
    return ""


def environment(layout: Layout, state: State, node: SandboxNode) -> dict[str, str]:
    """What a login on a node finds set, whatever the daemon."""
    found = {
        "PATH": f"{layout.tools(node)}:{NODE_PATH}",
        process.MARKER: f"{layout.id}/{node.name}",
    }
    # Its own /etc/passwd says where home is, and its own /tmp is real.
    if state.mode == "namespaces":
        return found
    found["HOME"] = str(layout.home(node))
    if temporary := layout.temporary(node):
        found["TMPDIR"] = str(temporary)
    return found


def daemon_environment(layout: Layout, node: str) -> dict[str, str]:
    """What the daemon itself finds set."""
    return {"PATH": NODE_PATH, process.MARKER: f"{layout.id}/{node}"}


def write_config(layout: Layout, state: State, node: SandboxNode, sshd: str) -> Path:
    """A node's sshd_config: one key lets in one user, and nothing else does."""
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
    # It then punishes an address after failed logins, which is what tests make.
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
    # The folders above a sandbox are the user's business.
    "StrictModes no",
    # Each process here wrote its own record before it became sshd.
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
    # The stock 10:30:100 drops connections of a burst, which these drills make.
    "MaxStartups 500",
    "MaxSessions 200",
)

# sshd starts in the home that the machine's passwd names; a node's own home is another.
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
    """OpenSSH's version; old daemons print it with their complaint about -V."""
    done = subprocess.run([sshd, "-V"], capture_output=True, text=True, check=False)
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", done.stdout + done.stderr)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def start(layout: Layout, state: State, node: SandboxNode) -> None:
    """Start a node's daemon on its loopback address and port."""
    sshd = find_sshd()
    # The mode was chosen because it is there.
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
    """See to it that root's sshd finds its folder; where no one made it yet, note that we did and use it."""
    if os.geteuid() != 0 or (RUN_SSHD.is_dir() and not _leases()):
        return
    while True:
        RUN_SSHD.mkdir(mode=0o755, parents=True, exist_ok=True)
        # Another sandbox's `down` removed it just now.
        with contextlib.suppress(FileNotFoundError):
            (RUN_SSHD / f"clusterctl-{layout.id}").touch(mode=0o600)
            return


def end_lease(layout: Layout) -> None:
    """Remove the folder that `lease_run_folder` made, unless another sandbox or any sshd needs it."""
    lease = RUN_SSHD / f"clusterctl-{layout.id}"
    if os.geteuid() != 0 or not lease.exists():
        return
    lease.unlink()
    if not process.named("sshd"):
        # Not empty: another sandbox's lease.
        with contextlib.suppress(OSError):
            RUN_SSHD.rmdir()


def _leases() -> list[Path]:
    return list(RUN_SSHD.glob("clusterctl-*"))
