"""Every recipe is understood; the small ones are trained by tests/live/test_training.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterctl import document as documents
from clusterctl.inventory import cluster as inventory_cluster
from clusterctl.jobs import job, plan

FOLDER = Path(__file__).resolve().parents[1] / "examples"
JOBS = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "cluster.yaml")
# Where the layout needs so many.
RANKS = {
    "ascend-345m": 8,
    "ascend-345m-plain": 8,
    "ascend-1.3b": 8,
    "ascend-2.7b": 8,
    "ascend-3.7b": 8,
    "gpt3-125m": 1,
    "gpt3-1.3b": 4,
    "gpt3-13b": 16,
    "gpt2-13b": 32,
    "gpt2-13b-tensor8": 32,
    "gpt2-52b": 128,
    "gpt2-1536x16": 8,
    "gpt2-2304x24": 32,
    "gpt3-175b": 1536,
    "glm-large": 8,
    "glm-10b": 16,
}


def test_there_are_recipes_and_an_inventory() -> None:
    cluster = inventory_cluster.load(FOLDER / "cluster.yaml")
    assert [len(node.devices) for node in cluster.nodes] == [8, 8, 8, 8]
    assert len(JOBS) >= 4


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_recipe_is_planned_on_the_example_cluster(path: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    copy = tmp_path / path.name
    copy.write_text(path.read_text(encoding="utf-8"))
    loaded = job.load(copy)
    cluster = inventory_cluster.load(FOLDER / "cluster.yaml").select(loaded.nodes)
    if loaded.train is None:
        made = plan.make_plan(cluster, loaded)
        assert made.nodes[1].processes[0].argv[-1] == "10.0.0.2"
        return
    world = RANKS.get(path.stem) or (32 if loaded.train["global_batch"] >= 512 else 4)
    train = {"hardware": {"kind": "npu", "devices_per_node": 8}, **loaded.train}
    question = {"train": train, "world_size": world, "name": loaded.name}
    answer = job.ask_trainer(["check"], json.dumps(question))
    assert answer["faults"] == []
    layout = answer["summary"]["layout"]
    assert layout["data"] * layout["tensor"] * layout["pipeline"] == world
    assert not [note for note in answer["summary"]["notes"] if "the job is called" in note]


def test_the_table_of_recipes_names_them_all() -> None:
    told = (FOLDER / "README.md").read_text(encoding="utf-8")
    named = {word.strip(" ,|") for line in told.splitlines() if line.startswith("|") for word in line.split()}
    assert {path.stem for path in JOBS} <= named


def test_the_smallest_recipes_can_be_started() -> None:
    ranks = {"tiny": 4, "tiny-deepspeed": 4, "blend": 8, "survive": 24, "gpt2-124m": 32, "gpt2-auto": 16}
    for name, world in ranks.items():
        train = documents.load_document(FOLDER / f"{name}.yaml").value["train"]
        answer = job.ask_trainer(["check"], json.dumps({"train": train, "world_size": world}))
        assert answer["faults"] == [], name
