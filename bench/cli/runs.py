"""The processor time of `runs`, `runs prune` and `status` with many run folders: python -m bench.cli.runs [--runs N].

One run of 2 nodes and 4 ranks is launched in a sandbox, and its folders here and on the nodes are copied. Each command
is a whole process; the least of 5 is printed. The last row deletes the runs.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from bench.field import read_options, run, sandbox, user_environment

TIMES = 5
PROGRAM = """
for step in range(1, 301):
    print(f"step {step}/300 | loss {9 - step / 50:.4f} | 12.5 ms per step", flush=True)
"""


def copies(first: Path, wanted: int) -> None:
    """Copy a run's folders here and on its nodes, until there are `wanted` runs."""
    text = (first / "run.json").read_text()
    node_folders = [Path(folder) for folder in json.loads(text)["run_dirs"].values()]
    for number in range(1, wanted):
        name = f"{first.name[:-4]}{number:04x}"
        for folder in (first, *node_folders):
            shutil.copytree(folder, folder.with_name(name))
        for record in (first.parent / name).rglob("*.json"):
            record.write_text(record.read_text().replace(first.name, name))


def measure(folder: Path, argv: list[str], times: int = TIMES) -> str:
    """Return the least time and processor time of a command, which must end with 0."""
    environment = user_environment(CLUSTERCTL_RUNS=str(folder / "runs"))
    command = [sys.executable, "-m", "clusterctl", *argv]
    rows = [run(command, cwd=folder, env=environment) for _ in range(times)]
    return f"{min(rows).wall:6.2f} s  {min(used.cpu for used in rows):6.2f} s of processor"


def main() -> None:
    """Launch, copy, and print a row for each command."""
    wanted = read_options(__doc__, runs=1000).runs
    with sandbox("clusterctl-runs", 2, devices=2) as (nodes, folder):
        code = folder / "code"
        code.mkdir()
        (code / "steps.py").write_text(PROGRAM)
        launch = ["launch", "-c", str(nodes.cluster_file), "--code", str(code), "--", "python3", "steps.py"]
        measure(folder, launch, times=1)
        copies(next((folder / "runs").iterdir()), wanted)
        print(f"{wanted:,} runs")
        for argv in (["--version"], ["runs"], ["runs", "--json"], ["status"]):
            print(f"{' '.join(argv):<32}{measure(folder, argv)}", flush=True)
        prune = ["runs", "prune", "--keep", "0"]
        for argv in ([*prune, "--dry-run"], [*prune, "--dry-run", "--here"]):
            print(f"{' '.join(argv):<32}{measure(folder, argv)}", flush=True)
        print(f"{' '.join([*prune, '--yes']):<32}{measure(folder, [*prune, '--yes'], times=1)}")
        left = [path.name for path in (folder / "runs").iterdir()]
        if left:
            raise SystemExit(f"{len(left)} runs were not deleted")


if __name__ == "__main__":
    main()
