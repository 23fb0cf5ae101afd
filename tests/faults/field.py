"""The environment of a fault: a cluster of namespaces per lane, and functions that inject faults into it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from bench.field import user_environment
from clusterctl.jobs.run_folder import RunDir
from clusterctl.sandbox import cluster as sandbox_cluster
from clusterctl.sandbox import namespaces
from clusterctl.sandbox import process as sandbox_process

PROGRAM = Path(__file__).with_name("fake_trainer.py")
# Below a node's home folder.
WORKDIR = ".clusterctl"
# The size in MB of the disk that gets full.
DISK = 8
# How many files and folders fit on it; a run makes about a hundred.
INODES = 1000
# The seconds by which a skewed node's clocks are ahead.
WALL_AHEAD, STEADY_AHEAD = 600, 86400
SHIFT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <sys/time.h>
#include <time.h>
static int (*real)(clockid_t, struct timespec *);
int clock_gettime(clockid_t id, struct timespec *t) {
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(id, t);
    if (!done && id == CLOCK_REALTIME) t->tv_sec += AHEAD;
    return done;
}
time_t time(time_t *out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out) *out = t.tv_sec;
    return t.tv_sec;
}
"""


class Scanner:
    """A thread that records five times a second which processes have a run's marker.

    `seen` contains for each run its (attempt, node) pairs, with the time of every change.
    """

    EVERY = 0.2

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[float, frozenset[tuple[int, str]]]]] = {}
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while not self.closed.wait(self.EVERY):
            now, runs = time.time(), marked()
            for run in {*runs, *self.seen}:
                found = frozenset((attempt, node) for attempt, node, _ in runs.get(run, ()))
                story = self.seen.setdefault(run, [])
                if not story or story[-1][1] != found:
                    story.append((now, found))

    def close(self) -> None:
        self.closed.set()
        self.thread.join()


def marked() -> dict[str, list[tuple[int, str, int]]]:
    """Return by run the (attempt, node, pid) of every living process with a run's marker."""
    found: dict[str, list[tuple[int, str, int]]] = {}
    for pid in processes():
        env = environment_of(pid)
        if b"CLUSTERCTL_RUN_ID" in env and b"CLUSTERCTL_ATTEMPT" in env:
            run, node = env[b"CLUSTERCTL_RUN_ID"].decode(), env.get(b"CLUSTERCTL_NODE", b"?").decode()
            found.setdefault(run, []).append((int(env[b"CLUSTERCTL_ATTEMPT"]), node, pid))
    return found


def environment_of(pid: int) -> dict[bytes, bytes]:
    with contextlib.suppress(OSError):
        raw = Path(f"/proc/{pid}/environ").read_bytes()
        if b"CLUSTERCTL_" in raw:
            return dict(part.partition(b"=")[::2] for part in raw.split(b"\0"))
    return {}


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def words_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def is_dead(pid: int) -> bool:
    """Return whether a process has ended; zombies count as ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    return True


def end_nodes(folder: Path) -> None:
    """End the nodes of a lane's folder, also those that were started incompletely; do nothing if there are none."""
    sandbox_cluster.down(folder / "s")


