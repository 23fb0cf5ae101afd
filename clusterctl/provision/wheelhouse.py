"""A wheelhouse: a folder with the wheels of a lock file. Check one, and make one where there is internet."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from clusterctl.environment import environment
from clusterctl.errors import Fault, InputFaults, UsageError
from clusterctl.files import replace_file
from clusterctl.provision.lock import LOCK, MAKE, Lock, Pin, normal
from clusterctl.wire.typed_json import BadValue, decode, parse

# Seconds for one call of pip, which fetches some gigabytes.
PIP_LIMIT = 4 * 3600
NAME = re.compile(
    r"(?P<name>[^-]+)-(?P<version>[^-]+)(-\d[^-]*)?-(?P<python>[^-]+)-(?P<abi>[^-]+)-(?P<platform>[^-]+)\.whl\Z"
)


@dataclass(frozen=True)
class Wheel:
    """One file of a wheelhouse, read from its name."""

    file: str
    name: str
    version: str
    pythons: tuple[str, ...]
    abis: tuple[str, ...]
    platforms: tuple[str, ...]

    def fits(self, python: tuple[int, int], machine: str) -> bool:
        """Return whether a Python on Linux can install this wheel; only pip checks the version of libc."""
        major, minor = python
        own = f"cp{major}{minor}"
        fits_python = own in self.pythons or any(
            tag in (f"py{major}", f"py{major}{minor}") or ("abi3" in self.abis and _older(tag, major, minor))
            for tag in self.pythons
        )
        system = re.compile(rf"(many|musl)?linux.*_{re.escape(machine)}\Z")
        return fits_python and any(tag == "any" or system.match(tag) for tag in self.platforms)


def _older(tag: str, major: int, minor: int) -> bool:
    found = re.fullmatch(rf"cp{major}(\d+)", tag)
    return found is not None and int(found[1]) <= minor


@dataclass(frozen=True)
class Wheelhouse:
    """A folder with wheels."""

    folder: Path
    wheels: tuple[Wheel, ...]

    def of(self, pin: Pin) -> list[Wheel]:
        """Return the wheels of a package in its version."""
        return [
            wheel for wheel in self.wheels if wheel.name == pin.name and _same(wheel.version, pin.version)
        ]

    def files_for(self, lock: Lock) -> list[str]:
        """Return the names of the files that go to the nodes: the lock's wheels, and pip."""
        wanted = {wheel.file for pin in lock.pins for wheel in self.of(pin)}
        return sorted(wanted | {wheel.file for wheel in self.wheels if wheel.name == "pip"})


def _same(version: str, other: str) -> bool:
    return version.replace("_", "+").lower() == other.replace("-", "+").lower() or version == other


def open_wheelhouse(folder: Path) -> Wheelhouse:
    """Return the wheels in a folder; raise UsageError if there are none."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder", MAKE)
    wheels = [_wheel(path.name) for path in sorted(folder.glob("*.whl")) if path.is_file()]
    found = tuple(wheel for wheel in wheels if wheel is not None)
    if not found:
        raise UsageError(f"{folder}: contains no wheels", MAKE)
    return Wheelhouse(folder, found)


def _wheel(file: str) -> Wheel | None:
    found = NAME.fullmatch(file)
    if found is None:
        return None
    tags = (tuple(found[part].split(".")) for part in ("python", "abi", "platform"))
    return Wheel(file, normal(found["name"]), found["version"], *tags)


def lacks(house: Wheelhouse, lock: Lock, python: tuple[int, int], machine: str) -> list[Fault]:
    """Return a fault for each package without a wheel for a Python; packages with a marker are left to pip."""
    faults = []
    for pin in lock.pins:
        if pin.marker or any(wheel.fits(python, machine) for wheel in house.of(pin)):
            continue
        others = ", ".join(wheel.file for wheel in house.of(pin)[:3])
        problem = f"no wheel of {pin.name} {pin.version} for Python {python[0]}.{python[1]} on {machine}"
        options = f"--python-version {python[0]}.{python[1]} --platform manylinux_2_28_{machine}"
        remedy = f"run `clusterctl nodes wheelhouse` with {options}"
        faults.append(Fault(str(house.folder), problem + (f"; it has {others}" if others else ""), remedy))
    return faults


def check_hashes(house: Wheelhouse, lock: Lock) -> None:
    """Compare every wheel that will be sent with the lock's hashes; raise InputFaults for all that differ."""
    faults = []
    for pin in lock.pins:
        for wheel in house.of(pin):
            if sha256(house.folder / wheel.file) not in pin.hashes:
                problem = f"its SHA-256 is not in line {pin.line} of {lock.source}"
                remedy = "fetch the wheel again; if it changed on purpose, make the lock file again"
                faults.append(Fault(str(house.folder / wheel.file), problem, remedy))
    if faults:
        raise InputFaults(faults)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    try:
        with path.open("rb") as file:
            found = hashlib.sha256()
            while piece := file.read(1 << 20):
                found.update(piece)
    except OSError as problem:
        raise UsageError(f"{path}: {problem.strerror}", "check the file and its permissions") from None
    return found.hexdigest()


