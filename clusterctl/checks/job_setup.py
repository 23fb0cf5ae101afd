"""Run the setup of a job on a node without starting the job, and report its changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from clusterctl.finding import Finding
from clusterctl.inventory.setup import Setup, request_for
from clusterctl.transport.link import RequestFailed
from clusterctl.transport.setups import SetupResult, ask_setup

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Node
    from clusterctl.transport.connection import Connection

# Findings about setups, which say what they change.
SETUP = "setup"


@dataclass(frozen=True)
class JobSetup:
    """The setup of a job, and the hash of the code in whose folder it starts ("" for a job without code)."""

    setup: Setup
    code: str = ""

    @property
    def needs_code(self) -> bool:
        """Return whether it may read the job's code: it sources a relative file, or runs commands."""
        return bool(self.code) and (bool(self.setup.relative) or bool(self.setup.run))


@dataclass(frozen=True)
class JobSetupAnswer:
    """The changes of a job's setup on one node, after the node's own setup."""

    setup: Setup
    result: SetupResult | None = None
    """None if it failed, or was not run."""
    problem: str = ""
    """Why it failed."""
    request: dict[str, object] | None = field(default=None, hash=False)
    """What the node's agent ran; None if it did not run."""


def ask(node: Node, link: Connection, workdir: str, job: JobSetup) -> JobSetupAnswer:
    """Run a job's setup after the node's; without its code on the node, only if it needs none."""
    folder = f"{workdir}/store/code/{job.code}" if job.code else ""
    if folder and link.directory(folder).missing:
        folder = ""
    if job.needs_code and not folder:
        return JobSetupAnswer(job.setup)
    request = request_for(node.setup, job.setup, folder)
    assert request is not None
    try:
        return JobSetupAnswer(job.setup, ask_setup(node, link, request, fresh=True), "", request)
    except RequestFailed as failed:
        return JobSetupAnswer(job.setup, problem=failed.reason)


def findings(node: str, answer: JobSetupAnswer) -> Iterator[Finding]:
    """Yield what a job's setup changes, why it failed, or why it was not run."""
    if answer.problem:
        text = f"the job's {answer.problem}"
        remedy = "correct `setup` in the job; to try it by hand: clusterctl ssh NODE"
        yield Finding("bad", node, text, remedy, SETUP)
    elif answer.result is not None:
        text = f"with the job's setup, ranks get {answer.result.text(most=12)}"
        yield Finding("ok", node, text, check=SETUP)
    else:
        text = (
            "the job's setup was not run: it uses the code, which is not here yet; `launch` pushes it first"
        )
        yield Finding("ok", node, text, check=SETUP)
