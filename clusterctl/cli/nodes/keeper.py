"""`keeper`: inspect and stop the background process that keeps connections open."""

from __future__ import annotations

import time
from dataclasses import asdict

from clusterctl.cli import options, screen


def status(as_json: options.Json = False) -> None:
    """List your connection keepers and the connections that they hold. There is more than one only after clusterctl or
    its settings have changed."""
    from clusterctl.keeper.client import running_keepers

    states = [state for keeper in running_keepers() if (state := keeper.status())]
    if as_json:
        screen.show_json([asdict(state) for state in states])
        return
    if not states:
        screen.log("no keeper is running; `--persist 10m` starts one")
    for state in states:
        since = time.strftime("%H:%M:%S", time.localtime(state.began))
        screen.write(
            f"keeper {state.pid} since {since}: {len(state.links)} links, {state.commands} commands, "
            f"kept {state.persist:.0f} s, {state.memory_mb} MB\n"
        )
        for link in state.links:
            screen.write(f"  {link.node:<16} {link.host:<24} idle {link.idle:.0f} s\n")


def stop() -> None:
    """Stop your connection keepers and close their connections. Commands that use them are stopped too."""
    from clusterctl.keeper.client import running_keepers

    stopped = [keeper.stop() for keeper in running_keepers()]
    screen.log(f"{sum(stopped)} stopped" if stopped else "no keeper is running")
