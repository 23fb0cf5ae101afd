"""Create a Python environment from wheels, on a node: standard library only, Python 3.8, run as a program.

An environment is a folder named by its fingerprint. It is used only once it is complete: a link is then switched
to it. An installation that was interrupted continues in the same folder.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import subprocess
import sys
import time
from typing import Any, Dict, TextIO

MARK = ".clusterctl-environment"
# Seconds to wait for another installation on the same node.
PATIENCE = 600
# Seconds for one program: pip unpacks some gigabytes, perhaps to a network disk.
LIMIT = 3600


class Refused(Exception):
    """The environment cannot be made; the arguments are the reason and the remedy."""


def main(argv: list[str]) -> int:
    """Make the environment that the JSON of the first argument describes; print the result as one line of JSON."""
    order = json.loads(argv[1])
    try:
        answer = install(order)
    except Refused as refused:
        answer = {"refused": str(refused.args[0]), "hint": str(refused.args[1])}
    except OSError as problem:
        place = problem.filename or order["folder"]
        answer = {
            "refused": f"{place}: {problem.strerror}",
            "hint": "free some space, or check permissions",
        }
    print(json.dumps(answer))
    return 1 if "refused" in answer else 0


def install(order: Dict[str, Any]) -> Dict[str, Any]:
    """Install the environment that the order describes; return its path, and what was installed and removed."""
    began = time.time()
    folder, link = os.path.expanduser(order["folder"]), os.path.expanduser(order["link"])
    if os.path.lexists(link) and not os.path.islink(link):
        raise Refused(
            f"{link} exists and is not an environment of clusterctl",
            "rename that folder, or choose another one with --env",
        )
    os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
    os.makedirs(os.path.dirname(link), exist_ok=True)
    with open(folder + ".lock", "a") as lock:
        wait_for(lock)
        new = read_mark(folder) != order["fingerprint"]
        if new:
            fill(folder, order)
        switch(folder, link)
    removed = prune(folder) if order["prune"] else []
    return {"path": link, "installed": new, "seconds": round(time.time() - began, 3), "removed": removed}


def wait_for(lock: TextIO) -> None:
    deadline = time.time() + PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.time() > deadline:
                raise Refused(
                    "another installation of this environment is running", "wait until it ends"
                ) from None
            time.sleep(0.2)


def read_mark(folder: str) -> str:
    """Return the fingerprint of a complete environment; "" if it is not complete."""
    try:
        with open(os.path.join(folder, MARK), encoding="utf-8") as file:
            fingerprint = str(json.load(file)["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return fingerprint if os.access(os.path.join(folder, "bin", "python"), os.X_OK) else ""


def fill(folder: str, order: Dict[str, Any]) -> None:
    """Create the environment and install every package of the lock file; mark it as complete."""
    python = os.path.join(folder, "bin", "python")
    pip_wheel = sorted(glob.glob(os.path.join(glob.escape(order["wheels"]), "pip-*.whl")))
    if not works(python):
        # Debian's Python has no ensurepip without the package python3-venv: pip then runs out of its wheel.
        bare = ["--without-pip"] if pip_wheel else []
        made = run([sys.executable, "-m", "venv", "--clear", *bare, folder])
        if made.returncode:
            hint = "put a wheel of pip into the wheelhouse, or install python3-venv there"
            raise Refused(f"no environment could be made: {last_lines(made)}", hint)
    pip = [os.path.join(pip_wheel[-1], "pip")] if pip_wheel else ["-m", "pip"]
    lock = os.path.join(folder, "requirements.lock")
    with open(lock, "w", encoding="utf-8") as file:
        file.write(order["lock"])
    # `-I` would hide the wheel from Python's path, which pip sets itself.
    words = [python, *pip, "install", "--isolated", "--no-index", "--find-links", order["wheels"]]
    words += ["--require-hashes", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"]
    done = run([*words, "--no-input", "--quiet", "--progress-bar", "off", "-r", lock])
    if done.returncode:
        hint = "see `pip` above: a wheel for this Python and machine may be missing in the wheelhouse"
        raise Refused(f"pip ended with {done.returncode}: {last_lines(done)}", hint)
    facts = {
        "fingerprint": order["fingerprint"],
        "python": ".".join(map(str, sys.version_info[:3])),
        "time": time.time(),
    }
    aside = os.path.join(folder, MARK + ".new")
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(facts, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, os.path.join(folder, MARK))


def works(python: str) -> bool:
    """Return whether an earlier attempt left an environment whose Python runs."""
    return os.access(python, os.X_OK) and run([python, "-I", "-c", ""]).returncode == 0


def run(words: list[str]) -> subprocess.CompletedProcess[bytes]:
    # The user's settings must not change what pip does.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    env["PIP_CONFIG_FILE"] = os.devnull
    pipe = subprocess.PIPE
    try:
        return subprocess.run(
            words, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, timeout=LIMIT
        )
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"") + b"\nERROR: not ready after %d s\n" % LIMIT
        return subprocess.CompletedProcess(words, 1, text)


def last_lines(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return the lines that explain a failure: pip's errors, else the last lines."""
    lines = [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " / ".join((errors or lines)[-4:])[:1500]


def switch(folder: str, link: str) -> None:
    """Point the link to the environment, in one step: the link exists at every moment."""
    if os.path.islink(link) and os.readlink(link) == folder:
        return
    aside = f"{link}.{os.getpid()}.new"
    os.symlink(folder, aside)
    os.replace(aside, link)


def prune(folder: str) -> list[str]:
    """Delete the other environments next to this one that no process uses; return their names."""
    import shutil

    parent, removed = os.path.dirname(folder), []
    for name in sorted(os.listdir(parent)):
        path = os.path.join(parent, name)
        if path != folder and read_mark(path) == name and not in_use(path):
            shutil.rmtree(path)
            removed.append(name)
    return removed


def in_use(folder: str) -> bool:
    """Return whether a process has a file of an environment mapped, or runs its Python."""
    inside = folder + os.sep
    for entry in glob.glob("/proc/[0-9]*"):
        try:
            with open(entry + "/cmdline", "rb") as file:
                words = os.fsdecode(file.read()).split("\0")
            with open(entry + "/maps", errors="replace") as file:
                maps = file.read()
        except OSError:
            continue
        if inside in maps or any(
            os.path.realpath(os.path.dirname(word)).startswith(inside) for word in words[:1]
        ):
            return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv))
