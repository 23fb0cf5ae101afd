"""The groups of options in a help, and the form of the texts."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from clusterctl.cli import commands
from clusterctl.cli.commands import TABLE
from clusterctl.cli.option_groups import GROUPS, SHARED, grouped
from trainer.command_line import parsers

SHOWN = [key for key, verb in TABLE.items() if not verb.hidden]


def params_of(key: str) -> list[Any]:
    command: Any = commands.built(key)
    found: list[Any] = command.get_params(command.context_class(command, info_name=key))
    return found


def test_a_help_has_arguments_first_then_own_options_and_the_shared_ones_last() -> None:
    titles = [title for title, _ in grouped("launch", params_of("launch"))]
    assert titles == ["Arguments", "Options", "For a command after --", *SHARED]


def test_every_option_stands_in_one_group() -> None:
    for key in SHOWN:
        params = params_of(key)
        shown = [param.name for _, members in grouped(key, params) for param in members]
        assert sorted(shown) == sorted(param.name for param in params)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
def test_a_group_names_only_options_that_exist(group: Any) -> None:
    names = {param.name for key in group.commands or SHOWN for param in params_of(key)}
    assert set(group.options) <= names


def test_only_shared_options_need_no_section_of_their_own() -> None:
    assert [title for title, _ in grouped("version", params_of("version"))] == ["Options"]


@pytest.mark.parametrize("key", [key for key in SHOWN if TABLE[key].forwards or TABLE[key].open_ended])
def test_the_trainers_helps_have_the_form_of_the_others(key: str) -> None:
    (verbs,) = (a for a in parsers()._actions if isinstance(a, argparse._SubParsersAction))
    parser = verbs.choices[TABLE[key].forwards or "data-build"]
    texts = [parser.description, *(action.help for action in parser._actions)]
    for text in texts:
        if text != argparse.SUPPRESS:
            assert text and text.rstrip().endswith("."), text
            assert text[0].isupper() or text.startswith("tokenizer.json"), text
    help_text = parser.format_help()
    assert help_text.startswith("Usage: ") and "\nOptions:\n" in help_text
