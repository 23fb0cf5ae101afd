"""The launchers that are known: their names, options, and how each learns of the other nodes."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from clusterctl.jobs.launchers import options
from clusterctl.jobs.launchers.options import Options

TORCH_MODULES = ("torch.distributed.run", "torch.distributed.launch")
# The last ones are Debian's names.
MPI = (
    "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun",
    "mpirun.openmpi", "mpiexec.openmpi", "mpirun.mpich", "mpiexec.mpich",
)  # fmt: skip


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks, as named in a command."""

    name: str
    options: Options = options.nothing
    flags: tuple[str, ...] = ()
    """Its options without a value."""
    valued: tuple[str, ...] = ()
    """Further options with a value, besides those that are filled in or checked; a star stands for any end."""
    parser: str = ""
    """The name under which the launcher's own parser is asked for options that are not known; empty: never."""
    pairs: tuple[str, ...] = ()
    """Its options with two values."""
    verbs: tuple[str, ...] = ()
    """The words after its name that start ranks: `accelerate launch`; empty if it has no such words."""
    by_variables: bool = False
    """Whether variables of its environment fill it in, so that it may stand inside a script."""
    instead: str = ""
    """The form that works on several nodes, for a launcher that would reach them by a way of its own."""
    words: int = 1
    """How many words of the command name it: 3 for `python -m torch.distributed.run`."""


def _torch(name: str) -> Launcher:
    valued = options.TORCH_VALUED
    return Launcher(name, options.torchrun, options.TORCH_FLAGS, valued, "torchrun", by_variables=True)


DEEPSPEED = Launcher(
    "deepspeed", options.deepspeed, options.DEEPSPEED_FLAGS, options.DEEPSPEED_VALUED, "deepspeed"
)
ACCELERATE = Launcher(
    "accelerate", options.accelerate, options.ACCELERATE_FLAGS, options.ACCELERATE_VALUED, "accelerate"
)
MSRUN = Launcher("msrun", options.msrun)
COMPOSER = Launcher("composer", options.composer, ("-v", "--verbose", "-c", "--command_mode"))
PADDLE = Launcher("paddle", options.paddle, by_variables=True)
LLAMAFACTORY = Launcher("llamafactory-cli", verbs=("train",), by_variables=True)
COLOSSALAI = Launcher("colossalai", options.colossalai, verbs=("run",), instead="torchrun")
HOROVOD = Launcher("horovodrun", options.mpi, ("--gloo", "--mpi", "--verbose"), instead="mpirun")
OF_MPI = Launcher("mpirun", options.mpi, options.MPI_FLAGS, pairs=options.MPI_PAIRS, by_variables=True)
PROGRAMS = {
    "torchrun": _torch("torchrun"),
    # torchtune's, with torchrun's options.
    "tune": replace(_torch("tune"), verbs=("run",)),
    "deepspeed": DEEPSPEED,
    "accelerate": replace(ACCELERATE, verbs=("launch",)),
    "accelerate-launch": ACCELERATE,
    "msrun": MSRUN,
    "composer": COMPOSER,
    "fleetrun": replace(PADDLE, name="fleetrun"),
    "llamafactory-cli": LLAMAFACTORY,
    "lmf": replace(LLAMAFACTORY, name="lmf"),
    "swift": Launcher("swift", verbs=("pt", "sft", "rlhf"), by_variables=True),
    "colossalai": COLOSSALAI,
    "horovodrun": HOROVOD,
    "torchx": Launcher("torchx", verbs=("run",), instead="torchrun"),
    "srun": Launcher("srun", instead=""),
    "ray": Launcher("ray", options.ray_start, ("--head", "--block", "--disable-usage-stats"), verbs=("start",)),
    **{name: replace(OF_MPI, name=name) for name in MPI},
}  # fmt: skip
MODULES = {
    **{name: _torch(name) for name in TORCH_MODULES},
    "deepspeed": DEEPSPEED,
    "deepspeed.launcher.runner": DEEPSPEED,
    "accelerate.commands.launch": ACCELERATE,
    "accelerate.commands.accelerate_cli": PROGRAMS["accelerate"],
    "composer": COMPOSER,
    "composer.cli.launcher": COMPOSER,
    "colossalai.cli": COLOSSALAI,
    "horovod.runner.launch": HOROVOD,
    "horovod.run": HOROVOD,
    "llamafactory.cli": LLAMAFACTORY,
    "mindspore.parallel.cluster.run": MSRUN,
    "paddle.distributed.launch": PADDLE,
    "paddle.distributed.fleet.launch": PADDLE,
    "paddle.distributed.run": PADDLE,
    "ray.scripts.scripts": PROGRAMS["ray"],
}
# Programs and modules that start ranks on a node, with the words after their names that mean it: also those that
# launchers, and MPI's libraries in a program that was started without mpirun, start there.
STARTERS = {
    **{name: launcher.verbs for name, launcher in {**PROGRAMS, **MODULES}.items() if launcher.name != "ray"},
    **dict.fromkeys(("deepspeed.launcher.launch", "orted", "prted", "prterun", "hydra_pmi_proxy"), ()),
}
PYTHON = re.compile(r"(python|pypy)[0-9.]*")


