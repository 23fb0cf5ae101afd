"""`nodes trust`: host keys, shown and recorded on consent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import options, reaching, screen

if TYPE_CHECKING:
    from clusterctl.host_keys import SeenKey
    from clusterctl.inventory import Cluster
    from clusterctl.ssh_choice import SshChoice
    from clusterctl.transport import Outcome

STYLES = {"known": "green", "new": "yellow", "changed": "bold red"}


def trust(
    selection: Annotated[str | None, typer.Argument(metavar="[SET]", help="Only these nodes.")] = None,
    cluster: options.ClusterFile = None,
    exclude: options.Exclude = None,
    yes: options.Yes = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Fetch the nodes' host keys without logging in, show their fingerprints, and record new ones on
    consent."""
    from clusterctl.run import raise_failures
    from clusterctl.ssh_choice import choice_for
    from clusterctl.transport import on_each

    chosen = options.cluster_of(cluster, selection, exclude)
    transport = choice_for(chosen, reaching.chosen())
    outcomes = on_each(chosen.nodes, transport.seen)
    _show(outcomes, as_json)
    new = [one for one in outcomes if one.value is not None and one.value.state == "new"]
    if new and not dry_run:
        _record(chosen, transport, new, yes)
    for one in outcomes:
        if one.value is not None and one.value.state == "changed":
            raise one.value.refusal()
    raise_failures(outcomes)


def _record(chosen: Cluster, transport: SshChoice, new: list[Outcome[SeenKey]], yes: bool) -> None:
    from clusterctl.errors import UsageError

    names = ", ".join(one.node.name for one in new)
    if not screen.ask(f"record the new keys of {names}?", yes):
        if not screen.on_terminal():
            raise UsageError(
                f"the keys of {names} were not recorded: nobody is here to ask",
                "compare the fingerprints, then --yes",
            )
        return
    paths = {str(transport.record(one.node, one.get().key)) for one in new}
    screen.say(f"recorded {len(new)} keys in {', '.join(sorted(paths))}")


def _show(outcomes: list[Outcome[SeenKey]], as_json: bool) -> None:
    from rich.text import Text

    from clusterctl import views

    found = [one.value for one in outcomes if one.value is not None]
    if as_json:
        return screen.show_json([one.as_json() for one in found])
    rows = [
        [one.node, one.name, one.key.kind, one.fingerprint, Text(one.state, style=STYLES[one.state])]
        for one in found
    ]
    if rows:
        screen.show(views.table(["NODE", "HOST", "TYPE", "FINGERPRINT", "STATE"], rows))
