"""Ctrl-C while the program loads its modules. It is imported first, and imports only what Python itself has loaded."""

from __future__ import annotations

import atexit
import os
import signal

EXIT_INTERRUPTED = 130


def end_at_once(number: int, frame: object) -> None:
    """End this process, which has not begun any work, with one line; as a handler of SIGINT."""
    os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def while_loading() -> None:
    """Let Ctrl-C end this process immediately, without a traceback; an ignored SIGINT stays ignored."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, end_at_once)
        # At its end, Python restores the signal's default, which would change the exit code of finished work.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def while_working() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, as usual."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def handled() -> None:
    """Let no SIGINT reach this process any more: Python sends itself one if a KeyboardInterrupt came inside `exec`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
