"""`python -m trainer VERB`: results as JSON on stdout; a wrong input as one line on stderr, with exit code 2."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from clusterctl.wire.output import output_fault
from trainer import command_line
from trainer.errors import ConfigFaults, InputError, TrainerError, machine_error
from trainer.packages import missing_package

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code; the traceback of a bug goes to stderr, the rank's log."""
    words = list(sys.argv[1:] if argv is None else argv)
    called = words[1] if words[:1] == ["--called"] and len(words) > 1 else ""
    verb = ""
    try:
        # The launcher starts this program with these signals blocked, so that none shows a traceback of its imports.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        verb, request = command_line.read(words[2:] if called else words, called)
        code = command_line.VERBS[verb].function(request)
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
