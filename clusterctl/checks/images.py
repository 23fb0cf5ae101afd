"""Check the image of a job's containers on every node: present, the same everywhere, and with the needed parts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.checks.remedies import remedy_for
from clusterctl.errors import ClusterctlError
from clusterctl.finding import Finding
from clusterctl.inventory.container import ContainerOptions
from clusterctl.jobs.job import Job
from clusterctl.jobs.parts.container import device_options
from clusterctl.jobs.plan import container_of
from clusterctl.wire.versions import TRAINER_PYTHON

if TYPE_CHECKING:
    from clusterctl.inventory.cluster import Cluster, Node
    from clusterctl.transport.connection import Connection
    from clusterctl.transport.fanout import Connections

# Seconds for a runtime to answer, and for Python to start in a container.
LIMIT = 60.0
# The modules that a training needs, by the kind of its devices.
MODULES = {"cpu": ("torch", "numpy"), "cuda": ("torch", "numpy"), "npu": ("torch", "torch_npu", "numpy")}
PROBE = """
import importlib.util, json, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(json.dumps({"python": sys.version_info[:2], "missing": missing}))
"""


@dataclass(frozen=True)
class ImageAnswer:
    """A node's answer about its image: the problem, and the image's id."""

    node: str
    problem: str = ""
    remedy: str = ""
    digest: str = ""


def findings(cluster: Cluster, job: Job, connections: Connections) -> list[Finding]:
    """Return the problems of the images of a job's nodes; [] if its ranks run in no container."""
    nodes = [node for node in cluster.nodes if container_of(job, node)]
    outcomes = connections.on_each(nodes, lambda node, link: _ask(node, link, job))
    answers = [
        outcome.get() if outcome.ok else ImageAnswer(outcome.node.name, str(outcome.error))
        for outcome in outcomes
    ]
    bad = [
        Finding("bad", answer.node, answer.problem, answer.remedy, "image")
        for answer in answers
        if answer.problem
    ]
    return bad + _differing(cluster, job, answers)


def _differing(cluster: Cluster, job: Job, answers: Sequence[ImageAnswer]) -> list[Finding]:
    """Return a warning for each node whose image differs from the image of the same name on most nodes."""
    names = {node.name: container_of(job, node) for node in cluster.nodes}
    result = []
    for options in dict.fromkeys(names.values()):
        of_image = [answer for answer in answers if answer.digest and names[answer.node] == options]
        counted = Counter(answer.digest for answer in of_image)
        if options is None or len(counted) < 2:
            continue
        usual = counted.most_common(1)[0][0]
        remedy = f"bring the same image to all nodes: clusterctl push --image {options.image}.tar"
        result += [
            Finding(
                "warning", answer.node, f"{options.image} differs from that of most nodes", remedy, "image"
            )
            for answer in of_image
            if answer.digest != usual
        ]
    return result


def _ask(node: Node, link: Connection, job: Job) -> ImageAnswer:
    options = container_of(job, node)
    assert options is not None
    digest = ""
    if options.dialect != "apptainer":
        shown = link.run(
            [options.runtime, "image", "inspect", "--format={{.Id}}", options.image], timeout=LIMIT
        )
        if shown.exit_code == 127:
            return ImageAnswer(
                node.name, f"{options.runtime} is not installed", "another `container.runtime`"
            )
        if shown.exit_code != 0:
            last = (shown.error_text.strip().splitlines() or [f"exit code {shown.exit_code}"])[-1]
            # A daemon that answers is named too: "Error response from daemon: No such image".
            if re.search("connect to the docker (daemon|API)", last, re.IGNORECASE):
                remedy, _ = remedy_for("connect to the docker", "", "")
                return ImageAnswer(node.name, f"{options.runtime} does not answer: {last}", remedy)
            remedy = f"clusterctl push --image FILE -n {node.name}, or {options.runtime} pull {options.image} there"
            return ImageAnswer(node.name, f"it has no image {options.image}: {last}", remedy)
        digest = shown.stdout.decode("utf-8", "replace").strip()
    problem = _missing_parts(node, link, job, options)
    remedy, _ = remedy_for(problem, f"build them into {options.image}: examples/images has Dockerfiles", "")
    return ImageAnswer(node.name, problem, remedy if problem else "", digest)


def _missing_parts(node: Node, link: Connection, job: Job, options: ContainerOptions) -> str:
    """Return which parts an image lacks for this job."""
    uses_python = job.train is not None or job.trainer or job.command[:1] in (("python",), ("python3",))
    if not uses_python:
        return ""
    modules = MODULES[node.kind] if job.train is not None or job.trainer else ()
    run = ("exec",) if options.dialect == "apptainer" else ("run", "--rm", "--network=none")
    argv = [
        options.runtime,
        *run,
        *device_options(options, node),
        options.image,
        options.python,
        "-c",
        PROBE,
        *modules,
    ]
    try:
        done = link.run(argv, timeout=LIMIT)
    except ClusterctlError as error:
        return error.message
    if done.exit_code != 0:
        last = (done.error_text.strip().splitlines() or [f"exit code {done.exit_code}"])[-1]
        return f"{options.python} does not run in {options.image}: {last}"
    found = json.loads(done.stdout)
    version = tuple(found["python"])
    if modules and version < TRAINER_PYTHON:
        has, needs = (".".join(map(str, numbers)) for numbers in (version, TRAINER_PYTHON))
        return f"{options.image} has Python {has}, and the trainer needs {needs}"
    missing = ", ".join(found["missing"])
    return f"{options.image} lacks {missing}" if missing else ""
