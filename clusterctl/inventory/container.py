"""The `container` part of a job or a node: the image that the ranks run in, and how it is started."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from clusterctl.document import Section, recorded_secret, secrets_in
from clusterctl.errors import did_you_mean

RUNTIMES = ("docker", "podman", "apptainer")
# registry:5000/name/name:tag@sha256:..., or for apptainer a file; never an option.
IMAGE = re.compile(r"[A-Za-z0-9./~_][A-Za-z0-9._/:@~+-]{0,400}\Z")
# HOST:CONTAINER[:ro]
MOUNT = re.compile(r"(?P<host>[/~][^:,\s]*):(?P<inside>/[^:,\s]*)(?P<mode>:(ro|rw))?\Z")
# Options that clusterctl sets itself; with another value it could not control the ranks.
RESERVED = {
    "--name", "--rm", "--detach", "-d", "--network", "--net", "--ipc", "--pid", "--cidfile", "--restart", "--init",
    "--workdir", "-w",
}  # fmt: skip


@dataclass(frozen=True)
class ContainerOptions:
    """An image, and how the ranks run in it."""

    image: str
    runtime: str = "docker"
    """docker, podman or apptainer; or the path of one of them."""
    mounts: tuple[str, ...] = ()
    """Folders of the node: HOST:CONTAINER or HOST:CONTAINER:ro. The run's folders are always mounted."""
    options: tuple[str, ...] = ()
    """More options of the runtime, such as --ulimit=memlock=-1."""
    python: str = "python3"
    """The Python inside the image."""

    @property
    def dialect(self) -> str:
        """The runtime whose command-line options the program accepts."""
        return self.runtime.rpartition("/")[2]


def read_container(top: Section) -> ContainerOptions | None:
    """Return the `container` part of a job or a node, or None if it has none."""
    inner = top.section("container")
    if top.value.get("container") is None:
        return None
    found = ContainerOptions(
        image=inner.take_text("image"),
        runtime=inner.take_text("runtime", "docker"),
        mounts=_texts(inner, "mounts"),
        options=_texts(inner, "options"),
        python=inner.take_text("python", "python3"),
    )
    if not IMAGE.match(found.image):
        problem = f"{found.image!r} is not an image" if found.image else "'image' is missing"
        inner.fault("image", problem, "as in registry.example/team/train:2.1, or train.sif for apptainer")
    if found.dialect not in RUNTIMES or ("/" in found.runtime and not found.runtime.startswith("/")):
        near = did_you_mean(found.dialect, RUNTIMES) or f"one of {', '.join(RUNTIMES)}"
        inner.fault("runtime", f"unknown runtime {found.runtime!r}", near)
    for mount in found.mounts:
        if not MOUNT.match(mount):
            inner.fault("mounts", f"{mount!r} is not a mount", "HOST:CONTAINER or HOST:CONTAINER:ro")
    for option in found.options:
        if not option.startswith("-"):
            inner.fault("options", f"{option!r} is not an option", "one word each: --ulimit=memlock=-1")
        elif option.split("=")[0] in RESERVED:
            inner.fault("options", f"{option.split('=')[0]} is set by clusterctl", "leave it out")
    for name in secrets_in(_variables(found.options)):
        inner.fault("options", *recorded_secret(name))
    inner.done()
    return found


def _variables(options: Sequence[str]) -> dict[str, str]:
    """Return the variables that options such as --env=NAME=VALUE set."""
    found = dict[str, str]()
    for option in options:
        # --env=NAME=VALUE, or -eNAME=VALUE. Apptainer's --env has several variables, with commas between.
        text = option.removeprefix("--env=") if option.startswith("--") else option.removeprefix("-e")
        for variable in text.split(",") if text != option else ():
            name, _, value = variable.lstrip("=").partition("=")
            found[name] = value
    return found


def _texts(section: Section, key: str) -> tuple[str, ...]:
    words: Sequence[object] = section.take(key, list, []) or []
    if not all(isinstance(word, str) for word in words):
        section.fault(key, f"{key} must be a list of texts", "quote each word")
    return tuple(str(word) for word in words)
