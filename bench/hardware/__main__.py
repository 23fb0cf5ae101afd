"""Measure one device, within a number of seconds and without a network.

    python -m bench.hardware --out DIR [--seconds 400] [--device cuda|cpu|npu] [--only STEP ...]

It needs torch, Triton on a GPU, NumPy, typer, rich and pyyaml, and no installation of this project: PYTHONPATH=. is
enough. Liger and transformers take part if they are installed. DIR gets results.jsonl, with each result as soon as it
is known, table.md and log.txt. docs/hardware/README.md says what each row means. On a CPU the models are small: such a
run only shows that the program works.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from bench.hardware.runner import Runner, Step
from bench.hardware.table import tables


def steps(device: str) -> list[Step]:
    """Return the steps in their order; the shares are seconds on an H200 with slow cores."""
    return [
        Step("facts", "bench.hardware.facts", (device,), 20),
        Step("cases", "bench.hardware.cases", (device,), 60),
        Step("ops", "bench.hardware.ops", (device,), 50),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="write the results there")
    parser.add_argument("--seconds", type=float, default=400.0, help="seconds for all steps together")
    parser.add_argument("--device", choices=("cuda", "cpu", "npu"), default="cuda")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run only the steps that begin with this")
    options = parser.parse_args()
    # Turn SIGTERM into an exit, so that the table is written.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    runner = Runner(options.out, options.seconds)
    wanted = tuple(options.only or ("",))
    try:
        runner.run_all([step for step in steps(options.device) if step.name.startswith(wanted)])
    finally:
        text = tables(runner.rows)
        (options.out / "table.md").write_text(text + "\n", encoding="utf-8")
        print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
