"""`nodes`: the inventory as it is understood; `init` writes one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
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


EXAMPLE = """\
# The machines that clusterctl reaches. Check it with: clusterctl nodes, then clusterctl doctor
name: {name}

defaults:                         # for every node that does not say otherwise
  # user: alice                   # SSH's own choice where nothing is said
  # key: ~/.ssh/id_ed25519
  # port: 22
  # python: ~/venv/bin/python     # the Python that ranks run with on the node
  # workdir: ~/.clusterctl        # code, data and runs, on the node
  devices: {devices}                      # a count, a half-open range "[0,8)", or a list [0, 1]
  kind: {kind}                       # cpu, cuda or npu
  # interface: eth0               # the one that all nodes share; handed to gloo, NCCL and HCCL

nodes:
{nodes}
# groups:
#   left: node[1-2]               # then: clusterctl exec @left -- hostname
"""


def init(
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts", metavar="SET", help="The nodes' names or addresses: node[1-4], 10.0.0.[1-8]."
        ),
    ] = None,
    devices: Annotated[str, typer.Option(help="Devices of each node.")] = "8",
    kind: Annotated[str, typer.Option(help="cpu, cuda or npu.")] = "npu",
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write.")] = Path("cluster.yaml"),
    force: options.Force = False,
    dry_run: options.DryRun = False,
) -> None:
    """Write a commented cluster.yaml to begin with; never overwrites without --force."""
    from clusterctl import nodeset
    from clusterctl.document import parse_document
    from clusterctl.errors import UsageError
    from clusterctl.inventory import KINDS, parse_devices
    from clusterctl.rundir import replace_file

    names = nodeset.expand(hosts or "node[1-2]")
    if kind not in KINDS:
        raise UsageError(f"--kind {kind}: no such kind", "cpu, cuda (NVIDIA GPUs) or npu (Ascend)")
    parse_devices(
        parse_document(devices if not devices.startswith("[") else f'"{devices}"', "--devices").value
    )
    shown = f'"{devices}"' if devices.startswith("[") else devices
    lines = "".join(_entry(number, name, hosts is None) for number, name in enumerate(names, 1))
    text = EXAMPLE.format(name=output.stem, devices=shown, kind=kind, nodes=lines)
    if dry_run:
        screen.write(text)
        return
    if output.exists() and not force:
        raise UsageError(f"{output} is there already", "--force overwrites it, -o FILE writes elsewhere")
    replace_file(output, text)
    screen.say(
        f"wrote {output}; next: clusterctl -h shows the verbs, clusterctl nodes -c {output} shows what was understood"
    )


def _entry(number: int, name: str, example: bool) -> str:
    if example:
        return f"  {name}: {{host: 10.0.0.{number}}}\n"
    return f"  {name}: {{}}\n" if not name[0].isdigit() else f"  node{number}: {{host: {name}}}\n"
