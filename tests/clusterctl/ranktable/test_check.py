"""Each rule has a case file that breaks exactly it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.ranktable import check as ranktable_check
from clusterctl.ranktable.check import (
    alike,
    check,
    check_file,
    inspect,
)
from clusterctl.ranktable.rules.fields import FIELDS

CASES = Path(__file__).parents[2] / "cases" / "ranktable"


def load_case(name: str) -> tuple[dict[str, Any], bytes]:
    case = json.loads((CASES / f"{name}.json").read_text())
    if "hex" in case:
        return case, bytes.fromhex(case["hex"])
    return case, (case["text"] if "text" in case else json.dumps(case["table"])).encode()


def written(case: dict[str, Any], raw: bytes, folder: Path) -> Path:
    """Write the file of a case: under another name, behind a link, as a folder, unreadable."""
    how = case["file"]
    path = folder / how.get("name", "table.json")
    if "folder" in how:
        path.mkdir()
    elif "fifo" in how:
        os.mkfifo(path)
    elif "link" in how:
        (folder / "inner.json").write_bytes(raw)
        path.symlink_to("inner.json")
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw)
        if "size" in how:
            # Without blocks behind it.
            os.truncate(path, how["size"])
        path.chmod(how.get("mode", 0o644))
    return path


@pytest.mark.parametrize("name", sorted(path.stem for path in CASES.glob("*.json")))
def test_a_case_breaks_exactly_its_rule(name: str, tmp_path: Path) -> None:
    case, raw = load_case(name)
    if "file" in case:
        found = list(check_file(written(case, raw, tmp_path), case.get("for")).findings)
    elif "other" in case:
        found = list(alike([inspect(raw), inspect(json.dumps(case["other"]))])[1].findings)
    else:
        found = check(raw, case.get("for"))
    seen = [(item.code, item.pointer, item.hccl_code, item.severity.value) for item in found]
    expected = [
        (item["code"], item["pointer"], item["hccl_code"], item.get("severity", "refused"))
        for item in case["expect"]
    ]
    assert seen == expected, case["about"]
    assert all(item.what and item.remedy for item in found)


# Each rule that HCCL and torch_npu have for a table, in the order of the reference, and what breaks it.
RULES = {
    "every scalar is a string, and in 2.0 a number": [
        "number-for-server-count",
        "number-for-version",
        "number-for-rank-id",
        "boolean-for-status",
        "null-for-device-ip",
        "number-for-super-pod-id",
        "number-for-super-device-id",
        "number-for-device-port",
        "number-for-host-ip",
        "2.0-string-for-rank-id",
        "2.0-boolean-for-rank-id",
        "2.0-string-for-rank-count",
        "2.0-device-id-negative",
        "2.0-rank-id-missing",
        "number-for-net-position",
        "number-for-net-protocol",
        "2.0-net-attr-number",
        "2.0-port-number",
        "2.0-control-plane-a-string",
    ],
    "server_count is the length of server_list": [
        "server-count-too-large",
        "server-count-no-number",
        "server-count-negative",
    ],
    "server_list and device are not empty": ["server-list-empty", "server-list-missing", "device-list-empty"],
    "status is completed": ["status-initializing", "status-missing", "status-in-capitals"],
    "server_id is 1 to 64 characters, once": [
        "server-id-empty",
        "server-id-65-characters",
        "server-id-66-bytes",
        "server-id-twice",
        "server-id-missing",
    ],
    "host_ip is an address": ["host-ip-no-address"],
    "device_id is a decimal number below the hardware's, once a server": [
        "device-id-negative",
        "device-id-no-number",
        "device-id-arabic-digit",
        "device-id-missing",
        "device-id-8-on-910a",
        "device-id-16-on-a3",
        "device-id-16-on-a2",
        "device-id-twice",
        "old-form-device-id-twice",
        "device-id-with-a-letter",
    ],
    "device_ip is an address, once in the table": [
        "device-ip-300",
        "device-ip-leading-zero",
        "device-ip-twice",
        "device-ip-twice-in-two-spellings",
        "old-form-address-twice",
    ],
    "every device has as many addresses": [
        "device-ip-counts-differ",
        "no-address-next-to-two",
    ],
    "device_ip is there between servers": [
        "device-ip-missing-on-two-servers",
        "address-missing-between-super-pods",
    ],
    "addresses are of one family": [
        "device-ip-families-mixed",
        "host-ip-families-mixed",
    ],
    "ranks are 0 to N-1": [
        "rank-gap",
        "rank-twice",
        "rank-missing",
        "2.0-rank-twice",
        "2.0-rank-gap",
        "old-form-rank-gap",
    ],
    "910A has as many devices on every server": ["unequal-counts-on-910a"],
    "the old form has 1, 2, 4, 8 or 16 devices a server": ["old-form-3-devices"],
    "1.2 has a super pod and a super-device id for every rank": [
        "super-pods-missing",
        "super-pod-list-empty",
        "super-device-id-missing",
    ],
    "a super-device id is a number, once in its pod": [
        "super-device-id-no-number",
        "super-device-id-twice",
        "super-device-id-4294967295",
        "super-device-id-twice-in-two-spellings",
    ],
    "a super_pod_id is up to 127 characters, once": [
        "super-pod-id-128-characters",
        "super-pod-id-empty",
        "super-pod-id-missing",
        "super-pod-id-twice",
    ],
    "the super pods' servers are the table's": [
        "super-pod-leaves-a-server-out",
        "super-pod-names-a-stranger",
        "server-in-two-super-pods",
    ],
    "ports are 1 to 65535": [
        "device-port-0",
        "device-port-65536",
        "host-port-0",
        "backup-port-0",
        "backup-port-65536",
        "device-vnic-port-70000",
        "2.0-device-port-70000",
        "2.0-host-port-0",
    ],
    "the name ends in .json": [
        "file-suffix",
        "file-two-suffixes",
        "file-in-a-folder-with-the-suffix",
    ],
    "JSON without comments, of a size that a table has": ["json-comment", "json-size"],
    "the ranks' tables are alike": ["differs-in-array-order"],
    "a regular file, no link, readable for its owner": [
        "file-folder",
        "file-fifo",
        "file-symlink",
        "file-unreadable",
    ],
    "the version is one that a reader knows": ["version-missing", "version-9", "version-1.1"],
    "the version is the hardware's": ["1.0-on-a3", "1.0-on-a5", "1.2-on-a2", "2.0-on-a3"],
    "the old form counts its groups and says its networks": [
        "old-form-group-count",
        "old-form-group-count-missing",
        "old-form-without-nic-location",
        "old-form-host-networks",
        "old-form-without-deploy-mode",
        "old-form-without-group-name",
        "old-form-without-instance-count",
        "old-form-without-device-num",
        "old-form-without-server-num",
    ],
    "2.0 counts its ranks, each with levels": [
        "2.0-rank-count",
        "2.0-levels-empty",
        "2.0-addresses-empty",
        "2.0-rank-count-0",
    ],
    "the table is in HCCL's own form": [
        "dialect-global-ranktable",
        "dialect-prefill-decode",
        "dialect-cloud",
    ],
    "2.0 has addresses of its types": [
        "2.0-address-300",
        "2.0-addr-nonsense",
        "2.0-addr-missing",
        "2.0-addr-type-ipv5",
        "2.0-eid-31-digits",
        "2.0-ipv6-of-seven-groups-and-a-gap",
        "2.0-backup-addr-of-an-eid",
        "2.0-backup-addr-of-another-kind",
        "2.0-plane-id-1025-bytes",
        "2.0-control-plane-without-port",
    ],
    "2.0 has 1 to 16 ports of 1 to 32 bytes": [
        "2.0-ports-missing",
        "2.0-ports-empty",
        "2.0-ports-17",
        "2.0-port-33-bytes",
    ],
    "2.0 has levels in the order of their layers": [
        "2.0-net-layer-9",
        "2.0-net-type-foo",
        "2.0-net-instance-id-empty",
        "2.0-layers-not-increasing",
    ],
    "2.0 has ids up to 64, and one backup rank": [
        "2.0-device-id-900",
        "2.0-local-id-65",
        "2.0-backup-rank-without-replaced",
        "2.0-backup-rank-of-a-living-rank",
        "2.0-two-backup-ranks",
    ],
    "detour is true or false": [
        "2.0-detour-yes",
    ],
    "ranks on the network of their hosts have a host_ip": [
        "net-position-host-without-host-ip",
    ],
    "a backup address is another device's": [
        "backup-address-own",
    ],
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_has_cases_that_break_it_and_nothing_else(rule: str) -> None:
    for name in RULES[rule]:
        case, _ = load_case(name)
        assert len(case["expect"]) == 1, name


CODES = {
    "address", "choice", "list-length", "list-too-long", "local-id", "net-instance", "net-layer", "plane-id",
    "pod-name",
    "scalar-type", "missing-key", "not-a-number", "empty-list", "version", "hardware", "status",
    "server-count", "server-id", "host-ip", "device-id", "device-ip", "ip-family", "rank-id", "device-count",
    "port", "super-pod", "super-device-id", "json-bom", "json-encoding", "json-syntax", "json-depth",
    "json-duplicate-key", "json-number", "json-size", "json-top", "dialect", "differs",
    "file-symlink", "file-kind", "file-suffix", "file-unreadable",
}  # fmt: skip


def test_every_code_has_a_case() -> None:
    cases = [json.loads(path.read_text()) for path in CASES.glob("*.json")]
    assert {one["code"] for case in cases for one in case["expect"]} == CODES


def test_no_code_is_without_a_case_here() -> None:
    """Compare the codes in the modules and in the table of fields with the list above."""
    folder = Path(ranktable_check.__file__).parent
    paths = [folder / "check.py", *(folder / "rules").glob("*.py")]
    text = "".join(path.read_text() for path in paths)
    called = set(re.findall(r'(?:add\(|warn\(|once\(|_alike\(|Finding\()\s*"([a-z-]+)"', text))
    of_fields = {field.code for field in FIELDS} - {"", "group-name"}
    assert called | of_fields <= CODES and len(called) > 20


def test_all_findings_come_at_once() -> None:
    _, raw = load_case("good-1.0")
    table = json.loads(raw)
    table["server_count"] = 2
    table["status"] = "initializing"
    table["server_list"][0]["device"][0]["rank_id"] = "7"
    assert {one.code for one in check(json.dumps(table))} == {"scalar-type", "status", "rank-id"}


def test_the_message_of_hccl_is_quoted_with_its_misleading_word() -> None:
    _, raw = load_case("number-for-server-count")
    (one,) = check(raw)
    assert one.hccl_message == "EI0017: Config server_count is missing in the ranktable file."
    assert "string" in one.what and '"server_count": "2"' in one.remedy


def test_the_hardware_is_guessed_from_the_version_and_said() -> None:
    for name, hardware in (
        ("good-1.0", "a2"),
        ("good-1.2", "a3"),
        ("good-2.0", "a5"),
        ("good-old-form", "910a"),
    ):
        report = inspect(load_case(name)[1])
        assert (report.hardware, report.guessed) == (hardware, True)
    assert not inspect(load_case("good-1.0")[1], "910a").guessed


def test_unknown_hardware_names_the_near_miss() -> None:
    with pytest.raises(UsageError) as caught:
        check("{}", "a2x")
    assert "a2" in caught.value.hint


def write(path: Path) -> Path:
    path.write_bytes(load_case("good-1.0")[1])
    return path


def codes_of(path: Path) -> list[str]:
    return [one.code for one in check_file(path).findings]


def test_a_good_file_has_no_findings(tmp_path: Path) -> None:
    report = check_file(write(tmp_path / "table.json"))
    assert (report.findings, report.servers, report.ranks) == ((), 2, 4)


def test_a_loop_of_links_is_found_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "table.json").symlink_to("table.json")
    assert codes_of(tmp_path / "table.json") == ["file-symlink", "file-unreadable"]


def test_a_missing_file_is_the_command_lines_fault(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"table\.json: no such file"):
        check_file(tmp_path / "table.json")


def test_findings_can_be_printed_whatever_the_table_holds() -> None:
    _, raw = load_case("good-1.0")
    odd = r"\u001b[2J\u202e"
    table = raw.replace(b'"192.1.27.6"', f'"{odd}"'.encode()).replace(b'"completed"', f'"{odd}"'.encode())
    found = check(table.replace(b'"version"', f'"{odd}": 1, "{odd}": 1, "version"'.encode()))
    assert {one.code for one in found} == {"json-duplicate-key", "device-ip", "status"}
    for one in found:
        for text in (one.pointer, one.what, one.remedy, one.hccl_message):
            assert text.encode().isascii() and "\x1b" not in text


def test_every_case_that_breaks_a_rule_is_filed_under_it() -> None:
    filed = {name for names in RULES.values() for name in names}
    broken = {path.stem for path in CASES.glob("*.json") if json.loads(path.read_text())["expect"]}
    about_json = {name for name in broken if name.startswith("json-")}
    assert broken - filed - about_json == {
        "backup-address", "server-is-a-string", "2.0-nine-levels", "old-form-two-addresses",
        "host-ip-for-rank-0-only", "dialect-cloud-initializing", "dialect-cloud-pod-twice", "2.0-25-addresses",
        "dialect-global-ranktable-bad-address",
        "dialect-prefill-decode-no-device-id",
    }  # fmt: skip
