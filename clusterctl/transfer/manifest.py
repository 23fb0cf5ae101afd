"""Read a local folder for a transfer: list its entries, check them, and hash their content.

Ignore files, version control folders and caches decide which entries are left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from clusterctl.agent.files import tree, tree_cache
from clusterctl.agent.files.tree import Entry
from clusterctl.errors import Fault, InputFaults, UsageError
from clusterctl.settings import cache_folder

MANY_FILES, MANY_BYTES = 10_000, 1_000_000_000
# Seconds without a push of a folder after which the hashes of its files are deleted.
FORGET_AFTER = 60 * 86400.0


@dataclass(frozen=True)
class Manifest:
    """The entries of a tree at the time when it was read."""

    entries: tuple[Entry, ...]
    warnings: tuple[str, ...] = ()
    table: bytes = b""
    """The digests of the pieces of large files."""

    @cached_property
    def text(self) -> bytes:
        return tree.to_bytes(self.entries)

    @cached_property
    def id(self) -> str:
        """Return the tree's name: a hash of every path, mode and content."""
        return tree.tree_id(self.text)

    @cached_property
    def files(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == "f"]

    @cached_property
    def pieces(self) -> tree.Pieces:
        return tree.Pieces(self.files, self.table)

    @cached_property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def make_manifest(
    root: Path,
    include_vcs: bool = False,
    only: Sequence[str] = (),
    everything: bool = False,
    recheck: bool = False,
    without: Path | None = None,
) -> Manifest:
    """Return the manifest of a folder, without ignored files, version control folders and caches.

    With `everything`, only caches are left out. `only` names the files and folders to include; empty means
    all. A file whose inode shows no change since the last read is not read again, except with `recheck`.
    The path `without` is left out.
    """
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder", "name the folder to send")
    rules = Ignore(root, include_vcs)
    apart = _below(root, without)
    chosen, above = set(only), {parent for each in only for parent in _parents(each)}

    def skips(path: str, is_dir: bool) -> bool:
        if path == apart or (only and path not in above and chosen.isdisjoint((path, *_parents(path)))):
            return True
        return path.rsplit("/", 1)[-1] in ALWAYS_OUT if everything else rules.skips(path, is_dir)

    try:
        scanned = _scan(root, skips, recheck)
    except OSError as problem:
        raise UsageError(
            f"{problem.filename}: {problem.strerror}", "add it to .clusterctlignore, or make it readable"
        ) from None
    _refuse_what_no_node_takes(root, scanned.entries)
    manifest = Manifest(tuple(scanned.entries), tuple(scanned.warnings), scanned.table)
    more = [*_size_warnings(root, manifest), *_secret_warnings(root, rules.secrets)]
    return replace(manifest, warnings=(*manifest.warnings, *more))


def _parents(path: str) -> list[str]:
    """Return the folders that contain a path."""
    parts = path.split("/")
    return ["/".join(parts[:number]) for number in range(1, len(parts))]


def _below(root: Path, path: Path | None) -> str:
    """Return a path relative to root in the form used by trees; "" if it is not below root."""
    if path is None or not path.resolve().is_relative_to(root.resolve()):
        return ""
    return path.resolve().relative_to(root.resolve()).as_posix()


def _scan(root: Path, skips: Callable[[str, bool], bool], recheck: bool) -> tree.Scanned:
    """Read the folder, using the stored hashes of its files, and store the new ones."""
    with _remembered(root, recheck) as known:
        return tree.scan(str(root), skips, known.read)


@contextlib.contextmanager
def _remembered(path: Path, recheck: bool) -> Iterator[tree_cache.Memory]:
    """Yield the stored hashes of a folder or file; afterwards save them if anything was read."""
    name = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:32]
    cache = cache_folder() / "contents" / name
    known = tree_cache.Memory({} if recheck else tree_cache.load(str(cache)))
    yield known
    if known.read_bytes:
        # If the cache folder cannot be written, files are hashed again next time.
        with contextlib.suppress(OSError):
            tree_cache.save(str(cache), known.now)
            _forget_old(cache.parent)


def _forget_old(folder: Path) -> None:
    for file in folder.iterdir():
        if time.time() - file.stat().st_mtime > FORGET_AFTER:
            file.unlink(missing_ok=True)


def file_manifest(path: Path, name: str, recheck: bool = False) -> Manifest:
    """Return the manifest of one file as a tree with a single entry `name`."""
    try:
        with _remembered(path, recheck) as known:
            status = path.stat()
            size, content, table = known.read("", str(path), status)
    except OSError as problem:
        raise UsageError(f"{path}: {problem.strerror}", "name a file that can be read") from None
    return Manifest((Entry(name, "f", status.st_mode & 0o777, size, content),), (), table)


def _refuse_what_no_node_takes(root: Path, entries: list[Entry]) -> None:
    remedy = "add it to .clusterctlignore, or push what it points to"
    faults = [
        Fault(str(root / entry.path), f"the link leads out of the tree, to {entry.content}", remedy)
        for entry in entries
        if entry.kind == "l" and not tree.link_stays_inside(entry.path, entry.content)
    ]
    if faults:
        raise InputFaults(faults)
    names = "\0".join(entry.path for entry in entries)
    if names.isascii() and len(set(names.lower().split("\0"))) == len(entries):
        # A folder of this machine has no other faults than two names that are one; 20 ms for 10,000 files.
        return
    try:
        tree.check(entries)
    except tree.BadTree as problem:
        raise UsageError(
            f"{root}: {problem}", "rename one of them, or leave it out by .clusterctlignore"
        ) from None


