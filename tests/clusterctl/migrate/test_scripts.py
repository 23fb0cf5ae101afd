"""A hundred public start scripts: the options that each gives its program, and what they become.

The table has names, options and values alone. The options are those that bash gave the program when each script was run
with stand-ins for all programs; the expected values were read from them by another mapping than ours.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from clusterctl.document import parse_document
from clusterctl.errors import UsageError
from clusterctl.migrate import read
from clusterctl.migrate.commands import command_text
from clusterctl.migrate.translate import translate
from clusterctl.migrate.write import job_text

CASES = Path(__file__).resolve().parents[3] / "tests" / "cases" / "sources" / "scripts.json"
SCRIPTS: list[dict[str, Any]] = json.loads(CASES.read_text())


def at(job: Any, key: str) -> object:
    """Return the value at a key such as `optimizer.lr`; None if the job has none."""
    for part in key.split("."):
        job = job.get(part) if isinstance(job, dict) else None
    return job


def source(script: dict[str, Any], folder: Path) -> str:
    """Return the command of a script; the name of a TOML file for one that is such a file."""
    if "keys" not in script:
        return str(script["command"])
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no reader of TOML")
    (folder / "config.toml").write_text(
        "".join(f"{key} = {json.dumps(value)}\n" for key, value in script["keys"].items())
    )
    return str(folder / "config.toml")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script["name"])
def test_the_options_of_a_public_script_convert_or_are_refused(
    script: dict[str, Any], tmp_path: Path
) -> None:
    text = source(script, tmp_path)
    if "refused" in script:
        with pytest.raises(UsageError) as caught:
            found = read.read(text)
            command_text(found) if found.verb != "job" else translate(found)
        assert script["refused"] in str(caught.value)
        return
    found = read.read(text)
    assert found.verb == script.get("verb", "job")
    if found.verb != "job":
        assert f"clusterctl {VERBS[found.verb]} " in command_text(found)
        return
    train = parse_document(job_text(translate(found)), "job.yaml").value["train"]
    wrong = {
        key: (value, at(train, key)) for key, value in script["expect"].items() if at(train, key) != value
    }
    assert not wrong


VERBS = {
    "import": "checkpoint import",
    "data": "data build",
    "serve": "serve",
    "generate": "generate",
    "eval": "eval",
}


def test_the_table_has_a_hundred_scripts_of_six_repositories() -> None:
    assert len(SCRIPTS) >= 100 and len({script["name"] for script in SCRIPTS}) == len(SCRIPTS)
    repositories = Counter(script["name"].partition(" ")[0].partition("/")[0] for script in SCRIPTS)
    assert {"NVIDIA", "microsoft", "Ascend", "THUDM", "Oneflow-Inc", "pytorch"} <= set(repositories)
