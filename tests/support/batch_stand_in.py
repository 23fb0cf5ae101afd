"""Stands in for the programs of PBS and LSF: one host, this machine, which runs each job at once.

Called as `qsub`, `qstat`, `qdel`, `bsub`, `bjobs`, `bkill` or `brequeue`; $STAND_IN is its folder. A job whose batch
file asks for the queue `full` waits.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

PBS_STATES = {"waiting": "Q", "running": "R"}


def submit(folder: Path, text: str, lsf: bool) -> int:
    """Run a batch file, or leave it waiting; return the number of the job."""
    number = len(list(folder.glob("*.sh"))) + 1
    script = folder / f"{number}.sh"
    script.write_text(text)
    script.chmod(0o755)
    state = folder / f"{number}.state"
    if " -q full\n" in text:
        state.write_text("waiting")
        return number
    state.write_text("running")
    (folder / "hosts").write_text(f"{socket.gethostname()}\n" * 2)
    pbs = {"PBS_JOBID": f"{number}.stand-in", "PBS_NODEFILE": str(folder / "hosts")}
    own = {"LSB_JOBID": str(number), "LSB_MCPU_HOSTS": f"{socket.gethostname()} 4"} if lsf else pbs
    log = next(line.split()[2] for line in text.splitlines() if line.startswith(("#PBS -o ", "#BSUB -o ")))
    end = f'"{script}"; echo "ended $?" > "{state}"'
    with open(log, "ab") as out:
        subprocess.Popen(
            ["sh", "-c", end],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **own},
            start_new_session=True,
        )
    return number


def main() -> None:
    name, words, folder = Path(sys.argv[0]).name, sys.argv[1:], Path(os.environ["STAND_IN"])
    states = {int(path.stem): path.read_text().split() for path in folder.glob("*.state")}
    if name == "qsub":
        print(f"{submit(folder, sys.stdin.read(), lsf=False)}.stand-in")
    elif name == "bsub":
        print(f"Job <{submit(folder, sys.stdin.read(), lsf=True)}> is submitted to default queue <normal>.")
    elif name in ("qdel", "bkill"):
        (folder / f"{words[0]}.state").write_text("ended 271")
    elif name == "qstat":
        jobs = {}
        for number, (state, *code) in states.items():
            if not code or "-x" in words:
                ended = {"Exit_status": int(code[0])} if code else {}
                comment = "Not Running: Insufficient amount of resource: ngpus" if state == "waiting" else ""
                jobs[f"{number}.stand-in"] = {
                    "job_state": PBS_STATES.get(state, "F"),
                    "comment": comment,
                    **ended,
                }
        print(json.dumps({"Jobs": jobs} if jobs else {}))
    elif name == "bjobs":
        for number, (state, *code) in states.items():
            word = {"waiting": "PEND", "running": "RUN"}.get(state, "DONE" if code == ["0"] else "EXIT")
            ended = "TERM_OWNER: job killed by owner" if code == ["271"] else "-"
            pending = "Not enough GPUs" if state == "waiting" else "-"
            print(f"{number}|{word}|{ended}|{pending}|-")


main()
