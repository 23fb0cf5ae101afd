"""Each verb of `python -m trainer`: its request, which its function declares, is read from the command line."""

from __future__ import annotations

import argparse
import importlib
import sys
import typing
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from clusterctl.wire.arguments import add_arguments, group_of, wrong_options
from trainer.errors import InputError

# Types of an option's value, in words.
NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class Verb:
    """A row of the table of verbs: what it does, and its function, which takes one request."""

    text: str
    target: str
    """"module:function" below trainer."""
    epilog: str | None = None
    collects: bool = False
    """Whether the function reports wrong values, together with other errors of its input."""

    @property
    def function(self) -> Callable[[Any], int]:
        """Return the function; import its module."""
        module, name = self.target.split(":")
        found: Callable[[Any], int] = getattr(importlib.import_module(f"trainer.{module}"), name)
        return found

    @property
    def request(self) -> Any:
        """Return the type of the request."""
        hints = typing.get_type_hints(self.function)
        return hints[next(name for name in hints if name != "return")]


SPREAD = (
    "With --on SET, as in --on node[1-4], each node builds a part; the result is the same and is written here. With "
    "--leave as well, the parts stay on their nodes."
)
VERBS = {
    "check": Verb(
        "check a config: JSON on stdin, all faults and a summary on stdout", "train.commands:check"
    ),
    "rehearse": Verb(
        "build and step one rank of a layout here: JSON on stdin, what it took on stdout",
        "train.commands:rehearse",
    ),
    "schema": Verb("print a JSON schema of the train part of a job", "train.commands:schema"),
    "train": Verb("train with the launcher's environment, or alone", "train.commands:train"),
    "tokenizer-train": Verb("Train a byte-level BPE tokenizer on texts.", "corpus.commands:tokenizer_train"),
    "tokenizer-glm": Verb("Add GLM's special tokens to a tokenizer.", "corpus.commands:tokenizer_glm"),
    "data-build": Verb(
        "Build Megatron's .bin and .idx files from texts, with a manifest.",
        "corpus.commands:build_pair",
        SPREAD,
        collects=True,
    ),
    "data-shares": Verb(
        "Divide the inputs of a build into shares, one per node; print JSON.",
        "corpus.commands:divide_inputs",
        collects=True,
    ),
    "data-info": Verb(
        "Show the documents, tokens and epochs of a .bin/.idx pair.", "corpus.commands:describe_pair"
    ),
    "data-verify": Verb(
        "Check every rule for .bin/.idx pairs; exit with 1 if one is broken.", "corpus.commands:verify_pairs"
    ),
    "data-repair": Verb(
        "Correct an index that does not count the end-of-document tokens of its .bin file.",
        "corpus.commands:repair_pair",
    ),
    "data-split": Verb(
        "Split a corpus into shards, or into train, valid and test.", "corpus.commands:split_pair"
    ),
    "data-merge": Verb("Merge .bin/.idx pairs into one, in the given order.", "corpus.commands:merge_pairs"),
    "weights-model": Verb("describe the model of a checkpoint, as keys of a job", "weights.commands:model"),
    "checkpoint-import": Verb("convert another program's checkpoint to ours", "weights.commands:import_"),
    "checkpoint-export": Verb("convert our checkpoint to another format", "weights.commands:export"),
    "checkpoint-diff": Verb(
        "compare the tensors of two checkpoints: JSON on stdin and stdout", "train.commands:checkpoint_diff"
    ),
    "checkpoint-verify": Verb("compare a checkpoint with its manifest", "train.commands:checkpoint_verify"),
    "tensorboard": Verb(
        "write a run's metrics as TensorBoard's files, with Megatron's tags", "train.commands:tensorboard"
    ),
    "generate": Verb("generate text from a checkpoint", "generate.command:run"),
    "serve": Verb("answer requests over HTTP", "serve.command:run", collects=True),
    "evaluate": Verb("evaluate a checkpoint on local files", "evaluate.command:run", collects=True),
}


class _Formatter(argparse.HelpFormatter):
    """A format of help texts that marks required options."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        """Add the line with the usage."""
        super().add_usage(usage, actions, groups, "Usage: " if prefix is None else prefix)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        required = action.required and action.option_strings and action.help
        return f"{action.help}  [required]" if required else action.help


class _Once(argparse.Action):
    """Stores a value; a second, different one is an error and not the last one that counts."""

    _given: object = None

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        if option and self._given not in (None, values):
            parser._wrong.append(f"{option}: is given twice: {self._given}, {values}")
        self._given = values
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    """A parser whose help and errors have the form of the launcher's."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more, formatter_class=_Formatter, add_help=False)
        self.register("action", None, _Once)
        self._positionals.title, self._optionals.title = "Arguments", "Options"
        self.add_argument("-h", "--help", action="help", help="Show this message and exit.")
        self._wrong: list[str] = []

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Return the value of a word; remember a wrong one, so that all are reported together."""
        if not arg_string and action.type not in (None, *NUMBERS):
            # Path("") would be the current folder.
            name = "/".join(action.option_strings) or action.metavar or action.dest
            self._wrong.append(f"{name}: is empty; is a variable of the shell unset?")
            return action.default
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            name, kind = "/".join(action.option_strings), NUMBERS.get(action.type)
            self._wrong.append(f"{name}: {arg_string!r} is not {kind}" if name and kind else str(error))
            return action.default

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words; report all that cannot be read."""
        found, unknown = super().parse_known_args(args, namespace)
        if self._wrong or unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}" if unknown else self._wrong.pop())
        return found, unknown

    def print_help(self, file: Any = None) -> None:
        """Print the help; raise an error if it cannot be written."""
        super().print_help(file)
        sys.stdout.flush()

    def error(self, message: str) -> NoReturn:
        lines = [f"error: {text.removeprefix('argument ')}\n" for text in (*self._wrong, message)]
        sys.stderr.write("".join(lines) + f"  try: {self.prog} --help\n")
        sys.exit(InputError.exit_code)


def parsers(called: str = "", filled: Collection[str] = VERBS, *, explained: bool = True) -> _Parser:
    """Return the parser of the program, in which the verbs `filled` have their arguments.

    `called` is the command that the user typed, if it was not this program.
    """
    parser = _Parser(prog="python -m trainer", description="The embedded trainer.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in VERBS.items():
        text = verb.text
        added = verbs.add_parser(name, help=text, description=text, epilog=verb.epilog, prog=called or None)
        if name in filled:
            add_arguments(added, verb.request, explained=explained)
    return parser


def read(words: Sequence[str], called: str = "") -> tuple[str, Any]:
    """Return the verb of a command line, and its request; raise an InputError for values that are not possible."""
    explained = not {"-h", "--help"}.isdisjoint(words)
    arguments = parsers(called, words[:1], explained=explained).parse_args(words)
    verb = VERBS[arguments.verb]
    request = group_of(verb.request, arguments)
    if not verb.collects:
        refuse(request)
    return arguments.verb, request


def refuse(request: Any) -> None:
    """Raise an InputError that lists all options whose values are not possible."""
    if wrong := list(wrong_options(request)):
        raise InputError("\n".join(wrong))
