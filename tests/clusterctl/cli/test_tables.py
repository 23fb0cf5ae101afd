"""The commands over rank tables, hostfiles and node sets: what a user types, and what comes back."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from clusterctl.cli.commands import application
from clusterctl.cli.screen import report_error
from clusterctl.errors import Fault, InputFaults, UsageError
from clusterctl.ranktable.api import Device, RankTable, Server
from clusterctl.ranktable.check import inspect

EXAMPLES = Path(__file__).parents[3] / "rank_tables"
PARTS = [f"hccl_8p_01234567_10.155.111.{140 + place}.json" for place in range(4)]

program = application()


@pytest.fixture(autouse=True)
def folder(here: Path) -> Path:
    """A folder with the example parts, and nothing of the user's own settings."""
    for name in PARTS:
        shutil.copy(EXAMPLES / name, here)
    return here


def typed(*words: str, stdin: str = "") -> Result:
    return CliRunner().invoke(program, words, input=stdin)


def refused(*words: str) -> UsageError:
    """The error that the door turns into words and exit code 2."""
    result = typed(*words)
    assert isinstance(result.exception, UsageError), result.output
    assert result.exception.exit_code == 2
    return result.exception


def test_merge_writes_the_vendors_name_and_says_it(folder: Path) -> None:
    result = typed("ranktable", "merge", *PARTS)
    assert (result.exit_code, result.stdout) == (0, "hccl_4s_32p.json: written: 4 servers, 32 ranks\n")
    assert (folder / "hccl_4s_32p.json").read_text() == (EXAMPLES / "hccl_4s_32p.json").read_text()
    assert "already has this table" in typed("ranktable", "merge", *PARTS).stdout


def test_merge_keeps_another_merge_of_the_same_size(folder: Path) -> None:
    typed("ranktable", "merge", *PARTS)
    error = refused("ranktable", "merge", *reversed(PARTS))
    assert "another file" in error.message and "--force" in error.hint
    assert typed("ranktable", "merge", *reversed(PARTS), "--force").exit_code == 0


def test_a_dry_run_shows_the_table_and_writes_nothing(folder: Path) -> None:
    result = typed("ranktable", "merge", *PARTS, "--dry-run")
    assert "would be written" in result.stdout and '"server_count": "4"' in result.stdout
    assert not (folder / "hccl_4s_32p.json").exists()


def test_a_dry_run_refuses_what_the_real_one_would(folder: Path) -> None:
    (folder / "t.json").write_text("another")
    for where in ("t.json", "t.txt", "."):
        dry = refused("ranktable", "merge", PARTS[0], "-o", where, "--dry-run")
        assert dry.message == refused("ranktable", "merge", PARTS[0], "-o", where).message
    forced = typed("ranktable", "merge", PARTS[0], "-o", "t.json", "--force", "--dry-run")
    assert "would be written" in forced.stdout
    assert (folder / "t.json").read_text() == "another"
    for noun, target in (("ranktable", "plan"), ("hostfile", "slurm")):
        dry = refused(noun, "convert", PARTS[0], "--to", target, "-o", "t.json", "--dry-run")
        assert "another file" in dry.message
    typed("ranktable", "merge", *PARTS)
    assert "already has this table" in typed("ranktable", "merge", *PARTS, "--dry-run").stdout


def test_an_option_that_says_nothing_is_no_option_left_out() -> None:
    for words in (("slice", PARTS[0], "--ranks"), ("slice", PARTS[0], "--nodes"), ("build", "--devices")):
        assert refused("ranktable", *words, "").exit_code == 2
    assert (
        "is not a choice of devices"
        in refused("ranktable", "build", "--devices", "\N{SUPERSCRIPT TWO}").message
    )


def test_json_gives_the_files_hash(folder: Path) -> None:
    said = json.loads(typed("ranktable", "merge", *PARTS, "-o", "t.json", "--json").stdout)
    digest = hashlib.sha256((folder / "t.json").read_bytes()).hexdigest()
    assert said == {
        "file": "t.json",
        "version": "1.0",
        "servers": 4,
        "ranks": 32,
        "sha256": digest,
        "written": True,
    }


