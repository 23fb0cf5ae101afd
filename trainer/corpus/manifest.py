"""The file with the manifest of a .bin/.idx pair."""

from __future__ import annotations

import json
from pathlib import Path

from clusterctl.wire.pair import Manifest, read_manifest
from trainer.files import replace_file


def manifest_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".manifest.json")


def write_manifest(path: Path, manifest: Manifest) -> None:
    replace_file(path, json.dumps(manifest.as_json(), indent=2, ensure_ascii=False).encode() + b"\n")


def load_manifest(path: Path) -> Manifest | None:
    """Return the manifest in a file, or None without one; raise ValueError for a file that is no manifest."""
    try:
        return read_manifest(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"not a manifest: {error}") from None
