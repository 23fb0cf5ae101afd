"""Ask a launcher that is installed here for its options, if a command has one that our tables lack."""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys

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
