"""`nodes setup`, `nodes wheelhouse` and `bundle`: Python environments for nodes without internet."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl import text
from clusterctl.cli import options, screen
from clusterctl.cli.declared import argument, flag, option
from clusterctl.cli.nodes.fab import choice_of
from clusterctl.errors import Collected, Fault, InputFaults, UsageError
from clusterctl.inventory import nodeset
from clusterctl.settings import load_settings
from clusterctl.transport.fanout import Outcome, raise_failures, values
from clusterctl.wire import versions

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster
    from clusterctl.provision.bundle import Bundle, Input
    from clusterctl.provision.lock import Lock
    from clusterctl.provision.setup import Result, Wanted
    from clusterctl.provision.wheelhouse import Target, Wheelhouse

LockFile = Annotated[
    Path | None,
    typer.Option(
        "--lock",
        metavar="FILE",
        help="The lock file: versions and hashes. Default: FOLDER/requirements.lock.",
    ),
]
WheelFolder = Annotated[
    Path | None, typer.Option("--wheelhouse", metavar="FOLDER", help="The folder with the wheels.")
]


@dataclass(frozen=True)
class EnvironmentOptions:
    """The options of an environment: where it is, and from which wheels it is made."""

    lock: LockFile = None
    wheelhouse: WheelFolder = None
    bundle: Path | None = option(
        "An archive of `clusterctl bundle`, instead of lock file and wheels.", metavar="FILE"
    )
    env: str | None = option(
        "Path of the environment on the nodes. Default: from `python` of the inventory.", metavar="PATH"
    )
    base: str = option(
        "The Python on the nodes that makes the environment.", default="python3", metavar="PYTHON"
    )
    prune: bool = flag("Delete earlier environments that no process uses.")
    relay: str = option(
        "How to copy wheels to the nodes, as for `push`.", default="auto", metavar="auto|on|off|plain"
    )


def setup(
    *,
    selection: options.NodeOptions,
    source: EnvironmentOptions,
    fanout: options.Fanout = None,
    connection: options.ConnectionOptions,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Make the same Python environment on every node, from a lock file and wheels that are sent once. The nodes need no
    internet. A setup that was interrupted continues. If nothing changed, it changes nothing."""
    from clusterctl.provision.present import complete_on
    from clusterctl.provision.setup import Setup, Wanted, query_nodes, require_base, require_fit

    if source.env and not source.env.startswith(("/", "~/")):
        raise UsageError(f"--env {source.env}: not an absolute path", "a path of the nodes: /PATH or ~/PATH")
    began = time.monotonic()
    with _contents(source) as contents:
        chosen = selection.chosen()
        wanted = Wanted(contents.lock, source.base, source.env or "", source.prune)
        require_base(source.base, chosen.nodes, wanted)
        logins = choice_of(chosen, connection.accept_new, connection.connect_timeout)
        at_once = fanout or load_settings().fanout
        outcomes: list[Outcome[Result]] = []
        with connection.open(chosen) as connections:
            links = {node.name: wanted.link_on(node) for node in chosen.nodes}
            present = values(complete_on(connections, chosen.nodes, links, at_once))
            lacking = [
                node for node in chosen.nodes if source.prune or present[node.name] != wanted.fingerprint
            ]
            if lacking:
                states = query_nodes(logins, lacking, wanted, at_once)
                raise_failures(states)
                require_fit({o.node: o.get() for o in states}, wanted, contents.wheels())
            if dry_run:
                return _show_plan(chosen, wanted, {node.name for node in lacking}, as_json)
            if lacking:
                running = Setup(logins, connections, wanted, source.relay, at_once)
                outcomes = running.run(
                    lacking, contents.wheels(), lambda name, text: screen.log(f"{name}: {text}")
                )
    _show(chosen, wanted, outcomes, as_json, time.monotonic() - began)
    raise_failures(outcomes)


class _Contents:
    """A lock file with its wheels, from a folder or a bundle."""

    def __init__(self, lock: Lock, folder: Path, bundle: Bundle | None = None) -> None:
        self.lock, self._folder, self._bundle = lock, folder, bundle
        self._house: Wheelhouse | None = None

    def wheels(self) -> Wheelhouse:
        """Return the wheelhouse; a bundle is unpacked and verified for it."""
        from clusterctl.provision.bundle import WHEELS
        from clusterctl.provision.wheelhouse import open_wheelhouse

        if self._house is None and self._bundle is not None:
            screen.log(f"verifying {self._bundle.path}")
            self._bundle.unpack(self._folder.parent, (WHEELS,), lambda count: None)
        self._house = self._house or open_wheelhouse(self._folder)
        return self._house


