"""Start one measurement of checkpoints: `python -m bench.train.checkpoints times`, `... pairs --help`."""

from __future__ import annotations

import importlib
import sys

NAMES = {
    "deepspeed": "save and load times of DeepSpeed itself",
    "manifest": "the time for a manifest of 1,536 ranks",
    "reshard": "continue on fewer ranks, compared with DeepSpeed's offline conversion",
    "times": "save and load times compared with torch's distributed checkpoints",
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        sys.stderr.write("\n".join(f"{name:<10} {title}" for name, title in NAMES.items()) + "\n")
        return 2
    name = sys.argv.pop(1)
    return int(importlib.import_module(f"bench.train.checkpoints.{name}").main() or 0)


if __name__ == "__main__":
    sys.exit(main())
