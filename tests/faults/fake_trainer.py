"""A stand-in for the trainer in tests/faults: a step takes a tenth of a second and needs no torch.

It follows the launcher's contract like the trainer: all ranks step together (over TCP, so that they notice a lost
rank), each writes a heartbeat, rank 0 writes metrics and complete checkpoints and resumes from the newest valid one,
and SIGTERM leads to a last checkpoint. The steps compute a chain of numbers, so a run that resumes from an incorrect
checkpoint ends with a different number. It uses only the standard library.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
# In seconds, until rank 0 listens.
CONNECT_WITHIN = 60.0
# How many checkpoints are kept.
KEPT = 3


def after(state: int, step: int) -> int:
    """Return the state after step `step`, computed from the state before it."""
    return (state * 6364136223846793005 + step * 1442695040888963407 + 1) % 2**64


def state_at(step: int) -> int:
    """Return the state after `step` steps; it is the same however often the training was interrupted."""
    state = 0
    for number in range(1, step + 1):
        state = after(state, number)
    return state


# -- checkpoints --------------------------------------------------------------------------------------------


def save(folder: Path, step: int, state: int, seconds: float) -> Path:
    """Write a checkpoint atomically and return its path.

    It is written under another name, synced and renamed; it sleeps `seconds` between the state and the manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Rank 0 of the current attempt is the only writer.
    for left in folder.glob(".tmp-*"):
        shutil.rmtree(left, ignore_errors=True)
    target = folder / f"step-{step:08d}"
    aside = folder / f".tmp-{target.name}-{os.getpid()}"
    aside.mkdir()
    try:
        content = json.dumps({"state": state, "ballast": "x" * 20000}).encode()
        _write(aside / "state.json", content)
        time.sleep(seconds)
        about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest = {"format": 1, "step": step, "files": {"state.json": about}}
        _write(aside / MANIFEST, json.dumps(manifest).encode())
        if target.exists():
            shutil.rmtree(target)
        os.rename(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for old in sorted(folder.glob("step-*"))[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def verified(path: Path) -> tuple[int, int] | None:
    """Return a checkpoint's step and state, or None if it is damaged."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        content = (path / "state.json").read_bytes()
        if hashlib.sha256(content).hexdigest() == manifest["files"]["state.json"]["sha256"]:
            return int(manifest["step"]), int(json.loads(content)["state"])
    except (OSError, ValueError, KeyError):
        pass
    return None


def latest(folder: Path) -> tuple[int, int, str]:
    """Return step, state and path of the newest valid checkpoint, or (0, 0, "")."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        found = verified(path)
        if found:
            return (*found, str(path))
    return 0, 0, ""


# -- the group ----------------------------------------------------------------------------------------------


class Group:
    """All ranks in lock-step over TCP: each sends a number, and rank 0 replies with the sum."""

    def __init__(self, rank: int, world: int, address: str, port: int) -> None:
        self.rank = rank
        self.peers = self._gather(world, port) if rank == 0 else [self._join(address, port)]

    def _gather(self, world: int, port: int) -> list[Any]:
        listener = socket.create_server(("", port))
        found = []
        while len(found) < world - 1:
            found.append(listener.accept()[0].makefile("rwb"))
        listener.close()
        return found

    def _join(self, address: str, port: int) -> Any:
        deadline = time.monotonic() + CONNECT_WITHIN
        while True:
            try:
                link = socket.create_connection((address, port), timeout=CONNECT_WITHIN)
                link.settimeout(None)
                return link.makefile("rwb")
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def add(self, word: int) -> int:
        """Return the sum of all ranks' numbers; raise if a rank is gone."""
        if self.rank:
            self._send(self.peers[0], word)
            return self._receive(self.peers[0])
        total = word + sum(self._receive(peer) for peer in self.peers)
        for peer in self.peers:
            self._send(peer, total)
        return total

    def _send(self, peer: Any, word: int) -> None:
        peer.write(b"%d\n" % word)
        peer.flush()

    def _receive(self, peer: Any) -> int:
        line = peer.readline()
        if not line:
            raise ConnectionResetError("Connection closed by peer")
        return int(line)


# -- a rank -------------------------------------------------------------------------------------------------


class Rank:
    """One rank of the training."""

    def __init__(self, env: dict[str, str]) -> None:
        self.rank, self.attempt = int(env["RANK"]), int(env["CLUSTERCTL_ATTEMPT"])
        self.run_dir, self.node = Path(env["CLUSTERCTL_RUN_DIR"]), env["CLUSTERCTL_NODE"]
        self.steps, self.step_seconds = int(env["DRILL_STEPS"]), float(env["DRILL_STEP_SECONDS"])
        self.every, self.save_seconds = int(env["DRILL_SAVE_EVERY"]), float(env["DRILL_SAVE_SECONDS"])
        self.checkpoints = Path(env.get("DRILL_CHECKPOINTS") or self.run_dir / "checkpoints")
        self.fault, self.slow = env.get("DRILL_FAULT", ""), env.get("DRILL_SLOW") == env["RANK"]
        self.stopping = False
        signal.signal(signal.SIGTERM, self._stop)
        heartbeat = self.run_dir / "heartbeat" / f"rank-{self.rank}"
        heartbeat.parent.mkdir(parents=True, exist_ok=True)
        self.heartbeat = os.open(heartbeat, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        metrics = self.run_dir / "metrics.jsonl"
        self.metrics = os.open(metrics, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        # Like the embedded trainer: end a line that a full disk cut off before writing the first new line.
        if self.rank == 0 and metrics.read_bytes()[-1:] not in (b"", b"\n"):
            os.write(self.metrics, b"\n")
        self.group = Group(self.rank, int(env["WORLD_SIZE"]), env["MASTER_ADDR"], int(env["MASTER_PORT"]))

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def work(self) -> None:
        step, state, path = latest(self.checkpoints) if self.rank == 0 else (0, 0, "")
        # The other ranks add 0.
        step = self.group.add(step)
        state = self.group.add(state)
        self._beat(step)
        self._record("start", step=step, steps=self.steps, state=state, resumed_from=path or None)
        stopping = False
        while step < self.steps and not stopping:
            self._strike(step + 1)
            time.sleep(self.step_seconds * (3 if self.slow else 1))
            stopping = self.group.add(int(self.stopping)) > 0
            step, state = step + 1, after(state, step + 1)
            due = stopping or step == self.steps or step % self.every == 0
            self._beat(step, pause=due)
            print(f"step {step} of attempt {self.attempt}", flush=True)
            self._record("step", step=step, steps=self.steps, loss=state / 2**64, state=state)
            if due:
                self._save(step, state)
                self._beat(step)
        self._record("stopped" if stopping else "end", step=step, state=state)

    def _save(self, step: int, state: int) -> None:
        if self.rank == 0:
            path = save(self.checkpoints, step, state, self.save_seconds)
            self._record("checkpoint", step=step, path=str(path))
        self.group.add(0)

    def _beat(self, step: int, pause: bool = False) -> None:
        written = os.pwrite(self.heartbeat, f"{step}\n{'pause' * pause}".encode(), 0)
        if not pause:
            os.ftruncate(self.heartbeat, written)

    def _record(self, event: str, **facts: Any) -> None:
        if self.rank == 0:
            line = {"event": event, **facts, "attempt": self.attempt, "node": self.node, "time": time.time()}
            os.write(self.metrics, json.dumps(line).encode() + b"\n")

    def _strike(self, step: int) -> None:
        """Inject the fault `RANK:STEP:HOW` in the first attempt, or in each attempt with `:always`."""
        rank, at, how, *always = (*self.fault.split(":"), "", "", "")[:4]
        if rank != str(self.rank) or at != str(step) or not (self.attempt == 1 or always == ["always"]):
            return
        print(f"drill: {how} at {time.time()}", file=sys.stderr, flush=True)
        if how.startswith("exit"):
            os._exit(int(how[4:]))
        if how.startswith("signal"):
            os.kill(os.getpid(), int(how[6:]))
        raise RuntimeError(f"drill: arranged at step {step}")


LOITER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def scatter() -> None:
    """Leave child processes as data loaders do: in another session, forked twice, ignoring SIGTERM, or stopped."""
    subprocess.Popen([sys.executable, "-S", "-c", LOITER], start_new_session=True)
    stopped = subprocess.Popen([sys.executable, "-S", "-c", LOITER], start_new_session=True)
    stopped.send_signal(signal.SIGSTOP)
    if os.fork() == 0:
        os.setsid()
        with contextlib.suppress(OSError):
            subprocess.Popen(["sleep", "600"], start_new_session=True)
        os._exit(0)
    os.wait()


def detach() -> None:
    """Start a daemon as other programs do: forked twice, in a session of its own, with an empty environment."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-S", "-c", LOITER], {})
        os._exit(0)
    os.wait()


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    env = dict(os.environ)
    if env.get("DRILL_FAULT", "").endswith("import"):
        import a_module_that_nobody_installed  # type: ignore[import-not-found]  # noqa: F401
    rank = Rank(env)
    if env.get("DRILL_CHILDREN"):
        scatter()
    if env.get("DRILL_DAEMON"):
        detach()
    rank.work()


if __name__ == "__main__":
    main()