def test_a_dash_is_stdout_and_nothing_else_is_on_it() -> None:
    said = typed("ranktable", "merge", *PARTS, "-o", "-").stdout
    assert said == (EXAMPLES / "hccl_4s_32p.json").read_text()


def test_merging_one_server_twice_is_refused_once() -> None:
    error = refused("ranktable", "merge", PARTS[0], PARTS[0])
    assert isinstance(error, InputFaults) and len(error.faults) == 1


def test_check_exits_1_and_quotes_hccl(folder: Path) -> None:
    (folder / "bad.json").write_text((folder / PARTS[0]).read_text().replace('"completed"', '"initializing"'))
    result = typed("ranktable", "check", PARTS[0], "bad.json")
    assert result.exit_code == 1
    assert f"{PARTS[0]}: valid: 1 server, 8 ranks (checked as a2; use --for to choose)" in result.stdout
    assert "/status" in result.stdout and "30 minutes" in result.stdout
    (good, bad) = json.loads(typed("ranktable", "check", PARTS[0], "bad.json", "--json").stdout)
    assert good["ok"] and not bad["ok"] and bad["findings"][0]["pointer"] == "/status"


def test_check_exits_0_on_a_good_table_and_2_on_none() -> None:
    assert typed("ranktable", "check", PARTS[0], "--for", "910a").exit_code == 0
    assert "no such file" in refused("ranktable", "check", "none.json").message


def test_a_file_of_thousands_of_faults_is_shown_in_part(folder: Path) -> None:
    table = json.loads((EXAMPLES / "hccl_4s_32p.json").read_text())
    for server in table["server_list"]:
        for device in server["device"]:
            device["device_id"], device["rank_id"] = 0, 0
    (folder / "bad.json").write_text(json.dumps(table))
    assert "and 14 more; --json lists them all" in typed("ranktable", "check", "bad.json").stdout


@pytest.mark.slow
def test_an_input_of_thousands_of_errors_is_reported_in_part(capsys: pytest.CaptureFixture[str]) -> None:
    report_error(
        InputFaults(
            [Fault(f"big.json /server_list/{number}", f"{number} is wrong") for number in range(78_000)]
        )
    )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 51
    assert lines[0] == "error: big.json /server_list/0: 0 is wrong"
    assert lines[-1] == "error: and 77,950 more"
    report_error(InputFaults([Fault(f"big.json /{number}", "is wrong") for number in range(78_000)]))
    assert capsys.readouterr().err == (
        "error: big.json /0: is wrong (also big.json /1, big.json /2 and 77,997 more places)\n"
    )


def test_show_draws_every_rank() -> None:
    lines = typed("ranktable", "show", PARTS[1]).stdout.splitlines()
    assert lines[0].split() == ["rank", "server", "device", "address"]
    assert lines[-1].split() == ["7", "10.155.111.141", "7", "192.4.27.9"] and len(lines) == 9
    ranks = json.loads(typed("ranktable", "show", PARTS[1], "--json").stdout)["ranks"]
    assert ranks[7] == {"rank": 7, "server": "10.155.111.141", "device": 7, "address": "192.4.27.9"}


def test_show_draws_a_large_table_by_server(folder: Path) -> None:
    wide = RankTable(
        tuple(
            Server(
                f"10.0.0.{number}",
                tuple(Device(at, f"192.{at}.0.{number}", number * 8 + at) for at in range(8)),
            )
            for number in range(40)
        )
    )
    (folder / "wide.json").write_text(wide.render())
    lines = typed("ranktable", "show", "wide.json").stdout.splitlines()
    assert len(lines) == 41
    assert lines[2].split() == ["[8,16)", "10.0.0.1", "[0,8)", "192.0.0.1", "...", "192.7.0.1"]
    assert len(typed("ranktable", "show", "wide.json", "--by", "rank").stdout.splitlines()) == 321
    assert "by rank or by server" in refused("ranktable", "show", "wide.json", "--by", "node").message


