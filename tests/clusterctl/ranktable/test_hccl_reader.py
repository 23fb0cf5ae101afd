"""Compare the check with an independent reader; `--cases 20000` compares many more tables."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from clusterctl.ranktable.check import inspect
from clusterctl.ranktable.finding import Severity
from tests.conftest import Cases
from tests.support import random_tables
from tests.support.hccl_reader import reads

CASES = Path(__file__).parents[2] / "cases" / "ranktable"


@pytest.mark.parametrize("version", random_tables.VERSIONS)
def test_a_reader_of_its_own_agrees_on_random_tables(version: str, cases: Cases) -> None:
    differences, counts = [], Counter[bool]()
    for number, random in cases(200):
        table = random_tables.mutant(random, version)
        if hardware := random_tables.hardware_for(table, version, number):
            counts[bool(reads(table, hardware))] += 1
            if difference := random_tables.compare(table, hardware):
                differences.append(f"table {number}: {difference}")
    assert differences == []
    assert min(counts[False], counts[True]) > sum(counts.values()) / 4


def test_a_device_outside_of_super_pods_needs_no_super_device_id() -> None:
    table = random_tables.good(Random(0), "1.2")
    del table["super_pod_list"]
    for server in table["server_list"]:  # type: ignore[attr-defined]
        for device in server["device"]:
            del device["super_device_id"]
    assert random_tables.compare(table, "a3") == ""


@pytest.mark.parametrize("version", random_tables.VERSIONS)
def test_tables_are_good_before_they_are_changed(version: str) -> None:
    for number in range(40):
        table = random_tables.good(Random(number), version)
        assert reads(table) == ""
        findings = inspect(json.dumps(table)).findings
        assert not [finding for finding in findings if finding.severity is Severity.REFUSED]


def test_the_reader_agrees_with_every_case_of_a_table() -> None:
    for path in sorted(CASES.glob("*.json")):
        case = json.loads(path.read_text())
        table, hardware = case.get("table"), case.get("for", "")
        if table is None or "file" in case or "other" in case or hardware in ("a5", "a3"):
            continue
        if path.stem.startswith(("dialect-global", "dialect-prefill", "version-1.1")):
            continue
        findings = inspect(json.dumps(table), hardware or None).findings
        refused = any(finding.severity is Severity.REFUSED for finding in findings)
        assert refused == bool(reads(table, hardware)), path.stem
