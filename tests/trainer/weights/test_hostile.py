"""Hostile files run nothing, take no memory, and end with exit code 2 and a message that names them."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.wire.requests import ImportRequest
from tests.support import hostile_weights
from trainer.errors import InputError
from trainer.weights.convert import import_weights


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("hostile")
    return folder


@pytest.fixture(scope="module")
def sources(hostile: Path) -> dict[str, Path]:
    return hostile_weights.folders(hostile)


def test_each_hostile_file_is_refused_and_runs_nothing(
    hostile: Path, sources: dict[str, Path], tmp_path: Path
) -> None:
    assert len(sources) > 120
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accepted, unnamed = [], []
    for name, source in sources.items():
        try:
            # What is beside the weights is read with their state.
            asked = ImportRequest(
                heads=0 if name.endswith("the object") else 2, state=name.endswith("the object")
            )
            import_weights(source, tmp_path / "ours", name.partition(":")[0], asked)
            accepted.append(name)
        except InputError as error:
            assert error.exit_code == 2
            if str(hostile) not in error.message:
                unnamed.append(f"{name}: {error.message}")
    assert not accepted and not unnamed
    assert not (hostile / hostile_weights.MARK).exists()
    assert [path.name for path in tmp_path.iterdir()] == []
    # Kilobytes: no file made the reader allocate what it claims.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


@pytest.mark.parametrize("name", ["hf: os.system", "hf: huge header", "megatron: os.system inside of a dict"])
def test_the_program_exits_with_2(sources: dict[str, Path], hostile: Path, tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", "trainer", "checkpoint-import", str(sources[name])]
    command += ["--from", name.partition(":")[0], "--output", str(tmp_path / "ours")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and str(sources[name]) in done.stderr and "Traceback" not in done.stderr
    assert not (hostile / hostile_weights.MARK).exists()


def test_the_payload_is_real(tmp_path: Path) -> None:
    """The pickle would create the file if a program ran it, so that the test above can fail."""
    import pickle
    import zipfile

    content = hostile_weights.torch_files(str(tmp_path / "harmed"))["os.system"]
    (tmp_path / "a.zip").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        pickle.loads(archive.read("archive/data.pkl"))
    assert (tmp_path / "harmed").exists()
