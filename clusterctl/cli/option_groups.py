"""Group the options of a command in its help: its own ones first, then those that many commands share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Group:
    """Options with one subject."""

    title: str
    options: tuple[str, ...]
    # The commands that have the group; () for all.
    commands: tuple[str, ...] = ()


OWN, COMMON = "Options", "Common"
# Groups that many commands share.
SHARED = ("Nodes", "Connections", COMMON)
GROUPS = (
    Group(
        "Model", ("tokenizer", "base", "device", "weights", "cache", "threads"), ("generate", "serve", "eval")
    ),
    Group("Model on several nodes", ("on", "tensor", "pipeline"), ("generate", "serve", "eval")),
    Group(
        "Choice of tokens",
        (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "no_repeat_ngram",
            "beams",
            "length_penalty",
            "seed",
        ),
        ("generate",),
    ),
    Group("Limits", ("batch", "queue", "connections", "max_body", "request_timeout", "drain"), ("serve",)),
    Group("For a command after --", ("code", "no_code", "env", "per_node", "env_style"), ("plan", "launch")),
    Group("Nodes", ("cluster", "nodes", "exclude", "kind")),
    Group(
        "Connections", ("ssh_user", "ssh_port", "ssh", "fanout", "connect_timeout", "accept_new", "persist")
    ),
    # Here it chooses lines, or slots.
    Group(OWN, ("exclude",), ("logs show", "logs tail", "hostfile convert", "hostfile check")),
    Group(COMMON, ("force", "yes", "dry_run", "json", "as_json", "no_pager", "help")),
)


def grouped(key: str, params: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the title and the parameters of each section of a command's help: arguments, its own options, groups."""
    # The program itself has few options.
    groups = [group for group in GROUPS if key and (not group.commands or key in group.commands)]
    titles = {name: group.title for group in groups for name in group.options}
    sections: dict[str, list[Any]] = {"Arguments": [], OWN: []}
    for group in groups:
        sections[group.title] = []
    for param in params:
        argument = param.param_type_name == "argument"
        sections["Arguments" if argument else titles.get(param.name, OWN)].append(param)
    filled = {title: members for title, members in sections.items() if members}
    if OWN not in filled and COMMON in filled:
        filled[OWN] = filled.pop(COMMON)
    yield from filled.items()
