"""Tables in other versions and forms: what a user types, and what comes back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from clusterctl.cli.commands import application
from clusterctl.errors import InputFaults, UsageError
from clusterctl.ranktable.api import RankTable, load, parse
from clusterctl.ranktable.edit import to_version

EXAMPLES = Path(__file__).parents[3] / "rank_tables"
CASES = Path(__file__).parents[2] / "cases" / "ranktable"
PARTS = [f"hccl_8p_01234567_10.155.111.{140 + place}.json" for place in range(4)]

program = application()


def text_of(name: str) -> str:
    return json.dumps(json.loads((CASES / f"{name}.json").read_text())["table"])


@pytest.fixture(autouse=True)
def folder(here: Path) -> Path:
    for name in (*PARTS, "hccl_4s_32p.json", "plan.yaml"):
        shutil.copy(EXAMPLES / name, here)
    for name in ("good-1.0", "good-1.2", "good-2.0", "dialect-global-ranktable", "dialect-prefill-decode"):
        (here / f"{name}.json").write_text(text_of(name))
    return here


def typed(*words: str) -> Result:
    return CliRunner().invoke(program, ["ranktable", *words])


def refused(*words: str) -> UsageError:
    result = typed(*words)
    assert isinstance(result.exception, UsageError), result.output
    return result.exception


# -- versions


def bare() -> RankTable:
    return to_version(parse(text_of("good-1.2")), "1.0")


def test_1_0_becomes_1_2_again_with_the_facts_of_a_1_2_table() -> None:
    whole = parse(text_of("good-1.2"))
    assert to_version(bare(), "1.2", facts=whole) == whole
    pods = tuple(replace(pod, super_pod_id="x") for pod in whole.super_pods)
    assert [pod.super_pod_id for pod in to_version(bare(), "1.2", whole, "x").super_pods] == ["x"]
    assert pods


def test_1_2_without_the_facts_names_each_server_and_device() -> None:
    with pytest.raises(InputFaults) as caught:
        to_version(bare(), "1.2", super_pod="0")
    assert [one.where for one in caught.value.faults] == [
        f"/server_list/{server}/device/{device}" for server in (0, 1) for device in (0, 1)
    ]
    with pytest.raises(UsageError, match=r"2\.0"):
        to_version(bare(), "2.0")


def test_versions_are_turned_on_the_command_line() -> None:
    assert typed("convert", "good-1.2.json", "--to", "1.0", "-o", "a.json").exit_code == 0
    assert "super-device id" in refused("convert", "a.json", "--to", "1.2", "-o", "b.json").message
    typed("convert", "a.json", "--to", "1.2", "--facts", "good-1.2.json", "-o", "b.json")
    assert load(Path("b.json")) == load(Path("good-1.2.json"))


# -- forms


@pytest.mark.parametrize("name", ["dialect-global-ranktable", "dialect-prefill-decode"])
def test_a_kubernetes_form_is_written_as_hccl_reads_it(name: str) -> None:
    assert typed("check", f"{name}.json").exit_code == 1
    assert typed("convert", f"{name}.json", "-o", "out.json").exit_code == 0
    assert typed("check", "out.json").exit_code == 0
    table = load(Path("out.json"))
    assert [server.server_id for server in table.servers] == ["10.0.0.1", "10.0.0.2"]
    assert [device.rank_id for _, device in table.by_rank()] == list(range(table.ranks))


def test_an_operators_own_keys_are_kept() -> None:
    server = parse(text_of("good-operator-keys")).as_json()["server_list"][0]
    assert server["container_ip"] == "172.16.0.4" and server["hardware_type"] == "800I-A2-64G"


def test_there_and_back_through_a_plan() -> None:
    assert typed("convert", "hccl_4s_32p.json", "--to", "plan", "-o", "p.yaml").stdout == "p.yaml: written\n"
    assert typed("build", "--from", "p.yaml", "-o", "again.json").exit_code == 0
    assert Path("again.json").read_text() == Path("hccl_4s_32p.json").read_text()
    assert typed("convert", "plan.yaml", "-o", "-").stdout == Path("hccl_4s_32p.json").read_text()
    assert "another file" in refused("convert", "good-1.0.json", "--to", "plan", "-o", "p.yaml").message


def test_a_plan_stands_alone() -> None:
    assert "alone" in refused("build", "--from", "plan.yaml", "--devices", "8").message


def test_a_table_becomes_a_hostfile_and_a_hostfile_a_plan_to_be_filled_in() -> None:
    hosts = typed("convert", "hccl_4s_32p.json", "--to", "deepspeed").stdout
    assert hosts.splitlines()[0] == "10.155.111.140 slots=8"
    Path("hosts").write_text(hosts)
    plan = typed("convert", "hosts", "--to", "plan", "--lossy").stdout
    assert 'server_id: "10.155.111.143"' in plan and "Fill in device_ips" in plan
    assert "deepspeed" in refused("convert", "hccl_4s_32p.json", "--to", "deepsped").hint
    error = refused("convert", "hosts", "--to", "1.0")
    assert "has no addresses" in error.message and "build --hostfile hosts" in error.hint


# -- merging and comparing


def _inventory() -> Path:
    path = Path("cluster.yaml")
    path.write_text(
        "nodes:\n"
        + "".join(f"  n{n}: {{host: 10.155.111.{n}, kind: npu, devices: 8}}\n" for n in (143, 140, 142, 141))
    )
    return path


def test_merge_sorts_as_the_inventory() -> None:
    typed("merge", *PARTS, "--sort", "inventory", "-c", str(_inventory()), "-o", "m.json")
    assert [one.server_id[-3:] for one in load(Path("m.json")).servers] == ["143", "140", "142", "141"]
    Path("cluster.yaml").write_text("nodes:\n  n140: {host: 10.155.111.140, kind: npu, devices: 8}\n")
    error = refused("merge", *PARTS, "--sort", "inventory", "-c", "cluster.yaml")
    assert isinstance(error, InputFaults) and len(error.faults) == 3


def test_unequal_servers_are_refused_with_their_file_and_pointer() -> None:
    typed("slice", PARTS[2], "--ranks", "[0,4)", "-o", "half.json")
    error = refused("merge", PARTS[0], "half.json", "--for", "910a", "-o", "m.json")
    assert isinstance(error, InputFaults)
    assert error.faults[0].where == "half.json /server_list/0/device"


def test_tables_of_one_run_must_be_alike() -> None:
    shutil.copy(PARTS[0], "copy.json")
    assert typed("check", "--same", PARTS[0], "copy.json").exit_code == 0
    result = typed("check", "--same", PARTS[0], PARTS[1])
    assert result.exit_code == 1 and "EI0005" in result.stdout
    assert typed("check", PARTS[0], PARTS[1]).exit_code == 0


def test_version_2_0_is_shown_and_cut() -> None:
    assert "223.0.0.11" in typed("show", "good-2.0.json").stdout
    typed("slice", "good-2.0.json", "--ranks", "[1,2)", "-o", "one.json")
    (rank,) = json.loads(Path("one.json").read_text())["rank_list"]
    assert (rank["rank_id"], rank["device_id"]) == (0, 1)
