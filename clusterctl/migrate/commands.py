"""Translate commands that serve, generate, evaluate, convert or prepare data into commands of ours."""

from __future__ import annotations

import shlex

from clusterctl.bash.texts import is_open, shown
from clusterctl.errors import UsageError
from clusterctl.migrate.families import trained_option
from clusterctl.migrate.found import ZERO, Found
from clusterctl.migrate.tables.verbs import TASKS
from clusterctl.migrate.write import comment

# Names in one comment.
MOST_NAMES = 12
# Options whose value 0 means that they are off.
OFF = ("--top-k", "--top-p", "--seed", "--no-repeat-ngram")


def command_text(found: Found) -> str:
    """Return our commands, after comments with the options that have no counterpart."""
    facts: dict[str, list[str]] = {}
    words: list[str] = []
    comments: list[str] = []
    reasons: dict[str, list[str]] = {}
    for given in found.given:
        values = [str(value) for value in given.values]
        option = given.option
        if option is None and trained_option(given.name) is not None:
            reasons.setdefault("the checkpoint or the defaults have them", []).append(given.name)
        elif option is None or not option.target:
            reasons.setdefault(option.note if option else "unknown to this table", []).append(given.name)
        elif any(is_open(value) for value in values):
            comments.append(
                f"{given.name}: its value {shown(' '.join(values))} is known only when the script runs"
            )
        elif option.target.startswith("@"):
            facts[option.target[1:]] = values
        elif "=" in option.target:
            words += option.target.split("=")
        elif option.kind == "flag":
            words.append(option.target)
        elif not (option.target in OFF and values and ZERO.fullmatch(values[0])):
            words += [word for value in values for word in (option.target, value)]
    comments += [f"{_listed(list(dict.fromkeys(names)))}: {reason}" for reason, names in reasons.items()]
    comments += [f"{place}: {reason}" for place, reason in found.unknown.items()]
    lines = [line for text in comments for line in comment(text)]
    return "\n".join([*lines, *WRITERS[found.verb](found, facts, words)]) + "\n"


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _line(*words: str) -> str:
    return shlex.join(["clusterctl", *words])


def _weights(found: Found, facts: dict[str, list[str]]) -> tuple[list[str], str]:
    """Return the command that imports the weights, and the folder that it makes; the last run without weights."""
    if not facts.get("load"):
        return [], "last"
    folder = f"weights/{found.name}"
    return [_line("checkpoint", "import", facts["load"][0], "-o", folder)], folder


def _serve(found: Found, facts: dict[str, list[str]], words: list[str]) -> list[str]:
    first, folder = _weights(found, facts)
    port = [] if "--port" in words else ["--port", "5000"]
    return [*first, _line("serve", folder, *words, *port)]


def _generate(found: Found, facts: dict[str, list[str]], words: list[str]) -> list[str]:
    first, folder = _weights(found, facts)
    if facts.get("sample", ["true"])[0].lower() == "false":
        words = [*words, "--temperature", "0"]
    if not {"--prompt", "--prompts"} & set(words):
        first = ["# Give the texts to continue: --prompt TEXT, or --prompts FILE", *first]
    return [*first, _line("generate", folder, *words)]


def _eval(found: Found, facts: dict[str, list[str]], words: list[str]) -> list[str]:
    first, folder = _weights(found, facts)
    names = facts.get("task", ["none"])[0].split(",")
    tasks = [TASKS.get(name.lower(), ("", "")) for name in names]
    missing = ", ".join(name for name, (task, _) in zip(names, tasks, strict=True) if not task)
    if missing:
        ours = ", ".join(dict.fromkeys(task for task, _ in TASKS.values()))
        problem = f"{found.source}: the task {missing} has no counterpart"
        raise UsageError(
            problem, f"tasks of clusterctl eval: {ours}; for others run lm-eval on `clusterctl serve`"
        )
    convention = tasks[0][1] if found.family != "glm" and len(tasks) == 1 else ""
    if convention and "--convention" not in words:
        words = [*words, "--convention", convention]
    files = facts.get("file", [""])
    given = [f"{task}={file}" if file else task for task, _ in tasks for file in files]
    return [*first, _line("eval", folder, *(word for text in given for word in ("--task", text)), *words)]


def _import(found: Found, facts: dict[str, list[str]], words: list[str]) -> list[str]:
    source = facts.get("load", ["CHECKPOINT"])[0]
    output = [] if "--output" in words else ["--output", f"weights/{found.name}"]
    return [_line("checkpoint", "import", source, *words, *output)]


def _data(found: Found, facts: dict[str, list[str]], words: list[str]) -> list[str]:
    keys = facts.get("keys", ["text"])
    unit = "sentence" if "--unit" in words else "document"
    prefix = facts.get("output", ["data/corpus"])[0]
    given = [word for key in keys for word in ("--key", key)] if "keys" in facts else []
    return [_line("data", "build", *words, *given, "--output", f"{prefix}_{keys[0]}_{unit}")]


WRITERS = {"serve": _serve, "generate": _generate, "eval": _eval, "import": _import, "data": _data}
