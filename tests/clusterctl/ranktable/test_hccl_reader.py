"""Compare the check with an independent reader; `python -m bench.fuzz.hccl` compares many more tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.fuzz import hccl
from clusterctl.ranktable.check import inspect
from clusterctl.ranktable.finding import Severity
from tests.support.hccl_reader import reads

CASES = Path(__file__).parents[2] / "cases" / "ranktable"


def test_a_reader_of_its_own_agrees_on_random_tables_of_every_version() -> None:
    counts, differences = hccl.run(200, 7)
    assert differences == []
    for version in hccl.VERSIONS:
        assert counts[f"{version} read"] > 50 and counts[f"{version} refused"] > 50


def test_a_device_outside_of_super_pods_needs_no_super_device_id() -> None:
    table = hccl.mutant(11, "1.2", 1199)
    assert "super_pod_list" not in table
    assert hccl.compare(table, "a3") == ""


@pytest.mark.parametrize("version", hccl.VERSIONS)
def test_tables_are_good_before_they_are_changed(version: str) -> None:
    for number in range(40):
        table = hccl.good(hccl.Random(f"{number}"), version)
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
