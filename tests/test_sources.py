"""The pages about published procedures: their commands run, in order, and their figures are those of the plan."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clusterctl.cli import main
from clusterctl.document import load_document
from clusterctl.sandbox import cluster
from tests.live.conftest import clean_environment
from tests.support import source_pages
from tests.support.source_pages import CASES, PAGES, ROOT, Project, command_lines, rows_of, smaller
from tests.support.weights import write_glm
from trainer.checkpoint.store import verify
from trainer.plan.summary import check

NAMES = ("ascend-gpt2", "glm", "megatron-deepspeed", "mindformers", "oneflow")
COMMANDS: dict[str, list[str]] = json.loads((CASES / "commands.json").read_text())
SEEDS = os.environ.get("CLUSTERCTL_TEST_SOURCES", "")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    threads = torch.get_num_threads()
    for name in list(os.environ):
        if name.startswith("CLUSTERCTL_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    source_pages.trainer_in_this_process(monkeypatch)
    yield source_pages.prepare(tmp_path)
    torch.set_num_threads(threads)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", NAMES)
def test_the_commands_of_a_page_run_in_order(
    page: str, project: Project, capfd: pytest.CaptureFixture[str]
) -> None:
    said = ""
    for line in command_lines(page):
        if line.startswith("clusterctl checkpoint import checkpoints/glm"):
            write_weights_of_glm(project)
        project.run(line)
        out = capfd.readouterr()
        said += out.out + out.err
    for metrics in project.folder.glob("runs/*/metrics.jsonl"):
        losses = [
            event["loss"]
            for event in map(json.loads, metrics.read_text().splitlines())
            if event["event"] == "eval"
        ]
        assert len(losses) == 3 and (losses[-1] < losses[0] or "copa" in metrics.parent.name), metrics
    assert len(list(project.folder.glob("runs/*/run.json"))) == sum(
        " launch " in line and " -- " not in line for line in command_lines(page)
    )
    EXTRA[page](project, said)


def write_weights_of_glm(project: Project) -> None:
    """Write the GLM that was just trained as THUDM's program saves one."""
    if not list(project.last.checkpoints.glob("step-*")):
        assert main.run(["checkpoint", "pull", project.last.run_id]) == 0
    saved = verify(sorted(project.last.checkpoints.glob("step-*"))[-1])
    state = {name: saved.read([name])[name] for name in saved.table if not name.startswith("exp_avg")}
    write_glm(project.folder / "checkpoints" / "glm-10b-1024" / "126000", state, 1)
    (project.folder / "checkpoints" / "glm-10b-1024" / "latest").write_text("126000")


def after_ascend(project: Project, said: str) -> None:
    assert list((project.folder / "exports" / "gpt2-345m").rglob("model_optim_rng.pt"))
    train = load_document(project.folder / "from-script.yaml").value["train"]
    assert train["steps"] == 5000 and train["model"] == "gpt2-1.3B"


def after_glm(project: Project, said: str) -> None:
    assert "copa (glm-cloze)" in said
    # The prompt with its blank filled in.
    filled = [line for line in said.splitlines() if line.startswith("Ng is an adjunct professor at")]
    assert filled and "[MASK]" not in filled[0]
    assert load_document(project.folder / "from-script.yaml").value["train"]["tune"]["task"] == "copa"


def after_megatron(project: Project, said: str) -> None:
    assert list(project.folder.glob("runs/*/tensorboard/**/*tfevents*")) or list(
        project.folder.rglob("*tfevents*")
    )
    assert (project.folder / "gpt3-125m.html").stat().st_size > 10_000
    assert "kind: Job" in said and "schedulerName: volcano" in said


def after_mindformers(project: Project, said: str) -> None:
    exported = verify(sorted(project.last.checkpoints.glob("step-*"))[-1])
    imported = verify(project.folder / "weights" / "gpt2-13b")
    for name in imported.table:
        assert torch.equal(imported.read([name])[name], exported.read([name])[name]), name


def after_oneflow(project: Project, said: str) -> None:
    assert (project.folder / "exports" / "gpt2-2304x24" / "config.json").exists()
    single = load_document(project.folder / "single.yaml").value["train"]
    assert (
        single["micro_batch"] == 4 and single["recompute"]["mode"] == "full" and single["precision"] == "fp16"
    )
    assert "lambada" in said and "clusterctl data build" in said


EXTRA = {
    "ascend-gpt2": after_ascend,
    "glm": after_glm,
    "megatron-deepspeed": after_megatron,
    "mindformers": after_mindformers,
    "oneflow": after_oneflow,
}


@pytest.mark.parametrize("page", NAMES)
def test_a_page_names_every_command_of_its_document(page: str) -> None:
    text = " ".join((PAGES / f"{page}.md").read_text(encoding="utf-8").split())
    missing = [command for command in COMMANDS[page] if command not in text]
    assert not missing


# The names of the documents' files.
FILES = {
    "ascend-gpt2": "gpt2-for-pytorch",
    "glm": "glm-10b",
    "megatron-deepspeed": "megatron-deepspeed-gpt",
    "mindformers": "gpt2-13b-distributed",
    "oneflow": "oneflow-gpt",
}
PROGRAM = re.compile(
    r"^(?:\./|(?:bash|cd|cp|docker|git|kubectl|make|mkdir|pip3?|python3?|vim|wget)\s)(?P<rest>[^#\\]*)"
)


