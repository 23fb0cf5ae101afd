"""The front door: one place turns an error into words and an exit code."""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from types import FrameType

from clusterctl.errors import EXIT_BUG, ClusterctlError, InputFaults

OF_THIS_MACHINE = {
    errno.ENOSPC: "free some space on this machine; df -h . ~ /tmp shows where there is none",
    errno.EDQUOT: "free some space on this machine; `quota` shows how much you may have",
    errno.EROFS: "work in a folder that can be written",
    errno.EACCES: "check the owner and mode of what is named there",
    errno.EPERM: "check the owner and mode of what is named there",
    errno.EMFILE: "ulimit -n raises how many files may be open, --fanout takes fewer nodes at once",
    errno.ENOMEM: "free some memory on this machine",
}


def main() -> None:
    """The program `clusterctl`."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command line and give its exit code; a failure of the user's makes no traceback."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    try:
        from clusterctl.cli.direct import command_for

        command_for(argv)(args=argv, prog_name="clusterctl")
        return 0
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(bool(done.code))
    except ClusterctlError as error:
        tell(error)
        return error.exit_code
    except OSError as problem:
        said = _of_this_machine(problem)
        if said is None:
            return _confess(problem, argv)
        tell(said)
        return said.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as bug:  # the outermost door: what comes this far is a bug of ours
        return _confess(bug, argv)


def warm_up() -> None:
    """Load what an `exec` will need, for a process that runs many."""
    import yaml  # noqa: F401
    from rich import console, text  # noqa: F401

    from clusterctl import hostfile_any, keeper_client, nodeset, output  # noqa: F401
    from clusterctl.cli.program import command

    command()


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def tell(error: ClusterctlError) -> None:
    """An error in words on stderr: what and where, then what to try."""
    from clusterctl.cli.screen import error_console, safe

    console = error_console()
    if isinstance(error, InputFaults):
        for fault in error.faults:
            console.print(safe(f"error: {fault.where}: {fault.what}"), style="bold red", highlight=False)
            if fault.remedy:
                console.print(safe(f"  try: {fault.remedy}"), highlight=False)
    else:
        console.print(safe(f"error: {error.message}"), style="bold red", highlight=False)
    for line in error.hint.splitlines():
        console.print(safe(f"  try: {line}"), highlight=False)


def _of_this_machine(problem: OSError) -> ClusterctlError | None:
    """What is no bug of ours: a full disk, a folder that was removed under our feet."""
    if problem.errno == errno.ENOENT and problem.filename is None:  # as only a question for the current folder has it
        return ClusterctlError("the folder that this was started in is gone", "cd to one that is there")
    hint = OF_THIS_MACHINE.get(problem.errno or 0)
    where = problem.filename or "on this machine"
    return ClusterctlError(f"{where}: {problem.strerror}", hint) if hint else None


def _confess(bug: Exception, argv: list[str]) -> int:
    import tempfile

    from clusterctl import __version__

    with tempfile.NamedTemporaryFile("w", prefix="clusterctl-bug-", suffix=".txt", delete=False) as file:
        file.write(f"clusterctl {__version__}, Python {sys.version}\ncommand: {argv}\n\n")
        traceback.print_exception(bug, file=file)
    print(f"error: a bug of ours: {type(bug).__name__}: {bug}", file=sys.stderr)
    print(f"  try: send us {file.name}, which holds the traceback", file=sys.stderr)
    return EXIT_BUG
