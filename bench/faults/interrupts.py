"""Press Ctrl-C at random moments of `clusterctl demo` and look for leftovers; a round takes about 25 s.

python -m bench.faults.interrupts [ROUNDS] [SEED]
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.field import ROOT, take_signals
from tests.support.leftovers import listening, processes_of

# The moments are within this many seconds: sandbox, data, push, start, first checkpoints.
LONGEST = 35.0


def round_of(moment: float) -> tuple[str, float, int, int, int, int]:
    """Interrupt one demo; return its phase at that moment, the seconds until it ended, and counts of leftovers."""
    with tempfile.TemporaryDirectory(prefix="interrupts-") as name:
        here, temporary = Path(name) / "here", Path(name) / "tmp"
        here.mkdir()
        temporary.mkdir()
        before = listening()
        process = subprocess.Popen(
            [sys.executable, "-m", "clusterctl", "demo", "--steps", "400"],
            cwd=here,
            env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        time.sleep(moment)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=120)[0]
        took = time.monotonic() - began
        time.sleep(0.3)
        lines = [
            line
            for line in output.splitlines()
            if line.strip() and not line.startswith(("stop", "interrupted"))
        ]
        outside = [path for path in here.iterdir() if path.name != "clusterctl-demo"] + list(
            temporary.iterdir()
        )
        folders = len(outside) + (here / "clusterctl-demo" / "sandbox").exists()
        phase = lines[-1][:44] if lines else "(nothing printed yet)"
        return phase, took, process.returncode, len(processes_of(here)), len(listening() - before), folders


def main() -> None:
    take_signals()
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    chance = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    left = 0
    print(
        f"{'moment':>7} {'end':>6} {'exit':>4} {'processes':>9} {'ports':>5} {'folders':>7}  last line before"
    )
    for _ in range(rounds):
        moment = chance.uniform(0.05, LONGEST)
        phase, took, code, processes, ports, folders = round_of(moment)
        # The latter means that Python was interrupted before the first line of our code.
        left += processes + ports + folders + (code not in (130, -signal.SIGINT))
        print(
            f"{moment:6.2f}s {took:5.2f}s {code:>4} {processes:>9} {ports:>5} {folders:>7}  {phase}",
            flush=True,
        )
    print(f"left after {rounds} interrupts: {left}")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
