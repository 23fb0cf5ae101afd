"""Which checkpoints a prune removes; the newest complete one and those in use stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.agent.files import checkpoints as on_disk
from clusterctl.checkpoints.checkpoint import CheckpointList
from clusterctl.checkpoints.find import of_folder
from clusterctl.checkpoints.prune import Keep, prune, reasons
from tests.clusterctl.checkpoints.test_find import entry, together
from tests.support import checkpoints as made


def gone(found: CheckpointList, keep: Keep) -> list[str]:
    return [name for name, why in reasons(found, keep).items() if not why]


def steps(*entries: object, **nodes: object) -> CheckpointList:
    return CheckpointList("run", together(**{"node1": list(entries), **nodes}))  # type: ignore[arg-type]


def test_the_last_the_best_and_multiples_stay() -> None:
    found = steps(
        *(
            entry(step, "a", "b", eval_loss=loss)
            for step, loss in ((50, 2.0), (40, 1.0), (30, 0.5), (20, 3.0), (10, 9.0))
        )
    )
    assert gone(found, Keep(last=2)) == ["step-00000030", "step-00000020", "step-00000010"]
    assert gone(found, Keep(last=1, best=1)) == ["step-00000040", "step-00000020", "step-00000010"]
    assert gone(found, Keep(last=1, every=20)) == ["step-00000030", "step-00000010"]


def test_the_only_complete_checkpoint_stays_and_so_does_what_is_newer() -> None:
    found = steps(entry(30, "a"), entry(20, "a", "b"), entry(10, "a"))
    assert gone(found, Keep()) == ["step-00000010"]
    assert not gone(steps(entry(30, "a"), entry(20, "a")), Keep())


def test_what_training_can_resume_from_stays_next_to_newer_weights() -> None:
    found = steps(entry(30, "a", "b", state="weights"), entry(20, "a", "b"), entry(10, "a", "b"))
    assert gone(found, Keep()) == ["step-00000010"]


def test_a_checkpoint_in_use_stays_whole(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        made.saved(tmp_path, step)
    with on_disk.protected(str(tmp_path / "step-00000001"), "reader"):
        results = prune(of_folder(tmp_path), Keep(), dry_run=False)
    assert {result.checkpoint.step: bool(result.kept) for result in results} == {3: True, 2: False, 1: True}
    assert "being read or copied" in next(r.kept for r in results if r.checkpoint.step == 1)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000003"]


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    for step in (1, 2):
        made.saved(tmp_path, step)
    results = prune(of_folder(tmp_path), Keep(), dry_run=True)
    assert [bool(result.bytes) for result in results] == [False, True]
    assert len(list(tmp_path.glob("step-*"))) == 2


def test_a_removal_that_fails_on_one_machine_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        made.saved(tmp_path, step)

    def full(folder: str) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(on_disk, "_remove", full)
    results = prune(of_folder(tmp_path), Keep(), dry_run=False)
    assert "Read-only file system" in results[1].kept
