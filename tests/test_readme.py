"""What the README and the guide show works: the tour is typed, commands parse, YAML is valid, both languages agree."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
READMES = (ROOT / "README.md", ROOT / "README.zh.md")
GUIDE = sorted((ROOT / "docs" / "guide").rglob("*.md"))
PAGES = (*READMES, *GUIDE)
# Words that follow "clusterctl" in prose.
PROSE = {
    "takes",
    "has",
    "normally",
    "reads",
    "checks",
    "writes",
    "never",
    "does",
    "runs",
    "uses",
    "needs",
    "starts",
    "submits",
    "reaches",
    "finds",
    "fills",
    "stores",
    "pushes",
    "itself",
    "is",
    "can",
    "on",
    "last",
}


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a language."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [code for name, code in fences if name == language]


def typed(readme: Path) -> list[str]:
    """Return the lines after `$ ` in the README's console blocks, in order."""
    lines = [line for block in blocks(readme, "console") for line in block.splitlines()]
    return [line[2:] for line in lines if line.startswith("$ ")]


def shell_lines(page: Path) -> list[str]:
    """Return the command lines of the bash blocks and of the tour, without comments."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    return [re.sub(r"\s+# .*", "", line) for line in (*lines, *typed(page))]


@pytest.mark.live
@pytest.mark.root
@pytest.mark.timeout(1200)
def test_the_tour_works_when_it_is_typed_line_by_line(tmp_path: Path) -> None:
    lines = typed(ROOT / "README.md")
    assert len(lines) > 15
    script = "".join(
        f"echo '$' {i}\n{line} || {{ echo failed: line {i}; exit 1; }}\n" for i, line in enumerate(lines)
    )
    program = tmp_path / "bin" / "clusterctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m clusterctl "$@"\n')
    program.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("CLUSTERCTL_")}
    env.update(PATH=f"{program.parent}:{os.environ['PATH']}", PYTHONPATH=str(ROOT), NO_COLOR="1")
    folder = tmp_path / "tour"
    folder.mkdir()
    try:
        done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True)
    finally:
        subprocess.run(
            [str(program), "sandbox", "down"], cwd=folder, env=env, capture_output=True, timeout=60
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for part in (
        "node[1-4] (4)",
        "node1 node2 node4",
        "node[1-2,4]",
        "8 ranks",
        "--nproc-per-node=2",
        "rank 0 of 4",
        "node2:3",
    ):
        assert part in done.stdout, f"{part}\n{done.stdout}"
    assert not (folder / ".clusterctl-sandbox").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_command_that_is_named_exists(page: Path) -> None:
    from clusterctl.cli.commands import built

    root = built("")
    named = re.findall(r"clusterctl ([a-z][a-z-]+)(?: ([a-z][a-z-]+))?", page.read_text(encoding="utf-8"))
    for verb, sub in named:
        if verb in PROSE and verb not in root.commands:
            continue
        assert verb in root.commands, f"{page.name} names `clusterctl {verb}`"
        group = getattr(root.commands[verb], "commands", None)
        if group and sub and sub not in PROSE:
            assert sub in group, f"{page.name} names `clusterctl {verb} {sub}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_command_line_parses(page: Path) -> None:
    from clusterctl.cli import commands

    count = 0
    for line in shell_lines(page):
        words = shlex.split(re.split(r" [|>] ", line)[0])
        if words[:1] != ["clusterctl"] or words[1].startswith("-"):
            continue
        names = [" ".join(words[1:end]) for end in (4, 3, 2)]
        name = next(name for name in names if name in commands.TABLE)
        verb = commands.TABLE[name]
        if not (verb.forwards or verb.open_ended):
            built: Any = commands.built(name)
            built.make_context(name, words[1 + len(name.split()) :])
        count += 1
    assert count or page.name in ("planning.md", "watching.md", "index.md")


@pytest.mark.parametrize("page", (ROOT / "README.md", *GUIDE), ids=lambda path: path.name)
def test_the_yaml_that_is_shown_is_valid(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(blocks(page, "yaml")):
        value = yaml.safe_load(text)
        if isinstance(value.get("nodes"), dict):
            path = tmp_path / f"cluster-{number}.yaml"
            path.write_text(text)
            from clusterctl.inventory import cluster

            assert len(cluster.load(path).nodes) == 4
        else:
            _check_job(value, tmp_path / f"job-{number}.yaml")


def _check_job(value: dict[str, Any], path: Path) -> None:
    """Load a job, or a part of one that the text explains; check its training with the trainer."""
    from clusterctl.jobs import job
    from clusterctl.jobs.ask_trainer import ask_trainer

    folder = path.parent
    for name in ("data", "src", "corpus"):
        (folder / name).mkdir(exist_ok=True)
    if not {"train", "command"} & set(value):
        whole = set(value) <= {"restart", "hang_after", "collect", "container"}
        value = {"command": ["true"], **value} if whole else {"train": {**MINIMAL, **value}}
    elif "train" in value:
        value["train"] = {**MINIMAL, **value["train"]}
    training = value.get("train", {})
    if "tune" in training:
        training["data"] = {"tokenizer": "{data}/tokenizer.json", **training["data"]}
        training["data"].pop("prefix", None)
        training.setdefault("init", {"source": "{data}/weights"})
    path.write_text(yaml.safe_dump(value))
    loaded = job.load(path)
    if loaded.train is not None:
        question = {
            "train": loaded.train,
            "world_size": 4 if "name" in value and not loaded.nodes else 32,
            "base_dir": "/",
            "check_data": False,
        }
        assert ask_trainer(dict, ["check"], json.dumps(question))["faults"] == []


MINIMAL = {
    "model": {"layers": 8, "hidden": 64, "heads": 8, "sequence": 64, "vocab": 512},
    "data": {"prefix": "{data}/x"},
    "steps": 10,
    "micro_batch": 1,
    "global_batch": 32,
}


def test_both_languages_have_the_same_sections_commands_and_links() -> None:
    english, chinese = (path.read_text(encoding="utf-8") for path in READMES)
    levels = [re.findall(r"^#+", text, re.MULTILINE) for text in (english, chinese)]
    assert levels[0] == levels[1]
    for language in ("", "console", "bash", "yaml"):
        code = [[re.sub(r"\s*# .*", "", block) for block in blocks(readme, language)] for readme in READMES]
        assert code[0] == code[1]
    links = [re.findall(r"\]\(([^)]+)\)", text) for text in (english, chinese)]
    assert [link.replace("README.zh.md", "README.md") for link in links[0]] == links[1]
    tables = [text.count("\n|") for text in (english, chinese)]
    assert tables[0] == tables[1]
