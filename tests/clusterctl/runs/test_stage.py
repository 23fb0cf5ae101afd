"""Data that is already on the nodes: fingerprints from a real agent are compared before a run starts."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.files import fingerprint as asked
from clusterctl.errors import InputFaults, WorkFailed
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import job as jobs
from clusterctl.runs.prepare.stage import compare_data, faults_of, push_data
from clusterctl.transport.answers import FolderFingerprint
from clusterctl.transport.connection import Connection
from clusterctl.transport.fanout import Connections
from tests.support.scripted import ScriptedTransport


def pair(folder: Path, name: str, lengths: tuple[int, ...] = (3, 4)) -> None:
    """A pair in Megatron's format, two bytes a token."""
    starts = [2 * sum(lengths[:number]) for number in range(len(lengths))]
    count = len(lengths)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, count, count + 1)
    body = struct.pack(f"<{count}i{count}q{count + 1}q", *lengths, *starts, *range(count + 1))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.idx").write_bytes(head + body)
    (folder / f"{name}.bin").write_bytes(bytes(2 * sum(lengths)))


def test_a_node_tells_all_files_and_what_is_wrong_with_them(link: Connection, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    pair(folder / "deep", "good")
    pair(folder, "cut")
    (folder / "cut.bin").write_bytes(bytes(12))
    pair(folder, "short")
    (folder / "short.idx").write_bytes((folder / "short.idx").read_bytes()[:-5])
    pair(folder, "alone")
    (folder / "alone.bin").unlink()
    pair(folder, "empty", ())
    (folder / ".hidden").write_text("no")
    outputs = {"bin": {"bytes": 14, "sha256": "0" * 64}, "gone": {"bytes": 1, "sha256": ""}}
    (folder / "deep" / "good.manifest.json").write_text(json.dumps({"outputs": outputs}))
    (folder / "odd.manifest.json").write_text("[]")
    found = link.ask(FolderFingerprint, "fingerprint_folder", {"path": str(folder)})
    assert found.sizes["deep/good.bin"] == 14 and ".hidden" not in found.sizes
    assert found.sizes.keys() == found.hashes.keys()
    assert sorted(found.faults) == [
        "alone.idx: its .bin is missing",
        "cut.bin: has 12 bytes, but its index ends at 14",
        "deep/good.bin: is not the file that was built: its hash differs",
        "deep/good.gone: is missing, and deep/good.manifest.json names it",
        "odd.manifest.json: not a manifest of a build",
        "short.idx: has 77 bytes; its header asks for 82: it was cut",
    ]
    assert link.ask(FolderFingerprint, "fingerprint_folder", {"path": str(tmp_path / "none")}).missing


def test_a_large_file_is_told_by_blocks_spread_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "WHOLE", 1000)
    monkeypatch.setattr(asked, "BLOCK", 64)
    content = bytearray(range(256)) * 400
    names = {}
    for name, at in (
        ("same", None),
        ("alike", None),
        ("first", 0),
        ("last", -1),
        ("middle", 100_000 // 63 * 20 + 5),
    ):
        changed = bytearray(content)
        if at is not None:
            changed[at] ^= 1
        (tmp_path / name).write_bytes(bytes(changed))
        names[name] = asked.fingerprint_of(str(tmp_path / name), len(changed))
    assert names["same"] == names["alike"] and len(set(names.values())) >= 3
    assert names["same"].startswith("sample:") and names["first"] != names["same"] != names["last"]
    (tmp_path / "small").write_bytes(b"x")
    assert asked.fingerprint_of(str(tmp_path / "small"), 1).startswith("sha256:")


def answer(missing: bool = False, faults: tuple[str, ...] = (), **files: Any) -> FolderFingerprint:
    sizes, hashes = ({name: file[part] for name, file in files.items()} for part in (0, 1))
    return FolderFingerprint("/d", missing, sizes, hashes, faults)


def sent(**files: Any) -> dict[str, Any]:
    """Return a fingerprint as a node sends it."""
    return dict(json.loads(json.dumps(asdict(answer(**files)))))


def test_what_is_wrong_is_told_with_its_nodes_the_commonest_copy_being_right() -> None:
    good = answer(a=[3, "x"], b=[4, "y"])
    assert faults_of("/d", {"node1": good, "node2": good}) == []
    told = faults_of(
        "/d",
        {
            "node1": good,
            "node2": answer(missing=True),
            "node3": answer(a=[3, "x"]),
            "node4": answer(a=[3, "other"], b=[9, "z"], faults=("b: was cut",)),
            "node5": good,
            "node6": answer(),
        },
    )
    assert sorted(told) == [
        "node2: /d: no such folder",
        "node3: /d/b: is missing",
        "node4: /d/a: differs from the other nodes'",
        "node4: /d/b: has 9 bytes, on others 4",
        "node4: /d/b: was cut",
        "node6: /d: is empty",
    ]
    assert faults_of("/d", {f"node{n}": answer(missing=True) for n in (1, 2, 3)}) == [
        "node[1-3]: /d: no such folder"
    ]


def cluster(count: int) -> Cluster:
    return Cluster("c", tuple(Node(f"node{n}", f"h{n}", f"10.0.0.{n}") for n in range(1, count + 1)))


def test_a_run_begins_only_where_all_nodes_have_the_same(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("command: [a]\ndata_there: ~/wiki\n")
    job = jobs.load(tmp_path / "job.yaml")
    assert job.data_there == "~/wiki"
    told: list[str] = []
    good = {**sent(a=[3, "x"]), "path": "/home/u/wiki"}
    with Connections(ScriptedTransport({("*", "fingerprint_folder"): good})) as connections:
        paths = push_data(cluster(2), job, connections, lambda phase, what: told.append(what))
    assert paths == {"node1": "/home/u/wiki", "node2": "/home/u/wiki"}
    assert "1 file, 3 B, whole and alike on 2 nodes" in told[0]
    table = {("*", "fingerprint_folder"): good, ("node2", "fingerprint_folder"): sent(a=[3, "y"])}
    with Connections(ScriptedTransport(table)) as connections, pytest.raises(WorkFailed) as caught:
        compare_data(cluster(3), "/d", connections, lambda phase, what: None)
    assert "nothing was started:\nnode2: /d/a: differs from the other nodes'" in caught.value.message


def test_a_job_names_its_data_once(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for text, says in (
        ("data_there: wiki\n", "is not an absolute path"),
        ("data_there: /wiki\ndata: ./data\n", "`data` is given too"),
    ):
        (tmp_path / "job.yaml").write_text("command: [a]\n" + text)
        with pytest.raises(InputFaults, match=says):
            jobs.load(tmp_path / "job.yaml")
