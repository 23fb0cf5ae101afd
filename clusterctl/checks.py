"""What can be asked before a run, each answer a Finding with its remedy; nothing is changed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.errors import ClusterctlError
from clusterctl.settings import environment

if TYPE_CHECKING:
    from clusterctl.inventory import Cluster, Node
    from clusterctl.transport import Connection, Connections

MAX_SKEW = 2.0  # seconds between clocks before logs can't be put in order
MIN_DISK = 2 << 30  # bytes free on a node: code, logs, a small model's checkpoints

NODE_PYTHON = """
import json, sys
found = {"python": sys.version.split()[0]}
import importlib.util
for name in ("torch", "deepspeed", "torch_npu", "numpy", "safetensors", "tokenizers"):
    found[name] = importlib.util.find_spec(name) is not None
from importlib.metadata import PackageNotFoundError, version
try:
    found["torch_version"] = version("torch")
except PackageNotFoundError:
    pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Finding:
    """One answer: `level` is ok, warning or bad; where, what, and what to do about it."""

    level: str
    where: str
    what: str
    remedy: str = ""


def here() -> list[Finding]:
    """The launching machine."""
    return [*_libraries(), *_native(), *_ssh()]


def _libraries() -> Iterable[Finding]:
    yield Finding("ok", "here", f"Python {sys.version.split()[0]}")
    missing = [
        name
        for name in ("torch", "numpy", "tokenizers", "safetensors")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        remedy = "pip install torch==2.13.0, then pip install 'clusterctl[train]'; programs of your own need neither"
        yield Finding(
            "warning", "here", f"the embedded trainer can't run: {', '.join(missing)} not installed", remedy
        )
    if importlib.util.find_spec("deepspeed") is None:
        yield Finding(
            "warning",
            "here",
            "DeepSpeed is not installed: `engine: deepspeed` can't run",
            "pip install deepspeed, after torch",
        )


def _native() -> Iterable[Finding]:
    """Which backend serves each fused op, and why; the native package itself answers."""
    if importlib.util.find_spec("torch") is None:
        return  # said already
    done = subprocess.run(
        [sys.executable, "-m", "native", "--json"], capture_output=True, text=True, env=environment()
    )
    try:
        chosen = json.loads(done.stdout)
    except ValueError:
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        yield Finding(
            "warning", "here", f"the fused ops can't be asked: {reason}", "python -m native says more"
        )
        return
    for op in chosen.get("ops", ()):
        reasons = {one["backend"]: one["reason"] for one in op["backends"]}
        missing = [one for one in op["backends"] if not one["available"]]
        yield Finding("ok", "here", f"op {op['op']}: {op['chosen']} ({reasons.get(op['chosen'], '')})")
        for one in missing:
            yield Finding("warning", "here", f"op {op['op']}: no {one['backend']} backend: {one['reason']}")


def _ssh() -> Iterable[Finding]:
    sshd = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    yield Finding(
        "ok", "here", f"sandbox nodes run {sshd or 'the embedded SSH server (no sshd is installed)'}"
    )


def nodes(cluster: Cluster, connections: Connections) -> list[Finding]:
    """Every node at once; a node that can't be reached is one finding, not the end."""
    outcomes = connections.on_each(cluster.nodes, _node)
    findings: list[Finding] = []
    for outcome in outcomes:
        if outcome.error is not None:
            findings.append(
                Finding(
                    "bad",
                    outcome.node.name,
                    getattr(outcome.error, "reason", str(outcome.error)),
                    outcome.error.hint,
                )
            )
        else:
            findings += outcome.value or []
    findings += _same_everywhere([(one.node.name, one.value or []) for one in outcomes if one.error is None])
    return findings


def _node(node: Node, link: Connection) -> list[Finding]:
    before = time.time()
    hello = link.call("hello")
    delay = time.time() - before
    findings = [
        Finding("ok", node.name, f"answers; {hello['cpus']} cores, Python {hello['python']} for the agent")
    ]
    skew = hello["wall"] - (before + delay / 2)
    if abs(skew) > MAX_SKEW + delay:
        findings.append(
            Finding(
                "warning",
                node.name,
                f"its clock is {skew:+.1f} s from this machine's",
                "run an NTP client on all nodes",
            )
        )
    if hello["disk_free"] < MIN_DISK:
        what = f"{hello['disk_free'] / 1e9:.1f} GB free for {hello['workdir']}"
        findings.append(
            Finding("bad", node.name, what, "free some space, or name another `workdir` in the inventory")
        )
    return findings + _python(node, link, hello)


def _python(node: Node, link: Connection, hello: dict[str, Any]) -> list[Finding]:
    python = node.python.replace("~", str(hello["home"]), 1) if node.python.startswith("~/") else node.python
    try:
        done = link.run([python, "-c", NODE_PYTHON], timeout=30.0)
        found = json.loads(done.text)
    except (ClusterctlError, ValueError) as error:
        said = error.message if isinstance(error, ClusterctlError) else "no answer"
        return [
            Finding(
                "bad",
                node.name,
                f"{node.python} does not run: {said}",
                "name the ranks' Python in the inventory: python: /path/to/python",
            )
        ]
    torch = found.get("torch_version", "no torch")
    needed = [name for name in ("torch", "numpy", "safetensors", "tokenizers") if not found[name]]
    if needed:
        remedy = f"install them into {node.python} on that node; not needed for programs of your own"
        return [
            Finding(
                "warning", node.name, f"the embedded trainer can't run there: no {', '.join(needed)}", remedy
            )
        ]
    return [Finding("ok", node.name, f"ranks run with Python {found['python']}, torch {torch}")]


def _same_everywhere(answers: list[tuple[str, list[Finding]]]) -> Iterable[Finding]:
    versions: dict[str, list[str]] = {}
    for name, findings in answers:
        for finding in findings:
            if finding.what.startswith("ranks run with "):
                versions.setdefault(finding.what.removeprefix("ranks run with "), []).append(name)
    if len(versions) > 1:
        said = "; ".join(f"{', '.join(names)}: {version}" for version, names in versions.items())
        yield Finding(
            "warning",
            "all nodes",
            f"not the same everywhere: {said}",
            "install the same versions on every node",
        )