# ---- make one


@dataclass(frozen=True)
class Target:
    """The Python and the platforms for which wheels are fetched; by default those of the Python that runs this."""

    python: str = ""
    platforms: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    """Folders with wheels that no index has."""
    built: tuple[str, ...] = ()
    """Packages without a wheel, which are built from source."""

    def words(self) -> list[str]:
        """Return pip's options."""
        words = ["--only-binary", ":all:"]
        if self.python:
            words += ["--python-version", self.python]
        words += self.links()
        tags = dict.fromkeys(tag for platform in self.platforms for tag in older_tags(platform))
        return words + [word for tag in tags for word in ("--platform", tag)]

    def links(self) -> list[str]:
        """Return pip's options that name folders with wheels."""
        return [word for folder in self.find_links for word in ("--find-links", folder)]


def check_target(target: Target) -> None:
    """Raise InputFaults for versions, platforms and folders that pip would accept, but find nothing for."""
    faults = []
    if target.python and not re.fullmatch(r"3(\.\d+){1,2}", target.python):
        faults.append(Fault(f"--python-version {target.python}", "not a version of Python 3", "as in 3.11"))
    faults += [
        Fault(f"--platform {platform}", "not a platform of Linux", "as in manylinux_2_28_aarch64")
        for platform in target.platforms
        if not re.fullmatch(r"(many|musl)?linux\d*(_\d+_\d+)?_\w+", platform)
    ]
    faults += [
        Fault(f"--find-links {folder}", "no such folder", "name a folder with wheels")
        for folder in target.find_links
        if not Path(folder).is_dir()
    ]
    if faults:
        raise InputFaults(faults)


def older_tags(platform: str) -> list[str]:
    """Return a platform's tag and those of older systems, whose wheels it can install too; pip adds only a few."""
    found = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", platform)
    if found is None:
        return [platform]
    minor, machine = int(found[1]), found[2]
    older = [f"manylinux_2_{number}_{machine}" for number in range(minor, 4, -1)]
    named = [name for name, since in (("2014", 17), ("2010", 12), ("1", 5)) if since <= minor]
    return older + [f"manylinux{name}_{machine}" for name in named]


@dataclass(frozen=True)
class ArchiveInfo:
    """The part of pip's report with a file's hashes."""

    hashes: dict[str, str] = field(default_factory=dict)
    hash: str = ""
    """`sha256=...`, the only entry of pip before 23.1."""

    @property
    def sha256(self) -> str | None:
        """Return the SHA-256, or None."""
        kind, _, digest = self.hash.partition("=")
        return self.hashes.get("sha256") or (digest if kind == "sha256" else None)


@dataclass(frozen=True)
class DownloadInfo:
    """The part of pip's report about one file."""

    url: str
    archive_info: ArchiveInfo | None = None


@dataclass(frozen=True)
class PackageInfo:
    """A package's name and version in pip's report."""

    name: str
    version: str


@dataclass(frozen=True)
class Resolved:
    """One package of pip's report."""

    metadata: PackageInfo
    download_info: DownloadInfo


@dataclass(frozen=True)
class Report:
    """What pip would install."""

    install: tuple[Resolved, ...]


