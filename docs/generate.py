"""Write the reference pages from the code: `python docs/generate.py`. A test compares the pages with the code."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from clusterctl.cli import commands  # noqa: E402
from clusterctl.cli.commands import SECTIONS, TABLE  # noqa: E402
from clusterctl.cli.examples import examples  # noqa: E402
from clusterctl.cli.option_groups import SHARED, grouped  # noqa: E402
from clusterctl.inventory.cluster import Cluster, Node  # noqa: E402
from clusterctl.jobs.job_check import job_schema  # noqa: E402
from clusterctl.settings import PREFIX, Settings  # noqa: E402
from clusterctl.wire import versions  # noqa: E402
from clusterctl.wire.schema import explanations  # noqa: E402
from native.npu import facts  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
# An option that so many commands have is described once.
MANY = 4
NOTE = "<!-- Written by `python docs/generate.py`. Change the code, not this page. -->\n"


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def commands_page() -> str:
    """Return the page of all commands."""
    parts = [
        f"# Commands\n\n{NOTE}",
        "Every command prints results on stdout, and messages and errors on stderr. `clusterctl COMMAND --help` shows "
        "the text of this page.\n",
        "[Exit codes](exit-codes.md) are the same for all commands.\n",
        "## Settings\n",
        "Defaults for options, in this order: the option, the environment variable, `clusterctl.yaml` in the current "
        "folder, `~/.config/clusterctl/config.yaml`, the default.\n",
        table(("key", "variable", "default", "meaning"), settings_rows()),
        "## Shared options\n",
        "Many commands have these options. The part of a command names those that it has.\n",
        table(("option", "meaning"), [(f"`{names}`", text) for names, text in shared_records()]),
    ]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [
            command_part(key)
            for name in names
            for key in TABLE
            if (key == name or key.startswith(f"{name} ")) and not TABLE[key].hidden
        ]
    return "\n".join(parts)


def settings_rows() -> list[tuple[str, ...]]:
    """Return a row for each setting."""
    texts = explanations(Settings)
    return [
        (f"`{item.name}`", f"`{PREFIX}{item.name.upper()}`", f"`{item.default}`", texts[item.name])
        for item in dataclasses.fields(Settings)
    ]


def command_part(key: str) -> str:
    """Return the part of one command: its help, arguments, options and examples."""
    command: Any = commands.built(key)
    context = command.context_class(command, info_name=f"clusterctl {key}")
    parts = [f"### clusterctl {key}\n", " ".join(command.help.split()) + "\n"]
    verb = TABLE[key].forwards or ("data-build" if key == "data build" else "")
    if not hasattr(command, "commands"):
        usage = command.get_usage(context).removeprefix("Usage: ")
        parts.append(f"```\n{' '.join(usage.split())}\n```\n")
    found, common = records(key), shared_records()
    rows = [(f"`{names}`", text) for _, names, text in found if (names, text) not in common]
    rows += list(trainer_rows(verb)) if verb else []
    if rows:
        parts.append(table(("option", "meaning"), rows))
    own = {record[1:] for record in found}
    if shared := [f"`{re.split('[ ,]', record[0])[0]}`" for record in common if record in own]:
        parts.append(f"[Shared options](#shared-options): {', '.join(shared)}.\n")
    if lines := examples(key, TABLE):
        parts.append("```console\n" + "".join(f"$ {line}\n" for line in lines) + "```\n")
    return "\n".join(parts)


@cache
def records(key: str) -> tuple[tuple[str, str, str], ...]:
    """Return group, names and help of each argument and option of a command, in the order of its help."""
    command: Any = commands.built(key)
    context = command.context_class(command, info_name=f"clusterctl {key}")
    return tuple(
        (title, record[0], " ".join(record[1].split()))
        for title, params in grouped(key, command.get_params(context))
        for param in params
        if param.name != "help" and (record := param.get_help_record(context))
    )


@cache
def shared_records() -> tuple[tuple[str, str], ...]:
    """Return names and help of the options that many commands have, in the order of a help."""
    counts = Counter(record for key in TABLE if not TABLE[key].hidden for record in records(key))
    many = [record for record, count in counts.items() if count >= MANY and record[0] in SHARED]
    return tuple(record[1:] for record in sorted(many, key=lambda record: SHARED.index(record[0])))


def trainer_rows(verb: str) -> Iterator[tuple[str, str]]:
    """Yield a row for each argument of a command that the trainer reads."""
    from trainer.command_line import parsers

    (choices,) = (a for a in parsers()._actions if isinstance(a, argparse._SubParsersAction))
    for action in choices.choices[verb]._actions:
        if isinstance(action, argparse._HelpAction) or action.help is argparse.SUPPRESS:
            continue
        value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
        value = " ".join(value) if isinstance(value, tuple) else str(value)
        names = ", ".join(action.option_strings)
        text = (action.help or "").replace("%%", "%") + "  [required]" * action.required
        yield f"`{' '.join(filter(None, (names, value)))}`", " ".join(text.split())


def job_page() -> str:
    """Return the page of every key of a job file."""
    schema = job_schema()
    properties = schema["properties"]
    train = properties.pop("train")
    return "\n".join(
        [
            f"# Job files\n\n{NOTE}",
            "A job file is YAML with either `command` or `train`. `clusterctl schema` prints the JSON schema; "
            "`clusterctl plan JOB` lists every error of a file.\n",
            table(("key", "value", "meaning"), list(key_rows(properties))),
            "## The `train` part\n",
            table(("key", "value", "meaning"), list(key_rows(train["properties"]))),
        ]
    )


def key_rows(properties: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield a row for each key of a JSON schema, and for the keys below it."""
    for name, schema in properties.items():
        key = f"{prefix}{name}"
        yield f"`{key}`", value_text(schema), schema.get("description", "")
        inner = [schema, *schema.get("anyOf", ())]
        inner += [option.get("items", {}) for option in inner]
        seen: set[str] = set()
        for option in inner:
            for below, value in option.get("properties", {}).items():
                if below not in seen:
                    seen.add(below)
                    yield from key_rows({below: value}, f"{key}.")


KINDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "object": "mapping",
    "array": "list",
    "null": "null",
}


def value_text(schema: dict[str, Any]) -> str:
    """Return the values that a JSON schema allows, in words, with the default."""
    kinds = list(dict.fromkeys(kinds_of(schema)))
    text = ", ".join(kinds[:-1]) + " or " * (len(kinds) > 1) + kinds[-1]
    bounds = [
        f"{sign} {schema[name]:g}"
        for name, sign in (
            ("minimum", ">="),
            ("exclusiveMinimum", ">"),
            ("maximum", "<="),
            ("exclusiveMaximum", "<"),
        )
        if name in schema
    ]
    default = schema.get("default")
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    return ", ".join(filter(None, (text, *bounds, f"default {shown}" if "default" in schema else "")))


def kinds_of(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the kinds of value that a JSON schema allows."""
    if "enum" in schema:
        yield from (f"`{value}`" for value in schema["enum"])
    elif "const" in schema:
        yield f"`{schema['const']}`"
    for option in schema.get("anyOf", ()):
        yield from kinds_of(option)
    kind = schema.get("type", [])
    yield from (KINDS[name] for name in ([kind] if isinstance(kind, str) else kind))


def cluster_page() -> str:
    """Return the page of every key of cluster.yaml."""
    return "\n".join(
        [
            f"# cluster.yaml\n\n{NOTE}",
            "The inventory: which nodes there are and how to reach them. `clusterctl init` writes one with comments; "
            "`clusterctl nodes` shows how it is read.\n",
            "```yaml\nname: lab\ndefaults: {user: alice, devices: 8, kind: npu}\nnodes:\n"
            "  node[1-4]: {host: '10.0.0.{n}'}\ngroups: {first: 'node[1-2]'}\n```\n",
            "## Top level\n",
            table(("key", "meaning"), [(f"`{name}`", text) for name, text in top_keys().items()]),
            "## Keys of a node, and of `defaults`\n",
            "`{node}` in a value becomes the name of the node, `{n}` the number at its end.\n",
            table(("key", "default", "meaning"), list(node_rows())),
        ]
    )


def versions_page() -> str:
    """Return the page of the versions that go together, and of the chips and types of CANN's kernels."""
    npu_python = {torch: f"{oldest} to {newest}" for torch, (oldest, newest) in versions.NPU_PYTHON.items()}
    releases = [
        (cann, release, versions.torch_of(release), npu_python[versions.short(release)])
        for cann, entries in versions.TORCH_NPU.items()
        for release in entries
    ]
    oldest_driver = [(cuda, str(driver)) for cuda, driver in versions.DRIVERS.items()]
    kernels = [
        (name, *(", ".join(facts.types(name, chips)) or "no" for chips in facts.GENERATIONS), row.weight,
         row.backward or "no", row.source)
        for name, row in facts.KERNELS.items()
    ]  # fmt: skip
    sources = versions.SOURCES
    parts = [
        f"# Cards and versions\n\n{NOTE}",
        "`clusterctl doctor`, `nodes wheelhouse --cann`, the plan and the choice of ops read these tables.\n",
        "## CANN and torch_npu\n",
        table(("CANN", "torch_npu", "torch", "Python"), releases),
        f"CANN {', '.join(versions.MIXED)} also run each other's torch_npu. Sources: {sources['TORCH_NPU']}; "
        f"{sources['MIXED']}; {sources['NPU_PYTHON']}.\n",
        "## Driver and firmware of NPUs\n",
        table(("driver", "firmware"), list(versions.FIRMWARE.items())),
        f"Source: {sources['FIRMWARE']}.\n",
        "## torch, CUDA and driver\n",
        table(
            ("torch", "built for CUDA"), [(torch, ", ".join(cuda)) for torch, cuda in versions.CUDA.items()]
        ),
        table(("CUDA", "oldest driver"), oldest_driver),
        f"Sources: {sources['CUDA']}; {sources['DRIVERS']}.\n",
        "## Kernels of CANN\n",
        "The types that a kernel has on a generation of chips, forward; its derivative has a row of its own. 910 is "
        "the first generation: 910A, 910ProA, 910ProB, 910PremiumA, and CANN's `Ascend910B` without a digit. A2 is "
        "the 910B with a digit, A3 the 910C. Where a type is missing, the reference computes the op. Sources are files "
        "of op-plugin (commit 517f2e7), ops-nn (e5c3fa9) and ops-transformer (c29bc10).\n",
        table(("kernel", *facts.GENERATIONS, "weight", "derivative", "source"), kernels),
    ]
    return "\n".join(parts)


def top_keys() -> dict[str, str]:
    """Return the top-level keys of cluster.yaml with their meaning."""
    texts = explanations(Cluster)
    return {
        "name": texts["name"],
        "defaults": "Keys of a node, for every node that does not set them itself.",
        "nodes": "A mapping from node sets, such as `node[1-4]`, to keys; or a list of names.",
        "groups": texts["groups"],
        "known_hosts": texts["known_hosts"],
    }


def node_rows() -> Iterator[tuple[str, str, str]]:
    """Yield a row for each key of a node."""
    texts = explanations(Node)
    for item in dataclasses.fields(Node):
        # An inventory cannot name an allocation, nor what it does not name.
        if item.name in ("name", "allocation", "unnamed"):
            continue
        default = item.default if item.default not in (dataclasses.MISSING, None, "", ()) else ""
        yield f"`{item.name}`", f"`{default}`" if default != "" else "", texts[item.name]


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "job.md": job_page,
    "cluster.md": cluster_page,
    "versions.md": versions_page,
}


def text_of(name: str) -> str:
    """Return the text of a page."""
    return re.sub(r"\n{3,}", "\n\n", PAGES[name]())


def main() -> None:
    """Write every page."""
    for name in PAGES:
        (FOLDER / name).write_text(text_of(name), encoding="utf-8")


if __name__ == "__main__":
    main()
