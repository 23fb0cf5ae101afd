from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from clusterctl.cli import direct, program


@pytest.mark.parametrize("verb", direct.VERBS)
def test_a_command_made_alone_is_the_one_of_the_whole_program(verb: str) -> None:
    alone: Any = direct._alone(verb)
    whole: Any = program.command()
    assert list(alone.commands) == [verb]
    ours, theirs = alone.commands[verb], whole.commands[verb]
    assert ours.help == theirs.help
    shown = [
        [(one.name, one.opts, one.default, one.required, getattr(one, "help", "")) for one in command.params]
        for command in (ours, theirs, alone, whole)
    ]
    assert shown[0] == shown[1] and shown[2] == shown[3]


@pytest.mark.parametrize("verb", direct.VERBS)
def test_it_loads_no_other_commands(verb: str) -> None:
    code = (
        "import json, sys\nfrom clusterctl.cli.direct import command_for\n"
        f"command_for([{verb!r}])\nprint(json.dumps(list(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {name for name in json.loads(said) if name.startswith("clusterctl.cli.")}
    assert not loaded & {f"clusterctl.cli.{name}" for name in ("program", "launch", "demo", "ranktable", "sandbox")}