def make_wheelhouse(
    requirements: Sequence[str], folder: Path, target: Target, tell: Callable[[str], None]
) -> tuple[Lock, int]:
    """Resolve requirements, write their lock file, and fetch each wheel; return the lock and the number of wheels.

    `requirements` are arguments of pip: `-r FILE`, or `NAME`. Wheels in the folder are not fetched again.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UsageError(f"{folder}: {problem.strerror}", "name another folder: -o") from None
    # Wheels that an earlier call built stay the same, and so does the lock file.
    target = replace(target, find_links=(*target.find_links, str(folder)))
    for requirement in target.built:
        tell(f"building a wheel of {requirement}")
        _build(requirement, folder, target)
    tell("resolving")
    pins = _resolve([*requirements, "pip"], target)
    lock = Lock(tuple(pins), str(folder / LOCK))
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch) / LOCK
        wanted.write_text(lock.text, encoding="utf-8")
        tell(f"fetching {len(pins)} wheels")
        words = ["download", "--no-deps", "--require-hashes", "-r", str(wanted)]
        _pip([*words, *target.words(), "--dest", str(folder)])
    house = open_wheelhouse(folder)
    check_hashes(house, lock)
    needed = set(house.files_for(lock))
    for wheel in house.wheels:
        if wheel.file not in needed:
            tell(f"{wheel.file} belongs to another lock file; it stays, and is not sent to nodes")
    replace_file(folder / LOCK, lock.text)
    return lock, len(needed)


def _build(requirement: str, folder: Path, target: Target) -> None:
    """Build the wheel of one package into `folder`; raise UsageError if it fits only this machine's Python and the
    target names another."""
    with tempfile.TemporaryDirectory() as scratch:
        _pip(["wheel", "--no-deps", "--wheel-dir", scratch, *target.links(), requirement])
        for wheel in Path(scratch).glob("*.whl"):
            if (target.python or target.platforms) and not wheel.name.endswith("-none-any.whl"):
                raise UsageError(
                    f"--build {requirement}: {wheel.name} only fits this machine's Python",
                    "build it on a node with `pip wheel`, and name its folder with --find-links",
                )
            if not (folder / wheel.name).exists():
                shutil.copyfile(wheel, folder / wheel.name)


def _resolve(requirements: Iterable[str], target: Target) -> list[Pin]:
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "report.json"
        words = ["install", "--dry-run", "--ignore-installed", "--report", str(file)]
        _pip([*words, *target.words(), "--target", scratch, *requirements])
        try:
            report = decode(Report, parse(file.read_bytes()))
        except (OSError, BadValue) as problem:
            raise UsageError(f"pip's report cannot be read: {problem}", "use pip 22.2 or newer") from None
    pins = []
    for found in report.install:
        digest = (found.download_info.archive_info or ArchiveInfo()).sha256
        if digest is None:
            raise UsageError(
                f"{found.metadata.name} comes from {found.download_info.url}, which has no hash",
                "build a wheel of it (`pip wheel`) and name the wheel's folder with --find-links",
            )
        pins.append(Pin(normal(found.metadata.name), found.metadata.version, frozenset({digest})))
    return sorted(pins, key=lambda pin: pin.name)


def _pip(words: Sequence[str]) -> None:
    argv = [sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check", "--no-input"]
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            env=environment(),
            stdin=subprocess.DEVNULL,
            timeout=PIP_LIMIT,
        )
    except subprocess.TimeoutExpired:
        hint = "the same command continues with the wheels that are there; or fetch them with pip itself"
        raise UsageError(f"pip did not fetch the wheels within {PIP_LIMIT / 3600:g} hours", hint) from None
    except OSError as problem:
        raise UsageError(f"{sys.executable}: {problem.strerror}") from None
    if done.returncode:
        lines = [
            line for line in done.stderr.splitlines() if line.startswith("ERROR")
        ] or done.stderr.splitlines()[-3:]
        hint = "a package without a wheel: --build NAME builds one; wheels for other machines: --find-links FOLDER"
        raise UsageError("pip could not fetch the wheels: " + " / ".join(lines[-4:]), hint)


# Packages of the extras that have no wheel in the public index.
WITHOUT_WHEEL = ("deepspeed",)


def built_for(requirements: Iterable[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the requirements whose wheels are built: the named packages, in the version that is required."""
    required = {normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]): line for line in requirements}
    return tuple(required.get(normal(name), name) for name in names)


def requirements_of_extra(extra: str) -> list[str]:
    """Return what an extra of this program requires: `train` for the embedded trainer."""
    try:
        lines = requires("clusterctl") or []
    except PackageNotFoundError:
        raise UsageError(
            "clusterctl is not installed as a package", "name a requirements file instead"
        ) from None
    marked = [re.split(r";", line, maxsplit=1) for line in lines]
    found = [parts[0].strip() for parts in marked if len(parts) == 2 and _of_extra(parts[1], extra)]
    if not found:
        extras = sorted(set(re.findall(r"""extra == ["']([a-z0-9-]+)["']""", "\n".join(lines))))
        raise UsageError(f"no extra is called {extra!r}", f"use one of {', '.join(extras)}")
    return found


def _of_extra(marker: str, extra: str) -> bool:
    return re.search(rf"""extra == ["']{re.escape(extra)}["']""", marker) is not None
