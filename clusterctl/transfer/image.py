"""Read an image archive (docker-archive or OCI layout in a tar) and bring it to nodes: pushed, loaded, verified."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl.errors import UsageError, WorkFailed
from clusterctl.inventory.cluster import Node
from clusterctl.transport.connection import Connection

# Seconds for a runtime to unpack an image of tens of gigabytes.
LOAD_LIMIT = 3600.0
ASK_LIMIT = 60.0
# Linux's names of processors that have other names in images.
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
# The largest JSON file of an archive that is read.
MOST_JSON = 16 << 20
NO_ARCHIVE = "write one with: docker save -o train.tar IMAGE (also podman save, buildah push docker-archive:)"


@dataclass(frozen=True)
class ImageArchive:
    """An image in a file."""

    path: Path
    name: str
    """Its name with the tag."""
    digests: tuple[str, ...]
    """The ids by which a runtime may know it: of its configuration, or of its manifest."""
    architecture: str

    def remote_path(self, node: Node) -> str:
        """Return where the file lies on a node until it is loaded."""
        return f"{node.workdir}/images/{self.path.name}"


def read_archive(path: Path) -> ImageArchive:
    """Return the image in an archive; raise a UsageError if there is none, or several."""
    try:
        with tarfile.open(path) as archive:
            names = set(archive.getnames())
            if "manifest.json" in names:
                return _docker(path, archive)
            if "index.json" in names:
                return _oci(path, archive)
    except tarfile.ReadError:
        raise UsageError(f"{path} is not an archive of an image: it is no tar file", NO_ARCHIVE) from None
    except (tarfile.TarError, OSError, EOFError, KeyError, ValueError, TypeError, AttributeError) as problem:
        raise UsageError(f"{path} is not an archive of an image: {problem}", NO_ARCHIVE) from None
    raise UsageError(
        f"{path} is not an archive of an image: it has neither manifest.json nor index.json", NO_ARCHIVE
    )


def _docker(path: Path, archive: tarfile.TarFile) -> ImageArchive:
    entries = _json(archive, "manifest.json")
    if len(entries) != 1 or len(entries[0].get("RepoTags") or ()) != 1:
        raise ValueError("it must hold one image with one name")
    (entry,) = entries
    config = str(entry["Config"])
    digest = config.removesuffix(".json").rpartition("/")[2]
    return ImageArchive(
        path, str(entry["RepoTags"][0]), (f"sha256:{digest}",), _architecture(archive, config)
    )


def _oci(path: Path, archive: tarfile.TarFile) -> ImageArchive:
    entries = _json(archive, "index.json")["manifests"]
    named = [
        entry for entry in entries if entry.get("annotations", {}).get("org.opencontainers.image.ref.name")
    ]
    if len(named) != 1:
        raise ValueError("it must hold one image with one name")
    manifest = _json(archive, _blob(named[0]["digest"]))
    config = manifest["config"]["digest"]
    name = str(named[0]["annotations"]["org.opencontainers.image.ref.name"])
    return ImageArchive(path, name, (config, named[0]["digest"]), _architecture(archive, _blob(config)))


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _architecture(archive: tarfile.TarFile, config: str) -> str:
    return str(_json(archive, config).get("architecture", ""))


def _json(archive: tarfile.TarFile, name: str) -> Any:
    file = archive.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is not a file")
    return json.loads(file.read(MOST_JSON))


def refuse_machine(image: ImageArchive, node: str, link: Connection) -> None:
    """Raise an error if an image is for another processor than a node has."""
    wanted = MACHINES.get(image.architecture, image.architecture)
    found = link.run(["uname", "-m"], timeout=ASK_LIMIT).stdout.decode("utf-8", "replace").strip()
    if wanted and found and wanted != found:
        hint = f"build the image for {found}: --platform linux/{_platform(found)}"
        raise WorkFailed(f"{node}: {image.name} is for {wanted}, and the node has {found}", hint)


def _platform(machine: str) -> str:
    names: Mapping[str, str] = {value: key for key, value in MACHINES.items()}
    return names.get(machine, machine)


def has_image(image: ImageArchive, runtime: str, link: Connection) -> bool:
    """Return whether a node already has this image."""
    done = link.run([runtime, "image", "inspect", "--format={{.Id}}", image.name], timeout=ASK_LIMIT)
    shown = done.stdout.decode("utf-8", "replace").strip()
    shown = shown if shown.startswith("sha256:") else f"sha256:{shown}"
    return done.exit_code == 0 and shown in image.digests


def load(image: ImageArchive, runtime: str, node: Node, link: Connection) -> None:
    """Load a pushed archive into a node's runtime, delete the archive there, and look for the image."""
    path = image.remote_path(node)
    if path.startswith("~/"):
        # A runtime does not know what `~` is.
        path = link.hello().home + path[1:]
    done = link.run([runtime, "load", f"--input={path}"], timeout=LOAD_LIMIT)
    link.run(["rm", "-f", path], timeout=ASK_LIMIT)
    if done.exit_code != 0:
        last = (done.error_text.strip().splitlines() or [f"exit code {done.exit_code}"])[-1]
        hint = f"is {runtime} installed there, and may this user run it?"
        raise WorkFailed(f"{node.name}: {runtime} does not load {image.name}: {last}", hint)
    shown = link.run([runtime, "image", "inspect", "--format={{.Id}}", image.name], timeout=ASK_LIMIT)
    if shown.exit_code != 0:
        raise WorkFailed(f"{node.name}: {runtime} loaded the archive, and has no image {image.name}")
