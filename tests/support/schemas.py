"""Judges of Kubernetes manifests: the published schemas of the kinds, where this machine has them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

# A folder with the CustomResourceDefinitions of JobSet, TrainJob, Volcano and AscendJob.
FOLDER = "KUBERNETES_SCHEMAS"
BESIDE = Path(__file__).resolve().parents[2].parent / "shared" / "tools" / "manifest-judge"


@dataclass(frozen=True)
class Judges:
    """The schemas of custom kinds, and kubernetes-validate for those of Kubernetes itself."""

    schemas: dict[tuple[str, str], dict[str, Any]]

    def problems(self, manifest: dict[str, Any]) -> list[str]:
        """Return what the schema of a manifest's kind refuses, unknown keys too."""
        import jsonschema
        import kubernetes_validate

        schema = self.schemas.get((manifest["apiVersion"], manifest["kind"]))
        if schema is not None:
            errors = jsonschema.Draft7Validator(schema).iter_errors(manifest)
            return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]
        try:
            kubernetes_validate.validate(manifest, "1.31", strict=True)
        except kubernetes_validate.ValidationError as error:
            return [str(error)]
        return []


@cache
def judges() -> Judges:
    """Return the judges; skip the test where they are not installed."""
    pytest.importorskip("jsonschema")
    pytest.importorskip("kubernetes_validate")
    folder = Path(os.environ.get(FOLDER) or BESIDE)
    if not folder.is_dir():
        pytest.skip(f"no folder with the schemas of custom kinds; ${FOLDER} names one")
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        for document in yaml.load_all(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if document and document.get("kind") == "CustomResourceDefinition":
                spec = document["spec"]
                for version in spec["versions"]:
                    schema = _strict(version["schema"]["openAPIV3Schema"])
                    schema["properties"]["metadata"] = {"type": "object"}
                    found[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = schema
    return Judges(found)


def _strict(schema: Any) -> Any:
    """Return an OpenAPI schema as JSON schema; objects take only the keys that it names."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = dict(schema)
    for key in ("items", "additionalProperties"):
        if key in found:
            found[key] = _strict(found[key])
    if "properties" in found:
        found["properties"] = {name: _strict(part) for name, part in found["properties"].items()}
        open_ended = found.get("x-kubernetes-preserve-unknown-fields")
        if "additionalProperties" not in found and not open_ended:
            found["additionalProperties"] = False
    if found.pop("nullable", None) and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    return found
