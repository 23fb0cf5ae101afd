"""The `setup` of a node or a job: what a shell has to run so that the programs on a node find their libraries."""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass
from typing import Any

from clusterctl.wire.fields import BAD, Key, Reader, setting

FORMS = "setup: /path/to/set_env.sh, or {source: FILE, modules: [NAME], venv: DIR, run: [COMMAND]}"
# Defines `module` in a shell without a login, and fails after a failed `module load` in versions that do not report it.
MODULES = """type module >/dev/null 2>&1 || for clusterctl_file in "$MODULESHOME/init/bash" \
/etc/profile.d/modules.sh /etc/profile.d/z00_lmod.sh /etc/profile.d/lmod.sh /usr/share/modules/init/bash \
/usr/share/lmod/lmod/init/bash
do if [ -r "$clusterctl_file" ]; then . "$clusterctl_file"; break; fi; done
module load {name} && case ":$LOADEDMODULES:" in
*:{name}:*|*:{name}/*) ;; *) echo "{name} is not loaded"; false;; esac"""
MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+:@/-]*")
PLACE = re.compile("~?/.*")
# The JSON schema of one text or a list of texts.
TEXTS = {"type": ["string", "array"], "items": {"type": "string"}}


def texts(value: object) -> tuple[str, ...]:
    """Return one text or a list of texts; raise ValueError for anything else."""
    entries = value if isinstance(value, list) else [value]
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, str) or not entry.strip() or "\0" in entry:
            raise ValueError(f"entry {number} is not a text", "quote it, or leave it out")
    return tuple(entries)


def several(**rule: Any) -> tuple[str, ...]:
    """Return the setting of one text or a list of texts."""
    found: tuple[str, ...] = setting((), read=texts, form=TEXTS, **rule)
    return found


@dataclass(frozen=True)
class Setup:
    """Shell commands whose effect on the environment is passed to ranks; each part is run in this order."""

    source: tuple[str, ...] = several()
    """Files for the shell to source. A relative path is in the pushed code."""
    modules: tuple[str, ...] = several(
        pattern=MODULE, noun="the name of a module", example="one name for each entry, as in cann/8.0"
    )
    """Environment modules to load."""
    venv: str = setting("", pattern=PLACE, noun="an absolute path", example="as in /opt/venv or ~/venv")
    """Folder of a virtual environment. Its Python runs the ranks."""
    run: tuple[str, ...] = several()
    """Shell commands."""

    @property
    def relative(self) -> tuple[str, ...]:
        """Return the files to source whose path is relative: they are in the pushed code."""
        return tuple(path for path in self.source if not path.startswith(("/", "~/")))

    def steps(self, folder: str) -> list[dict[str, str]]:
        """Return the commands with their labels; they run in a folder of the node."""
        parts = [(f"source {path}", f". {_quoted(path)}") for path in self.source]
        parts += [(f"module load {name}", MODULES.format(name=name)) for name in self.modules]
        if self.venv:
            parts.append((f"venv {self.venv}", f". {_quoted(posixpath.join(self.venv, 'bin/activate'))}"))
        parts += [(line if len(line) < 80 else line[:77] + "...", line) for line in self.run]
        return [{"label": label, "text": text, "folder": folder} for label, text in parts]

    def files(self, folder: str) -> list[str]:
        """Return the files whose change makes a cached result invalid."""
        found = [posixpath.join(folder, path) for path in self.source]
        return [*found, posixpath.join(self.venv, "pyvenv.cfg")] if self.venv else found


def _quoted(path: str) -> str:
    """Return a quoted path for the shell; a leading `~/` is the home folder, and a name without a folder is in the
    current one.
    """
    if path.startswith("~/"):
        return f"~/{shlex.quote(path[2:])}"
    return shlex.quote(path if "/" in path else f"./{path}")


def request_for(node: Setup | None, job: Setup | None = None, code: str = "") -> dict[str, object] | None:
    """Return what an agent needs to run a node's setup and then a job's, which starts in the job's code; or None."""
    parts = [(setup, folder) for setup, folder in ((node, "~"), (job, code or "~")) if setup is not None]
    if not parts:
        return None
    steps = [step for setup, folder in parts for step in setup.steps(folder)]
    return {"steps": steps, "files": [path for setup, folder in parts for path in setup.files(folder)]}


def rank_python(python: str, *setups: Setup | None) -> str:
    """Return the Python of the ranks: that of the last virtual environment of the setups, else the node's."""
    venvs = [setup.venv for setup in setups if setup is not None and setup.venv]
    return posixpath.join(venvs[-1], "bin/python") if venvs else python


def take_setup(reader: Reader, value: object, key: Key) -> object:
    """Return the setup of a node or a job: a file or a command, a list of commands, or a mapping of its parts."""
    if isinstance(value, str) and value.strip():
        # A file name with a space is written as {source: ...}.
        return reader.read(Setup, {"run" if " " in value.strip() else "source": value.strip()}, key)
    if isinstance(value, list) and value:
        return reader.read(Setup, {"run": value}, key)
    if isinstance(value, dict) and value:
        return reader.read(Setup, value, key)
    reader.report(key, "is empty" if not value else "must be a file, commands or a mapping", FORMS)
    return BAD