@contextmanager
def _contents(source: EnvironmentOptions) -> Iterator[_Contents]:
    """Yield the lock file and wheels that the options name."""
    from clusterctl.provision.lock import LOCK, MAKE, read_lock

    if source.bundle is not None:
        import tempfile

        from clusterctl.provision.bundle import WHEELS, open_bundle

        if source.lock or source.wheelhouse:
            raise UsageError("--bundle cannot be combined with --lock or --wheelhouse", "it contains both")
        # Next to the bundle, where there is room for such files.
        with (
            open_bundle(source.bundle) as bundle,
            tempfile.TemporaryDirectory(prefix=".unpacked-", dir=source.bundle.resolve().parent) as folder,
        ):
            yield _Contents(bundle.lock(), Path(folder) / WHEELS, bundle)
        return
    if source.wheelhouse is None:
        raise UsageError("no wheels are named", f"--wheelhouse FOLDER or --bundle FILE; {MAKE}")
    if not source.wheelhouse.is_dir():
        raise UsageError(f"--wheelhouse {source.wheelhouse}: no such folder", MAKE)
    yield _Contents(read_lock(source.lock or source.wheelhouse / LOCK), source.wheelhouse)


def _show_plan(chosen: Cluster, wanted: Wanted, needed: set[str], as_json: bool) -> None:
    rows = [
        {
            "node": node.name,
            "environment": wanted.link_on(node),
            "packages": len(wanted.lock.pins),
            "change": "install" if node.name in needed else "none",
        }
        for node in chosen.nodes
    ]
    if as_json:
        return screen.show_json(rows)
    for row in rows:
        change = (
            f"would install {row['packages']} packages"
            if row["change"] == "install"
            else "nothing would change"
        )
        screen.write(f"{row['node']}: {row['environment']}: {change}\n")


def _show(
    chosen: Cluster, wanted: Wanted, outcomes: Sequence[Outcome[Result]], as_json: bool, seconds: float
) -> None:
    done = {outcome.node.name: outcome.value for outcome in outcomes}
    failed = {outcome.node.name for outcome in outcomes if not outcome.ok}
    if as_json:
        return screen.show_json(
            [
                {
                    "node": node.name,
                    "environment": wanted.link_on(node),
                    "fingerprint": wanted.fingerprint,
                    **(asdict(result) if (result := done.get(node.name)) else {"installed": False}),
                }
                for node in chosen.nodes
                if node.name not in failed
            ]
        )
    rows = []
    for node in chosen.nodes:
        result = done.get(node.name)
        if node.name not in failed:
            state = (
                f"{text.plural(len(wanted.lock.pins), 'package')} installed"
                if result and result.installed
                else "unchanged"
            )
            rows.append([node.name, wanted.link_on(node), state, f"{result.seconds:.1f} s" if result else ""])
    if rows and not outcomes and len({row[1] for row in rows}) == 1:
        # A table would take longer to draw than a node takes to answer.
        screen.write(f"{nodeset.fold([row[0] for row in rows])}: {rows[0][1]}: unchanged ({seconds:.2f} s)\n")
    elif rows:
        from clusterctl.cli.views import tables

        screen.show(tables.table(["NODE", "ENVIRONMENT", "STATE", "TIME"], rows, right=["TIME"]))
        screen.log(f"{text.plural(len(rows), 'node')} ready in {seconds:.2f} s")
    unused = [node.name for node in chosen.nodes if not node.python.startswith(wanted.link_on(node) + "/")]
    if unused:
        line = f"python: {wanted.link_on(chosen.node(unused[0]))}/bin/python"
        screen.log(
            f"the inventory names another Python for {nodeset.fold(unused)}: set {line}", style="yellow"
        )


def _is_path(requirement: str) -> bool:
    """Return whether a requirement looks like the name of a file of requirements."""
    return requirement.endswith((".txt", ".in", ".lock")) or requirement.startswith(("./", "../", "/"))


