"""The `setup` of a node or a job: what a shell has to run so that the programs on a node find their libraries."""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from clusterctl.document import Section

FORMS = "setup: /path/to/set_env.sh, or {source: FILE, modules: [NAME], venv: DIR, run: [COMMAND]}"
# Defines `module` in a shell without a login, and fails after a failed `module load` in versions that do not report it.
MODULES = """type module >/dev/null 2>&1 || for clusterctl_file in "$MODULESHOME/init/bash" \
/etc/profile.d/modules.sh /etc/profile.d/z00_lmod.sh /etc/profile.d/lmod.sh /usr/share/modules/init/bash \
/usr/share/lmod/lmod/init/bash
do if [ -r "$clusterctl_file" ]; then . "$clusterctl_file"; break; fi; done
module load {name} && case ":$LOADEDMODULES:" in
*:{name}:*|*:{name}/*) ;; *) echo "{name} is not loaded"; false;; esac"""
MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+:@/-]*\Z")


@dataclass(frozen=True)
class Setup:
    """Shell commands whose effect on the environment is passed to ranks; each part is run in this order."""

    source: tuple[str, ...] = ()
    """Files for the shell to source."""
    modules: tuple[str, ...] = ()
    """Environment modules to load."""
    venv: str = ""
    """Folder of a virtual environment; its Python runs the ranks."""
    run: tuple[str, ...] = ()
    """Commands."""

    @property
    def uses_code(self) -> bool:
        """Whether a file to source is relative: it lies in the pushed code."""
        return any(not path.startswith(("/", "~/")) for path in self.source)

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


def require_files(top: Section, setup: Setup | None, code: Path | None) -> None:
    """Record each relative file to source that the pushed folder lacks."""
    if setup is None or code is None:
        return
    for path in setup.source:
        if not path.startswith(("/", "~/")) and not (code / path).is_file():
            top.fault("setup", f"{code} has no file {path}", "a relative path is in the pushed code")


def take_setup(top: Section) -> Setup | None:
    """Read `setup` of a node or a job: a file or a command, a list of commands, or a mapping of its parts."""
    top.taken.append("setup")
    value = top.value.get("setup")
    if value is None:
        return None
    if isinstance(value, str) and value.strip():
        # A file name with a space is written as {source: ...}.
        setup = Setup(run=(value,)) if " " in value.strip() else Setup(source=(value.strip(),))
    elif isinstance(value, list) and value:
        setup = Setup(run=_texts(top, "setup", value))
    elif isinstance(value, dict) and value:
        inner = top.section("setup")
        setup = Setup(
            source=_texts(inner, "source", inner.value.get("source")),
            modules=_texts(inner, "modules", inner.value.get("modules")),
            venv=inner.take_text("venv"),
            run=_texts(inner, "run", inner.value.get("run")),
        )
        inner.taken += ["source", "modules", "run"]
        inner.done()
    else:
        top.fault("setup", "is empty" if not value else "must be a file, commands or a mapping", FORMS)
        return None
    _check(top, setup)
    return setup


def _texts(section: Section, key: str, value: object) -> tuple[str, ...]:
    entries = value if isinstance(value, list) else [] if value is None else [value]
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, str) or not entry.strip() or "\0" in entry:
            section.fault(key, f"entry {number} of {key!r} is not a text", "quote it, or leave it out")
    return tuple(entry for entry in entries if isinstance(entry, str) and entry.strip())


def _check(top: Section, setup: Setup) -> None:
    # Only a job has these keys.
    has_code = any(top.value.get(key) for key in ("code", "train"))
    if setup.uses_code and not has_code:
        path = next(path for path in setup.source if not path.startswith(("/", "~/")))
        where = (
            "give the job `code`, or name" if top.value.get("command") or top.value.get("train") else "name"
        )
        top.fault(
            "setup", f"{path!r} is not an absolute path", f"{where} a file of the node: /path or ~/path"
        )
    if setup.venv and not setup.venv.startswith(("/", "~/")):
        top.fault("setup", f"venv {setup.venv!r} is not an absolute path", "as in /opt/venv or ~/venv")
    for name in setup.modules:
        if not MODULE.match(name):
            top.fault("setup", f"{name!r} can't name a module", "one name for each entry, as in cann/8.0")
