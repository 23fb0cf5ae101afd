"""The first lines that run on a node: find the agent there by its hash, or ask for it, verify it, start it.

Its text is sent to `python -c 'import sys;exec(sys.stdin.buffer.read(N))'`, so that nothing depends on the
login shell. It must parse on any Python 3, to be able to say that a node's Python is too old: no newer
syntax, annotations as texts.
"""

import hashlib
import json
import os
import sys

MARK = "CLUSTERCTL-AGENT"


def say(word: str, text: str = "") -> None:
    """One line to the launcher; it begins on a line of its own, whatever a login script printed before."""
    sys.stdout.buffer.write(("\n%s %s %s\n" % (MARK, word, json.dumps(text))).encode())
    sys.stdout.buffer.flush()


def digest(files: "dict[str, str]") -> str:
    """The hash that names an agent: over its files' names and texts."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def is_whole(folder: str, names: "list[str]", wanted: str) -> bool:
    """Whether the agent is there and is what its name says."""
    files = {}
    try:
        for name in names:
            with open(os.path.join(folder, "clusterctl", name), encoding="utf-8") as file:
                files[name] = file.read()
    except (OSError, UnicodeDecodeError):
        return False
    return digest(files) == wanted


def install(folder: str, files: "dict[str, str]", wanted: str) -> None:
    """Write beside, then rename: two launchers may do this at once, and both find a whole agent
    afterwards."""
    if digest(files) != wanted:
        raise OSError("the agent arrived damaged")
    beside = "%s.%d" % (folder, os.getpid())
    os.makedirs(os.path.join(beside, "clusterctl", "agent"))
    for name, text in files.items():
        handle = os.open(
            os.path.join(beside, "clusterctl", name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600
        )
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    if os.path.isdir(folder) and not is_whole(folder, list(files), wanted):
        os.rename(folder, beside + ".damaged")
    try:
        os.rename(beside, folder)
    except OSError:
        if not is_whole(folder, list(files), wanted):
            raise


def start() -> None:
    """Read what is wanted, make sure that it is here, and become the agent."""
    ask = json.loads(sys.stdin.buffer.readline().decode())
    if sys.version_info < (3, 8):
        return say("old", sys.version.split()[0])
    root = os.path.join(os.path.expanduser(ask["workdir"]), "agent")
    folder = os.path.join(root, ask["hash"])
    try:
        if not is_whole(folder, ask["names"], ask["hash"]):
            say("need")
            files = json.loads(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())).decode())
            mask = os.umask(0o077)  # the work folder is this login's own, and so is all that will be in it
            os.makedirs(root, exist_ok=True)
            install(folder, files, ask["hash"])
            os.umask(mask)  # what users run here has theirs
    except (OSError, ValueError) as problem:
        return say("error", "%s: %s" % (root, problem))
    say("have")
    sys.path.insert(0, folder)
    from clusterctl.agent.server import main

    main(os.path.expanduser(ask["workdir"]))
