"""The readers of other files around a run: sweeps, Slurm jobs, stores, environments, setups, checkpoints."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterctl.agent import setups
from clusterctl.agent.records import read_json
from clusterctl.backends.pods.rank_table import why_incomplete
from clusterctl.backends.queue import Submission
from clusterctl.backends.slurm.backend import BACKEND as slurm
from clusterctl.errors import ClusterctlError
from clusterctl.jobs.run_folder import RunDir
from clusterctl.jobs.sweep import FILE as SWEEP
from clusterctl.jobs.sweep import SweepRecord, SweepRequest, Variant, read_sweep
from clusterctl.provision.bundle import LIST, Bundle
from clusterctl.provision.present import seen_in
from clusterctl.storage.client import AnswerLines, FileList, StoredFile, read_list
from clusterctl.wire.saved import FORMAT, SavedFile, encode_manifest
from clusterctl.wire.typed_json import encode
from tests.fuzz.inputs import as_json, as_lines, damaged
from trainer.checkpoint.manifest import BaseWeights, Manifest, Origin, decode_manifest
from trainer.config.train_config import TrainConfig
from trainer.errors import CheckpointError, TrainerError
from trainer.evaluate.results import Progress
from trainer.weights.target import JOURNAL, UNFINISHED, open_target


def is_numbered(found: Submission | None) -> bool:
    assert found is None or isinstance(found.job, int)
    return found is not None


def has_names_inside(found: FileList) -> bool:
    """No name may point outside the folder, and every file must have a hash of each piece."""
    for name, file in found.files.items():
        assert not os.path.isabs(name) and ".." not in name.split("/"), name
        assert len(file.pieces) == max(1, -(-file.bytes // file.piece))
    return True


def read_answers(data: bytes) -> tuple[list[int], object]:
    """Read the answers of the program that moves files on a node."""
    reported: list[int] = []
    lines = AnswerLines(reported.append)
    piece = len(data) // 7 + 1
    for begin in range(0, len(data), piece):
        lines.feed(data[begin : begin + piece])
    return reported, lines.answer


def has_counts(found: tuple[list[int], object]) -> object:
    assert all(type(count) is int for count in found[0])
    return found[1]


def read_mark(data: bytes) -> str:
    fingerprint, is_foreign = seen_in(data.decode("utf-8", "surrogateescape") + "\nruns\n")
    assert isinstance(fingerprint, str) and not is_foreign
    return fingerprint


def archive_of(content: bytes) -> bytes:
    """Return a bundle whose list, the first member of the tar file, has this content."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        header = tarfile.TarInfo(LIST)
        header.size = len(content)
        archive.addfile(header, io.BytesIO(content))
    return data.getvalue()


def read_bundle(data: bytes) -> Any:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        return Bundle(Path("b.tar"), archive).contents


def stays_inside(contents: Any) -> bool:
    assert all(".." not in member.path.split("/") for member in contents.files)
    return True


def is_used(kept: dict[str, Any] | None) -> bool:
    """The cached result of a setup may only be used if every value is a text."""
    if kept is None or not setups.fits(kept):
        return False
    assert all(isinstance(value, str) for value in kept["set"].values())
    assert all(isinstance(name, str) for name in (*kept["set"], *kept["unset"]))
    return True


def read_scores(folder: Path) -> dict[int, Any]:
    with Progress(folder, "k", 1) as progress:
        return progress.read(10)


def has_indices(scores: dict[int, Any]) -> bool:
    assert all(type(index) is int and 0 <= index < 10 for index in scores)
    return bool(scores)


IDENTITY = {"source": "s"}


def resume_conversion(folder: Path) -> dict[str, SavedFile]:
    """Continue a conversion with a damaged journal: a file without a valid entry must be written again."""
    journal, aside = (folder / "journal").read_bytes(), folder / f"{UNFINISHED}out"
    aside.mkdir()
    (aside / "a.bin").write_bytes(b"xyz")
    (aside / JOURNAL).write_bytes(json.dumps(IDENTITY, sort_keys=True).encode() + b"\n" + journal)
    with open_target(folder / "out", IDENTITY, 3) as target:
        return dict(target.entries)


def is_whole(resumed: dict[str, SavedFile]) -> bool:
    assert all(entry.bytes == 3 and isinstance(entry.sha256, str) for entry in resumed.values())
    return bool(resumed)


