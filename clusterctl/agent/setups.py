"""Run a setup, shell commands such as `source set_env.sh`, once, and keep what it changes in the environment.

The result is kept in the work folder. It is used again while the commands, the files that they name, the system's
start and the login's values of the changed variables are the same.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from typing import Any, Dict, List, Optional, Tuple

from clusterctl.agent.processes import boot_id, end_all
from clusterctl.agent.records import read_json, write_json
from clusterctl.agent.request import Refused, Request
from clusterctl.agent.spawn import environment, raw

# Seconds for all commands of a setup: `module load` from a slow file server takes some.
TIMEOUT = 300.0
# Bytes of output after which a setup is ended.
MOST_OUTPUT = 16 << 20
# Seconds between SIGTERM and SIGKILL.
POLITE = 2.0
# Limit of stored results.
KEPT = 32
# Variables of the shell itself.
OF_THE_SHELL = ("PWD", "OLDPWD", "SHLVL", "_")


def setup(request: Request) -> Dict[str, Any]:
    """Return the names of the variables that a setup sets and unsets, whether the result was kept, and its seconds.

    For a variable that is a list of paths, `set` has the number of paths that were added, else 0. `fresh` runs the
    setup in any case. Values stay on the node.
    """
    result = changes(request, fresh=bool(request.params.get("fresh")))
    added = {name: _added(value, result["before"].get(name)) for name, value in result["set"].items()}
    return {
        "set": added,
        "unset": result["unset"],
        "kept": bool(result.get("kept")),
        "seconds": result["seconds"],
    }


def _added(value: str, before: Optional[str]) -> int:
    """Return how many paths a list of paths has gained; 0 if the value is no such list."""
    if "/" not in value or not (before is None or before in value):
        return 0
    old = set((before or "").split(":"))
    new = [path for path in value.split(":") if path and path not in old]
    return len(new) if all(path.startswith("/") for path in new) else 0


def changes(request: Request, fresh: bool = False, spec: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    """Return what the request's setup changes: `set`, `unset`, and the values `before`; run it if that is not known."""
    params = spec or request.need("setup", dict)
    steps, files = params.get("steps"), params.get("files") or []
    if not isinstance(steps, list) or not all(_is_step(step) for step in steps):
        raise Refused("usage", "setup: steps must be a list of {label, text, folder}")
    folder = os.path.join(request.workdir, "cache", "setups")
    path = os.path.join(folder, f"{_key(steps, files)}.json")
    earlier = None if fresh else read_json(path)
    if earlier is not None and fits(earlier):
        return {**earlier, "kept": True}
    began = time.monotonic()
    result = _run(request, steps)
    result["seconds"] = round(time.monotonic() - began, 3)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    write_json(path, result, durable=False)
    _remove_oldest(folder)
    return result


def _is_step(step: Any) -> bool:
    return isinstance(step, dict) and all(
        isinstance(step.get(name), str) and "\0" not in step[name] for name in ("label", "text", "folder")
    )


def _key(steps: List[Dict[str, str]], files: List[Any]) -> str:
    """Return the name of a result: it changes with the commands, the named files, and the start of the system."""
    stamps = []
    for name in files:
        try:
            result = os.stat(os.path.expanduser(str(name)))
            stamps.append([str(name), result.st_mtime_ns, result.st_size, result.st_ino])
        except OSError:
            stamps.append([str(name), None, None, None])
    return hashlib.sha256(json.dumps([steps, stamps, boot_id()]).encode()).hexdigest()[:32]


def fits(earlier: Dict[str, Any]) -> bool:
    """Return whether the login's environment still has the values that an earlier result was made from."""
    if not all(isinstance(earlier.get(name), dict) for name in ("set", "before")):
        return False
    if not isinstance(earlier.get("unset"), list) or not isinstance(earlier.get("seconds"), (int, float)):
        return False
    now = environment({})
    names = [*earlier["set"], *earlier["unset"]]
    if not all(isinstance(value, str) and "\0" not in value for value in (*names, *earlier["set"].values())):
        return False
    try:
        return all(_text(now.get(raw(name))) == earlier["before"].get(name) for name in names)
    except UnicodeEncodeError:
        return False


