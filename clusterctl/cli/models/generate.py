"""`generate` and `serve`: text from a checkpoint, by the trainer in a separate process."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_click_type

from clusterctl.cli import options, screen
from clusterctl.cli.models.trainer import forward
from clusterctl.cli.option_values import KINDS, MATRICES

# Shared with `eval` and `checkpoint export`.
Where = Annotated[str, typer.Argument(metavar="RUN|DIR", help="A run, or a checkpoint's folder.")]
Tokenizer = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The tokenizer. Default: the one in the checkpoint.")
]
Base = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The weights that adapters belong to, if they moved.")
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        callback=options.one_of(KINDS),
        help="Device: cpu, cuda or npu. Default: the nodes' kind; here the best available.",
    ),
]
AddBos = Annotated[
    bool | None,
    typer.Option(
        "--add-bos/--no-add-bos", help="Begin prompts with bos_token. Default: as the tokenizer does."
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """How a model is loaded."""

    tokenizer: Tokenizer = None
    base: Base = None
    device: Device = None
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            callback=options.one_of(MATRICES),
            help="Store matrices as fp32, bf16, fp16 or int8. Default: fp32 on CPUs, else bf16 if possible.",
        ),
    ] = None
    cache: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory for keys and values, as in 4GiB. Default: 16 texts."),
    ] = None
    threads: Annotated[
        int, typer.Option(min=0, max=1024, metavar="N", help="Compute with N threads; 0: one per core.")
    ] = 0
    tensor: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Divide every layer among N ranks. 0: as many as possible."),
    ] = 0
    pipeline: Annotated[
        int, typer.Option(min=0, metavar="N", help="Divide the sequence of layers among N ranks.")
    ] = 0
    add_bos: AddBos = None


def _above_zero(most: float) -> Any:
    """Return the type of numbers that are greater than 0 and at most `most`."""
    kind: Any = get_click_type(annotation=float, parameter_info=typer.Option(min=0, max=most))
    kind.min_open = True
    return kind


# The trainer has the same limits (trainer/generate/sampling.py); here they are checked before anything starts.
@dataclass(frozen=True)
class DrawingOptions:
    """How tokens are chosen."""

    max_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Generate at most N tokens; for a GLM, in each blank.")
    ] = 64
    temperature: Annotated[
        float,
        typer.Option(
            min=0, max=100, metavar="T", help="Higher: more varied text; 0: always the most likely token."
        ),
    ] = 0.8
    top_k: Annotated[
        int, typer.Option(min=0, metavar="K", help="Choose among the K most likely tokens; 0: all.")
    ] = 40
    top_p: Annotated[
        float,
        typer.Option(
            click_type=_above_zero(1),
            metavar="P",
            help="Choose among the tokens that make up this probability.",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        typer.Option(
            min=0, max=1, metavar="P", help="Leave out tokens less likely than P times the most likely one."
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        typer.Option(
            click_type=_above_zero(100),
            metavar="X",
            help="Above 1: make tokens of the prompt and the text less likely.",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        typer.Option(
            min=-2, max=2, metavar="X", help="Subtract X from the logits of tokens that the text has."
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        typer.Option(
            min=-2, max=2, metavar="X", help="Subtract X for each time that the text has the token."
        ),
    ] = 0.0
    no_repeat_ngram: Annotated[
        int, typer.Option(min=0, metavar="N", help="Never repeat N tokens in a row.")
    ] = 0
    beams: Annotated[
        int,
        typer.Option(
            min=1, max=64, metavar="N", help="Search with N beams instead of drawing tokens, if N is above 1."
        ),
    ] = 1
    length_penalty: Annotated[
        float,
        typer.Option(
            min=-10, max=10, metavar="X", help="With --beams: divide log probabilities by length^X."
        ),
    ] = 1.0
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this text. Can be repeated.")
    ] = None
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, max=100, metavar="N", help="Report log probabilities and the N best tokens."),
    ] = None
    samples: Annotated[
        int,
        typer.Option(
            min=1, max=1000, metavar="N", help="Generate N texts for each prompt, each with the next seed."
        ),
    ] = 1
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same text.")] = 1234
    ignore_end: Annotated[
        bool, typer.Option("--ignore-end", help="Do not stop at the end of a document.")
    ] = False
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Shorten a prompt that is too long to its last tokens.")
    ] = False


def generate(
    model: ModelOptions,
    drawing: DrawingOptions,
    where: Where = "last",
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="Text to continue; a GLM fills in [MASK], [sMASK] and [gMASK]. Can be repeated.",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A file with a prompt per line, or JSON lines with `prompt`; '-' for stdin."
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="SET", help="Generate on these nodes, which divide the model."),
    ] = None,
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

    drawn = [*arguments_of(model), *arguments_of(drawing)]
    if on is not None:
        target = place.on_nodes(where, on, cluster)
        lines = _lines(prompt or ([] if prompts else [""]), prompts)
        more = [*drawn, "--json", "--prompts={data}/prompts.jsonl"]
        ranks = place.ranks_of(target.cluster, model.device, model.tensor, model.pipeline)
        answer = place.answer_of(target, "generate", more, {"prompts.jsonl": lines}, ranks)
        plain = drawing.samples == drawing.beams == 1 and drawing.logprobs is None and prompts is None
        if as_json or not plain or len(prompt or [""]) > 1:
            screen.write(answer)
        else:
            screen.write(json.loads(answer)["text"] + "\n")
        return
    arguments = ["--checkpoint", str(place.here(where)), *drawn]
    arguments += [f"--prompt={text}" for text in prompt or ()]
    arguments += [f"--prompts={prompts}"] if prompts is not None else []
    forward("generate", "generate", [*arguments, *(["--json"] if as_json else [])])


def _lines(given: list[str], file: str | None) -> bytes:
    """Return the prompts of options and of a file as lines for the trainer."""
    from clusterctl.errors import UsageError

    lines = b"".join(json.dumps({"prompt": text}).encode() + b"\n" for text in given)
    if file is None:
        return lines
    try:
        return lines + (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes())
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", "write one prompt per line; - reads stdin") from None


def arguments_of(group: Any) -> list[str]:
    """Return the trainer's arguments for a group of options, which have the same names there."""
    found = list[str]()
    for field in fields(group):
        name, value = "--" + field.name.replace("_", "-"), getattr(group, field.name)
        if isinstance(value, bool):
            absent = [] if field.default is False else [f"--no-{name[2:]}"]
            found += [name] if value else absent
        elif isinstance(value, (list, tuple)):
            found += [f"{name}={item}" for item in value]
        elif value is not None:
            found.append(f"{name}={value}")
    return found


