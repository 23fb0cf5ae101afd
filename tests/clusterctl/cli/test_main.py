from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from clusterctl.cli import commands
from clusterctl.cli.commands import SECTIONS, TABLE


def test_every_command_of_the_table_can_be_built() -> None:
    for key in TABLE:
        command: Any = commands.built(key)
        assert command.name == key.rpartition(" ")[2]
        assert command.help


def test_short_helps_fit_a_line_and_every_command_stands_in_one_section() -> None:
    assert all(0 < len(verb.help) <= 50 for verb in TABLE.values())
    top = [name for name in TABLE if " " not in name]
    assert sorted(top) == sorted(name for names in SECTIONS.values() for name in names)


def loaded_by(*argv: str) -> set[str]:
    code = (
        "import json, sys\nfrom clusterctl.cli.main import run\n"
        f"run({list(argv)!r})\nsys.stdout = sys.__stderr__\nprint(json.dumps(list(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name for name in json.loads(done.stderr.splitlines()[-1]) if name.split(".")[0] == "clusterctl"}


@pytest.mark.parametrize(
    ("argv", "most"),
    [(["--help"], 40), (["exec", "--help"], 60), (["exec", "all", "--dry-run", "--", "true"], 60)],
    ids=["help", "exec help", "exec"],
)
def test_a_command_loads_few_modules_and_no_other_commands(argv: list[str], most: int) -> None:
    loaded = loaded_by(*argv)
    assert len(loaded) <= most, sorted(loaded)
    assert not loaded & {
        f"clusterctl.cli.{name}" for name in ("launch", "demo", "ranktable", "sandbox", "runs")
    }