def _text(value: Optional[bytes]) -> Optional[str]:
    return None if value is None else value.decode("utf-8", "surrogateescape")


def _run(request: Request, steps: List[Dict[str, str]]) -> Dict[str, Any]:
    """Run the commands in one shell and return what they changed; raise Refused with the last line of a failure."""
    shell = shutil.which("bash") or "/bin/sh"
    options = ["--noprofile", "--norc"] if shell.endswith("bash") else []
    watcher = request.watcher
    marker, name = watcher.marker()
    before = environment({})
    # Files, not pipes: a process that a setup leaves running may keep a pipe open for ever.
    with contextlib.ExitStack() as opened:
        output, step, result = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        process = subprocess.Popen(
            [shell, *options, "-c", _script(steps, step.fileno(), result.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**before, **{raw(key): raw(value) for key, value in marker.items()}},
            cwd=os.path.expanduser("~"),
            pass_fds=(step.fileno(), result.fileno()),
            start_new_session=True,
        )
        watcher.watch(process.pid, name)
        try:
            problem = _wait(request, process, marker, output.fileno())
        finally:
            watcher.release(process.pid, name)
        data = _content(result.fileno())
        if problem or not data:
            number = _content(step.fileno()).strip() or b"0"
            label = steps[int(number)]["label"] if steps else "setup"
            raise Refused(
                "setup", f"setup: {label}: {problem or 'it ended the shell'}{_last_line(output.fileno())}"
            )
    return _difference(before, data, {raw(key) for key in marker})


def _script(steps: List[Dict[str, str]], step: int, result: int) -> str:
    """Return the text that runs each step in its folder, and writes the environment if all succeed."""
    lines = []
    for number, entry in enumerate(steps):
        folder = os.path.expanduser(entry["folder"])
        lines += [
            f"echo {number} >/dev/fd/{step}",
            f"cd {shlex.quote(folder)} && eval {shlex.quote(entry['text'])}",
            'clusterctl_status=$?; [ "$clusterctl_status" = 0 ] || exit "$clusterctl_status"',
        ]
    return "\n".join([*lines, f"exec /bin/cat /proc/self/environ >/dev/fd/{result}"])


def _wait(request: Request, process: "subprocess.Popen[bytes]", marker: Dict[str, str], output: int) -> str:
    """Wait for the shell; return why it failed, or an empty text."""
    deadline, pause = time.monotonic() + TIMEOUT, 0.002
    while process.poll() is None:
        size = os.fstat(output).st_size
        late = time.monotonic() > deadline
        if late or size > MOST_OUTPUT or request.cancelled.is_set():
            end_all([process.pid], marker, POLITE)
            process.wait()
            return f"no end in {TIMEOUT:g} s" if late else f"it printed more than {MOST_OUTPUT >> 20} MB"
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    code = process.returncode
    return "" if code == 0 else f"exit code {code}" if code > 0 else f"ended by signal {-code}"


def _content(descriptor: int) -> bytes:
    """Return the whole content of an open file."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _last_line(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, 4096, max(size - 4096, 0)).decode(errors="replace")
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return f": {lines[-1][-300:]}" if lines else ""


def _difference(before: Dict[bytes, bytes], data: bytes, own: "set[bytes]") -> Dict[str, Any]:
    """Return what the environment in `data`, NAME=VALUE with null bytes between, changes of the one before."""
    pairs: List[Tuple[bytes, bytes, bytes]] = [entry.partition(b"=") for entry in data.split(b"\0") if entry]
    ignored = own | {raw(name) for name in OF_THE_SHELL}
    after = {name: value for name, _, value in pairs if name not in ignored}
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    gone = [name for name in before if name not in after and name not in ignored]
    return {
        "set": {str(_text(name)): _text(value) for name, value in sorted(changed.items())},
        "unset": sorted(str(_text(name)) for name in gone),
        "before": {str(_text(name)): _text(before.get(name)) for name in [*changed, *gone]},
    }


def _remove_oldest(folder: str) -> None:
    entries = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".json")]
    stamped = []
    for path in entries:
        try:
            stamped.append((os.stat(path).st_mtime, path))
        except OSError:
            continue
    for _, path in sorted(stamped)[:-KEPT]:
        try:
            os.unlink(path)
        except OSError:
            continue