def _words_of(requirements: Sequence[str]) -> list[str]:
    """Return requirements as arguments of pip; raise InputFaults for all that cannot be one."""
    faults = [
        Fault("", f"{name!r} is not a requirement", "name files or packages")
        for name in requirements
        if name.startswith("-") or not name.strip()
    ]
    faults += [
        Fault(name, "no such file", "name a requirements file, or a package as pip does")
        for name in requirements
        if _is_path(name) and not Path(name).is_file()
    ]
    if faults:
        raise InputFaults(faults)
    return [word for name in requirements for word in (["-r", name] if Path(name).is_file() else [name])]


def _pins(cann: str, python: str, trains: bool) -> list[str]:
    """Return the newest torch and torch_npu for a CANN and a Python as requirements of pip."""
    newest = versions.newest_for(cann, python)
    torch = versions.torch_of(newest)
    if not newest:
        beside = f" and Python {python}" if versions.newest_for(cann) else ""
        problem = f"--cann {cann}: no torch_npu is known for it{beside}"
        raise UsageError(problem, f"one of {', '.join(versions.TORCH_NPU)}")
    if trains and not versions.fits_trainer(torch):
        needed = ".".join(map(str, versions.TRAINER_TORCH))
        problem = f"--cann {cann}: its newest torch is {torch}"
        raise UsageError(problem, f"the embedded trainer needs torch {needed}: use a newer CANN")
    return [f"torch=={torch}", f"torch_npu=={newest}"]


def _wanted(
    extra: str | None, cann: str, requirements: Sequence[str], target: Target
) -> tuple[list[str], list[str]]:
    """Return what an extra requires, and all requirements as arguments of pip; raise all errors, also of a target."""
    from clusterctl.provision.wheelhouse import check_target, requirements_of_extra

    of_extra, words, errors = list[str](), list[str](), Collected()
    with errors:
        of_extra = requirements_of_extra(extra) if extra else []
    with errors:
        words = _words_of(requirements)
    with errors:
        words += _pins(cann, target.python, bool(extra)) if cann else ()
    with errors:
        if not extra and not cann and not requirements:
            raise UsageError("no requirement is named", "name a requirements file, or --extra train")
    with errors:
        check_target(target)
    errors.raise_all()
    return of_extra, [*words, *of_extra]


def wheelhouse(
    requirements: list[str] | None = argument(
        "Requirement files, or packages as pip names them.", metavar="REQUIREMENT..."
    ),
    output: Path = option(
        "The folder to write the wheels to.", "-o", "--output", default=Path("wheelhouse"), metavar="FOLDER"
    ),
    extra: str | None = option("Also fetch what an extra of clusterctl needs: train, npu.", metavar="NAME"),
    cann: str = option(
        "Also fetch the torch and torch_npu for this CANN: 8.2.", default="", metavar="VERSION"
    ),
    python_version: str = option(
        "The Python version of the nodes: 3.11. Default: of this Python.", default="", metavar="VERSION"
    ),
    platform: list[str] | None = option(
        "The platform of the nodes: manylinux_2_28_aarch64. Can be repeated.", metavar="TAG"
    ),
    build: list[str] | None = option("Build a wheel for a package that has only sources.", metavar="NAME"),
    find_links: list[Path] | None = option("A folder with wheels of your own.", metavar="FOLDER"),
) -> None:
    """Fetch the wheels of some requirements with all they depend on, and write a lock file with their hashes. This
    needs internet, or pip's own settings for a mirror."""
    from clusterctl.provision.wheelhouse import (
        WITHOUT_WHEEL,
        Target,
        built_for,
        make_wheelhouse,
    )

    chosen = Target(python_version, tuple(platform or ()), tuple(map(str, find_links or ())))
    of_extra, words = _wanted(extra, cann, requirements or (), chosen)
    lacking = [name for name in WITHOUT_WHEEL if any(line.startswith(name) for line in of_extra)]
    built = built_for(words, [*lacking, *(build or ())])
    lock, count = make_wheelhouse(words, output, replace(chosen, built=built), screen.log)
    screen.write(f"{output}: {count} wheels; {lock.source} pins {len(lock.pins)} packages\n")


