"""`clusterctl selftest` on a node: every check passes, and a check that fails is named in the report."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from tests.live.conftest import Shell
from tests.support import npu_library

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(900)]


def simulated(cluster_file: Path, folder: Path) -> Path:
    """Write an inventory of the same nodes with the simulated torch_npu, which their setup finds."""
    paths = {
        "PYTHONPATH": f"{npu_library.NODE}:{Path(__file__).parents[2]}",
        "LD_LIBRARY_PATH": str(npu_library.build(folder)),
        "NPU_LIBRARY": str(folder / "npu.so"),
    }
    setup = folder / "set_env.sh"
    setup.write_text("".join(f"export {name}={value}\n" for name, value in paths.items()))
    text = cluster_file.read_text().replace('"kind": "cpu"', f'"kind": "npu", "setup": "{setup}"')
    file = cluster_file.with_name("simulated.yaml")
    file.write_text(text)
    return file


@pytest.mark.parametrize("kind", ["npu", "cpu"])
def test_a_selftest_passes_on_a_node(kind: str, shell: Shell, cluster_file: Path, tmp_path: Path) -> None:
    file = simulated(cluster_file, tmp_path) if kind == "npu" else cluster_file
    done = shell("selftest", "-c", str(file), "-n", "node1", "--dir", "tested", timeout=800)
    folder = shell.folder / "tested"
    assert done.returncode == 0, (folder / "report.txt").read_text()
    report = json.loads((folder / "report.json").read_text())
    found = {check["name"]: check["found"] for check in report["checks"] if not check["problem"]}
    assert found["the other half"] == "the losses of 20 steps are equal to the last bit"
    assert found["the same on a CPU"].startswith("the losses differ by at most")
    assert {"nodes and devices", "training in bf16", "text"} <= found.keys()
    assert found["plan and measurement"].startswith("memory of a device: planned ")
    assert found["a server"].startswith("it answered 8 tokens: ")
    assert ("valid: 1 server, 2 ranks" in found.get("rank table", "")) == (kind == "npu")
    assert "passed  the other half" in (folder / "report.txt").read_text()


def test_a_selftest_without_time_names_what_is_left_and_stops_its_runs(
    shell: Shell, cluster_file: Path
) -> None:
    done = shell(
        "selftest", "-c", str(cluster_file), "-n", "node1", "--dir", "short", "--seconds", "12", timeout=300
    )
    assert done.returncode == 1 and "checks failed: " in done.stderr
    assert (
        "the time of the self-test (--seconds) is over" in (shell.folder / "short" / "report.txt").read_text()
    )
    runs = [path.name for path in (shell.folder / "short").glob("runs-*/*")]
    assert not [line for line in open_commands() if any(run in line for run in runs)]


def open_commands() -> list[str]:
    """Return the command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
    return found
