"""Write the command that runs a rank in a container, with its node's devices, network and folders.

Docker and podman get every variable of a rank by its name only: the value passes through the environment of the
runtime's own process, so that no process list shows it. Apptainer passes its whole environment on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clusterctl.inventory.cluster import Node
from clusterctl.inventory.container import ContainerOptions
from clusterctl.wire import contract

# Devices and files that every Ascend container needs from its node, in addition to its davinci devices.
ASCEND_DEVICES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
ASCEND_FILES = (
    "/usr/local/Ascend/driver",
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/etc/ascend_install.info",
    "/etc/hccn.conf",
)
# Set by the supervisor when it starts a rank; a container must pass them on too.
SUPERVISED = ("CLUSTERCTL_SUPERVISED",)
LABEL = "clusterctl.run"


@dataclass(frozen=True)
class RankContainer:
    """The container of one rank."""

    options: ContainerOptions
    node: Node
    name: str
    run_id: str
    folders: tuple[str, ...]
    """Folders of the node that the rank writes to, at the same path inside the container."""
    read_only: tuple[str, ...]
    """Folders of the node that the rank only reads."""
    cwd: str
    rdma: bool = False
    """Whether the container gets the RDMA devices."""

    def command(self, argv: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
        """Return the command that runs `argv` with the variables of these names."""
        if self.options.dialect == "apptainer":
            return (*self._apptainer(), *argv)
        passed = sorted({*names, *SUPERVISED, contract.RUN_DIR})
        return (
            *self._docker(),
            *(f"--env={name}" for name in passed),
            *self.options.options,
            self.image,
            *argv,
        )

    @property
    def image(self) -> str:
        """Return the image as the runtime names it."""
        image = self.options.image
        if (
            self.options.dialect != "apptainer"
            or "://" in image
            or image.endswith(".sif")
            or image[0] in "/.~"
        ):
            return image
        return f"docker://{image}"

    def removal(self) -> tuple[str, ...]:
        """Return the command that removes the container in any state; () if none can remain."""
        # Apptainer starts no daemon: its container ends with its process.
        return (
            () if self.options.dialect == "apptainer" else (self.options.runtime, "rm", "--force", self.name)
        )

    def _docker(self) -> Iterator[str]:
        """Yield the command of docker and podman up to the variables."""
        # --init: a first process that passes signals on and collects orphans.
        yield from (self.options.runtime, "run", "--rm", "--init", f"--name={self.name}")
        yield f"--label={LABEL}={self.run_id}"
        # The ranks of a node exchange data through /dev/shm, so they share the node's.
        yield from ("--network=host", "--ipc=host", f"--workdir={self.cwd}")
        if self.node.kind != "cpu":
            yield "--ulimit=memlock=-1"
        yield from device_options(self.options, self.node)
        if self.rdma:
            yield "--device=/dev/infiniband"
        yield from (f"--volume={mount}" for mount in self._mounts())

    def _mounts(self) -> Iterator[str]:
        """Yield each path of the node and where the container has it, in the order in which they are mounted."""
        yield from (f"{path}:{path}" for path in self.folders)
        ascend = ASCEND_FILES if self.node.kind == "npu" else ()
        yield from (f"{path}:{path}:ro" for path in (*self.read_only, *ascend))
        yield from self.options.mounts

    def _apptainer(self) -> Iterator[str]:
        """Yield the command of apptainer up to the rank's own; it shares the node's network, devices and /dev/shm."""
        yield from (self.options.runtime, "exec", "--no-home", f"--pwd={self.cwd}")
        yield from device_options(self.options, self.node)
        yield from (f"--bind={mount}" for mount in self._mounts())
        yield from (*self.options.options, self.image)


def device_options(options: ContainerOptions, node: Node) -> Iterator[str]:
    """Yield the options for the node's devices; ranks choose theirs by CUDA_VISIBLE_DEVICES and the like."""
    if node.kind == "cuda":
        cdi = {"docker": "--gpus=all", "apptainer": "--nv"}
        yield cdi.get(options.dialect, "--device=nvidia.com/gpu=all")
    if node.kind == "npu" and options.dialect != "apptainer":
        yield from (f"--device=/dev/davinci{device}" for device in node.devices)
        yield from (f"--device={path}" for path in ASCEND_DEVICES)


def container_name(run_id: str, attempt: int, node: str, rank: int) -> str:
    """Return the name of a rank's container; runtimes take letters, digits, '.', '_' and '-'."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", f"clusterctl-{run_id}-{attempt}-{node}-{rank}")
