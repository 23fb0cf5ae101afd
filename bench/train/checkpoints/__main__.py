"""Start one measurement of checkpoints: `python -m bench.train.checkpoints times`, `... pairs --help`."""

from __future__ import annotations

import importlib
import sys

NAMES = {
    "deepspeed": "save and load times of DeepSpeed itself",
    "disks": "fill a disk up during saves, and load what is left",
    "flips": "flip single bits of all files, and see whether each is noticed",
    "kills": "kill ranks, supervisors and nodes during saves, and load what is left",
    "manifest": "the work for a manifest of 1,536 ranks",
    "pairs": "continue in every layout from the checkpoints of every other",
    "processor": "processor time of saves and loads next to torch's, for busy machines",
    "reshard": "continue on fewer ranks, next to DeepSpeed's offline conversion",
    "times": "save and load times next to torch's distributed checkpoints",
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        sys.stderr.write("\n".join(f"{name:<10} {title}" for name, title in NAMES.items()) + "\n")
        return 2
    name = sys.argv.pop(1)
    return int(importlib.import_module(f"bench.train.checkpoints.{name}").main() or 0)


if __name__ == "__main__":
    sys.exit(main())
