from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer

from clusterctl.cli import commands
from clusterctl.cli.commands import SECTIONS, TABLE
from clusterctl.cli.declared import flag, option
from clusterctl.cli.examples import examples
from clusterctl.cli.option_fields import flat
from trainer.command_line import read as read_words


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
    others = tuple(f"clusterctl.cli.{folder}" for folder in ("clusters", "launch", "rank_tables", "runs"))
    assert not {name for name in loaded if name.startswith(others)}


# The trainer prints the help of these.
FORWARDED = [key for key, verb in TABLE.items() if verb.forwards or verb.open_ended]


@pytest.mark.parametrize("key", ["", *TABLE])
def test_the_help_of_a_command_ends_with_examples_that_parse(key: str) -> None:
    lines = examples(key, TABLE)
    assert lines or TABLE[key].hidden
    command: Any = commands.built(key)
    if key not in FORWARDED:
        shown = command.get_help(command.context_class(command, info_name=key))
        assert shown.endswith("".join(f"\n  {line}" for line in lines))
    for line in lines:
        words = shlex.split(line.rpartition(" | ")[2].partition(" > ")[0])
        assert words.pop(0) == "clusterctl"
        names = [" ".join(words[:end]) for end in (3, 2, 1)]
        name = next(name for name in names if name in TABLE)
        # A group without a command of its own would only print its help.
        assert TABLE[name].target or TABLE[name].forwards
        arguments = words[len(name.split()) :]
        if name not in FORWARDED:
            commands.built(name).make_context(name, arguments)
        elif "--on" not in arguments:
            read_words([TABLE[name].forwards or "data-build", *arguments])


def test_every_option_has_a_help_text_that_begins_a_sentence() -> None:
    for key in TABLE:
        command: Any = commands.built(key)
        for param in command.params:
            text = getattr(param, "help", None)
            assert text and (text[0].isupper() or text[0] == "0"), f"{key} {param.name}: {text}"


@dataclass(frozen=True)
class Selection:
    nodes: Annotated[str | None, typer.Option("--nodes", help="Use these.")] = None
    count: int = option("How many.", default=3)


def test_a_dataclass_of_options_is_one_parameter_of_the_function_and_many_of_the_command() -> None:
    seen: list[object] = []

    def function(name: str, selection: Selection, *, dry_run: bool = flag("Change nothing.", "-n")) -> None:
        """Do it."""
        seen.extend((name, selection, dry_run))

    command = flat(function)
    parameters = inspect.signature(command).parameters
    assert [(one.name, one.default) for one in parameters.values()] == [
        *(("name", inspect.Parameter.empty), ("nodes", None), ("count", 3), ("dry_run", False))
    ]
    # typer takes the first name for a default until it builds the command.
    names = [parameters[name].annotation.__metadata__[0].default for name in ("count", "dry_run")]
    assert (command.__doc__, names) == ("Do it.", ["--count", "-n"])
    command(name="a", nodes="b", count=4, dry_run=True)
    assert seen == ["a", Selection("b", 4), True]


UNCLEAR = re.compile(
    r"\b(told|heard|beside|whatever|at once|goes on|by itself|make-believe|none of it|as it stands|stand by)\b",
    re.I,
)


def test_the_help_uses_no_unclear_words() -> None:
    for key in TABLE:
        command: Any = commands.built(key)
        texts = [
            TABLE[key].help,
            command.help,
            *(param.help for param in command.params if hasattr(param, "help")),
        ]
        assert not [text for text in texts if text and UNCLEAR.search(text)], key


def test_a_message_off_a_terminal_needs_no_rich() -> None:
    """A controller is a fork of the program that started the run: it keeps for weeks what that has loaded."""
    code = "import sys; from clusterctl.cli import screen; screen.log('a\\x1b[31m\\tb\\nc', 'yellow')\n"
    code += "sys.exit(any(name in sys.modules for name in ('rich', 'statistics', 'concurrent.futures')))"
    environ = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    watching = "import clusterctl.runs.controller, clusterctl.storage.client\n"
    plain = subprocess.run([sys.executable, "-c", watching + code], capture_output=True, env=environ)
    assert plain.returncode == 0, plain.stderr
    coloured = {**environ, "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
    forced = subprocess.run([sys.executable, "-c", code], capture_output=True, env=coloured)
    assert forced.returncode == 1 and plain.stderr == forced.stderr