SAVED = Manifest(
    7,
    TrainConfig(),
    {"a.weight": (4, 2)},
    {"part-00000.safetensors": SavedFile(9, "0" * 64, [[[0, 4, 0, 2], [0, 1]]])},
    loss_scale={"scale": 2.0},
    base=BaseWeights("/w", "f"),
    origin=Origin("hf", "/w", before=Origin("glm", "/g")),
)


def read_manifests(data: bytes) -> list[Manifest]:
    """Read a checkpoint's manifest as it is, and with a correct hash, so that other faults must be found."""
    whole = encode_manifest({})
    # The text that `encode_manifest` writes between the last entry and the hash, and after the hash.
    key, end = whole[2 : whole.rindex(b'": "') + 4], whole[-4:]
    content = data.rstrip().removesuffix(b"}") + key
    found = []
    for text in (data, content + hashlib.sha256(content).hexdigest().encode() + end):
        try:
            found.append(decode_manifest(text, Path("manifest.json")))
        except CheckpointError as error:
            assert error.message.startswith("manifest.json: ")
    return found


def are_written_alike(manifests: list[Manifest]) -> bool:
    for found in manifests:
        if found.format == FORMAT:
            again = decode_manifest(encode_manifest(found.as_json()), Path("again"))
            assert replace(again, faults=found.faults, about=found.about) == found
    return bool(manifests)


SWEPT = SweepRecord(SweepRequest("job.yaml"), (Variant("lr=1", ("train.lr=1",), "r-1", "finished"),))
HASH = "0" * 64
LISTED = FileList({"a/b": StoredFile(5, 4, (HASH, HASH))}, step=3, digest=HASH)
BUNDLE = as_json(
    {"format": 1, "files": [{"path": "code/a.py", "size": 3, "sha256": HASH, "executable": False}]}
)
KEPT = {"set": {"A": "1"}, "unset": ["B"], "before": {"A": None, "B": None}, "seconds": 0.1}
ANSWERS = [{"bytes": 5}, {"result": ["a"]}, {"refused": "no", "hint": "x"}]
JOURNALED = [{"name": "a.bin", "bytes": 3, "sha256": HASH}, {"name": "b", "bytes": 1, "sha256": HASH}]
SUBMITTED = slurm.record
BROKEN_BUNDLE = (ClusterctlError, tarfile.TarError)

READERS = {
    "sweep": damaged(as_json(encode(SWEPT)), read_sweep, lambda swept: json.dumps(encode(swept)), SWEEP),
    "slurmjob": damaged(
        as_json(encode(Submission(7, 1.7e9))),
        lambda folder: slurm.submission_of(RunDir(folder)),
        is_numbered,
        SUBMITTED,
    ),
    "platformtable": damaged(
        as_json({"status": "completed"}, {"status": "x"}),
        lambda folder: not why_incomplete(folder / "table.json"),
        file="table.json",
    ),
    "storedlist": damaged(
        [LISTED.text().encode()],
        lambda data: read_list(data.decode("utf-8", "surrogateescape"), "s3://b/f"),
        has_names_inside,
    ),
    "storeanswers": damaged(as_lines(ANSWERS), read_answers, has_counts, refusals=()),
    "mark": damaged(as_json({"fingerprint": HASH}), read_mark, bool, refusals=()),
    "bundlelist": damaged(
        BUNDLE, lambda data: read_bundle(archive_of(data)), stays_inside, refusals=BROKEN_BUNDLE
    ),
    "bundle": damaged([archive_of(BUNDLE[0])], read_bundle, stays_inside, refusals=BROKEN_BUNDLE),
    "setup": damaged(
        as_json(KEPT), lambda folder: read_json(str(folder / "kept.json")), is_used, "kept.json", refusals=()
    ),
    "evaluation": damaged(
        [b"[0, -1.5, true]\n[1, -2.0, false]\n"],
        read_scores,
        has_indices,
        ".unfinished-k-0.jsonl",
        refusals=(),
    ),
    "conversion": damaged(
        as_lines(JOURNALED), resume_conversion, is_whole, "journal", refusals=(TrainerError,)
    ),
    "checkpoint": damaged(
        as_json(SAVED.as_json(), {**SAVED.as_json(), "format": 1}),
        read_manifests,
        are_written_alike,
        refusals=(),
    ),
}
