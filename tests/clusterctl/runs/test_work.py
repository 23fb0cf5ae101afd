"""The working folder of a program: a new one for each run, which its own next attempt finds again."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.jobs import job as jobs
from clusterctl.jobs.run_folder import RunDir
from clusterctl.runs import prune
from clusterctl.runs import start as runs
from clusterctl.runs.finish import bring_outputs, collect
from clusterctl.transport.fanout import Connections
from tests.clusterctl.runs.test_prune import local
from tests.clusterctl.runs.test_run import connections as connections
from tests.clusterctl.runs.test_run import lab, to_the_end

# Writes, rank by rank, what it found of an earlier start.
COUNTING = """
import os, pathlib, sys
last = pathlib.Path(f"ckpt/last-{os.environ['RANK']}.txt")
last.parent.mkdir(exist_ok=True)
print(last.read_text() if last.exists() else "nothing", flush=True)
last.write_text(os.environ["CLUSTERCTL_RUN_ID"] + " " + os.environ["CLUSTERCTL_ATTEMPT"])
with open("settings.json", "a") as file:
    file.write("changed")
open("written.py", "w").write("changed = 1")
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    (folder / "package").mkdir(parents=True)
    (folder / "count.py").write_text(COUNTING)
    (folder / "written.py").write_text("before = 1")
    (folder / "settings.json").write_text("{}")
    (folder / "package" / "module.py").write_text("")
    (folder / "link.py").symlink_to("package/module.py")
    os.chmod(folder / "count.py", 0o755)
    return folder


def start(tmp_path: Path, connections: Connections, code: Path, **more: object) -> RunDir:
    job = jobs.Job(name="count", command=("python", "count.py"), code=code, source="job.yaml", **more)  # type: ignore[arg-type]
    run = runs.launch(lab(tmp_path), job, connections, tmp_path / "runs", lambda phase, text: None)
    assert to_the_end(run, connections).phase == "finished", run.log("node1", 0, "err").read_text()
    return run


def output(run: RunDir, attempt: int = 1) -> str:
    return run.log("node1", 0, "out", attempt).read_text().strip()


def store(tmp_path: Path, kind: str = "code") -> list[Path]:
    return sorted(path for path in (tmp_path / "n1" / "store" / kind).iterdir() if path.name[0] != ".")


def test_a_second_run_finds_nothing_of_the_first_and_a_resumed_one_its_own_files(
    tmp_path: Path, connections: Connections, code: Path
) -> None:
    first, second = (start(tmp_path, connections, code) for _ in range(2))
    assert (output(first), output(second)) == ("nothing", "nothing")
    # An edit here changes nothing of a run that is resumed.
    (code / "count.py").write_text("raise SystemExit('edited')")
    runs.resume(first, connections, lambda *_: None)
    assert to_the_end(first, connections).phase == "finished"
    assert output(first, 2) == f"{first.run_id} 1"
    work = Path(first.read_record().work_dirs["node1"])
    assert work == tmp_path / "n1" / "work" / first.run_id
    assert (work / "ckpt" / "last-0.txt").read_text() == f"{first.run_id} 2"
    assert os.readlink(work / "link.py") == "package/module.py"
    assert (work / "count.py").stat().st_mode & 0o777 == 0o755


def test_source_files_are_links_and_what_a_run_writes_does_not_reach_the_store(
    tmp_path: Path, connections: Connections, code: Path
) -> None:
    run = start(tmp_path, connections, code)
    work, (tree,) = Path(run.read_record().work_dirs["node1"]), store(tmp_path)
    assert (work / "package/module.py").samefile(tree / "package/module.py")
    assert (tree / "settings.json").read_text() == "{}"
    assert (work / "settings.json").read_text() == "{}" + "changed" * 2
    # Written in place through the link: the next run gets the code as it was pushed.
    assert (tree / "written.py").read_text() == "changed = 1"
    (code / "look.py").write_text("")
    (code / "look.py").unlink()
    again = start(tmp_path, connections, code)
    assert output(again) == "nothing"
    assert store(tmp_path) == [tree]
    job = replace(again.read_record().job, command=("python", "-c", "print(open('written.py').read())"))
    third = runs.launch(lab(tmp_path), job, connections, tmp_path / "runs", lambda phase, text: None)
    to_the_end(third, connections)
    assert output(third) == "before = 1"
    assert (work / "written.py").read_text() == "changed = 1"


def test_a_kept_folder_has_the_files_of_earlier_runs_and_the_newest_code(
    tmp_path: Path, connections: Connections, code: Path
) -> None:
    first = start(tmp_path, connections, code, workdir="keep")
    (code / "package" / "module.py").write_text("new = 1")
    (code / "link.py").unlink()
    second = start(tmp_path, connections, code, workdir="keep")
    assert (output(first), output(second)) == ("nothing", f"{first.run_id} 1")
    work = tmp_path / "n1" / "work" / "count"
    assert (work / "package/module.py").read_text() == "new = 1"
    assert not (work / "link.py").is_symlink()
    # Its pushed content is the same: it stays as the runs left it.
    assert (work / "settings.json").read_text() == "{}" + "changed" * 4


def test_what_a_run_wrote_comes_home_and_not_the_code(
    tmp_path: Path, connections: Connections, code: Path
) -> None:
    run = start(tmp_path, connections, code, collect=("work",))
    assert collect(run, connections) == ["work/node1", "work/node2"]
    bring_outputs(run, connections, tmp_path / "home")
    for folder in (run.root / "work", tmp_path / "home"):
        found = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        assert sorted(found) == [
            "node1/ckpt/last-0.txt",
            "node1/ckpt/last-1.txt",
            "node1/settings.json",
            "node1/written.py",
            "node2/ckpt/last-2.txt",
            "node2/ckpt/last-3.txt",
            "node2/settings.json",
            "node2/written.py",
        ]
        assert not (folder / "node1" / "package").exists()


def test_prune_frees_the_store_of_what_no_run_uses(
    tmp_path: Path, connections: Connections, code: Path
) -> None:
    first = start(tmp_path, connections, code)
    (code / "package" / "module.py").write_text("another = 1")
    second = start(tmp_path, connections, code)
    old, new = sorted(store(tmp_path), key=lambda path: path.stat().st_ctime)
    for path in [*(tmp_path / "n1" / "trees").iterdir(), old, new]:
        os.utime(path, (time.time() - 3600,) * 2)
    stores: dict[str, prune.Store] = {}
    prune.prune([first], local, dry_run=True, on_store=stores.__setitem__)
    assert stores["node1"].names == (f"code/{old.name}",) and stores["node1"].size > 0
    assert old.is_dir()
    prune.prune([first], local, on_store=stores.__setitem__)
    assert stores["node1"].names == (f"code/{old.name}",)
    assert store(tmp_path) == [new]
    assert not (tmp_path / "n1" / "work" / first.run_id).exists()
    assert (tmp_path / "n1" / "work" / second.run_id).is_dir()
    # The other node's trees are new.
    assert stores["node2"].names == ()
