"""`nodes`: the inventory as it is understood."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from clusterctl.cli import options, screen

Wide = Annotated[bool, typer.Option("--wide", "-w", help="Interface, python and workdir too.")]

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
        screen.show(views.nodes_table(found, wide))
