"""Variants of a sweep, and where they run side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import InputFaults, UsageError
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs.job import Job
from clusterctl.jobs.sweep import (
    SweepRecord,
    SweepRequest,
    is_sweep,
    places_of,
    read_sweep,
    variants_of,
    write_sweep,
)

LAB = Cluster("lab", tuple(Node(name, name, name, devices=tuple(range(4))) for name in ("a", "b", "c")))
JOB = Job("job", ("true",))


def test_several_keys_give_all_combinations() -> None:
    found = variants_of(["train.optimizer.lr=1e-4,3e-4", "train.model={name: gpt, layers: 2},'a,b'"])
    assert [variant.settings for variant in found] == [
        ("train.optimizer.lr=1e-4", "train.model={name: gpt, layers: 2}"),
        ("train.optimizer.lr=1e-4", "train.model='a,b'"),
        ("train.optimizer.lr=3e-4", "train.model={name: gpt, layers: 2}"),
        ("train.optimizer.lr=3e-4", "train.model='a,b'"),
    ]
    assert found[1].label == "lr=1e-4 model='a,b'"
    # The same last word twice: the whole keys.
    assert variants_of(["a.x=1", "b.x=2"])[0].label == "a.x=1 b.x=2"


def test_all_errors_of_a_sweep_are_reported_together() -> None:
    with pytest.raises(InputFaults) as raised:
        variants_of(["x", "=1", "a=", "a=1,,2", "b=1,1", "c=1", "c=2", f"d={','.join(map(str, range(300)))}"])
    found = [f"{fault.where} {fault.what}" for fault in raised.value.faults]
    assert len(found) == 7 and all(fault.remedy for fault in raised.value.faults)
    assert "has a value twice" in found[4] and "given twice" in found[5] and "300 variants" in found[6]


def test_places_are_parts_of_the_nodes_or_of_their_devices() -> None:
    assert [cluster.names for cluster, _ in places_of(LAB, JOB, "nodes=1")] == [["a"], ["b"], ["c"]]
    # The third node is left over.
    assert [cluster.names for cluster, _ in places_of(LAB, JOB, "nodes=2")] == [["a", "b"]]
    halves = places_of(LAB, replace(JOB, devices=(0, 1, 3)), "devices=1")
    assert [(cluster.names[0], job.devices) for cluster, job in halves][:4] == [
        ("a", (0,)),
        ("a", (1,)),
        ("a", (3,)),
        ("b", (0,)),
    ]
    for each in ("nodes=4", "devices=5", "devices", "nodes=0", "ranks=1", "nodes=x"):
        with pytest.raises(UsageError) as raised:
            places_of(LAB, JOB, each)
        assert raised.value.hint


def test_a_sweeps_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = SweepRecord(SweepRequest("/job.yaml", settings=("a=1",)), variants_of(["x=1,2"]))
    record = record.with_variant(1, replace(record.variants[1], run="r", phase="failed", problem="why"))
    write_sweep(tmp_path / "sweep-1", record)
    assert is_sweep(tmp_path, "sweep-1") and not is_sweep(tmp_path, "sweep-2")
    assert read_sweep(tmp_path / "sweep-1") == record
    (tmp_path / "sweep-1" / "sweep.json").write_text("{")
    with pytest.raises(UsageError, match="unreadable"):
        read_sweep(tmp_path / "sweep-1")
