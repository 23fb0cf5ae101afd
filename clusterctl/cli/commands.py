"""Every command, listed once; a command's module is imported when the command is used."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandInfo

from clusterctl.backends.backend import KNOWN, PLATFORMS, QUEUES
from clusterctl.cli import choices, option_fields, options
from clusterctl.cli.given_once import refuse_contradictions, united
from clusterctl.cli.kind_option import WithKind
from clusterctl.cli.options import JOB_FILES, WRONG_WORDS
from clusterctl.cli.pager import WithPager
from clusterctl.cli.ssh_option import Reaching

PROGRAM = "Run programs on machines over SSH; train, fine-tune, evaluate and serve language models."


@dataclass(frozen=True)
class Verb:
    """One row of the table: the short help of a command, and its function."""

    help: str
    # "module:function" below clusterctl.cli; a noun without a function of its own has none.
    target: str = ""
    # Whether it has the option --ssh, because it connects to nodes.
    ssh: bool = False
    hidden: bool = False
    # The command of the trainer that gets all arguments.
    forwards: str = ""
    # Whether its function passes unknown options on to the trainer.
    open_ended: bool = False
    # The word for which the function in `target` makes the command's own.
    made_for: str = ""


# Sections of `clusterctl --help`, in order, with the names of their commands.
SECTIONS = {
    "Start": ("demo", "init", "sandbox", "doctor", "selftest", "version", "help"),
    "Nodes": ("nodes", "exec", "fab", "ssh", "push", "pull", "bundle", "keeper"),
    "Rank tables": ("ranktable", "hostfile"),
    "Runs": (
        "plan",
        "launch",
        "submit",
        "runs",
        "status",
        "top",
        "attach",
        "resume",
        "stop",
        "logs",
        "schema",
    ),
    "Results": ("report", "compare", "tensorboard"),
    "Training, data and models": ("data", "checkpoint", "generate", "serve", "eval"),
}

TABLE = {
    "demo": Verb("Train a small model on a sandbox cluster", "clusters.demo:demo", ssh=True),
    "selftest": Verb("Try a training on your nodes and write a report", "clusters.selftest:selftest"),
    "init": Verb("Write a commented cluster.yaml or job", "clusters.init:init"),
    "sandbox": Verb("Run SSH nodes on this machine, for trials"),
    "sandbox up": Verb("Start the nodes", "clusters.sandbox:up"),
    "sandbox status": Verb("Show the nodes and whether they run", "clusters.sandbox:status"),
    "sandbox down": Verb("Stop the nodes and delete the sandbox", "clusters.sandbox:down"),
    "sandbox kill": Verb("Kill a node with all its processes", "clusters.sandbox:kill"),
    "sandbox cut": Verb("Cut the network link of a node", "clusters.sandbox:cut"),
    "sandbox heal": Verb("Restore a network link that was cut", "clusters.sandbox:heal"),
    "doctor": Verb("Check this machine and the nodes", "nodes.doctor:doctor", ssh=True),
    "nodes": Verb("List nodes; handle node sets and host keys", "nodes.inventory:nodes"),
    "nodes list": Verb("List the nodes, their addresses and devices", "nodes.inventory:list_nodes"),
    "nodes expand": Verb("Print the nodes of a node set", "nodes.inventory:expand"),
    "nodes fold": Verb("Write node names as one node set", "nodes.inventory:fold"),
    "nodes trust": Verb("Fetch host keys and record them", "nodes.inventory:trust", ssh=True),
    "nodes setup": Verb("Make one Python environment on all nodes", "nodes.setup:setup", ssh=True),
    "nodes wheelhouse": Verb("Fetch wheels and write their lock file", "nodes.setup:wheelhouse"),
    "exec": Verb("Run a command on nodes in parallel", "nodes.exec:exec_", ssh=True),
    "fab": Verb("Run a fabric task on nodes", "nodes.fab:fab", ssh=True),
    "ssh": Verb("Open a terminal on a node", "everyday:ssh"),
    "version": Verb("Print the version", "everyday:version"),
    "help": Verb("Print the help of a command", "everyday:show_help"),
    "push": Verb("Copy a file or folder to nodes", "nodes.push:push", ssh=True),
    "pull": Verb("Copy a file or folder from nodes", "nodes.push:pull", ssh=True),
    "bundle": Verb("Pack wheels and code for a closed network", "nodes.setup:bundle"),
    "keeper": Verb("Show or stop connections kept by --persist"),
    "keeper status": Verb("List connection keepers and their connections", "nodes.keeper:status"),
    "keeper stop": Verb("Stop the connection keepers", "nodes.keeper:stop"),
    "ranktable": Verb("Build, check and convert RANK_TABLE_FILEs"),
    "ranktable build": Verb("Build a table from nodes or a plan", "rank_tables.ranktable:build", ssh=True),
    "ranktable merge": Verb("Merge tables of single nodes", "rank_tables.ranktable:merge"),
    "ranktable convert": Verb("Convert a table to another version or form", "rank_tables.ranktable:convert"),
    "ranktable check": Verb("Check tables by the rules of HCCL", "rank_tables.ranktable:check"),
    "ranktable show": Verb("Show a table by ranks", "rank_tables.ranktable:show"),
    "ranktable diff": Verb("Compare two tables by meaning", "rank_tables.ranktable:diff"),
    "ranktable slice": Verb("Cut a table down to some nodes or devices", "rank_tables.ranktable:cut"),
    "ranktable push": Verb("Copy a table to every node", "rank_tables.live:push", ssh=True),
    "ranktable verify": Verb("Compare a table with the nodes", "rank_tables.live:verify", ssh=True),
    "hostfile": Verb("Build, check and convert hostfiles"),
    "hostfile build": Verb("Write a hostfile from the inventory", "rank_tables.hostfile:build"),
    "hostfile check": Verb("Check hostfiles line by line", "rank_tables.hostfile:check"),
    "hostfile convert": Verb("Convert between hostfile formats", "rank_tables.hostfile:convert"),
    "plan": Verb("Show what a job would do, and all its errors", "launch.plan:plan"),
    "schema": Verb("Print the JSON schema of job files", "launch.plan:schema"),
    "launch": Verb("Start a job and follow it", "launch.start:launch", ssh=True),
    "submit": Verb(f"Submit a job to a batch system or {KNOWN['pods'].title}"),
    **{
        f"submit {name}": Verb(f"Submit a job to {known.title}", "launch.submit:to_queue", made_for=name)
        for name, known in QUEUES.items()
    },
    "submit start": Verb("Start a submitted run in its job", "launch.queue_job:start", hidden=True),
    **{
        f"submit {name}": Verb(verb.help, f"launch.submit:{verb.made_by}", made_for=name)
        for name, verb in PLATFORMS.items()
    },
    "attach": Verb("Follow a run that is active", "launch.run:attach", ssh=True),
    "resume": Verb("Start an ended run again", "launch.start:resume", ssh=True),
    "runs": Verb("List runs, newest first", "runs.runs:runs"),
    "runs prune": Verb("Delete old runs here and on their nodes", "runs.runs:prune", ssh=True),
    "status": Verb("Show the live state of a run", "runs.runs:status", ssh=True),
    "top": Verb("Watch runs and ranks on a live screen", "runs.top:top", ssh=True),
    "stop": Verb("Stop a run", "runs.runs:stop", ssh=True),
    "logs": Verb("Follow, show or fetch the logs of a run"),
    "logs tail": Verb("Show the last lines; -f keeps following", "runs.logs:tail", ssh=True),
    "logs show": Verb("Show the logs of a run", "runs.logs:show", ssh=True),
    "logs pull": Verb("Fetch the logs from the nodes", "runs.logs:pull"),
    "report": Verb("Write a run as one HTML file", "runs.report:report"),
    "compare": Verb("Compare runs: settings, losses, speed", "runs.report:compare"),
    "data": Verb("Build, verify and edit training data"),
    "data tokenizer": Verb("Train a tokenizer; add GLM's tokens"),
    "data tokenizer train": Verb("Train a byte-level BPE tokenizer", forwards="tokenizer-train"),
    "data tokenizer glm": Verb("Add GLM's special tokens", forwards="tokenizer-glm"),
    "data fetch": Verb("Download corpora and vocabularies", "models.fetch:fetch"),
    "data upload": Verb("Upload data to an object store", "models.fetch:upload"),
    "data build": Verb("Build .bin/.idx files from texts", "models.trainer:build", ssh=True, open_ended=True),
    "data info": Verb("Show documents, tokens and epochs", forwards="data-info"),
    "data verify": Verb("Check every rule of a .bin/.idx pair", forwards="data-verify"),
    "data repair": Verb("Correct an index that omits end tokens", forwards="data-repair"),
    "data split": Verb("Split a corpus into parts", forwards="data-split"),
    "data merge": Verb("Merge .bin/.idx pairs", forwards="data-merge"),
    "data scatter": Verb("Distribute the shards of a corpus over nodes", "models.trainer:scatter", ssh=True),
    "checkpoint": Verb("List, verify, convert and prune checkpoints"),
    "checkpoint list": Verb("List checkpoints and where they are", "models.checkpoint:list_", ssh=True),
    "checkpoint info": Verb("Show a checkpoint and where its files are", "models.checkpoint:info", ssh=True),
    "checkpoint verify": Verb("Compare every file with its hash", "models.checkpoint:verify", ssh=True),
    "checkpoint diff": Verb("Compare the tensors of two checkpoints", "models.checkpoint:diff", ssh=True),
    "checkpoint pull": Verb("Fetch a checkpoint from its nodes", "models.checkpoint:pull", ssh=True),
    "checkpoint prune": Verb("Delete old checkpoints", "models.checkpoint:prune", ssh=True),
    "checkpoint import": Verb("Convert other programs' checkpoints to ours", "models.weights:import_"),
    "checkpoint export": Verb("Convert a checkpoint for another program", "models.weights:export"),
    "generate": Verb("Generate text from a checkpoint", "models.generate:generate"),
    "serve": Verb("Serve a checkpoint over HTTP", "models.generate:serve"),
    "eval": Verb("Evaluate a checkpoint on local files", "models.evaluate:evaluate"),
    "tensorboard": Verb("Write TensorBoard files from a run", "models.trainer:tensorboard"),
}
# The trainer prints everything for these commands, including --help.
FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


class Commands(MutableMapping[str, Any]):
    """The commands below a noun ("" is the program itself); each is built when it is first used."""

    def __init__(self, noun: str) -> None:
        self._prefix = f"{noun} " if noun else ""
        self._names = [
            key.removeprefix(self._prefix)
            for key in TABLE
            if key.startswith(self._prefix) and " " not in key.removeprefix(self._prefix)
        ]
        self._built: dict[str, object] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._built:
            self._built[name] = built(self._prefix + name)
        return self._built[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._built[name] = command

    def __delitem__(self, name: str) -> None:
        self._names.remove(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


# Commands whose own words follow `--`, and those of them with a node set before it.
COMMANDS_OF_USERS = ("exec", "launch", "plan", "ssh")
AFTER_NODES = ("exec", "ssh")
# An option that names the nodes of `exec` as pdsh and clush do.
NODE_OPTION = re.compile(
    r"-a|--all|(?:--nodes|-[nw]|(?P<group>-g|--group))(?:(?:(?<=nodes)=|(?<=group)=|(?<=-[nwg]))(?P<set>.+))?",
    re.DOTALL,
)
ALL_NODES = ("-a", "--all")
# Letters in one word, as in `-bw node1`.
BUNDLE = re.compile(r"-(?=[abgnw]{2})(?P<flags>[ab]+)(?P<last>[gnw].*)?", re.DOTALL)
# Options of ours that other programs have too: after the first word of a command they are not taken for ours.
OF_MANY_PROGRAMS = re.compile(r"-[lftu]")


class WithExamples:
    """A command or group whose help ends with its examples."""

    key = ""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        refuse_contradictions(self.params)  # type: ignore[attr-defined]

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the words of a command line; report a `--` that seems to be missing."""
        args = self._with_one_set(args) if self.key == "exec" else args
        own = self._options_before(args)
        typed = list(args)
        if self.key in ("launch", "plan") and self._starts_command(typed, own):
            self._refuse_job_without_ending(typed[own])
        start = own
        if self.key in AFTER_NODES and typed[own : own + 1] and not typed[own].startswith("-"):
            start += 1 + self._options_before(typed[own + 1 :])
        short = [word[:2] for word in typed[start + 1 :] if OF_MANY_PROGRAMS.match(word)]
        if short and self._starts_command(typed, start):
            from clusterctl.cli import wrong_words

            raise wrong_words.options_of_command(self, ctx, typed, start, short)
        try:
            rest = super().parse_args(ctx, args)  # type: ignore[misc]
        except WRONG_WORDS as error:
            from clusterctl.cli import wrong_words

            is_unknown = wrong_words.is_unknown_option(error) and self._starts_command(typed, start)
            if is_unknown and not wrong_words.of_others(ctx, error, typed[:start]):
                raise wrong_words.options_of_command(self, ctx, typed, start) from None
            raise wrong_words.all_wrong(self, error, ctx, typed) from None
        values = ctx.params.values()
        is_empty = any(word == "" or word.endswith("=") for word in typed)
        if is_empty or any(isinstance(value, float) and not math.isfinite(value) for value in values):
            from clusterctl.cli.wrong_words import require_usable

            require_usable(self, ctx, typed)
        return rest

    def _with_one_set(self, args: list[str]) -> list[str]:
        """Return the words of `exec` with the node sets of -n, -w, -g and -a as one argument."""
        index, sets, rest = self._options_before(args), list[str](), list(args)
        while rest[index + 1 :]:
            if bundle := BUNDLE.fullmatch(rest[index]):
                letters = [*bundle["flags"], *([bundle["last"]] if bundle["last"] else [])]
                rest[index : index + 1] = [f"-{letter}" for letter in letters]
            elif not (found := NODE_OPTION.fullmatch(rest[index])):
                break
            elif rest.pop(index) in ALL_NODES:
                sets.append("all")
            else:
                text = rest.pop(index) if found["set"] is None else found["set"]
                sets.append(",".join(f"@{name}" for name in text.split(",")) if found["group"] else text)
            index += self._options_before(rest[index:])
        with choices.at_option("-n"):
            return [*rest[:index], united(sets), *rest[index:]] if sets else args

    def _starts_command(self, typed: list[str], start: int) -> bool:
        """Return whether the word at `start` seems to be the first one of the user's own command, without `--`."""
        if self.key not in COMMANDS_OF_USERS or "--" in typed or not typed[start : start + 1]:
            return False
        is_job = self.key not in AFTER_NODES and typed[start].endswith(JOB_FILES)
        return not is_job and not typed[start].startswith("-")

    def _refuse_job_without_ending(self, word: str) -> None:
        """Raise a UsageError for the first word of a command if a job file has this name, with an ending."""
        from clusterctl.errors import UsageError

        for file in (Path(word + ending) for ending in JOB_FILES):
            if file.is_file():
                start = f"clusterctl {self.key}"
                remedy = f"{start} {file} for the job; {start} -- {word} ... for a program of this name"
                raise UsageError(f"{word}: {file} is a job file; which of them is meant?", remedy)

    def _options_before(self, args: list[str]) -> int:
        """Return how many words are options of this command, and their values, before the first other word."""
        values = {
            name: not getattr(option, "is_flag", True)
            for option in self.params  # type: ignore[attr-defined]
            for name in (*option.opts, *option.secondary_opts)
        }
        index = 0
        while index < len(args) and args[index].partition("=")[0] in values and args[index].startswith("-"):
            index += 1 + values.get(args[index], False)
        return min(index, len(args))

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options and arguments; while a shell completes, with the values of each."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        if ctx.resilient_parsing:
            from clusterctl.cli.option_values import offer_values

            offer_values(self.key, found)
        return found

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options, in groups; a noun has its commands after them."""
        from clusterctl.cli.option_groups import grouped

        for title, members in grouped(self.key, self.get_params(ctx)):
            if records := [record for param in members if (record := param.get_help_record(ctx))]:
                with formatter.section(title):
                    formatter.write_dl(records)
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples."""
        from clusterctl.cli.examples import examples

        if lines := examples(self.key, TABLE):
            with formatter.section("Examples"):
                for line in lines:
                    formatter.write(f"  {line}\n")


