"""Every recipe is understood; the small ones are trained by tests/live/test_training.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterctl import document as documents
from clusterctl.inventory import cluster as inventory_cluster
from clusterctl.jobs import job, plan
from clusterctl.jobs.ask_trainer import ask_trainer
from trainer.plan.summary import check

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
    "glm-copa": 8,
    "gpt2-sft": 8,
    "llama-lora": 8,
    "qwen3-lora": 8,
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
    chip = loaded.train.get("hardware", {"chip": "910B"})["chip"]
    train = {**loaded.train, "hardware": {"chip": chip, "devices_per_node": 8}}
    question = {"train": train, "world_size": world, "name": loaded.name}
    answer = ask_trainer(dict, ["check"], json.dumps(question))
    assert answer["faults"] == []
    layout = answer["summary"]["layout"]
    assert layout["data"] * layout["tensor"] * layout["pipeline"] == world
    assert not [note for note in answer["summary"]["notes"] if "the job is called" in note]
    assert answer["summary"]["fits"]
    assert answer["summary"]["hardware"]["chip"] == chip


def test_recipes_of_other_sources_name_their_chip() -> None:
    """Only recipes that show a feature, on any nodes, name none."""
    for path in JOBS:
        train = documents.load_document(path).value.get("train", {})
        assert ("chip" in train.get("hardware", {})) == (path.stem in {*RANKS}), path.stem


# Samples a second (or days, "d") that the sources of the recipes published, and the chip that they name.
PUBLISHED = [
    ("ascend-345m", 8, "910A", 59.7),
    ("ascend-345m", 8, "V100-32", 37.8),
    ("ascend-345m-plain", 8, "910A", 227),
    ("ascend-345m-plain", 8, "A100-40", 235),
    ("ascend-1.3b", 8, "910A", 21.47),
    ("ascend-1.3b", 8, "V100-32", 15.71),
    ("ascend-2.7b", 8, "910A", 5.28),
    ("ascend-2.7b", 8, "V100-32", 4.125),
    ("ascend-3.7b", 8, "910A", 4.558),
    ("ascend-3.7b", 8, "V100-32", 3.12),
    ("glm-10b", 16, "910B", 25),
    ("glm-10b", 16, "A100-80", 31),
    # 2.5 billion tokens in 8 hours, 26 billion in 8 days.
    ("gpt3-125m", 1, "A100-40", 2.5e9 / 2048 / (8 * 3600)),
    ("gpt3-1.3b", 4, "A100-40", 26e9 / 2048 / (8 * 86400)),
]


@pytest.mark.parametrize(("name", "world", "chip", "published"), PUBLISHED)
def test_planned_rates_are_within_half_of_the_published_ones(
    name: str, world: int, chip: str, published: float
) -> None:
    train = documents.load_document(FOLDER / f"{name}.yaml").value["train"]
    train = {**train, "hardware": {"chip": chip, "devices_per_node": 8}}
    answer = check({"train": train, "world_size": world})
    time = answer["summary"]["time"]
    planned = time["tokens_per_second"] / answer["config"]["model"]["sequence"]
    assert 1 / 1.5 < planned / published < 1.5


def test_the_table_of_recipes_names_them_all() -> None:
    told = (FOLDER / "README.md").read_text(encoding="utf-8")
    named = {word.strip(" ,|") for line in told.splitlines() if line.startswith("|") for word in line.split()}
    assert {path.stem for path in JOBS} <= named


def test_the_smallest_recipes_can_be_started() -> None:
    ranks = {"tiny": 4, "tiny-deepspeed": 4, "blend": 8, "survive": 24, "gpt2-124m": 32, "gpt2-auto": 16}
    for name, world in ranks.items():
        train = documents.load_document(FOLDER / f"{name}.yaml").value["train"]
        answer = ask_trainer(dict, ["check"], json.dumps({"train": train, "world_size": world}))
        assert answer["faults"] == [], name
