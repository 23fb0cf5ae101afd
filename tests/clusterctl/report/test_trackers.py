"""Runs written for Weights & Biases and MLflow, read back by those packages where they are installed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.jobs.run_folder import RunDir
from clusterctl.report import trackers
from clusterctl.report.history import read_history
from tests.support.run_folders import restarted_run


def test_a_row_is_a_step_that_counts_with_its_validation_loss(tmp_path: Path) -> None:
    rows = list(trackers.rows(read_history(restarted_run(tmp_path))))
    assert [row.step for row in rows] == list(range(1, 41))
    last = rows[-1]
    assert last.values["train/loss"] == 2.1 and last.values["train/tokens"] == 2048 * 40
    assert last.values["validation/loss"] == 2.5 and "validation/loss" not in rows[0].values
    assert last.time > 1e9


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(trackers.importlib, "import_module", missing)
    for write, extra in ((trackers.write_wandb, "wandb"), (trackers.write_mlflow, "mlflow")):
        with pytest.raises(UsageError) as raised:
            write(restarted_run(tmp_path / extra), tmp_path / "out")
        assert f"--{extra}" in raised.value.message and f"[{extra}]" in raised.value.hint
    assert not (tmp_path / "out").exists()


def test_mlflow_reads_the_run_back(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    run = restarted_run(tmp_path)
    file, command = trackers.write_mlflow(run, tmp_path / "out")
    assert str(file) in command
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{file}")
    experiment = client.get_experiment_by_name("clusterctl")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == run.run_id and found.info.status == "FINISHED"
    assert found.data.params["train.optimizer.lr"] == "0.001"
    losses = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(entry.step, entry.value) for entry in losses][-1] == (40, 2.1) and len(losses) == 40
    with pytest.raises(UsageError, match="already"):
        trackers.write_mlflow(run, tmp_path / "out")


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log: blocks of 32 kB, pieces with checksum, length and kind (1 whole, 2 first, 4 last)."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        piece = data[at + 7 : at + 7 + size]
        at += 7 + size
        whole = piece if kind in (1, 2) else whole + piece
        if kind in (1, 4):
            yield whole


def test_wandb_reads_the_run_back(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    run = restarted_run(tmp_path)
    folder, command = trackers.write_wandb(run, tmp_path / "out")
    assert command == f"wandb sync {folder}"
    (file,) = folder.glob("*.wandb")
    steps, config = [], {}
    for data in records(file.read_bytes()):
        record = messages.Record.FromString(data)
        if record.HasField("history"):
            steps.append(
                {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            )
        if record.HasField("run"):
            config |= {item.key: item.value_json for item in record.run.config.update}
    assert len(steps) == 40 and steps[-1]["train/loss"] == "2.1"
    assert config["train.optimizer.lr"] == '"0.001"'


def test_a_run_without_steps_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_package", lambda name, extra: None)
    run: RunDir = restarted_run(tmp_path)
    run.metrics.unlink()
    with pytest.raises(UsageError, match="has no steps"):
        trackers.write_mlflow(run, tmp_path / "out")
