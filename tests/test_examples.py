"""Every recipe is understood; the small ones are trained by tests/live/test_training.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterctl import inventory, job, plan

FOLDER = Path(__file__).resolve().parents[1] / "examples"
JOBS = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "cluster.yaml")


def test_there_are_recipes_and_an_inventory() -> None:
    cluster = inventory.load(FOLDER / "cluster.yaml")
    assert [len(node.devices) for node in cluster.nodes] == [8, 8, 8, 8]
    assert len(JOBS) >= 4


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_a_recipe_is_planned_on_the_example_cluster(path: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    copy = tmp_path / path.name
    copy.write_text(path.read_text(encoding="utf-8"))
    loaded = job.load(copy)
    cluster = inventory.load(FOLDER / "cluster.yaml").select(loaded.nodes)
    if loaded.train is None:
        made = plan.make_plan(cluster, loaded)
        assert made.nodes[1].processes[0].argv[-1] == "10.0.0.2"
        return
    world = 32 if loaded.train["global_batch"] >= 512 else 4
    question = {"train": loaded.train, "world_size": world, "base_dir": "/", "check_data": False}
    answer = job.ask_trainer(["check"], json.dumps(question))
    assert answer["faults"] == []
    assert answer["summary"]["layout"]["data"] == world
