"""Read manifests of Kubernetes whose containers start a known program, and write the job's part for them."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path

from clusterctl.bash.evaluate import evaluate
from clusterctl.bash.evaluator import Word
from clusterctl.document import Document
from clusterctl.errors import UsageError
from clusterctl.migrate.families import KNOWN
from clusterctl.migrate.found import Found, Given, options_by_name, plain
from clusterctl.migrate.start import parse, start
from clusterctl.migrate.translation import Facts, Translation, number, of

# The part of a job, and what people call a manifest.
PART, TITLE = "kubernetes", "a job of Kubernetes"
# Keys of a manifest next to the command of its containers.
KEYS = """
replicas completions numNodes | int | @nodes
slotsPerWorker numProcPerNode | int | @devices
nvidia.com/gpu huawei.com/Ascend910 huawei.com/ascend-1980 | int | @devices
image | text | - | kubernetes: {image: ...} names an image with the embedded trainer; see examples/images
queue | text | kubernetes.queue
priority | any | - | `clusterctl submit` hands a job to a cluster with queues
cpu | text | kubernetes.cpus
memory | text | kubernetes.memory
claimName claims | any | @claims
localRank | bool | - | every rank finds LOCAL_RANK in its environment
"""


def from_manifest(document: Document, path: Path) -> Found:
    """Return the training in a manifest: the command of a known program, and the numbers of nodes and devices."""
    for words in _placed(document, path):
        begin = start(words)
        if begin is None:
            continue
        found = parse(begin[0], words, begin[1], path.name, path)
        found.name = str((document.value.get("metadata") or {}).get("name") or path.stem)[:41]
        found.given += [*_manifest_facts(document), *_claims(document)]
        return found
    lists = [words for keys, words in _commands_in(document.value, ()) if {"command", "args"} & set(keys)]
    started = "; ".join(" ".join(words) for words in lists)[:120]
    problem = f"{path}: no container starts a known program" + (f", only: {started}" if started else "")
    raise UsageError(problem, f"known programs: {KNOWN}")


def _claims(document: Document) -> Iterator[Given]:
    """Yield the volume claims of a manifest with the folders where they are mounted, and the working folder."""
    found: dict[str, list[tuple[str, str]]] = {"mountPath": [], "claimName": []}
    folders = [""]

    def walk(value: object) -> None:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if isinstance(value, dict):
            claim = value.get("persistentVolumeClaim")
            for key, text in (*value.items(), *(claim.items() if isinstance(claim, dict) else ())):
                if key in found and "name" in value:
                    found[key].append((str(value["name"]), str(text)))
            folders[0] = str(value.get("workingDir") or folders[0])
        for each in inner:
            walk(each)

    walk(document.value)
    mounts = dict(found["mountPath"])
    claims = {claim: mounts[name].rstrip("/") for name, claim in found["claimName"] if name in mounts}
    if claims:
        where = document.where(()).partition(" ")[0]
        option = options_by_name(KEYS)["claims"]
        yield Given("claimName", ({"claims": claims, "folder": folders[0]},), where, option)


def _commands_in(value: object, keys: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], list[str]]]:
    """Yield each list of words in a manifest, and the words of each command in a text, such as that of `sh -c`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _commands_in(inner, (*keys, key))
    elif isinstance(value, list):
        if value and all(isinstance(each, (str, int, float)) for each in value):
            yield keys, [str(each) for each in value]
        for at, inner in enumerate(value):
            yield from _commands_in(inner, (*keys, at))
            if isinstance(inner, str) and len(inner.split()) > 3:
                for command in evaluate(inner, "the manifest").commands:
                    yield keys, [word.text for word in command.words]


def _placed(document: Document, path: Path) -> Iterator[list[Word]]:
    """Yield each command of a manifest as words with their lines in the file."""
    for keys, texts in _commands_in(document.value, ()):
        lines = [document.lines.get((*keys, at), document.lines.get(keys, 1)) for at in range(len(texts))]  # type: ignore[arg-type]
        yield [Word(text, f"{path}:{line}") for text, line in zip(texts, lines, strict=True)]


def _manifest_facts(document: Document) -> Iterator[Given]:
    """Yield the numbers of nodes and devices that a manifest requests, and its other keys that the table names."""
    rows = options_by_name(KEYS)

    def walk(value: object, keys: tuple[str | int, ...]) -> Iterator[Given]:
        if isinstance(value, list):
            for at, inner in enumerate(value):
                yield from walk(inner, (*keys, at))
        if not isinstance(value, dict):
            return
        for key, inner in value.items():
            place = (*keys, key)
            option = rows.get(plain(str(key)))
            # Requests repeat the limits.
            if option is not None and not isinstance(inner, (dict, list)) and "requests" not in keys:
                where = document.where(place).partition(" ")[0]
                if option.kind != "int" or str(inner).isdigit():
                    yield Given(str(key), (inner,), where, option)
            else:
                yield from walk(inner, place)

    yield from walk(document.value, ())


def set_platform(result: Translation, facts: Facts) -> None:
    """Set the job's part for Kubernetes from a manifest; data on a claim is there, and not pushed."""
    claims = of(facts, "claims")
    if isinstance(claims, dict):
        name = facts["claims"][1]
        result.set("kubernetes.claims", claims["claims"], name)
        pushed = result.values.get("data")
        folder = (
            posixpath.normpath(posixpath.join(str(claims["folder"]), str(pushed.value))) if pushed else ""
        )
        if pushed and any(f"{folder}/".startswith(f"{place}/") for place in claims["claims"].values()):
            del result.values["data"]
            result.set("data_there", folder, f"{pushed.origin}, on the claim")
    if not any(key.startswith("kubernetes.") for key in result.values):
        return
    resource = facts["devices"][1] if "devices" in facts else ""
    if resource:
        result.set("kubernetes.devices", int(number(facts, "devices")), resource)
        result.set("kubernetes.kind", "npu" if "ascend" in resource.lower() else "cuda", resource)
    if number(facts, "nodes"):
        result.set("kubernetes.nodes", int(number(facts, "nodes")), facts["nodes"][1])
