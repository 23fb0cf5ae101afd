#!/usr/bin/env python3
"""A stand-in of docker: it really runs the command, keeps a list of containers, and outlives its client.

Copied as a program called docker or podman; its state lies next to it. Like docker's daemon, it goes on when its client
is killed, passes only the named variables on, and needs `rm --force` then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONTAINERS, IMAGES = HERE / "containers", HERE / "images"
# What an image itself sets.
OF_IMAGE = {"PATH": os.environ.get("PATH", os.defpath), "IN_IMAGE": "yes"}


def run(words: list[str]) -> int:
    options = []
    while words and words[0].startswith("-"):
        options.append(words.pop(0))
    image, *argv = words
    if not (IMAGES / image.replace("/", "_")).exists():
        print(f"Unable to find image '{image}' locally", file=sys.stderr)
        return 125
    values = dict(option.removeprefix("--").partition("=")[::2] for option in options if "=" in option)
    names = [option.removeprefix("--env=") for option in options if option.startswith("--env=")]
    env = {**OF_IMAGE, **{name: os.environ[name] for name in names if name in os.environ}}
    name = values.get("name", f"anonymous-{os.getpid()}")
    record = CONTAINERS / name
    record.write_text(json.dumps({"pid": 0, "options": options, "argv": argv}))
    cwd = values.get("workdir", "/")
    # In a session of its own, as a child of the daemon is: killing this client does not end it.
    try:
        process = subprocess.Popen(argv, env=env, cwd=cwd, start_new_session=True, stdin=subprocess.DEVNULL)
    except OSError as problem:
        record.unlink()
        print(f"exec: {argv[0]}: {problem.strerror}", file=sys.stderr)
        return 127
    record.write_text(json.dumps({"pid": process.pid, "options": options, "argv": argv}))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda given, _: process.send_signal(given))
    code = process.wait()
    record.unlink(missing_ok=True)
    with (HERE / "log").open("a") as log:
        log.write(json.dumps({"name": name, "options": options, "argv": argv, "code": code}) + "\n")
    return code if code >= 0 else 128 - code


def remove(names: list[str]) -> int:
    code = 0
    for name in names:
        record = CONTAINERS / name
        if not record.exists():
            print(f"Error response from daemon: No such container: {name}", file=sys.stderr)
            code = 1
            continue
        pid = json.loads(record.read_text())["pid"]
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        record.unlink(missing_ok=True)
    return code


def main(words: list[str]) -> int:
    for folder in (CONTAINERS, IMAGES):
        folder.mkdir(exist_ok=True)
    if words[0] == "run":
        return run(words[1:])
    if words[:2] == ["rm", "--force"]:
        return remove(words[2:])
    if words[:2] == ["image", "inspect"]:
        image = IMAGES / words[-1].replace("/", "_")
        if not image.exists():
            print(f"Error response from daemon: No such image: {words[-1]}", file=sys.stderr)
            return 1
        print(image.read_text())
        return 0
    if words[0] == "load":
        import tarfile

        with tarfile.open(words[1].removeprefix("--input=")) as archive:
            member = archive.extractfile("manifest.json")
            assert member is not None
            (entry,) = json.load(member)
        (tag,) = entry["RepoTags"]
        (IMAGES / tag.replace("/", "_")).write_text("sha256:" + entry["Config"].removesuffix(".json"))
        print(f"Loaded image: {tag}")
        return 0
    print(f"unknown command: {words}", file=sys.stderr)
    return 2


def living(folder: Path) -> list[str]:
    """Return the names of the containers that are on the list of a runtime in this folder."""
    deadline = time.monotonic() + 5
    while (
        names := [path.name for path in (folder / "containers").glob("*")]
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    return names


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