@dataclass(frozen=True)
class ServerOptions:
    """Where a server listens, and its limits."""

    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Listen on this address; one that others reach needs --api-key-file."
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="Listen on this port; 0: a free one.")
    ] = 8000
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name. Default: the checkpoint's folder.")
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the key that clients must send.")
    ] = None
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A Jinja template for conversations. Default: the tokenizer's."),
    ] = None
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Compute N texts at a time.")] = 64
    queue: Annotated[
        int, typer.Option(min=0, metavar="N", help="Let N requests wait; more get status 429.")
    ] = 256
    connections: Annotated[int, typer.Option(min=1, metavar="N", help="Keep at most N connections open.")] = (
        2048
    )
    max_body: Annotated[
        int, typer.Option(min=1024, metavar="BYTES", help="Refuse requests with a larger body.")
    ] = 4 << 20
    request_timeout: Annotated[
        float,
        typer.Option(min=0.1, max=1_000_000, metavar="SECONDS", help="End an answer that takes longer."),
    ] = 600.0
    drain: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=1_000_000,
            metavar="SECONDS",
            help="When stopped, wait this long for running answers.",
        ),
    ] = 30.0


def serve(
    model: ModelOptions,
    server: ServerOptions,
    where: Where = "last",
    on: Annotated[
        str | None, typer.Option(metavar="SET", help="Serve on these nodes, which divide the model.")
    ] = None,
    cluster: options.ClusterFile = None,
    *,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Serve as a run, on a node that has the checkpoint.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Serve a checkpoint over HTTP: OpenAI's API, Megatron's PUT /api, metrics, and a page to try the model.

    Ctrl-C or SIGTERM finishes the requests that run, then stops. With --detach or --on the server is a run: `status`,
    `logs` and `stop` work as for any other.
    """
    from clusterctl.cli.models import place

    arguments = [*arguments_of(model), *arguments_of(server)]
    if on is None and not detach:
        return forward("serve", "serve", ["--checkpoint", str(place.here(where)), *arguments])
    from dataclasses import replace

    from clusterctl.cli.launch.run import launch_job
    from clusterctl.cli.launch.target import Target

    target = place.on_nodes(where, on, cluster)
    name = server.name or target.name
    ranks = place.ranks_of(target.cluster, model.device, model.tensor, model.pipeline)
    job = place.job_on(target, "serve", [*arguments, f"--name={name}"], ranks)
    # The server's own --drain comes first.
    job = replace(job, name=f"serve-{name}"[:41], grace=server.drain + 10)
    launch_job(Target(job, target.cluster), detach=detach, as_json=as_json)
    return None
