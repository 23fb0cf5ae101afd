"""The whole command line: every noun's file, registered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import typer
import typer.main
from typer.models import CommandInfo

from clusterctl.cli import (
    demo,
    doctor,
    hostfile,
    init,
    keeper,
    launch,
    logs,
    nodes,
    nodeset,
    push,
    ranktable,
    ranktable_live,
    reaching,
    root,
    runs,
    sandbox,
    schema,
    train,
    trust,
)
from clusterctl.cli import exec as exec_

app = root.new()

app.command()(demo.demo)
app.add_typer(sandbox.app, name="sandbox")
app.command()(init.init)
app.add_typer(nodes.app, name="nodes")
nodes.app.command("expand")(nodeset.expand)
nodes.app.command("fold")(nodeset.fold)
nodes.app.command("trust")(trust.trust)
app.command("exec")(exec_.exec_)
app.command()(push.push)
app.command()(push.pull)
app.command()(doctor.doctor)
app.add_typer(ranktable.app, name="ranktable")
ranktable.app.command("push")(ranktable_live.push)
ranktable.app.command("verify")(ranktable_live.verify)
app.add_typer(hostfile.app, name="hostfile")
app.command()(launch.plan)
app.command()(schema.schema)
app.command()(launch.launch)
app.command()(launch.attach)
app.command()(launch.resume)
app.command(hidden=True)(launch.control)
app.add_typer(runs.app, name="runs")
app.command()(runs.status)
app.command()(runs.stop)
app.add_typer(logs.app, name="logs")
app.add_typer(keeper.app, name="keeper")
app.add_typer(train.data, name="data")
app.add_typer(train.checkpoint, name="checkpoint")
app.command()(train.generate)
app.command()(train.tensorboard)

reaching.mark(
    app, "demo", "exec", "push", "pull", "doctor", "launch", "attach", "resume", "control", "status", "stop"
)
reaching.mark(nodes.app, "trust")
reaching.mark(ranktable.app, "build", "push", "verify")
reaching.mark(runs.app, "prune")
reaching.mark(train.data, "build", "scatter")
reaching.mark(logs.app, "tail", "show")


@lru_cache(maxsize=1)
def command() -> Callable[..., Any]:
    """The whole command line, built once a process: 25 ms."""
    return typer.main.get_command(app)


def command_for(argv: list[str]) -> Callable[..., Any]:
    """The command line with no more of it than these arguments name: 2 ms for one command."""
    if command.cache_info().currsize or not argv:
        return command()
    part = copy.copy(app)
    part.registered_commands = [one for one in app.registered_commands if _name(one) == argv[0]]
    part.registered_groups = [one for one in app.registered_groups if one.name == argv[0]]
    if not part.registered_commands and not part.registered_groups:
        return command()  # which knows the near misses
    return typer.main.get_command(part)


def _name(one: CommandInfo) -> str:
    return one.name or typer.main.get_command_name(one.callback.__name__ if one.callback else "")