class Lane:
    """Three nodes for one run at a time, with one fault."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.box = sandbox_cluster.up(folder / "s", nodes=3, devices=2, mode="namespaces")
        # The disk that all nodes of the lane share.
        self.shared = folder / "s" / "shared"
        self.shared.mkdir()

    def renew(self) -> None:
        """Replace the nodes, because one of them has died."""
        self.close()
        self.box = sandbox_cluster.up(self.folder / "s", nodes=3, devices=2, mode="namespaces")
        self.shared.mkdir()

    def close(self) -> None:
        end_nodes(self.folder)

    # -- a node as its machine sees it

    def init(self, node: str) -> int:
        return namespaces.first_process(self.box.layout, self.box.node(node))

    def is_up(self, node: str) -> bool:
        record = sandbox_process.read_record(self.box.layout.record(node))
        return record is not None and record.alive

    def pids(self, node: str) -> dict[int, int]:
        """Return a node's living processes: the pid on the node -> the pid on this machine."""
        init, found = self.init(node), {}
        space = os.readlink(f"/proc/{init}/ns/pid")
        for pid in processes():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/pid") == space and not is_dead(pid):
                    status = Path(f"/proc/{pid}/status").read_text()
                    inner = next(line for line in status.splitlines() if line.startswith("NSpid:"))
                    found[int(inner.split()[-1])] = pid
        return found

    def run_dir(self, node: str, run: str) -> Path:
        """Return a run's folder on a node, through the node's mounts while the node lives."""
        home = self.box.layout.home(self.box.node(node)) / WORKDIR / "runs" / run / node
        if not self.is_up(node):
            return home
        return Path(f"/proc/{self.init(node)}/root{home}")

    def record(self, node: str, run: str, attempt: int, name: str) -> dict[str, Any]:
        """Return the content of one of an attempt's JSON files on a node; empty if it is missing or invalid."""
        try:
            value = json.loads((self.run_dir(node, run) / "attempts" / str(attempt) / name).read_bytes())
            return value if isinstance(value, dict) else {}
        except (OSError, ValueError):
            return {}

    def extra(self, node: str) -> list[str]:
        """Return the processes that run on a node in addition to its SSH server."""
        here = {inner: pid for inner, pid in self.pids(node).items() if inner != 1}
        return [f"{node}: {words_of(pid)[:90]}" for pid in here.values() if not is_dead(pid)]

    def listening(self, node: str) -> list[str]:
        """Return the ports that are open on a node, except SSH's."""
        found = []
        for name in ("tcp", "tcp6"):
            rows = Path(f"/proc/{self.init(node)}/net/{name}").read_text().splitlines()[1:]
            ports = [int(row.split()[1].rpartition(":")[2], 16) for row in rows if row.split()[3] == "0A"]
            found += [f"{node}: port {port}" for port in ports if port != 22]
        return found

    def temporary(self, node: str, run: str) -> list[str]:
        """Return the files left in a node's temporary folders, and unfinished files that a run never renamed."""
        machine, layout, root = self.box.node(node), self.box.layout, Path(f"/proc/{self.init(node)}/root")
        passing = [root / "dev/shm", layout.temporary(machine) or root / "tmp"]
        # A checkout below /tmp is mounted into the nodes and does not count.
        mounts = mounted_in(self.init(node))
        found = [
            str(path)
            for folder in passing
            if folder.is_dir()
            for path in folder.iterdir()
            if not any(mount.is_relative_to(path) for mount in mounts)
        ]
        return (
            found
            + aside_in(self.run_dir(node, run))
            + aside_in(Path(f"{root}{layout.home(machine)}/{WORKDIR}/store"))
        )

    # -- what is done to it

    def freeze(self, node: str) -> None:
        """Stop all processes of a node at the same time, like a frozen machine; its connections stay open."""
        # The second pass stops processes that were being forked during the first.
        for _ in range(2):
            for pid in self.pids(node).values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)

    def thaw(self, node: str) -> None:
        for pid in self.pids(node).values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def drop_connections(self, node: str) -> int:
        """Kill the SSH sessions of a node; return how many."""
        sessions = [
            pid for inner, pid in self.pids(node).items() if inner != 1 and words_of(pid).startswith("sshd")
        ]
        for pid in sessions:
            # The child of a killed process may have ended already.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(sessions)

    def hold_relay(self, number: int) -> None:
        """Send SIGSTOP or SIGCONT to the relay between this machine and every node; nodes still reach each other."""
        record = sandbox_process.read_record(self.box.layout.record(namespaces.RELAY))
        assert record is not None
        os.kill(record.pid, number)

    def small_disk(self, node: str) -> Path:
        """Mount a disk of a few megabytes below a node's runs; return the path of the file that fills it."""
        runs = self.box.layout.home(self.box.node(node)) / WORKDIR / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        limits = f"size={DISK}m,nr_inodes={INODES}"
        self._mount(node, "mount", "-t", "tmpfs", "-o", limits, "disk", str(runs))
        return Path(f"/proc/{self.init(node)}/root{runs}/ballast")

    def big_disk(self, node: str) -> None:
        """Unmount the small disk, so that the node uses its normal disk again."""
        self._mount(node, "umount", "-l", str(self.box.layout.home(self.box.node(node)) / WORKDIR / "runs"))

    def _mount(self, node: str, *arguments: str) -> None:
        spaces = [
            f"--{name}=/proc/{self.init(node)}/ns/{short}"
            for name, short in (("mount", "mnt"), ("pid", "pid"))
        ]
        # Enter the node's pid namespace too; otherwise /proc/self does not exist there.
        subprocess.run(["nsenter", *spaces, *arguments], check=True)

    def prolong_login(self, node: str, how: str) -> Path:
        """Make a node's login scripts print, or sleep, forever; return the script, which must be removed later."""
        text = "while :; do echo out of order; done" if how == "prints" else "sleep 600"
        script = Path(f"/proc/{self.init(node)}/root{self.box.layout.home(self.box.node(node))}/.bashrc")
        script.write_text(text + "\n")
        return script

    # -- clocks

    def skewed(self, node: str) -> Path | None:
        """Return an inventory in which all processes that clusterctl starts on one node see clocks that are ahead.

        Return None if this machine cannot do that. The monotonic clock is shifted by a time namespace. The wall clock
        has no namespace and is shifted by a preloaded library: the times that programs read are shifted, but file times
        are not.
        """
        library = self._clock_library()
        if library is None:
            return None
        wrapper = self.folder / "s" / "skewed-python"
        ahead = f"--time --monotonic {STEADY_AHEAD} --boottime {STEADY_AHEAD} --fork --kill-child=SIGKILL"
        text = f'#!/bin/sh\nLD_PRELOAD={library} exec unshare {ahead} {sys.executable} "$@"\n'
        wrapper.write_text(text)
        wrapper.chmod(0o755)
        lines = self.box.cluster_file.read_text().splitlines()
        at = next(index for index, line in enumerate(lines) if line.startswith(f"  {node}: "))
        entry = {**json.loads(lines[at].partition(": ")[2]), "python": str(wrapper)}
        lines[at] = f"  {node}: {json.dumps(entry)}"
        path = self.box.cluster_file.with_name("skewed.yaml")
        path.write_text("\n".join(lines) + "\n")
        return path

    def _clock_library(self) -> Path | None:
        compiler, path = shutil.which("cc"), self.folder / "s" / "clock.so"
        tried = subprocess.run(
            ["unshare", "--time", "--monotonic", "1", "--fork", "true"], capture_output=True
        )
        if compiler is None or tried.returncode:
            return None
        if not path.exists():
            flags = f"-DAHEAD={WALL_AHEAD} -shared -fPIC -O1 -x c - -ldl".split()
            subprocess.run([compiler, *flags, "-o", str(path)], input=SHIFT, text=True, check=True)
        return path


