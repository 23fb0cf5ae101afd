"""`python -m bench.weights --peer PYTHON`: import and export a random GPT-2, next to transformers' own load and save.

Each step runs in a process of its own, which reports its seconds and its largest resident memory. `--peer` is a Python
that has transformers; without one, only ours is measured. Files are in the page cache after the first step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPORT = """
import json, resource, sys, time
def report(began):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps({"seconds": time.monotonic() - began, "peak_mb": peak}))
"""
# Writes the folder that the others read, without holding the model in memory.
MAKE = """
from pathlib import Path
import torch
from trainer.config.model_sizes import sized
from trainer.weights.contents import Contents, ExportRequest
from trainer.weights.huggingface import write_huggingface
from trainer.weights.lazy import Lazy
from trainer.weights.ours import shapes_for
from trainer.weights.target import open_target
def random(shape):
    return Lazy(shape, torch.float32, lambda a, b: torch.randn((b - a, *shape[1:])) * 0.02)
model = sized(sys.argv[1])
tensors = {name: random(shape) for name, shape in shapes_for(model).items()}
with open_target(Path(sys.argv[2]), {}, 0) as target:
    write_huggingface(Contents(model, tensors, {}), target, ExportRequest(), lambda done, total: None)
    target.publish()
"""
IMPORT = """
from pathlib import Path
from trainer.weights.convert import import_weights
began = time.monotonic()
import_weights(Path(sys.argv[1]), Path(sys.argv[2]))
report(began)
"""
EXPORT = """
from pathlib import Path
from trainer.weights.contents import ExportRequest
from trainer.weights.convert import export_weights
began = time.monotonic()
export_weights(Path(sys.argv[1]), Path(sys.argv[2]), "hf", ExportRequest())
report(began)
"""
LOAD = """
from transformers import AutoModelForCausalLM
began = time.monotonic()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
# The file is mapped: read every number, as an import does.
for parameter in model.parameters():
    parameter.sum()
report(began)
"""
SAVE = """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
began = time.monotonic()
model.save_pretrained(sys.argv[2])
report(began)
"""


def run(python: str, code: str, *arguments: object) -> dict[str, float]:
    """Run a step and return what it reports."""
    argv = [python, "-c", REPORT + code, *map(str, arguments)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {}
    return found


def show(name: str, row: dict[str, float]) -> None:
    print(f"{name:16} {row['seconds']:7.1f} s  {row['peak_mb']:8,.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-1.3B", help="a named size of GPT-2")
    parser.add_argument("--peer", default="", metavar="PYTHON", help="a Python that has transformers")
    parser.add_argument("--folder", type=Path, help="where the files go (default: the temporary folder)")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="weights-", dir=arguments.folder))
    try:
        source, ours = folder / "hf", folder / "ours"
        run(sys.executable, MAKE, arguments.model, source)
        show("import", run(sys.executable, IMPORT, source, ours))
        show("export", run(sys.executable, EXPORT, ours, folder / "back"))
        shutil.rmtree(ours)
        if arguments.peer:
            show("from_pretrained", run(arguments.peer, LOAD, source))
            show("save_pretrained", run(arguments.peer, SAVE, source, folder / "peer"))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
