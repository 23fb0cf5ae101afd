"""Give the programs that tests start the usual signal handling, even if the test process ignores signals."""

from __future__ import annotations

import signal

# `command &` in a script ignores SIGINT and SIGQUIT, `nohup` ignores SIGHUP, and every child inherits that. A handler
# here is reset to the default when a child executes its program. pytest itself still ignores SIGQUIT and SIGHUP.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(
            _number, signal.default_int_handler if _number == signal.SIGINT else lambda number, frame: None
        )