def test_check_names_who_objects(folder: Path) -> None:
    table = json.loads((folder / PARTS[0]).read_text())
    table["server_list"][0]["device"][0]["device_id"] = "0x"
    (folder / "odd.json").write_text(json.dumps(table))
    assert "HCCL reads the table all the same" in typed("ranktable", "check", "odd.json").stdout
    (report,) = json.loads(typed("ranktable", "check", "odd.json", "--json").stdout)
    assert report["findings"][0]["severity"] == "wrong" and report["ok"]
    assert typed("ranktable", "check", "odd.json").exit_code == 0
    assert typed("ranktable", "check", "odd.json", "--strict").exit_code == 1
    table["server_list"][0]["device"][0]["device_id"] = 0
    (folder / "odd.json").write_text(json.dumps(table))
    said = typed("ranktable", "check", "odd.json").stdout
    assert "HCCL would fail with EI0017: Config device_id is missing" in said


def test_tables_of_two_versions_name_that_cause_first(folder: Path) -> None:
    a3 = json.loads((folder / PARTS[1]).read_text()) | {"version": "1.2"}
    (folder / "a3.json").write_text(json.dumps(a3))
    error = refused("ranktable", "merge", PARTS[0], "a3.json")
    assert isinstance(error, InputFaults) and len(error.faults) == 10
    assert error.faults[0].what == f"their versions differ: 1.0 in {PARTS[0]}, 1.2 in a3.json"


def test_the_servers_of_version_2_0_are_counted() -> None:
    case = json.loads((EXAMPLES.parent / "tests/cases/ranktable/good-2.0.json").read_text())
    report = inspect(json.dumps(case["table"]))
    assert (report.servers, report.ranks) == (1, 2)


def test_diff_exits_1_only_when_ranks_differ(folder: Path) -> None:
    (folder / "compact.json").write_text(
        json.dumps(json.loads((folder / PARTS[0]).read_text()), sort_keys=True)
    )
    assert typed("ranktable", "diff", PARTS[0], "compact.json").exit_code == 0
    by_node = typed("ranktable", "diff", PARTS[0], PARTS[1], "--by", "node")
    assert (by_node.exit_code, len(by_node.stdout.splitlines())) == (1, 2)
    assert by_node.stdout.startswith("10.155.111.140: ranks 0-7, devices 0-7 -> absent\n")
    result = typed("ranktable", "diff", PARTS[0], PARTS[1])
    assert result.exit_code == 1 and len(result.stdout.splitlines()) == 8


def test_a_slice_of_a_merge_is_the_part(folder: Path) -> None:
    typed("ranktable", "merge", *PARTS)
    typed("ranktable", "slice", "hccl_4s_32p.json", "--ranks", "[8,16)", "-o", "part.json")
    assert (folder / "part.json").read_text() == (folder / PARTS[1]).read_text()
    typed("ranktable", "slice", "hccl_4s_32p.json", "--drop", "10.155.111.[140,142-143]", "-o", "rest.json")
    assert (folder / "rest.json").read_text() == (folder / PARTS[1]).read_text()
    assert "[0,5)" in refused("ranktable", "slice", "hccl_4s_32p.json", "--ranks", "[0,4]").hint
    assert (
        "10.155.111.14"
        in refused("ranktable", "slice", "hccl_4s_32p.json", "--nodes", "10.155.111.14").message
    )


INVENTORY = """\
groups: {old: "node[1-2]"}
nodes:
  node[1-3]: {host: "10.0.0.{n}", devices: 8}
"""


def test_a_hostfile_is_built_from_the_inventory(folder: Path) -> None:
    (folder / "cluster.yaml").write_text(INVENTORY)
    assert typed("hostfile", "build", "-n", "node[1,3]").stdout == "10.0.0.1 slots=8\n10.0.0.3 slots=8\n"
    assert typed("hostfile", "build", "-x", "@old", "--slots", "2").stdout == "10.0.0.3 slots=2\n"
    assert typed("hostfile", "build", "--format", "mpich", "-n", "node2").stdout == "10.0.0.2:8\n"
    assert typed("hostfile", "build", "-o", "hosts").stdout == "hosts: written: 3 nodes\n"
    assert typed("hostfile", "check", "hosts").stdout == "hosts: ok: 3 nodes, 24 slots (deepspeed)\n"
    assert "another file" in refused("hostfile", "build", "-o", "hosts", "--slots", "2").message


