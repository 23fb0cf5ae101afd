"""`python -m trainer VERB`: results as JSON on stdout; a wrong input as one line on stderr, with exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from clusterctl.wire.output import output_fault
from trainer.corpus.commands import add_verbs
from trainer.env import Env
from trainer.errors import ConfigFaults, InputError, TrainerError, machine_error
from trainer.evaluate import command as evaluation
from trainer.generate import command as generation
from trainer.packages import missing_package
from trainer.serve import command as serving
from trainer.weights.commands import add_verbs as add_weights_verbs


def _check(_: argparse.Namespace) -> int:
    from trainer.plan.summary import check

    try:
        document = json.load(sys.stdin)
    except ValueError as error:
        raise InputError(f"stdin: not JSON: {error}") from None
    answer = check(document)
    _show(answer)
    return 0 if answer["ok"] else 1


def _rehearse(_: argparse.Namespace) -> int:
    from trainer.device import prepare_import
    from trainer.plan.resolve import plan_config

    document = json.load(sys.stdin)
    found = plan_config(document["train"], document["world_size"])
    if found.faults:
        raise ConfigFaults(found.faults)
    prepare_import()
    from trainer.train.rehearse import rehearse

    _show(rehearse(found.config, document["world_size"]))
    return 0


def _schema(_: argparse.Namespace) -> int:
    from trainer.config.schema import train_schema

    _show(train_schema())
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from trainer.device import keep_freed_memory, prepare_import
    from trainer.plan.resolve import read_config
    from trainer.train.startup import Startup

    startup = Startup()
    startup.done("python")
    # A supervisor sends this signal to a hung rank to get the stacks of all threads.
    faulthandler.register(signal.SIGUSR1)
    environment = Env.read()
    config = read_config(_read_json(arguments.config), environment.world_size)
    run_dir = arguments.run_dir or environment.run_dir or arguments.config.resolve().parent
    keep_freed_memory()
    prepare_import()
    # Garbage collections during these imports free nothing and take 0.2 s of a core.
    gc.disable()
    from trainer.parallel.group import leave
    from trainer.train.assemble import StopOnSigterm, run_training

    gc.freeze()
    gc.enable()
    _, group = run_training(config, environment, run_dir, StopOnSigterm(), startup)
    leave(group, 0)
    return 0


def _checkpoint_verify(arguments: argparse.Namespace) -> int:
    from trainer.device import prepare_import

    prepare_import()
    from trainer.checkpoint.store import verify

    found = verify(arguments.folder)
    _show(
        {
            "ok": True,
            "path": str(found.path),
            "step": found.step,
            "bytes": found.bytes,
            "files": list(found.files),
        }
    )
    return 0


def _checkpoint_diff(_: argparse.Namespace) -> int:
    from trainer.device import prepare_import

    question = json.load(sys.stdin)
    prepare_import()
    from trainer.checkpoint.compare import compare

    found = compare(Path(question["first"]), Path(question["second"]), question["pairs"])
    _show({name: asdict(difference) for name, difference in found.items()})
    return 0


def _tensorboard(arguments: argparse.Namespace) -> int:
    from clusterctl.wire.contract import METRICS_FILE, TENSORBOARD_DIR
    from trainer.train.tensorboard import convert

    metrics = arguments.run / METRICS_FILE if arguments.run.is_dir() else arguments.run
    folder = arguments.output or metrics.parent / TENSORBOARD_DIR
    if not metrics.is_file():
        raise InputError(f"{metrics} does not exist", "name the folder of a run that trains")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output {folder}: is a file, not a folder", "name another folder")
    if folder.is_dir() and any(folder.iterdir()):
        problem = f"{folder} is not empty: a curve would be drawn twice"
        raise InputError(problem, "remove it, or name another by --output")
    lines = convert(metrics, folder)
    sys.stdout.write(f"{lines} lines of {metrics}\ntensorboard --logdir {folder}\n")
    return 0


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from None


def _show(answer: object) -> None:
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")


HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Types of an option's value, in words.
NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}


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


def _parser(called: str) -> argparse.ArgumentParser:
    """Return the parser; `called` is the command that the user typed, if it was not this program."""
    parser = _Parser(prog="python -m trainer", description="The embedded trainer.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, does: Any, text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text, prog=called or None)
        added.set_defaults(does=does)
        return added

    verb("check", _check, "check a config: JSON on stdin, all faults and a summary on stdout")
    verb(
        "rehearse",
        _rehearse,
        "build and step one rank of a layout here: JSON on stdin, what it took on stdout",
    )
    verb("schema", _schema, "print a JSON schema of the train part of a job")
    train = verb("train", _train, "train with the launcher's environment, or alone")
    train.add_argument("config", type=Path, metavar="CONFIG.json")
    train.add_argument(
        "--run-dir", type=Path, help="where metrics and checkpoints go (default: the folder of the config)"
    )
    add_verbs(verb)
    add_weights_verbs(verb)
    board = verb(
        "tensorboard", _tensorboard, "write a run's metrics as TensorBoard's files, with Megatron's tags"
    )
    board.add_argument("run", type=Path, metavar="RUN_DIR")
    board.add_argument("--output", type=Path, metavar="DIR", help="default: tensorboard/ in the run's folder")
    verb(
        "checkpoint-diff",
        _checkpoint_diff,
        "compare the tensors of two checkpoints: JSON on stdin and stdout",
    )
    generation.add_verb(verb)
    serving.add_verb(verb)
    evaluation.add_verb(verb)
    verb("checkpoint-verify", _checkpoint_verify, "compare a checkpoint with its manifest").add_argument(
        "folder", type=Path
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; the traceback of a bug goes to stderr, the rank's log."""
    words = list(sys.argv[1:] if argv is None else argv)
    called = words[1] if words[:1] == ["--called"] and len(words) > 1 else ""
    verb = ""
    try:
        # The launcher starts this program with these signals blocked, so that none shows a traceback of its imports.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        arguments = _parser(called).parse_args(words[2:] if called else words)
        verb = arguments.verb
        code = int(arguments.does(arguments))
        if verb != "train":
            sys.stdout.flush()
        return code
    except TrainerError as error:
        sys.stderr.write("".join(f"error: {line}\n" for line in error.message.splitlines()))
        if called and isinstance(error, InputError) and not isinstance(error, ConfigFaults):
            error.hint = error.hint or f"{called} --help"
        if error.hint:
            sys.stderr.write(f"  try: {error.hint}\n")
        return error.exit_code
    except OSError as error:
        # In a rank's log, the traceback tells more.
        unwritten = None if verb == "train" else output_fault(error)
        fault = TrainerError(*unwritten) if unwritten else None if verb == "train" else machine_error(error)
        if fault is None:
            raise
        sys.stderr.write(f"error: {fault.message}\n  try: {fault.hint}\n")
        return fault.exit_code
    except ModuleNotFoundError as error:
        # In a rank's log, the traceback tells more.
        lacks = None if verb == "train" else missing_package(error)
        if lacks is None:
            raise
        sys.stderr.write(f"error: {lacks.message}\n  try: {lacks.hint}\n")
        return lacks.exit_code
    except KeyboardInterrupt:
        # Another one would show a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if called:
            sys.stderr.write("interrupted\n")
        return 130


def run() -> NoReturn:
    """Run the program and end the process; where torch is loaded, without the interpreter's shutdown.

    The shutdown takes half a second of a core on every rank of a failed run before the next attempt, and a gloo rank
    sometimes aborts in it, which hides the exit code. So nothing may depend on `atexit`.
    """
    try:
        code = main()
    except Exception:
        # The outermost handler: print the traceback as Python would.
        sys.excepthook(*sys.exc_info())
        code = 1
    if "torch" not in sys.modules:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
