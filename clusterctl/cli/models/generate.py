"""`generate` and `serve`: text from a checkpoint, by the trainer in a separate process."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from clusterctl.cli import options, screen
from clusterctl.cli.declared import flag, option
from clusterctl.cli.models.trainer import forward
from clusterctl.errors import UsageError
from clusterctl.wire.arguments import arguments_of
from clusterctl.wire.requests import (
    DrawingOptions,
    GenerateRequest,
    ModelOptions,
    PromptOptions,
    ServeRequest,
    ServerOptions,
)

# Shared with `eval` and `checkpoint export`.
Where = Annotated[str, typer.Argument(metavar="RUN|DIR", help="A run, or a checkpoint's folder.")]


def generate(
    model: ModelOptions,
    drawing: DrawingOptions,
    given: PromptOptions,
    where: Where = "last",
    on: str | None = option("Generate on these nodes, which divide the model.", metavar="SET"),
    cluster: options.ClusterFile = None,
    *,
    as_json: options.Json = False,
) -> None:
    """Generate text from a checkpoint.

    The text of a single prompt appears while it is written. With several prompts, --samples, --beams, --logprobs or
    --json the output has one JSON object for each text, in the order of the prompts. With --on, one process on each
    node, or on each of its GPUs or NPUs, computes its part of the model.
    """
    from clusterctl.cli.models import place

    if on is not None:
        target = place.on_nodes(where, on, cluster)
        lines = _lines(given)
        drawn = [*arguments_of(model), *arguments_of(drawing), "--json", "--prompts={data}/prompts.jsonl"]
        ranks = place.ranks_of(target.cluster, model.device, model.tensor, model.pipeline)
        answer = place.answer_of(target, "generate", drawn, {"prompts.jsonl": lines}, ranks)
        plain = drawing.samples == drawing.beams == 1 and drawing.logprobs is None and given.prompts is None
        if as_json or not plain or len(given.prompt) > 1:
            screen.write(answer)
        else:
            screen.write(json.loads(answer)["text"] + "\n")
        return
    checkpoint = place.here(where)
    request = GenerateRequest(checkpoint=checkpoint, model=model, drawing=drawing, given=given, json=as_json)
    forward("generate", "generate", arguments_of(request))


def _lines(given: PromptOptions) -> bytes:
    """Return the prompts of options and of a file as lines for the trainer."""
    file = given.prompts
    texts = given.prompt or (() if file else ("",))
    lines = b"".join(json.dumps({"prompt": text}).encode() + b"\n" for text in texts)
    if file is None:
        return lines
    try:
        return lines + (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes())
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", "write one prompt per line; - reads stdin") from None


def serve(
    model: ModelOptions,
    server: ServerOptions,
    where: Where = "last",
    on: str | None = option("Serve on these nodes, which divide the model.", metavar="SET"),
    cluster: options.ClusterFile = None,
    *,
    detach: bool = flag("Serve as a run, on a node that has the checkpoint.", "--detach", "-d"),
    as_json: options.Json = False,
) -> None:
    """Serve a checkpoint over HTTP: OpenAI's API, Megatron's PUT /api, metrics, and a page to try the model.

    Ctrl-C or SIGTERM finishes the requests that run, then stops. With --detach or --on the server is a run: `status`,
    `logs` and `stop` work as for any other.
    """
    from clusterctl.cli.models import place

    if on is None and not detach:
        request = ServeRequest(checkpoint=place.here(where), model=model, server=server)
        return forward("serve", "serve", arguments_of(request))

    from clusterctl.cli.launch.run import launch_job
    from clusterctl.client.attempts import Target

    target = place.on_nodes(where, on, cluster)
    name = server.name or target.name
    ranks = place.ranks_of(target.cluster, model.device, model.tensor, model.pipeline)
    arguments = [*arguments_of(model), *arguments_of(replace(server, name=name))]
    job = place.job_on(target, "serve", arguments, ranks)
    # The server's own --drain comes first.
    job = replace(job, name=f"serve-{name}"[:41], grace=server.drain + 10)
    launch_job(Target(job, target.cluster), detach=detach, as_json=as_json)
    return None
