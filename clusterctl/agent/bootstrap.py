"""The first lines that run on a node: find the agent by its hash, or request its files; verify it and start it.

Its text is sent to `python -c 'import sys;exec(sys.stdin.buffer.read(N))'`, so that nothing depends on the login shell.
It must parse on every Python 3, to report that a node's Python is too old: no newer syntax, annotations as strings.
"""

import os
import sys
import zlib

MARK = "CLUSTERCTL-AGENT"


def say(word: str, text: str = "") -> None:
    """Send one line to the launcher; it begins on a new line, whatever a login script printed before."""
    if text:
        # Imported here, because it takes 8 ms and a start without errors does not need it.
        import json

        text = " " + json.dumps(text)
    sys.stdout.buffer.write(("\n%s %s%s\n" % (MARK, word, text)).encode())
    sys.stdout.buffer.flush()


def sums(files: "dict[str, str]") -> "dict[str, int]":
    """Return a checksum of each file, which detects a damaged file at every start.

    It protects against accidents in this login's own folder, and needs no OpenSSL, which takes 4 MB and 5 ms.
    """
    return {name: zlib.crc32(text.encode()) for name, text in files.items()}


def is_whole(folder: str, wanted: "dict[str, int]") -> bool:
    """Return True if all files of an agent exist and have their checksums."""
    try:
        for name, wanted_sum in wanted.items():
            with open(os.path.join(folder, "clusterctl", name), "rb") as file:
                if zlib.crc32(file.read()) != wanted_sum:
                    return False
    except OSError:
        return False
    return True


def install(folder: str, files: "dict[str, str]", wanted: "dict[str, int]") -> None:
    """Write the files aside, then rename the folder.

    If two launchers do this at the same time, both find a complete agent.
    """
    if sums(files) != wanted:
        raise OSError("the agent arrived damaged")
    aside = "%s.%d" % (folder, os.getpid())
    os.makedirs(aside)
    for name, text in files.items():
        path = os.path.join(aside, "clusterctl", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    if os.path.isdir(folder) and not is_whole(folder, wanted):
        os.rename(folder, aside + ".damaged")
    try:
        os.rename(aside, folder)
    except OSError:
        if not is_whole(folder, wanted):
            raise


def why_unsafe(folder: str) -> str:
    """Return why another user could put a program into `folder`, or "" if no other user can.

    Writing by a group is allowed: many systems give each user a group of their own.
    """
    try:
        about = os.stat(folder)
    except FileNotFoundError:
        return ""
    if about.st_uid != os.geteuid():
        return "it belongs to user %d, and this login is user %d" % (about.st_uid, os.geteuid())
    if about.st_mode & 0o002:
        return "everybody may write into it (mode %04o)" % (about.st_mode & 0o7777)
    return ""


def why_parents_unsafe(folder: str) -> str:
    """Return why another user could replace `folder` through a folder above it, or "".

    As sshd's StrictModes: each belongs to root or this login, and others may not write into it, unless its sticky bit
    is set. In a user namespace, root is whoever owns `/`.
    """
    owners = (0, os.geteuid(), os.stat("/").st_uid)
    folder = os.path.realpath(folder)
    while folder != "/":
        folder = os.path.dirname(folder)
        try:
            about = os.stat(folder)
        except FileNotFoundError:
            continue
        mode = about.st_mode & 0o7777
        if about.st_uid not in owners:
            return "%s above it belongs to user %d" % (folder, about.st_uid)
        if mode & 0o002 and not mode & 0o1000:
            return "everybody may write into %s above it (mode %04o)" % (folder, mode)
    return ""


def start() -> str:
    """Read which agent is requested, and install it if it is missing; return the work folder, or "" on failure.

    The launcher appends the lines that call this function and then become the agent.

    The line holds the agent's hash, the work folder in hexadecimal, and NAME:SUM for each of its files.
    """
    wanted_hash, encoded_workdir, *named = sys.stdin.buffer.readline().decode().split()
    workdir = os.path.expanduser(bytes.fromhex(encoded_workdir).decode("utf-8", "surrogateescape"))
    wanted = {name: int(entry) for name, _, entry in (each.rpartition(":") for each in named)}
    if sys.version_info < (3, 8):
        say("old", sys.version.split()[0])
        return ""
    root = os.path.join(workdir, "agent")
    folder = os.path.join(root, wanted_hash)
    try:
        why = why_unsafe(workdir) or why_unsafe(root) or why_parents_unsafe(workdir)
        if why:
            raise OSError(why)
        if not is_whole(folder, wanted):
            say("need")
            import json

            files = json.loads(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())).decode())
            # Only this login may access the work folder and its content.
            mask = os.umask(0o077)
            os.makedirs(root, exist_ok=True)
            install(folder, files, wanted)
            # Programs of users run with the umask of the login.
            os.umask(mask)
    except (OSError, ValueError) as problem:
        say("error", "%s: %s" % (workdir, problem))
        return ""
    say("have")
    sys.path.insert(0, folder)
    return workdir
