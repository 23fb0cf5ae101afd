"""What a node reports about the image of a job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from clusterctl.checks import images
from clusterctl.inventory.cluster import Node
from clusterctl.inventory.container import ContainerOptions
from clusterctl.jobs.job import Job


@pytest.mark.parametrize(
    ("code", "error", "problem", "remedy"),
    [
        (127, "", "docker is not installed", "another `container.runtime`"),
        (1, "Error response from daemon: No such image: train:1", "it has no image train:1: ", "push --image"),
        (1, "permission denied while trying to connect to the docker API at /x", "docker does not answer: ", "socket"),
        (1, "Error: No such image: train:1", "it has no image train:1: ", "push --image FILE -n node1"),
        (1, "Cannot connect to the Docker daemon. Is it running?", "docker does not answer: ", "start the daemon"),
        (1, "permission denied while trying to connect to the Docker daemon", "docker does not answer: ", "socket"),
    ],
)  # fmt: skip
def test_the_reason_why_an_image_cannot_be_used(code: int, error: str, problem: str, remedy: str) -> None:
    def run(argv: list[str], **_: object) -> object:
        assert argv[:3] == ["docker", "image", "inspect"]
        return SimpleNamespace(exit_code=code, error_text=error, stdout=b"")

    job = Job(name="j", command=("true",), source="job.yaml", container=ContainerOptions("train:1"))
    link = cast("Any", SimpleNamespace(run=run))
    answer = images._ask(Node("node1", "10.0.0.1", "10.0.0.1", devices=(0,), kind="cpu"), link, job)
    assert answer.problem.startswith(problem) and remedy in answer.remedy