def module_of(words: Sequence[str]) -> tuple[str, int]:
    """Return the module or script that a command of Python runs, and how many words name it; ("", 0) for code."""
    index = 1
    while index < len(words):
        word = words[index]
        index += 1
        if word == "--check-hash-based-pycs":
            index += 1
        elif word.startswith("--") and len(word) > 2:
            continue
        elif word in ("-", "-c"):
            return "", 0
        elif not word.startswith("-"):
            return word, index
        elif found := re.fullmatch(r"-([^mcWX]*)([mcWX])(.*)", word):
            if found[2] == "c":
                return "", 0
            if found[2] == "m":
                module = found[3] or (words[index] if index < len(words) else "")
                return module, index + (not found[3])
            index += not found[3]
    return "", 0


def launcher_at(words: Sequence[str]) -> Launcher | None:
    """Return the launcher that a command begins with; None for any other program."""
    first = PurePath(words[0]).name if words else ""
    known, count = PROGRAMS.get(first), 1
    if PYTHON.fullmatch(first):
        module, count = module_of(words)
        known = MODULES.get(module) or (PROGRAMS.get(PurePath(module).name) if "/" in module else None)
    if known is None:
        return None
    if known.verbs:
        if tuple(words[count : count + 1]) not in [(verb,) for verb in known.verbs]:
            return None
        count += 1
    return replace(known, words=count)


# Seconds that a launcher may take to be imported.
PATIENCE = 60.0
# Prints the options without a value of the parser that a module makes, or of the first one that parses.
ASK = """
import argparse, importlib, json, sys
def show(parser, *_, **__):
    flags = [name for action in parser._actions if action.nargs == 0 for name in action.option_strings]
    print("\\n" + json.dumps(flags))
    sys.exit()
argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_known_args = show
module, function = sys.argv[1:]
made = getattr(importlib.import_module(module), function)([])
"""
# The module with the parser, and the function that parses.
PARSERS = {
    "torchrun": ("torch.distributed.run", "parse_args"),
    "deepspeed": ("deepspeed.launcher.runner", "parse_args"),
    "accelerate": ("accelerate.commands.launch", "main"),
}


@functools.cache
def flags(launcher: str) -> frozenset[str]:
    """Return the options without a value of a launcher; none if it is not installed here."""
    module, function = PARSERS.get(launcher, ("", ""))
    if not module or importlib.util.find_spec(module.partition(".")[0]) is None:
        return frozenset()
    command = [sys.executable, "-c", ASK, module, function]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE, text=True, check=True)
        found = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    except (OSError, ValueError, subprocess.SubprocessError):
        return frozenset()
    return frozenset(f"--{name[2:].replace('-', '_')}" if name[:2] == "--" else name for name in found)