@pytest.mark.skipif(not SEEDS, reason="CLUSTERCTL_TEST_SOURCES names no folder with the five documents")
@pytest.mark.parametrize("page", NAMES)
def test_no_command_of_the_documents_themselves_is_missing(page: str) -> None:
    document = (Path(SEEDS) / f"{FILES[page]}.txt").read_text(encoding="utf-8")
    text = " ".join((PAGES / f"{page}.md").read_text(encoding="utf-8").split())
    count = 0
    for line in map(str.strip, document.splitlines()):
        if PROGRAM.match(line):
            count += 1
            # Up to the first option, path of a machine or variable.
            start = " ".join(re.split(r"\s(?:--|#|\$|\{|\S*/)|\$|https", line)[0].split()[:3])
            assert start in text, line
    assert count


PLANNED = [
    (page, row)
    for page in NAMES
    for row in rows_of(page)
    if "planned samples/s" in row and (ROOT / "examples" / f"{row['recipe']}.yaml").exists()
]
CHIP = re.compile(r"(?:(\d+) x )?(910[AB]|[AV]100-\d+)")


@pytest.mark.parametrize(("page", "row"), PLANNED, ids=lambda value: value if isinstance(value, str) else "")
def test_the_figures_of_a_page_are_those_of_the_plan(page: str, row: dict[str, str]) -> None:
    train = load_document(ROOT / "examples" / f"{row['recipe']}.yaml").value["train"]
    found = CHIP.search(row.get("devices") or row["chip"])
    assert found
    world = int(found[1] or {"glm-10b": 16}.get(row["recipe"], 8))
    hardware = {"chip": found[2], "devices_per_node": 8}
    answer = check({"train": {**train, "hardware": hardware}, "world_size": world})
    summary: Any = answer["summary"]
    rate = summary["time"]["tokens_per_second"] / answer["config"]["model"]["sequence"]
    assert float(row["planned samples/s"]) == float(f"{rate:.3g}")
    memory = float(row["planned memory"].removesuffix(" GB"))
    assert memory == pytest.approx(summary["memory_per_device_bytes"]["total"] / 1e9, abs=0.06)


def test_every_page_has_figures() -> None:
    assert {page for page, _ in PLANNED} == set(NAMES) and len(PLANNED) > 15


REHEARSED = [
    ("ascend-1.3b", "nodes=1,devices=8,kind=npu"),
    ("glm-10b", "nodes=2,devices=8,kind=npu"),
    ("gpt3-13b", "nodes=2,devices=8,kind=cuda"),
    ("gpt2-13b", "nodes=4,devices=8,kind=npu"),
    ("gpt2-2304x24", "nodes=4,devices=8,kind=cuda"),
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("recipe", "nodes"), REHEARSED)
def test_a_recipe_is_rehearsed_at_full_size(recipe: str, nodes: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / f"{recipe}.yaml", tmp_path)
    words = [
        sys.executable,
        "-m",
        "clusterctl",
        "plan",
        f"{recipe}.yaml",
        "--what-if",
        nodes,
        "--rehearse",
        "--json",
    ]
    done = subprocess.run(words, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)["summary"]["rehearsed"]
    assert answer["parameters"] == answer["planned_parameters"]
    assert answer["peak_bytes"] == pytest.approx(answer["planned_bytes"], rel=0.1)


# Layouts that four nodes of two devices can have.
LAYOUTS = {
    "ascend-345m": "{tensor: 1, pipeline: 2}",
    "glm-10b": "{tensor: 1}",
    "gpt2-13b": "{tensor: 2, pipeline: 4}",
    "gpt2-2304x24": "{tensor: 2, pipeline: 2}",
}


# Written, or named by a flag; sandbox nodes take their places.
LEFT_OUT = ("clusterctl init --hosts", "clusterctl serve", "clusterctl launch -n all", "clusterctl plan")


@pytest.mark.live
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", NAMES)
def test_the_commands_of_a_page_run_over_ssh(
    page: str, project: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    box = cluster.up(project.folder / "box", nodes=4, devices=2)
    (project.folder / "rank_table.json").unlink()
    monkeypatch.setenv("CLUSTERCTL_CLUSTER", str(box.cluster_file))
    try:
        for line in command_lines(page):
            words = shlex.split(line)[1:]
            if words[0] == "launch" and "--" not in words:
                recipe = words[1].removesuffix(".yaml")
                for value in smaller(recipe, LAYOUTS.get(recipe, "{}")):
                    words += ["--set", value]
            elif words[0] != "doctor" and words[:2] not in (["ranktable", "build"], ["checkpoint", "list"]):
                if line.startswith("clusterctl checkpoint import checkpoints/glm"):
                    write_weights_of_glm(project)
                if not line.startswith(LEFT_OUT):
                    project.run(line)
                continue
            done = subprocess.run(
                [sys.executable, "-m", "clusterctl", *words],
                cwd=project.folder,
                env={**clean_environment(), "CLUSTERCTL_CLUSTER": str(box.cluster_file)},
                capture_output=True,
                text=True,
                timeout=200,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        finished = list(project.folder.glob("runs/*/run.json"))
        assert len(finished) == sum(" launch " in line and " -- " not in line for line in command_lines(page))
    finally:
        box.down()
