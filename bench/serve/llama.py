"""`python -m bench.serve.llama`: measure llama.cpp's `llama-bench` and our decoder in turn, as processes of their own.

`--models` is a folder with the same model as f32.gguf, bf16.gguf and q8_0.gguf. Both take the best of three runs of 64
tokens, or of a prompt of 512; the figure is the median of the rounds. It prints one JSON line per figure.

`--cpu`, for a busy machine, takes tokens per second of processor time on one thread: the difference between many
repetitions and one, so that loading the model does not count.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from bench.field import Option, read_options, run

KINDS = {"fp32": "f32", "bf16": "bf16", "int8": "q8_0"}
FIGURES = ("decode 1", "prefill 512")


def ours(threads: int, figure: str, *options: str) -> dict[str, dict[str, float]]:
    """Return our tokens per second for each kind of weights, and the floor where it is measured."""
    words = [sys.executable, "-m", "bench.serve", "--threads", str(threads), "--only", figure, *options]
    found: dict[str, dict[str, float]] = {}
    for line in subprocess.check_output(words, text=True).splitlines():
        entry = json.loads(line)
        rates = {"ours": entry["tokens_per_second"]} | ({"floor": entry["floor"]} if "floor" in entry else {})
        found[entry["figure"].rpartition(" ")[2]] = rates
    return found


def of_processor(program: Path, model: Path, figure: str) -> float:
    """Return llama.cpp's tokens per second of processor time."""
    counts, repetitions = (("0", "64"), 5) if figure == "decode 1" else (("512", "0"), 4)
    words = [str(program), "-m", str(model), "-t", "1", "-p", counts[0], "-n", counts[1], "-r"]
    seconds = [run([*words, str(times)]).cpu for times in (repetitions, 1)]
    return (repetitions - 1) * int(max(counts, key=int)) / (seconds[0] - seconds[1])


def theirs(program: Path, model: Path, threads: int, figure: str) -> float:
    """Return llama.cpp's tokens per second."""
    counts = ("0", "64") if figure == "decode 1" else ("512", "0")
    words = [str(program), "-m", str(model), "-t", str(threads), "-p", counts[0], "-n", counts[1]]
    words += ["-r", "3", "-o", "json"]
    (entry,) = json.loads(subprocess.check_output(words, text=True, stderr=subprocess.DEVNULL))
    return float(max(entry["samples_ts"]))


def main() -> None:
    arguments = read_options(
        __doc__,
        bench=Option(Path, "the program llama-bench"),
        models=Option(Path, "a folder with the same model in three types"),
        rounds=3,
        threads=(2, 1),
        cpu=Option(False, "processor time of one thread, for a busy machine"),
        figures=FIGURES,
    )
    if not (arguments.bench and arguments.models):
        sys.exit("--bench and --models are needed")
    for threads in [1] if arguments.cpu else arguments.threads:
        for figure in arguments.figures:
            rates: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in KINDS}
            for _ in range(arguments.rounds):
                for kind, found in ours(threads, figure, *(["--cpu"] if arguments.cpu else [])).items():
                    for name, rate in found.items():
                        rates[kind][name].append(rate)
                for kind, name in KINDS.items():
                    model = arguments.models / f"{name}.gguf"
                    rate = (
                        of_processor(arguments.bench, model, figure)
                        if arguments.cpu
                        else theirs(arguments.bench, model, threads, figure)
                    )
                    rates[kind]["llama.cpp"].append(rate)
            for kind, found_rates in rates.items():
                medians = {name: round(statistics.median(each), 1) for name, each in found_rates.items()}
                ranges = {
                    name: [round(min(each), 1), round(max(each), 1)] for name, each in found_rates.items()
                }
                line = {"figure": f"{figure} {kind}", "threads": threads, **medians, "ranges": ranges}
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
