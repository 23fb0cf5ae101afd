"""Run one command line: build the command it names, and turn an error into words and an exit code."""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from functools import lru_cache
from types import FrameType
from typing import Any

from clusterctl.cli.screen import report_error
from clusterctl.errors import EXIT_BUG, ClusterctlError

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
        command()(args=argv, prog_name="clusterctl")
        return 0
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(bool(done.code))
    except ClusterctlError as error:
        report_error(error)
        return error.exit_code
    except OSError as problem:
        said = _of_this_machine(problem)
        if said is None:
            return _confess(problem, argv)
        report_error(said)
        return said.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    # The outermost handler: what comes this far is a bug of ours.
    except Exception as bug:
        return _confess(bug, argv)


@lru_cache(maxsize=1)
def command() -> Any:
    """Return the whole command line; its commands are built when they are used."""
    from clusterctl.cli.commands import built

    return built("")


def warm_up() -> None:
    """Load what an `exec` will need, for a process that runs many."""
    import yaml  # noqa: F401
    from rich import console, text  # noqa: F401

    from clusterctl.exec import output  # noqa: F401
    from clusterctl.hostfile import detect  # noqa: F401
    from clusterctl.inventory import nodeset  # noqa: F401
    from clusterctl.keeper import client  # noqa: F401

    for verb in ("exec", "push", "pull"):
        command().commands[verb]


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _of_this_machine(problem: OSError) -> ClusterctlError | None:
    """What is no bug of ours: a full disk, a folder that was removed under our feet."""
    # As only a question for the current folder has it.
    if problem.errno == errno.ENOENT and problem.filename is None:
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
