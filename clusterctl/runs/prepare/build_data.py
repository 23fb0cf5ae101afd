"""Build training data on several nodes: each builds its share of the inputs; the results are copied here, or stay."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import posixpath
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import UsageError, WorkFailed
from clusterctl.files import replace_file
from clusterctl.inventory.setup import rank_python, request_for
from clusterctl.jobs.ask_trainer import ask_trainer
from clusterctl.runs.prepare.built_pair import BuildRecord, ShardEntry, ShardList, read_record
from clusterctl.text import plural, size
from clusterctl.transport.fanout import on_all
from clusterctl.wire.pair import InputShares, Manifest, PairCounts, read_manifest
from clusterctl.wire.typed_json import BadValue, decode

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.runs.prepare.stage import Tell
    from clusterctl.transfer.push import Progress
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections

# The name of each pair in its own folder on its node.
PAIR = "c"
DONE = "done.json"
SHARED = re.compile(
    r"^\S*/in/\d{6}-(?P<name>\S+?)(?:-from-line-(?P<first>\d+))?(?P<ending>\.[^\s:]+)?:(?P<line>\d+): "
)


@dataclass(frozen=True)
class Share:
    """The share of one node: its inputs on this machine, and the pair that is built from them."""

    folder: Path
    words: tuple[str, ...]
    place: str
    """Of the pair, below the node's work folder."""


@dataclass(frozen=True)
class Built:
    """The result of one node: where its files are, and their manifest."""

    node: str
    folder: str
    manifest: Manifest
    unchanged: bool

    @property
    def prefix(self) -> str:
        return posixpath.join(self.folder, PAIR)


def spread(
    cluster: Cluster,
    connections: Connections,
    arguments: Sequence[str],
    output: Path,
    leave: bool,
    tell: Tell,
    progress: Callable[[str], Progress],
) -> ShardList | PairCounts:
    """Build on all nodes in parallel; `output` is then byte for byte what one machine would build.

    With `leave` the results stay on the nodes, and `OUTPUT.shards.json` names their places.
    """
    _refuse(output, leave, arguments)
    with _alone(output.with_name(f".{output.name}.spread")) as work:
        shares = _cut(arguments, len(cluster.nodes), work / "shares", output, leave, tell)
        nodes = cluster.nodes[: len(shares)]
        given = {node.name: share for node, share in zip(nodes, shares, strict=True)}
        began = time.monotonic()
        code = _push_code(cluster, nodes, connections, tell)
        built = on_all(
            connections,
            nodes,
            lambda node, link: _build(node, link, given[node.name], code[node.name], progress(node.name)),
        )
        made: list[Built] = [built[node.name] for node in nodes]
        _tell_built(made, time.monotonic() - began, tell)
        if leave:
            return _left(made, output)
        return _brought(nodes, connections, made, work / "pairs", output, "--dedup" in arguments, tell)