class Command(WithExamples, WithKind, WithPager, TyperCommand):
    """A command of the table."""


class SshCommand(WithExamples, WithKind, WithPager, Reaching):
    """A command of the table that connects to nodes."""


class Noun(WithExamples, WithKind, WithPager, TyperGroup):
    """A group whose commands come from the table; listing them imports none of them."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**{**more, "commands": None})
        self.commands = Commands(self.key)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the words of a command line; `logs RUN [-f]` is short for `logs show RUN` or `logs tail -f RUN`."""
        if self.key == "logs" and args and args[0] not in (*self.commands, "-h", "--help"):
            follows = any(word in ("-f", "--follow") for word in args)
            args = ["tail" if follows else "show", *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the words name."""
        try:
            return super().resolve_command(ctx, args)
        except WRONG_WORDS as error:
            word = args[0]
            known = [name for name in self.commands if not TABLE[f"{self.key} {name}".strip()].hidden]
            if word.startswith("-"):
                from clusterctl.cli.wrong_words import usage_error

                raise usage_error(error, ctx, args) from None
            from clusterctl.cli import habits
            from clusterctl.errors import UsageError, did_you_mean

            other = "" if self.key else habits.COMMANDS.get(word, "")
            meant = f"did you mean {other!r}?" if other else did_you_mean(word, known)
            close = f". {meant[0].upper()}{meant[1:]}" if meant else ""
            raise UsageError(f"no such command {word!r}{close}", f"{ctx.command_path} -h") from None

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of its commands, in the table's order."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in sections, each with its short help."""
        names = {name: f"{self.key} {name}".strip() for name in self.commands}
        shown = {name: TABLE[key].help for name, key in names.items() if not TABLE[key].hidden}
        sections = {"Commands": tuple(shown)} if self.key else SECTIONS
        for title, members in sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, shown[name]) for name in members if name in shown], col_max=16)