def bundle(
    output: Path = option(
        "The archive to write.", "-o", "--output", default=Path("bundle.tar"), metavar="FILE"
    ),
    lock: LockFile = None,
    wheelhouse: WheelFolder = None,
    code: Path | None = option(
        "Also pack this folder, without the files that .gitignore names.", metavar="FOLDER"
    ),
    tokenizer: list[Path] | None = option(
        "Also pack the file of a tokenizer. Can be repeated.", metavar="FILE"
    ),
    unpack: Path | None = option("Verify this archive, and write its files to -o.", metavar="FILE"),
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Pack wheels, code and tokenizer into one archive for a network without internet. The same files give the same
    bytes. `nodes setup --bundle FILE` installs it; --unpack FILE -o FOLDER verifies and unpacks it."""
    from clusterctl.provision.bundle import PARTS, write_bundle

    if unpack is not None:
        if wheelhouse or code or tokenizer:
            raise UsageError("--unpack takes no --wheelhouse, --code or --tokenizer", "remove them")
        return _unpack(unpack, output if output != Path("bundle.tar") else Path(unpack.stem))
    inputs = [*_wheel_inputs(wheelhouse, lock), *_code_inputs(code), *_tokenizer_inputs(tokenizer or [])]
    if not inputs:
        raise UsageError("nothing to pack", "--wheelhouse FOLDER, --code FOLDER, --tokenizer FILE")
    if output.exists() and not force:
        raise UsageError(f"{output}: exists already", "--force overwrites it; -o names another file")
    contents, digest = write_bundle(output, inputs)
    if as_json:
        parts = {part: len(contents.part(part)) for part in PARTS}
        return screen.show_json(
            {"path": str(output), "sha256": digest, "bytes": contents.size, "files": parts}
        )
    for part in PARTS:
        if members := contents.part(part):
            total = text.size(sum(member.size for member in members))
            screen.write(f"{part}: {text.plural(len(members), 'file')}, {total}\n")
    screen.write(f"{output}: {text.size(contents.size)}, SHA-256 {digest}\n")


def _wheel_inputs(folder: Path | None, lock: Path | None) -> list[Input]:
    from clusterctl.provision.bundle import WHEELS, Input
    from clusterctl.provision.lock import LOCK, read_lock
    from clusterctl.provision.wheelhouse import check_hashes, open_wheelhouse

    if folder is None:
        if lock is not None:
            raise UsageError("--lock needs --wheelhouse", "name the folder with the wheels")
        return []
    source = lock or folder / LOCK
    house, pins = open_wheelhouse(folder), read_lock(source)
    check_hashes(house, pins)
    lacking = [pin.name for pin in pins.pins if not pin.marker and not house.of(pin)]
    if lacking:
        raise UsageError(
            f"{folder}: no wheel of {', '.join(lacking[:10])}", "clusterctl nodes wheelhouse fetches them"
        )
    wheels = [Input(f"{WHEELS}/{name}", folder / name) for name in house.files_for(pins)]
    return [Input(f"{WHEELS}/{LOCK}", source), *wheels]


def _code_inputs(folder: Path | None) -> list[Input]:
    from clusterctl.provision.bundle import CODE, Input
    from clusterctl.transfer.manifest import make_manifest

    if folder is None:
        return []
    manifest = make_manifest(folder)
    for warning in manifest.warnings:
        screen.log(f"warning: {warning}", style="yellow")
    links = [entry.path for entry in manifest.entries if entry.kind == "l"]
    if links:
        raise UsageError(
            f"{folder}: a bundle holds no links ({', '.join(links[:5])})", "replace them by their files"
        )
    return [Input(f"{CODE}/{entry.path}", folder / entry.path) for entry in manifest.files]


def _tokenizer_inputs(files: Sequence[Path]) -> list[Input]:
    from clusterctl.provision.bundle import TOKENIZER, Input

    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise UsageError(
            f"--tokenizer {', '.join(missing)}: no such file", "name a tokenizer.json, or vocabulary files"
        )
    names = [path.name for path in files]
    if len(set(names)) < len(names):
        raise UsageError("two tokenizer files have the same name", "rename one of them")
    return [Input(f"{TOKENIZER}/{path.name}", path) for path in files]


def _unpack(file: Path, folder: Path) -> None:
    from clusterctl.provision.bundle import PARTS, open_bundle

    if folder.exists():
        raise UsageError(f"{folder}: exists already", "name a new folder: -o FOLDER")
    aside = folder.with_name(f".{folder.name}.unpacking")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with open_bundle(file) as opened:
            opened.unpack(aside, PARTS, lambda count: None)
            aside.rename(folder)
            count, total = len(opened.contents.files), opened.contents.size
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    screen.write(f"{folder}: {text.plural(count, 'file')}, {text.size(total)}, all verified\n")
