"""`keeper`: the background process that keeps connections open."""

from __future__ import annotations

import time

import typer

from clusterctl.cli import options, screen

app = typer.Typer(
    no_args_is_help=True, help="The background process that keeps connections open (--persist)."
)


def status(as_json: options.Json = False) -> None:
    """What this user's keepers hold; more than one only where code or settings changed meanwhile."""
    from clusterctl.keeper.client import found

    keepers = [about for one in found() if (about := one.status())]
    if as_json:
        screen.show_json(keepers)
        return
    if not keepers:
        screen.log("no keeper runs; `--persist 10m` starts one")
    for one in keepers:
        since = time.strftime("%H:%M:%S", time.localtime(one["began"]))
        screen.write(
            f"keeper {one['pid']} since {since}: {len(one['links'])} links, {one['commands']} commands, "
            f"kept {one['persist']:.0f} s, {one['memory_mb']} MB\n"
        )
        for link in one["links"]:
            screen.write(f"  {link['node']:<16} {link['host']:<24} idle {link['idle']:.0f} s\n")


def stop() -> None:
    """End this user's keepers and their connections at once; commands that use them are ended too."""
    from clusterctl.keeper.client import found

    stopped = [one.stop() for one in found()]
    screen.log(f"{sum(stopped)} stopped" if stopped else "no keeper runs")