def built(key: str) -> Any:
    """Return the click command of a row of the table; `key` is "" for the program itself."""
    if key and not any(other.startswith(f"{key} ") for other in TABLE):
        return _command(key)
    return typer.main.get_group(application(key)) if key else typer.main.get_command(application())


def _command(key: str) -> Any:
    verb = TABLE[key]
    info = CommandInfo(
        name=key.rpartition(" ")[2],
        cls=type("Command", (SshCommand if verb.ssh else Command,), {"key": key}),
        context_settings=FORWARD if verb.forwards or verb.open_ended else None,
        callback=_forwarder(key) if verb.forwards else _function(verb.target, verb.made_for),
        hidden=verb.hidden,
        help=f"{verb.help}." if verb.forwards else None,
    )
    return typer.main.get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)


def application(key: str = "") -> typer.Typer:
    """Return the program, or one of its nouns, as a typer application."""
    callback = program if not key else _function(TABLE[key].target) if TABLE[key].target else None
    app = typer.Typer(
        name=key.rpartition(" ")[2] or None,
        cls=type("Noun", (Noun,), {"key": key}),
        no_args_is_help=not key or callback is None,
        add_completion=not key,
        # main.run reports every error; typer's tracebacks would show local variables, which can hold secrets.
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help=TABLE[key].help + "." if key else PROGRAM,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=callback is not None)(callback or _nothing)
    return app


def _nothing() -> None:
    pass


def _function(target: str, made_for: str = "") -> Callable[..., Any]:
    module, name = target.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"clusterctl.cli.{module}"), name)
    return option_fields.flat(found(made_for) if made_for else found)


def _forwarder(key: str) -> Callable[..., None]:
    def forward(context: typer.Context) -> None:
        from clusterctl.cli.models.trainer import forward as run_in_trainer

        run_in_trainer(key, TABLE[key].forwards, context.args)

    return forward


def program(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
    cluster: options.ClusterFile = None,
) -> None:
    """Run programs on machines over SSH; train, fine-tune, evaluate and serve language models."""
    from clusterctl import __version__
    from clusterctl.cli import screen

    if version:
        screen.write(f"clusterctl {__version__}\n")
        raise typer.Exit
    if cluster is not None:
        context.default_map = _for_all("", str(cluster))


def _for_all(key: str, cluster: str) -> dict[str, object]:
    """Return click's default_map that passes --cluster to every command below `key`."""
    below = {name: _for_all(f"{key} {name}".strip(), cluster) for name in Commands(key)}
    return {"cluster": cluster, **below}
