"""Which names of a folder stay at home when it is pushed: ignore files, version control, caches."""

from __future__ import annotations

import re
from pathlib import Path

VCS_FOLDERS = (".git", ".hg", ".svn", ".jj", "CVS")
ALWAYS_OUT = (
    "__pycache__",
    ".venv",
    ".clusterctl-sandbox",  # with its keys
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    ".DS_Store",
)
IGNORE_FILES = (".gitignore", ".clusterctlignore")


class Ignore:
    """The rules of ignore files in a tree, in the part of gitignore's language that people use."""

    def __init__(self, root: Path, include_vcs: bool) -> None:
        self._root = root
        self._out = set(ALWAYS_OUT) | (set() if include_vcs else set(VCS_FOLDERS))
        self._rules: dict[str, list[tuple[re.Pattern[str], bool, bool]]] = {}

    def skips(self, path: str, is_dir: bool) -> bool:
        """Whether a path below the root stays at home; the last rule that fits decides, as in git."""
        if path.rsplit("/", 1)[-1] in self._out:
            return True
        skipped = False
        folders = [""] + ["/".join(path.split("/")[:depth]) for depth in range(1, path.count("/") + 1)]
        for folder in folders:
            below = path[len(folder) + 1 :] if folder else path
            for pattern, keeps, folders_only in self._of(folder):
                if (is_dir or not folders_only) and pattern.fullmatch(below):
                    skipped = not keeps
        return skipped

    def _of(self, folder: str) -> list[tuple[re.Pattern[str], bool, bool]]:
        if folder not in self._rules:
            found = []
            for name in IGNORE_FILES:
                path = self._root / folder / name
                if path.is_file():
                    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
                    found += [rule for rule in map(_rule, lines) if rule is not None]
            self._rules[folder] = found
        return self._rules[folder]


def _rule(line: str) -> tuple[re.Pattern[str], bool, bool] | None:
    """One line of an ignore file: (pattern over a path, whether it keeps, whether it is about folders
    only)."""
    text = line.rstrip()
    if not text or text.startswith("#"):
        return None
    keeps = text.startswith("!")
    text = text.removeprefix("!").removeprefix("\\")
    folders_only = text.endswith("/")
    text = text.rstrip("/")
    anywhere = "/" not in text
    # A whole `**` takes any number of folders; `*`, `?` and `[…]` stay within a name.
    parts = [
        "(?:.*/)?" if part == "**" else _name_pattern(part) + "/" for part in text.lstrip("/").split("/")
    ]
    pattern = "".join(parts).removesuffix("/")
    if text.endswith("/**"):
        pattern = pattern.removesuffix("(?:.*/)?") + ".+"
    return re.compile(("(?:.*/)?" if anywhere else "") + pattern, re.DOTALL), keeps, folders_only


def _name_pattern(glob: str) -> str:
    """One name of a path as a regular expression."""
    found, place = "", 0
    while place < len(glob):
        letter = glob[place]
        closing = glob.find("]", place + 2) if letter == "[" else -1
        if letter == "\\" and place + 1 < len(glob):
            place += 1
            found += re.escape(glob[place])
        elif closing > 0:
            inside = glob[place + 1 : closing].replace("\\", "\\\\").replace("[", "\\[")
            found += "[^/" + inside[1:] + "]" if inside[0] in "!^" else "[" + inside + "]"
            place = closing
        else:
            found += {"*": "[^/]*", "?": "[^/]"}.get(letter) or re.escape(letter)
        place += 1
    return found
