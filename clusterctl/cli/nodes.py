"""`nodes`: the inventory as it is understood."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli import options, reaching, screen

if TYPE_CHECKING:
    from clusterctl.inventory import Cluster

Wide = Annotated[bool, typer.Option("--wide", "-w", help="Interface, python, workdir and the way of SSH too.")]

app = typer.Typer(rich_markup_mode=None, help="The inventory as it is understood; node sets; host keys.")


@app.callback(invoke_without_command=True)
def nodes(
    context: typer.Context,
    cluster: options.ClusterFile = None,
    wide: Wide = False,
    as_json: options.Json = False,
) -> None:
    """The inventory as it is understood."""
    if context.invoked_subcommand is None:
        list_nodes(None, cluster, None, None, wide, as_json)


@app.command("list")
def list_nodes(
    selection: Annotated[str | None, typer.Argument(metavar="SET", help="Only these nodes.")] = None,
    cluster: options.ClusterFile = None,
    nodes: options.Nodes = None,
    exclude: options.Exclude = None,
    wide: Wide = False,
    as_json: options.Json = False,
) -> None:
    """The nodes, their addresses and devices."""
    from clusterctl import views

    found = options.cluster_of(cluster, selection or nodes, exclude)
    if as_json:
        screen.show_json(
            {
                "name": found.name,
                "source": found.source,
                "nodes": [asdict(node) for node in found.nodes],
                "groups": {name: list(members) for name, members in found.groups.items()},
            }
        )
    else:
        screen.show(views.nodes_table(found, _ways(found) if wide else None))


def _ways(cluster: Cluster) -> dict[str, str]:
    """Which of the two transports `auto` takes for each node, and why where it is not paramiko."""
    from clusterctl.ssh_choice import choice_for

    choice = choice_for(cluster, reaching.chosen())
    found = {node.name: choice.chosen(node) for node in cluster.nodes if node.host != "local"}
    return {name: f"{way} ({reason})" if reason else way for name, (way, reason) in found.items()}
