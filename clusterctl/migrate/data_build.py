"""Translate a preprocess_data.py command into a `clusterctl data build` command."""

from __future__ import annotations

import shlex

from clusterctl.migrate.read import Found


def command_text(found: Found) -> str:
    """Return the command, after comments that name the options without a counterpart."""
    words = ["clusterctl", "data", "build"]
    lines = []
    keys = ["text"]
    for given in found.given:
        target = given.option.target if given.option else ""
        values = [str(value) for value in given.values]
        if given.option is None or not target:
            lines.append(f"# {given.name}: {given.option.note if given.option else 'unknown'}")
        elif target == "@output":
            continue
        elif "=" in target:
            words += target.split("=")
        elif given.option.kind == "flag":
            words.append(target)
        else:
            keys = values if target == "--json-key" else keys
            words += [word for value in values for word in (target, value)]
    unit = "sentence" if "--unit" in words else "document"
    prefix = next(
        (str(g.values[0]) for g in found.given if g.option and g.option.target == "@output"), "data/corpus"
    )
    words += ["--output", f"{prefix}_{keys[0]}_{unit}"]
    return "\n".join([*lines, shlex.join(words)]) + "\n"
