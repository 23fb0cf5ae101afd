"""Measure one device, within a number of seconds and without a network.

    python -m bench.hardware --out DIR [--seconds 400] [--device cuda|cpu|npu] [--only STEP ...]

It needs torch, Triton on a GPU, NumPy, typer, rich and pyyaml, and no installation of this project: PYTHONPATH=. is
enough. Liger and transformers take part if they are installed. DIR gets results.jsonl, with each result as soon as it
is known, table.md and log.txt. docs/hardware/README.md says what each row means. On a CPU the models are small: such a
run only shows that the program works.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from bench.field import end_by_signal
from bench.hardware.runner import Runner, Step
from bench.hardware.table import tables

# The steps of a trial on a CPU, where models are small and the others would run the same code.
TRIED = (
    "facts",
    "cases",
    "ops",
    "345M ours",
    "345M eager",
    "captured",
    "failing capture",
    "whole",
    "decoding",
)


def steps(device: str) -> list[Step]:
    """Return the steps in their order; the shares are seconds on an H200 with slow cores."""
    training = partial(Step, module="bench.hardware.training")
    small, large = ((device, model) for model in ("gpt2-345M", "gpt2-1.3B"))
    decoding = partial(Step, module="bench.hardware.decoding")
    found = [
        Step("facts", "bench.hardware.facts", (device,), 15),
        Step("cases", "bench.hardware.cases", (device,), 50),
        Step("ops", "bench.hardware.ops", (device,), 40),
        training("345M ours", arguments=(*small, "ours", "auto"), share=40),
        training("345M ours, off", arguments=(*small, "ours", "off"), share=30),
        training("345M eager", arguments=(*small, "eager"), share=30),
        training("345M regional", arguments=(*small, "regional"), share=35),
        training("1.3B ours", arguments=(*large, "ours", "auto"), share=40),
        training("1.3B eager", arguments=(*large, "eager"), share=30),
        Step("captured", "bench.hardware.captured", (device, "compare"), 35),
        # A process of its own, because a device may remember a capture that failed.
        Step("failing capture", "bench.hardware.captured", (device, "fail"), 20),
        Step("whole", "bench.hardware.whole", (device,), 50),
        decoding("decoding", arguments=(*small, "ours"), share=40),
        decoding("decoding, transformers", arguments=(*small, "transformers"), share=20),
        # The compiler needs longer than all others, so it has what is left.
        training("345M compile", arguments=(*small, "compile"), share=20),
    ]
    return found if device != "cpu" else [step for step in found if step.name in TRIED]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="write the results there")
    parser.add_argument("--seconds", type=float, default=400.0, help="seconds for all steps together")
    parser.add_argument("--device", choices=("cuda", "cpu", "npu"), default="cuda")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run only the steps that begin with this")
    options = parser.parse_args()
    end_by_signal()
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
