"""Find out before a start whether the program of a job exists in the folder that is pushed."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from clusterctl.errors import did_you_mean
from clusterctl.jobs.launchers.fill import Problem, program_of

SCRIPT = re.compile(r".+\.(py|sh)")
FOLDER_REMEDY = "name a job file, or write the command after --"


def missing_script(command: Sequence[str], code: Path | None) -> Problem | None:
    """Return what is wrong if the script of a command is not in the pushed folder; None if all is well or unknown.

    Without a folder to push, a script that lies in the current folder is reported: it was probably meant.
    """
    word = command[0] if command else ""
    if word.startswith(("/", "~")) and Path(word).expanduser().is_dir():
        return Problem(f"{word} is a folder, not a program", FOLDER_REMEDY)
    if code is not None and (problem := _no_program(command, code)):
        return problem
    script = program_of(command) or _script_of(command)
    if not script or not SCRIPT.fullmatch(script) or script.startswith(("/", "~")) or "{" in script:
        return None
    if code is None:
        text = f"{script} is here, but no folder is pushed to the nodes"
        remedy = "add `code: .` to the job, or write the full path that it has on the nodes"
        return Problem(text, remedy) if Path(script).is_file() else None
    if (code / script).exists():
        return None
    folder = (code / script).parent
    near = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    hint = (
        did_you_mean(Path(script).name, near)
        or "check the name, or push another folder: --code, `code` in a job"
    )
    return Problem(f"{script}: no such file in {code}, which is pushed to the nodes", hint)


def _no_program(command: Sequence[str], code: Path) -> Problem | None:
    """Return what is wrong if the first word of a command is a file of the pushed folder that cannot be started."""
    word = command[0] if command else ""
    path = code / word
    if not word or word.startswith(("/", "~")) or "{" in word:
        return None
    if path.is_dir() and ("/" in word or word in (".", "..")):
        return Problem(f"{word} is a folder, not a program", FOLDER_REMEDY)
    if not path.is_file():
        return None
    starter = {".py": "python ", ".sh": "bash "}.get(path.suffix, "")
    if starter and not ("/" in word and os.access(path, os.X_OK)):
        return Problem(f"{word} is not started by its name", f"write {starter}{word}")
    if "/" in word and not os.access(path, os.X_OK):
        return Problem(f"{word} is not executable", f"chmod +x {word}, or name the program that reads it")
    return None


def _script_of(command: Sequence[str]) -> str:
    """Return the script that an interpreter gets; "" for other commands."""
    if not command or not re.fullmatch(r"python[0-9.]*|(ba|z)?sh", Path(command[0]).name):
        return ""
    # Options may be written together, as in `bash -lc`.
    ends = "cm" if Path(command[0]).name.startswith("python") else "c"
    for word in command[1:]:
        if re.fullmatch(rf"-\w*[{ends}]\w*", word):
            return ""
        if not word.startswith("-"):
            return word
    return ""