def test_a_bad_hostfile_exits_1_with_every_line(folder: Path) -> None:
    (folder / "hosts").write_text("-oX slots=8\nnode1 slots=0\n")
    result = typed("hostfile", "check", "hosts")
    assert result.exit_code == 1 and "hosts:1:" in result.stdout and "hosts:2:" in result.stdout
    assert len(json.loads(typed("hostfile", "check", "hosts", "--json").stdout)["findings"]) == 2


def test_sets_expand_and_fold_as_nodeset_prints_them(folder: Path) -> None:
    assert typed("nodes", "expand", "node[1-3]!node2").stdout == "node1 node3\n"
    assert typed("nodes", "expand", "node[1-2]", "-S", r"\n").stdout == "node1\nnode2\n"
    assert typed("nodes", "fold", "node1", "node[2-3]").stdout == "node[1-3]\n"
    assert typed("nodes", "fold", "-", stdin="node1 node2\nnode3\n").stdout == "node[1-3]\n"
    assert json.loads(typed("nodes", "expand", "node[1-2]", "--json").stdout) == ["node1", "node2"]
    assert refused("nodes", "expand", "@old").hint == "the inventory has no groups"
    (folder / "cluster.yaml").write_text(INVENTORY)
    assert typed("nodes", "expand", "@old").stdout == "node1 node2\n"
    assert typed("nodes", "expand", "*!@old").stdout == "node3\n"


def test_a_slice_takes_the_inventorys_names_for_servers_that_the_table_knows_by_address(folder: Path) -> None:
    (folder / "lab.yaml").write_text(
        "nodes:\n"
        + "".join(f"  node{n}: {{host: 10.155.111.{140 + n}}}\n" for n in range(4))
        + "groups: {last: 'node[2-3]'}\n"
    )
    assert typed("ranktable", "merge", *PARTS, "-o", "t.json").exit_code == 0
    for words in (["--drop", "node[2-3]"], ["--nodes", "all!@last"], ["--drop", "10.155.111.[142-143]"]):
        done = typed("ranktable", "slice", "t.json", *words, "-c", "lab.yaml", "-o", "-")
        assert done.exit_code == 0, repr(done.exception)
        ids = [one["server_id"] for one in json.loads(done.stdout)["server_list"]]
        assert ids == ["10.155.111.140", "10.155.111.141"]
    (folder / "part.yaml").write_text("nodes:\n  node2: {host: 10.155.111.142}\n")
    refused = typed("ranktable", "slice", "t.json", "--drop", "node2", "-c", "part.yaml", "-o", "-")
    assert isinstance(refused.exception, UsageError) and "node2" in refused.exception.message


def test_a_narrow_terminal_gets_fewer_columns_and_paths_cut_in_the_middle() -> None:
    from rich.console import Console

    from clusterctl.cli.views.tables import table

    path = "/home/someone/.clusterctl/store/node1"
    drawn = table(
        ["NODE", "PATH", "BYTES", "TIME"], [["node1", path, 7, "0.1 s"]], ["BYTES"], ["TIME"], ["PATH"]
    )

    def shown(width: int) -> list[str]:
        console = Console(width=width, color_system=None)
        with console.capture() as output:
            console.print(drawn)
        return [line.rstrip() for line in output.get().splitlines()]

    assert len(shown(100)) == 3 and path in shown(100)[2] and "TIME" in shown(100)[0]
    for width in (60, 50, 30):
        head, _, row = shown(width)
        assert max(map(len, (head, row))) <= width and "…" in row and "re/node1 " in row
        assert ("TIME" in head) == (width > 30), head