def _size_warnings(root: Path, manifest: Manifest) -> list[str]:
    remedy = "is all of it needed? .clusterctlignore leaves things out"
    found = []
    if len(manifest.entries) > MANY_FILES:
        found.append(f"{root}: {len(manifest.entries):,} entries; {remedy}")
    if manifest.size > MANY_BYTES:
        found.append(f"{root}: {manifest.size / 1e9:.1f} GB; {remedy}")
    return found


def _secret_warnings(root: Path, secrets: Sequence[str]) -> list[str]:
    """Return a warning that names what was left out because of its name."""
    if not secrets:
        return []
    names = ", ".join(secrets[:MOST_NAMED]) + (
        f" and {len(secrets) - MOST_NAMED} more" * (len(secrets) > MOST_NAMED)
    )
    keep = "a line such as !.env in .clusterctlignore keeps them"
    return [f"{root}: left out, because the names are those of keys and passwords: {names}; {keep}"]


MOST_NAMED = 5
# Names of files and folders that usually hold keys or passwords.
SECRET = re.compile(
    r"\.env(\.(?!example$|sample$|template$|dist$).*)?|id_(rsa|dsa|ecdsa|ed25519)(_sk)?|.*\.(pem|p12|pfx)"
    r"|\.(ssh|aws|kube|netrc|pgpass|pypirc|npmrc|git-credentials)"
)
VCS_FOLDERS = (".git", ".hg", ".svn", ".jj", "CVS")
ALWAYS_OUT = (
    "__pycache__",
    ".venv",
    # It contains keys.
    ".clusterctl-sandbox",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    ".DS_Store",
)
IGNORE_FILES = (".gitignore", ".clusterctlignore")


# A pattern of paths, whether it keeps what matches, and whether it is for folders alone.
Rule = tuple[re.Pattern[str], bool, bool]


class Ignore:
    """The rules of the ignore files in a tree: the commonly used part of gitignore's language.

    What has the name of a secret is left out too, unless a rule keeps it.
    """

    def __init__(self, root: Path, include_vcs: bool) -> None:
        self._root = root
        self._out = set(ALWAYS_OUT) | (set() if include_vcs else set(VCS_FOLDERS))
        self._rules: dict[str, list[tuple[int, list[Rule]]]] = {}
        self.secrets: list[str] = []
        """The paths that no rule names and that were left out as secrets."""

    def skips(self, path: str, is_dir: bool) -> bool:
        """Return whether a path below the root is left out; the last matching rule decides, as in git."""
        folder, _, name = path.rpartition("/")
        if name in self._out:
            return True
        is_secret = skipped = SECRET.fullmatch(name) is not None
        for start, rules in self._of(folder):
            for pattern, keeps, folders_only in rules:
                if (is_dir or not folders_only) and pattern.fullmatch(path, start):
                    skipped, is_secret = not keeps, False
        if is_secret:
            self.secrets.append(f"{path}/" if is_dir else path)
        return skipped

    def _of(self, folder: str) -> list[tuple[int, list[Rule]]]:
        """Return the rules of a folder and those of the folders above it, each with where its paths begin."""
        if folder not in self._rules:
            above = self._of(folder.rpartition("/")[0]) if folder else []
            found = list[Rule]()
            for name in IGNORE_FILES:
                path = self._root / folder / name
                if path.is_file():
                    lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
                    found += [rule for rule in map(_rule, lines) if rule is not None]
            self._rules[folder] = [*above, (len(folder) + bool(folder), found)] if found else above
        return self._rules[folder]


def _rule(line: str) -> Rule | None:
    """Parse one line of an ignore file; return (pattern, keep, folders only), or None if it has no rule."""
    text = line.rstrip()
    if not text or text.startswith("#"):
        return None
    keeps = text.startswith("!")
    text = text.removeprefix("!").removeprefix("\\")
    folders_only = text.endswith("/")
    text = text.rstrip("/")
    anywhere = "/" not in text
    # A `**` component matches any number of folders; `*`, `?` and `[…]` match within one name.
    parts = [
        "(?:.*/)?" if part == "**" else _name_pattern(part) + "/" for part in text.lstrip("/").split("/")
    ]
    pattern = "".join(parts).removesuffix("/")
    if text.endswith("/**"):
        pattern = pattern.removesuffix("(?:.*/)?") + ".+"
    return re.compile(("(?:.*/)?" if anywhere else "") + pattern, re.DOTALL), keeps, folders_only


def _name_pattern(glob: str) -> str:
    """Return a regular expression for one component of a path."""
    found, index = "", 0
    while index < len(glob):
        letter = glob[index]
        closing = glob.find("]", index + 2) if letter == "[" else -1
        if letter == "\\" and index + 1 < len(glob):
            index += 1
            found += re.escape(glob[index])
        elif closing > 0:
            inside = glob[index + 1 : closing].replace("\\", "\\\\").replace("[", "\\[")
            found += "[^/" + inside[1:] + "]" if inside[0] in "!^" else "[" + inside + "]"
            index = closing
        else:
            found += {"*": "[^/]*", "?": "[^/]"}.get(letter) or re.escape(letter)
        index += 1
    return found