@contextmanager
def _alone(work: Path) -> Iterator[Path]:
    """Yield a folder next to the output that only this build uses; refuse a second build of the same output."""
    work.mkdir(parents=True, exist_ok=True)
    lock = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UsageError(f"{work}: another build of the same output is running", "wait for its end") from None
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def value_of(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of an option among words, as `--name VALUE` or `--name=VALUE`."""
    for index, word in enumerate(arguments):
        if word == name and index + 1 < len(arguments):
            return arguments[index + 1]
        if word.startswith(name + "="):
            return word[len(name) + 1 :]
    return None


def _refuse(output: Path, leave: bool, arguments: Sequence[str]) -> None:
    present = [name for name in (f"{output}.bin", f"{output}.idx") if Path(name).exists()]
    if present and not leave and "--replace" not in arguments:
        raise UsageError(
            f"{' and '.join(present)}: exists already", "--replace builds it again; or name another --output"
        )
    if leave and "--dedup" in arguments:
        subject = "--dedup finds copies across nodes only when the pairs come home"
        raise UsageError(subject, "leave out --leave or --dedup")


def _cut(
    arguments: Sequence[str], count: int, folder: Path, output: Path, leave: bool, tell: Tell
) -> list[Share]:
    argv = ["data-shares", *arguments, "--count", str(count), "--folder", str(folder)]
    inputs = ask_trainer(partial(decode, InputShares), argv, called="clusterctl data build")
    total, shares = sum(share.bytes for share in inputs.shares), len(inputs.shares)
    if not shares:
        raise UsageError("the inputs are empty", "check --input")
    tell("share", f"{size(total)} of inputs in {plural(shares, 'share')} for {plural(count, 'node')}")
    parent = f"{'data' if leave else 'tmp/data'}/{output.name}"
    return [
        Share(share.folder, inputs.words, f"{parent}/{number:05d}-of-{shares:05d}")
        for number, share in enumerate(inputs.shares)
    ]


def _push_code(
    cluster: Cluster, nodes: Sequence[Node], connections: Connections, tell: Tell
) -> dict[str, str]:
    from dataclasses import replace

    from clusterctl.jobs.job import Job
    from clusterctl.runs.prepare.stage import push_code

    return push_code(replace(cluster, nodes=tuple(nodes)), Job("data", train={}), connections, tell)


# -- on one node


def _build(node: Node, link: Connection, share: Share, code: str, progress: Progress) -> Built:
    """Push a share to its node and build it there, unless the node has built the same inputs before."""
    from clusterctl.transfer import push

    manifest = push.make_manifest(share.folder, everything=True)
    stored = push.push_store(link, push.Source(share.folder, manifest), "data")
    folder = posixpath.join(link.hello().workdir, share.place)
    key = hashlib.sha256(json.dumps([manifest.id, share.words]).encode()).hexdigest()
    before = _done(link, folder)
    if before and before.key == key and _is_on_node(link, folder, before.manifest):
        return Built(node.name, folder, before.manifest, True)
    link.call("mkdir", {"path": folder})
    reported = BuildOutput(
        sum(entry.size for entry in manifest.files if entry.path.startswith("in/")), progress
    )
    made = _run(node, link, share, stored.path, posixpath.join(folder, PAIR), code, reported)
    link.put(posixpath.join(folder, DONE), BuildRecord(key, made).as_text(), mode=0o644)
    return Built(node.name, folder, made, False)


def _done(link: Connection, folder: str) -> BuildRecord | None:
    if not any(entry.name == DONE for entry in link.directory(folder).entries):
        return None
    return read_record(link.get(posixpath.join(folder, DONE)))


def _is_on_node(link: Connection, folder: str, manifest: Manifest) -> bool:
    """Return True if both files have the hashes that the manifest says."""
    for ending, output in manifest.outputs.items():
        if link.fingerprint(posixpath.join(folder, f"{PAIR}.{ending}")).sha256 != output.sha256:
            return False
    return True


class BuildOutput:
    """Reads the output of a running build on a node: reports its progress, and keeps the other lines."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._total, self._progress = total, progress
        self.streams = {"stdout": bytearray(), "stderr": bytearray()}

    def take(self, stream: str, data: bytes) -> None:
        self.streams[stream] += data
        *whole, rest = bytes(self.streams["stderr"]).split(b"\n")
        output = [line.split() for line in whole if line.startswith(b"progress ")]
        if output:
            shown = [line for line in whole if not line.startswith(b"progress ")]
            self.streams["stderr"] = bytearray(b"\n".join([*shown, rest]))
            self._progress(min(int(output[-1][1]), self._total), self._total)

    def text(self, stream: str) -> str:
        return self.streams[stream].decode("utf-8", "replace")


def _run(
    node: Node, link: Connection, share: Share, stored: str, prefix: str, code: str, reported: BuildOutput
) -> Manifest:
    python = rank_python(node.python, node.setup)
    python = python.replace("~", link.hello().home, 1) if python.startswith("~/") else python
    arguments = [
        "data-build",
        "--input",
        f"{stored}/in",
        "--tokenizer",
        f"{stored}/tokenizer",
        "--output",
        prefix,
        *share.words,
    ]
    if (share.folder / "model").is_dir():
        arguments += ["--language-model", f"{stored}/model/lid.bin"]
    argv = [python, "-m", "trainer", *arguments, "--replace", "--json", "--progress-lines"]
    done = link.run(argv, env={"PYTHONPATH": code}, setup=request_for(node.setup), on_output=reported.take)
    try:
        if done.ok:
            return read_manifest(reported.text("stdout"))
    except BadValue:
        pass
    raise _failed(node, python, reported.text("stderr"), done.code)


def _failed(node: Node, python: str, output: str, code: int) -> WorkFailed:
    """Return the error of a node's build, with the message that the build printed."""
    lines = output.strip().splitlines()
    reported = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines[-1:]
    hint = next((line.removeprefix("  try: ") for line in lines if line.startswith("  try: ")), "")
    if any("No module named" in line for line in reported):
        hint = f"{python} there needs numpy and tokenizers: see `python` in the inventory"
    text = "\n".join(f"{node.name}: {as_named_here(line)}" for line in reported)
    return WorkFailed(text or f"{node.name}: the build ended with code {code}", hint)


def as_named_here(line: str) -> str:
    """Return a place in a share, `.../in/000000-wiki-from-line-600.jsonl:2: why`, as `wiki.jsonl:601: why`."""

    def named(result: re.Match[str]) -> str:
        return f"{result['name']}{result['ending'] or ''}:{int(result['first'] or 1) + int(result['line']) - 1}: "

    return SHARED.sub(named, line)


# -- all together


def _tell_built(made: Sequence[Built], seconds: float, tell: Tell) -> None:
    tokens = sum(entry.manifest.tokens for entry in made)
    unchanged = sum(entry.unchanged for entry in made)
    subject = f"{tokens:,} tokens on {plural(len(made), 'node')} in {seconds:.1f} s"
    tell("build", subject + (f", {unchanged} of them built before" if unchanged else ""))


def _left(made: Sequence[Built], output: Path) -> ShardList:
    """Write the list of the pairs and their places on the nodes, and return it."""
    first = made[0].manifest
    file = output.with_name(output.name + ".shards.json")
    shards = ShardList(
        listing=str(file),
        format=1,
        documents=sum(entry.manifest.documents for entry in made),
        tokens=sum(entry.manifest.tokens for entry in made),
        token_type=first.token_type,
        append_eod=first.append_eod,
        vocab=first.vocab,
        eod=first.eod,
        eod_token=first.eod_token,
        shards=tuple(
            ShardEntry(
                entry.node,
                entry.prefix,
                entry.manifest.documents,
                entry.manifest.tokens,
                entry.manifest.outputs,
            )
            for entry in made
        ),
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, shards.as_text())
    return shards


def _brought(
    nodes: Sequence[Node],
    connections: Connections,
    made: Sequence[Built],
    pairs: Path,
    output: Path,
    dedup: bool,
    tell: Tell,
) -> PairCounts:
    """Pull every result, join them in order, and remove them from their nodes."""
    from clusterctl.transfer.pull import pull_tree

    by_node = {entry.node: entry for entry in made}
    began = time.monotonic()
    pulled = on_all(
        connections, nodes, lambda node, link: pull_tree(link, by_node[node.name].folder, pairs / node.name)
    )
    sent = sum(entry.bytes_sent for entry in pulled.values())
    tell("pull", f"{size(sent)} in {time.monotonic() - began:.1f} s")
    prefixes = [str(pairs / node.name / PAIR) for node in nodes]
    arguments = ["data-merge", *prefixes, "--output", str(output), "--replace", "--json"]
    joined = ask_trainer(partial(decode, PairCounts), [*arguments, *(["--dedup"] if dedup else [])])
    on_all(connections, nodes, lambda node, link: link.call("remove", {"path": by_node[node.name].folder}))
    return joined
