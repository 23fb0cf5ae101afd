"""`plan` of trainings, on nodes that need not be there; and the schema that editors take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterctl.errors import UsageError
from clusterctl.inventory.cluster import Cluster, Node
from clusterctl.jobs import job, job_check, what_if
from clusterctl.jobs.job_check import job_schema
from tests.clusterctl.conftest import Run
from trainer.corpus.indexed import Writer

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TRAIN = """
train:
  model: gpt2-345M
  data: {prefix: x}
  steps: 100
  micro_batch: 4
  global_batch: 256
  precision: bf16
"""


@pytest.fixture
def run(command_line: Run) -> Run:
    """In a folder without an inventory."""
    return command_line


def test_a_training_is_planned_on_nodes_that_are_not_there(run: Run, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(TRAIN + "  parallel: auto\n")
    code, out, err = run("plan", "small.yaml", "--what-if", "nodes=2,devices=8,kind=npu")
    assert code == 0, err
    for said in (
        "16 ranks on 2 nodes",
        "tokens/s",
        "auto tried",
        "why other layouts are worse",
        "TFLOP/s per device",
        "assumed",
    ):
        assert said in out
    code, out, _ = run("plan", "small.yaml", "--what-if", "nodes=2,devices=8,kind=npu", "--json")
    summary = json.loads(out)["summary"]
    assert code == 0 and summary["chosen"]["best"][0]["data"] == 16
    assert summary["hardware"]["devices_per_node"] == 8


def test_a_corpus_that_the_model_cannot_read_is_refused_before_the_launch(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with Writer(tmp_path / "data" / "text", np.uint16) as writer:
        writer.add_document([[7, 283] * 400])
    text = TRAIN.replace("{prefix: x}", '{prefix: "{data}/text", split: "100,0,0"}')
    text = text.replace("steps: 100", "steps: 1")
    model = "{layers: 1, hidden: 8, heads: 1, sequence: 16, vocab: 20}"
    text = "data: ./data\n" + text.replace("gpt2-345M", model) + "  eval: {every: 0, batches: 0}\n"
    (tmp_path / "job.yaml").write_text(text)
    code, _, err = run("plan", "job.yaml", "--what-if", "nodes=1,devices=1,kind=npu")
    assert code == 2 and "train.data.prefix" in err
    file = tmp_path / "data" / "text.bin"
    assert f"{file}: has token id 283, but train.model.vocab is 20" in err
    assert "use vocab: 284" in err


def test_a_plan_begins_with_its_verdict_and_ends_with_1_when_it_does_not_fit(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "small.yaml").write_text(TRAIN)
    imagined = ("--what-if", "nodes=1,devices=8,kind=npu")
    code, out, err = run("plan", "small.yaml", *imagined)
    assert code == 0 and out.startswith("fits: ") and "assumed: an Ascend 910B" in out.splitlines()[0], err
    tight = ("--set", "train.hardware.memory=4")
    code, out, err = run("plan", "small.yaml", *imagined, *tight)
    assert code == 1 and out.startswith("does not fit: ") and "parallel: auto" in err
    code, out, err = run("plan", "small.yaml", *imagined, *tight, "--json")
    assert code == 1 and json.loads(out)["summary"]["fits"] is False


def test_bf16_on_a_chip_without_it_is_refused_with_its_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(TRAIN + "  hardware: {chip: 910A}\n")
    code, _, err = run("plan", "small.yaml", "--what-if", "nodes=1,devices=8,kind=npu")
    assert code == 2 and "small.yaml:8 train.precision: bf16 does not exist on an Ascend 910A" in err
    assert "use fp16 or fp32" in err


def test_a_recipe_is_planned_whole_where_neither_its_data_nor_its_nodes_are(run: Run) -> None:
    code, out, err = run(
        "plan", str(EXAMPLES / "gpt3-175b.yaml"), "--what-if", "nodes=192,devices=8,kind=cuda"
    )
    assert code == 0 and "1536 ranks on 192 nodes" in out and "[90,96)" in out
    assert "data" not in err


def test_fp16_on_cpus_is_planned_with_a_note(run: Run, tmp_path: Path) -> None:
    (tmp_path / "half.yaml").write_text(TRAIN.replace("bf16", "fp16"))
    for kind, noted in (("cpu", True), ("cuda", False)):
        code, out, err = run("plan", "half.yaml", "--what-if", f"nodes=1,devices=8,kind={kind}")
        assert code == 0 and "tokens/s" in out
        assert ("a CPU computes in fp16" in err) == noted


def test_what_is_surely_not_meant_is_said_and_stops_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gpt-52b.yaml").write_text(TRAIN)
    code, _, err = run("plan", "gpt-52b.yaml", "--what-if", "nodes=1,devices=8,kind=npu")
    assert code == 0 and "note: the job is called gpt-52b" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8", "not nodes="),
        ("node=8", "did you mean 'nodes'"),
        ("devices=8", "number of nodes is missing"),
        ("nodes=0", "not a number of nodes"),
        ("nodes=1e3", "not a number of nodes"),
        ("nodes=2,nodes=3", "given twice"),
        ("nodes=2,kind=gpu", "unknown kind 'gpu'"),
    ],
)
def test_imagined_nodes_that_make_no_sense_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        what_if.read(text)
    assert says in caught.value.message + caught.value.hint


def test_imagined_nodes_are_like_the_inventorys_first() -> None:
    there = Cluster(
        "lab", (Node("a", "a", "a", devices=(0, 1), kind="npu", python="py", device_ips=("1.2.3.4",)),)
    )
    made = what_if.read("nodes=3").cluster(lambda: there)
    assert [(node.name, node.devices, node.kind, node.python) for node in made.nodes] == [
        (f"what-if{n}", (0, 1), "npu", "py") for n in (1, 2, 3)
    ]
    assert made.nodes[0].device_ips == ()


def test_imagined_nodes_and_a_choice_of_real_ones_exclude_each_other(run: Run, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(TRAIN)
    code, _, err = run("plan", "small.yaml", "--what-if", "nodes=2", "--nodes", "node1")
    assert code == 2 and "leave out --nodes" in err


def test_every_rank_gets_what_the_inventory_says_of_devices_and_the_jobs_own_word_counts() -> None:
    nodes = tuple(Node(f"n{n}", "a", "a", devices=tuple(range(n)), kind="npu") for n in (1, 4))
    made = job.Job("j", train={"model": "gpt-tiny", "hardware": {"memory": 64, "kind": "cuda"}})
    part = job_check.train_part(made, Cluster("lab", nodes))
    assert part is not None
    assert part["hardware"] == {"kind": "cuda", "devices_per_node": 4, "memory": 64}


def test_the_schema_takes_every_recipe_and_refuses_a_wrong_key() -> None:
    from clusterctl.document import load_document

    schema = job_schema()
    for path in sorted(EXAMPLES.glob("*.yaml")):
        if path.name != "cluster.yaml":
            assert not list(faults(schema, load_document(path).value, path.name))
    recipe = load_document(EXAMPLES / "tiny.yaml").value
    recipe["train"]["micro_batsh"] = 1
    recipe["train"]["optimizer"]["lr"] = "fast"
    assert len(list(faults(schema, recipe, ""))) == 2
    told = schema["properties"]["train"]["properties"]
    assert all("description" in one for one in told.values())


def faults(schema: dict[str, Any], value: Any, place: str) -> list[str]:
    """As much of JSON schema as ours uses."""
    if "anyOf" in schema:
        ways = [faults(one, value, place) for one in schema["anyOf"]]
        return min(ways, key=len)
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{place}: {value!r}"]
    if "const" in schema:
        return [] if value == schema["const"] else [f"{place}: {value!r}"]
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "number": (int, float),
        "integer": int,
        "boolean": bool,
    }
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(isinstance(value, kinds[name]) for name in named if name != "null") and value is not None:
        return [f"{place}: {value!r} is no {named}"]
    found = []
    if isinstance(value, dict):
        known = schema.get("properties", {})
        more = schema.get("additionalProperties", True)
        for key, inner in value.items():
            if key in known:
                found += faults(known[key], inner, f"{place}.{key}")
            elif more is False:
                found.append(f"{place}: unknown {key}")
        found += [f"{place}: no {key}" for key in schema.get("required", []) if key not in value]
    if isinstance(value, list):
        found += (
            [fault for one in value for fault in faults(schema["items"], one, place)]
            if "items" in schema
            else []
        )
    return found


def test_null_on_the_command_line_leaves_a_key_out(run: Run, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(TRAIN + "  optimizer: {lr: 1.0}\n  loss_scale: {initial: 8}\n")
    where = ("--what-if", "nodes=2,devices=8,kind=npu", "--json")
    words = ("--set", "train.optimizer.lr=null", "--set", "train.loss_scale=null")
    code, _, err = run("plan", "small.yaml", *where, *words)
    assert code == 0, err
    code, _, err = run("plan", "small.yaml", *where, "--set", "train.steps=null")
    assert code == 2 and "train.steps" in err and "None" not in err