def aside_in(folder: Path) -> list[str]:
    """Return the temporary files and folders below a folder; they are renamed when they are complete."""
    found = []
    for here, folders, files in os.walk(folder):
        for name in (*folders, *files):
            # A partial push is kept for the next push.
            if name.endswith((".aside", ".tmp")) or name.startswith(".tmp-"):
                found.append(os.path.join(here, name))
    return found


# -- the user's side ----------------------------------------------------------------------------------------


class Desk:
    """A folder in which a user's commands run, with the runs that they created."""

    def __init__(self, folder: Path, cluster: Path) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(parents=True)
        here = {"CLUSTERCTL_CLUSTER": str(cluster), "TMPDIR": str(folder / "tmp")}
        self.env = user_environment(**here, COLUMNS="200", NO_COLOR="1")

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command; its output goes to `name`.out and `name`.err."""
        with (self.folder / f"{name}.out").open("ab") as out, (self.folder / f"{name}.err").open("ab") as err:
            argv = [sys.executable, "-m", "clusterctl", *arguments]
            return subprocess.Popen(
                argv, cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    def run(self, name: str, *arguments: str, seconds: float = 120.0) -> int:
        """Run a command to its end and return its exit code, or 124 after the timeout."""
        process = self.start(name, *arguments)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return 124

    def output(self) -> str:
        """Return everything that commands wrote to stderr, oldest file first."""
        files = sorted(self.folder.glob("*.err"), key=lambda path: path.stat().st_mtime)
        return "\n".join(path.read_text(errors="replace") for path in files)

    def found(self) -> RunDir | None:
        """Return the run that was recorded, or None."""
        records = sorted((self.folder / "runs").glob("*/run.json"))
        return RunDir(records[0].parent) if records else None

    def processes(self) -> list[str]:
        """Return the processes of this folder (commands, controllers), by environment or working directory.

        The process that waits for a lost node is left out.
        """
        wanted, found, run = os.fsencode(str(self.folder)), [], self.found()
        clearer = run.clearer() if run else None
        for pid in processes():
            with contextlib.suppress(OSError):
                seen = Path(f"/proc/{pid}/environ").read_bytes() + os.fsencode(
                    os.readlink(f"/proc/{pid}/cwd")
                )
                if wanted in seen and not is_dead(pid) and pid not in (os.getpid(), clearer):
                    found.append(f"here: {words_of(pid)[:90]}")
        return found

    def temporary(self) -> list[str]:
        """Return the files left in the folder for temporary files, and hidden files in the folders of runs."""
        runs = self.folder / "runs"
        hidden = [str(path) for path in runs.rglob(".*") if path.is_file()] if runs.is_dir() else []
        return [str(path) for path in (self.folder / "tmp").iterdir()] + hidden


def mounted_in(pid: int) -> list[Path]:
    """Return the mount points of a process, as paths on this machine."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return [Path(f"/proc/{pid}/root{line.split()[4]}") for line in lines]
