"""The README is typed as it stands, and names no command that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
READMES = (ROOT / "README.md", ROOT / "README.zh.md")


def typed(readme: Path) -> list[str]:
    """The lines after `$ ` in the README's console blocks, in order."""
    blocks = re.findall(r"```console\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.live
@pytest.mark.timeout(300)
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
        done = subprocess.run(
            ["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=280
        )
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


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_every_command_that_is_named_is_there(readme: Path) -> None:
    from clusterctl.cli.commands import built

    root = built("")
    named = re.findall(r"clusterctl ([a-z][a-z-]+)(?: ([a-z][a-z-]+))?", readme.read_text(encoding="utf-8"))
    assert len(named) > 10
    for verb, sub in named:
        # Prose.
        if verb in ("takes", "writes", "never"):
            continue
        commands = root.commands
        assert verb in commands, f"{readme.name} names `clusterctl {verb}`"
        group = getattr(commands[verb], "commands", None)
        if group and sub:
            assert sub in group, f"{readme.name} names `clusterctl {verb} {sub}`"


def test_the_yaml_that_is_shown_is_understood(tmp_path: Path) -> None:
    from clusterctl.inventory import cluster
    from clusterctl.jobs import job

    shown = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(shown) == 2
    for text in shown:
        path = tmp_path / "it.yaml"
        path.write_text(text)
        if "train:" in text:
            (tmp_path / "data").mkdir()
            loaded = job.load(path)
            assert set(yaml.safe_load(text)["train"]) == set(loaded.train or {})
            assert job.ask_trainer(["check"], _question(loaded.train))["faults"] == []
        else:
            assert len(cluster.load(path).nodes) == 4


def _question(train: object) -> str:
    import json

    return json.dumps({"train": train, "world_size": 32, "base_dir": "/", "check_data": False})
