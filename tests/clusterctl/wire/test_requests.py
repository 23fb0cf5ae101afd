"""Options that the launcher hands to the trainer: one declaration, the same option on both sides."""

from __future__ import annotations

import argparse
import re
from dataclasses import MISSING, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli import commands
from clusterctl.wire.arguments import add_arguments, arguments_of, group_of, option_name, wrong_options
from clusterctl.wire.fields import keys_of, types_of
from clusterctl.wire.requests import (
    DrawingOptions,
    ExportOptions,
    ExportRequest,
    ImportOptions,
    ImportRequest,
    ModelOptions,
    PromptOptions,
    Scoring,
    ScoringOptions,
    ServerOptions,
    TaskOptions,
    TensorboardOptions,
)
from trainer.command_line import VERBS, read

GROUPS = (ModelOptions, DrawingOptions, ServerOptions, Scoring)
COMMANDS = {
    "generate": (ModelOptions, DrawingOptions, PromptOptions),
    "serve": (ModelOptions, ServerOptions),
    "eval": (ScoringOptions, Scoring, TaskOptions),
    "tensorboard": (TensorboardOptions,),
    "checkpoint import": (ImportOptions, ImportRequest),
    "checkpoint export": (ExportOptions, ExportRequest),
}
ROOT = Path(__file__).resolve().parents[3]


def parsed(kind: type[Any], words: list[str]) -> Any:
    parser = argparse.ArgumentParser()
    add_arguments(parser, kind)
    return group_of(kind, parser.parse_args(words))


@pytest.mark.parametrize("kind", GROUPS, ids=lambda kind: kind.__name__)
def test_what_the_launcher_writes_the_trainer_reads(kind: type[Any]) -> None:
    assert parsed(kind, []) == kind() == parsed(kind, arguments_of(kind()))
    for item in keys_of(kind):
        other: Any = {
            str: "fp16" if item.name == "weights" else "cpu" if item.name == "device" else "train",
            int: 2000 if item.name == "max_body" else 3,
            float: 0.5,
            bool: not item.default,
            tuple: ("a b", "--c"),
            type(None): {"logprobs": 2, "add_bos": False, "cache": "4GiB"}.get(item.name, Path("/a b")),
        }[type(item.default)]
        made = replace(kind(), **{item.name: other})
        assert parsed(kind, arguments_of(made)) == made, item.name
        assert not list(wrong_options(made))


def test_every_value_that_is_not_possible_is_named() -> None:
    wrong = DrawingOptions(temperature=101, top_p=0, beams=0, stop=("",), seed=2**64, min_p=float("nan"))
    assert list(wrong_options(wrong, ModelOptions(device="tpu"))) == [
        "--temperature: 101 is too large (0 to 100)",
        "--top-p: 0 is too small (more than 0 and at most 1)",
        "--min-p: nan is not a number (0 to 1)",
        "--beams: 0 is too small (1 to 64)",
        "--seed: 18446744073709551616 is out of range: a number of 64 bits",
        '--stop: [""] is out of range: at most 64 texts of 1 to 1000 characters',
        "--device: unknown 'tpu' (one of cpu, cuda, npu)",
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_has_each_option_with_its_text_and_limits(command: str) -> None:
    built: Any = commands.built(command)
    options = {name: parameter for parameter in built.params for name in parameter.opts}
    for kind in COMMANDS[command]:
        for item in keys_of(kind):
            if is_dataclass(types_of(kind)[item.name]):
                continue
            option = options[option_name(item.name)]
            assert option.help, item.name
            rule = item.metadata["rule"]
            limits = (getattr(option.type, "min", None), getattr(option.type, "max", None))
            assert limits == (rule.least if rule.above is None else rule.above, rule.most), item.name


def filled(kind: Any) -> Any:
    """Return a request with a value in each field that needs one."""
    values: dict[type, Any] = {Path: Path("a b"), str: "hf", int: 3, tuple: (Path("a"), Path("b"))}
    given = {}
    for item in keys_of(kind):
        hint = types_of(kind)[item.name]
        if is_dataclass(hint):
            given[item.name] = filled(hint)
        elif item.metadata["rule"].required:
            given[item.name] = ("x", "y")
        elif item.default is MISSING:
            given[item.name] = values[getattr(hint, "__origin__", hint)]
    return kind(**given)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_reads_the_request_that_the_launcher_writes(verb: str) -> None:
    request = filled(VERBS[verb].request)
    assert read([verb, *arguments_of(request)]) == (verb, request)


def test_one_module_of_the_trainer_parses_command_lines() -> None:
    # PyTorch's files of other programs contain a Namespace.
    others = {"trainer/weights/files/torch_read.py", "trainer/weights/files/torch_write.py"}
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "trainer").rglob("*.py")
        if re.search(r"\bargparse\b|\badd_argument\b", path.read_text(encoding="utf-8"))
    }
    assert found - others == {"trainer/command_line.py"}
