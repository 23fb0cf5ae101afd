"""Run one command line: build its command, and turn errors into messages and exit codes."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import traceback
from functools import lru_cache
from types import FrameType
from typing import Any

from clusterctl import interrupts
from clusterctl.cli.screen import hints_with, report_error
from clusterctl.errors import EXIT_BUG, ClusterctlError, UsageError
from clusterctl.wire.output import output_fault

OF_THIS_MACHINE = {
    errno.ENOSPC: "free some space on this machine; `df -h . ~ /tmp` shows which disk is full",
    errno.EDQUOT: "free some space on this machine; `quota` shows your limit",
    errno.EROFS: "use a folder that you can write to",
    errno.EACCES: "check the owner and permissions of this file",
    errno.EPERM: "check the owner and permissions of this file",
    errno.EMFILE: "allow more open files with `ulimit -n`, or contact fewer nodes at a time with --fanout",
    errno.EFBIG: "allow larger files with `ulimit -f`",
    errno.ENOMEM: "free some memory on this machine",
}
# The named file is a wrong input: another one can be named.
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


def main() -> None:
    """Run the program `clusterctl`."""
    code = run(sys.argv[1:])
    # The operating system frees all objects together; to look for garbage among them takes a tenth of a short command.
    gc.freeze()
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Run one command line; return its exit code. Errors of the user show no traceback."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if sys.stdout is None:
        report_error(UsageError("standard output is closed", "redirect it, as in >/dev/null"))
        return UsageError.exit_code
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    hints_with(None)
    try:
        interrupts.while_working()
        if argv[:1] == ["exec"]:
            from clusterctl.cli.nodes import plain_exec

            plain = plain_exec.read(argv)
            if plain is not None:
                return plain.run()
        command()(args=argv, prog_name="clusterctl")
        return 0
    except SystemExit as done:
        if _was_interrupted(done):
            interrupts.handled()
            print("interrupted", file=sys.stderr)
        return done.code if isinstance(done.code, int) else int(bool(done.code))
    except ClusterctlError as error:
        report_error(error)
        return error.exit_code
    except OSError as problem:
        unwritten = output_fault(problem)
        fault = ClusterctlError(*unwritten) if unwritten else _machine_error(problem)
        if fault is None:
            return _report_bug(problem, argv)
        report_error(fault)
        return fault.exit_code
    except KeyboardInterrupt:
        interrupts.handled()
        print("interrupted", file=sys.stderr)
        return interrupts.EXIT_INTERRUPTED
    # The outermost handler: any other exception is a bug.
    except Exception as bug:
        return _report_bug(bug, argv)


@lru_cache(maxsize=1)
def command() -> Any:
    """Return the command line interface; its commands are built when they are used."""
    from clusterctl.cli.commands import built

    return built("")


def _was_interrupted(done: SystemExit) -> bool:
    """Return whether a command ended because of Ctrl-C, which typer turns into an exit code without a message."""
    return isinstance(getattr(done.__context__, "__cause__", None), KeyboardInterrupt)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _machine_error(problem: OSError) -> ClusterctlError | None:
    """Return the error for a fault of this machine, such as a full disk; None for a bug."""
    # Only a system call for the current folder fails without a file name.
    if problem.errno == errno.ENOENT and problem.filename is None:
        return ClusterctlError("the current folder is gone", "change to a folder that exists")
    if problem.errno == errno.ENAMETOOLONG and problem.filename is not None:
        # The file systems of Linux allow 255 bytes a name, and the kernel 4,096 a path.
        return UsageError(f"{os.fsdecode(problem.filename)[:60]}...: the name is too long", "check the name")
    hint = OF_THIS_MACHINE.get(problem.errno or 0)
    where = problem.filename or "on this machine"
    kind = UsageError if problem.errno in NOT_ALLOWED else ClusterctlError
    return kind(f"{where}: {problem.strerror}", hint) if hint else None


def _report_bug(bug: Exception, argv: list[str]) -> int:
    import tempfile

    from clusterctl import __version__

    with tempfile.NamedTemporaryFile("w", prefix="clusterctl-bug-", suffix=".txt", delete=False) as file:
        file.write(f"clusterctl {__version__}, Python {sys.version}\ncommand: {argv}\n\n")
        traceback.print_exception(bug, file=file)
    print(f"error: a bug in clusterctl: {type(bug).__name__}: {bug}", file=sys.stderr)
    print(f"  try: report it with {file.name}, which contains the traceback", file=sys.stderr)
    return EXIT_BUG
