"""Compare the trainer with other programs: same model, batch, data and threads; median of steps after a warm-up.

    python -m bench.train [ROW ...] [--peers PYTHON] [--seconds 150] [--json FILE]
    python -m bench.train ROW --without OP ...    # the trainer alone, with one op at a time by plain torch

Every subject is a process. All subjects of a row run at the same time and take steps in turn, first in one order and
then in the reverse order. Ours is the trainer as `launch` runs it. Peers have the fused AdamW, autocast and torch's
attention; in `-tuned` rows also the allocator settings that the launcher gives the trainer's ranks. --peers is an
interpreter with transformers and megatron-core (0.16.1); missing packages are reported, and the other subjects are
measured. In `1.3b-bf16` the subjects run one after the other, three steps each; peers have no fp32 copies of weights in
this row, because these would need 21 GB or more, but ours has them.

FLOPs are counted as in PaLM: 6 N + 12 L E T per token (N all parameters, L layers of width E, T tokens per sample).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.field import end_by_signal, log, scratch
from bench.train.contributions import contributions, contributions_table
from bench.train.field import (
    Field,
    Subject,
    Work,
    start_all,
    take_turns,
)
from clusterctl.json_types import JsonObject
from trainer.config.model import ModelConfig

# For processors without bf16 products, on which a bf16 step of the peers takes minutes.
TINY = {"layers": 2, "hidden": 256, "heads": 4, "sequence": 128, "vocab": 8192}
SMALL = {"layers": 6, "hidden": 384, "heads": 6, "sequence": 256, "vocab": 50257}
WORKS = {
    "124m-bf16": Work("gpt2-124M", 1, "bf16"),
    "124m-fp32": Work("gpt2-124M", 1, "fp32"),
    "6x384-bf16": Work(SMALL, 8, "bf16"),
    "6x384-fp32": Work(SMALL, 8, "fp32"),
    "2x256-bf16": Work(TINY, 2, "bf16"),
    "2x256-fp32": Work(TINY, 2, "fp32"),
    "ranks-bf16": Work(SMALL, 2, "bf16", ranks=2),
    "ranks-fp32": Work(SMALL, 2, "fp32", ranks=2),
    "llama-124m-bf16": Work("llama-124M", 1, "bf16"),
    "llama-124m-fp32": Work("llama-124M", 1, "fp32"),
    "1.3b-bf16": Work("gpt2-1.3B", 1, "bf16", narrow=True, sequential=True),
    # One subject after another: other load on the machine does not change the highest resident memory.
    "memory": Work("gpt2-124M", 1, "bf16", sequential=True),
}
# The smallest number of rounds.
LEAST = 3
KINDS = ("ours", "eager", "compile", "huggingface", "megatron", "products", "loop", "loop-eager")


def alone(tuned: bool) -> list[Subject]:
    """Return the subjects that run as one process each."""
    return [
        Subject("clusterctl", "ours", tuned=True),
        Subject("eager", "eager", tuned),
        Subject("torch.compile", "compile", tuned),
        Subject("Hugging Face", "huggingface", tuned, peer=True),
        Subject("megatron-core", "megatron", tuned, peer=True),
        Subject("products", "products", tuned=True),
    ]


def for_memory() -> list[Subject]:
    """Return the subjects of the row `memory`."""
    return [
        Subject("clusterctl", "ours", tuned=True),
        Subject("torch.compile", "compile", tuned=False),
        Subject("torch.compile, tuned", "compile", tuned=True),
        Subject("eager", "eager", tuned=False),
        Subject("eager, tuned", "eager", tuned=True),
        Subject("Hugging Face", "huggingface", tuned=False, peer=True),
    ]


def together() -> list[Subject]:
    """Return the subjects that run on two ranks each: both engines, and plain DistributedDataParallel loops."""
    return [
        Subject("bare DDP, our model, tuned", "loop", tuned=True),
        Subject("bare DDP, our model", "loop", tuned=False),
        Subject("bare DDP, eager model, tuned", "loop-eager", tuned=True),
        Subject("clusterctl, torch", "ours", tuned=True),
        Subject("clusterctl, deepspeed", "ours", tuned=True, engine="deepspeed"),
    ]


def flops_a_token(model: ModelConfig) -> float:
    return 6.0 * model.parameters() + 12.0 * model.layers * model.hidden * model.sequence


def measure(name: str, options: argparse.Namespace) -> JsonObject:
    """Measure one row and return every subject's figures."""
    tuned, work = name.endswith("-tuned"), WORKS[name.removesuffix("-tuned")]
    subjects = together() if work.ranks > 1 else alone(tuned)
    if work.model == "llama-124M":
        subjects = [subject for subject in subjects if subject.kind != "megatron"]
    elif name == "memory":
        subjects = for_memory()
    elif work.sequential:
        subjects = [subject for subject in subjects if subject.kind in ("ours", "compile", "huggingface")]
    subjects = [subject for subject in subjects if not options.only or subject.kind in options.only]
    until = time.monotonic() + options.seconds
    with scratch("train") as folder:
        field = Field(folder, work, options.peers, threads=1 if options.cpu else 0)
        for group in [[subject] for subject in subjects] if work.sequential else [subjects]:
            try:
                # Subjects that run one after the other take the smallest number of steps.
                take_turns(start_all(field, group, log), 0.0 if work.sequential else until, LEAST)
            finally:
                for subject in group:
                    subject.end()
        return answer(name, field, subjects, "cpu" if options.cpu else "seconds")


def answer(name: str, field: Field, subjects: list[Subject], clock: str) -> JsonObject:
    rates = next(
        (candidate for candidate in subjects if candidate.kind == "products" and candidate.steps), None
    )
    rate = {key: rates.median(key) for key in ("square", "step", "own")} if rates else {}
    each = flops_a_token(field.config.model)
    found = []
    for subject in subjects:
        if subject.gone or subject.kind == "products":
            found += [{"subject": subject.name, "missing": subject.gone}] if subject.gone else []
            continue
        seconds = subject.median(clock)
        values = [getattr(step, clock) for step in subject.steps]
        found.append(
            {
                "subject": subject.name,
                "tuned": subject.tuned,
                "tokens_per_second": field.tokens / seconds,
                "step_seconds": seconds,
                "spread": [min(values), max(values)],
                "cpu_seconds": subject.median("cpu"),
                "first_step_seconds": subject.first,
                "flops": each * field.tokens / seconds,
                "memory": subject.memory,
                "peak": max(step.peak for step in subject.steps),
                "steps": len(subject.steps),
            }
        )
    about = {"row": name, "clock": clock, "rates": rate, "flops_a_token": each, "threads": field.threads}
    return {**about, "subjects": found}


def table(found: JsonObject) -> str:
    """Return a row as text; `ours is` is the trainer's tokens/s divided by the subject's."""
    measured = [subject for subject in found["subjects"] if "missing" not in subject]
    each = f"{found['flops_a_token'] / 1e6:.0f} MFLOP a token (PaLM)"
    clock = ", processor time" if found["clock"] == "cpu" else ""
    lines = [f"{found['row']}: {found['threads']} threads a rank{clock}, {each}"]
    rates = found["rates"]
    if rates:
        text = f"  matrix products: large squares {rates['square'] / 1e9:.0f} GFLOP/s, "
        text += (
            f"those of this model's step {rates['step'] / 1e9:.0f}, by our functions {rates['own'] / 1e9:.0f}"
        )
        lines.append(text)
    head = f"  {'':<30}{'tokens/s':>10}{'ms/step':>9}{'(least-most)':>15}{'CPU s':>7}{'first, s':>9}"
    head += f"{'GB':>6}{'whole':>7}{'GFLOP/s':>9}{'of squares':>11}{'of step':>9}{'by ours':>9}{'ours is':>9}"
    lines.append(head)
    ours = next((subject for subject in measured if is_ours(subject)), None)
    for subject in measured:
        low, high = (1000 * each for each in subject["spread"])
        text = f"  {subject['subject']:<30}{subject['tokens_per_second']:>10.0f}{1000 * subject['step_seconds']:>9.0f}"
        text += f"{f'{low:.0f}-{high:.0f}':>15}{subject['cpu_seconds']:>7.2f}{subject['first_step_seconds']:>9.1f}"
        text += f"{subject['memory'] / 1e9:>6.2f}{subject['peak'] / 1e9:>7.2f}{subject['flops'] / 1e9:>9.0f}"
        for key in ("square", "step", "own"):
            text += f"{subject['flops'] / rates[key]:>10.0%} " if rates else f"{'':>10} "
        text += f"{ours['tokens_per_second'] / subject['tokens_per_second']:>7.2f}x" if ours else ""
        lines.append(text)
    return "\n".join(lines + not_there(found) + verdicts(found))


@dataclass(frozen=True)
class Target:
    """A target of a row: the subject's tokens/s must be at least `least` times those of `other`."""

    least: float
    other: str
    subject: str = "clusterctl"


COMPILE, BARE = "torch.compile", "bare DDP, our model, tuned"
EAGER = [Target(1.35, other) for other in ("eager", "Hugging Face", "megatron-core")]
RANKS = [Target(1 / 1.03, BARE, "clusterctl, torch"), Target(1 / 1.1, BARE, "clusterctl, deepspeed")]
TARGETS = {
    "124m-bf16": [Target(1.4, COMPILE), *EAGER],
    "124m-fp32": [Target(1.15, COMPILE)],
    "6x384-bf16": [Target(1.4, COMPILE)],
    "llama-124m-bf16": [Target(1.4, COMPILE)],
    "llama-124m-fp32": [Target(1.15, COMPILE)],
    "ranks-bf16": RANKS,
    "ranks-fp32": RANKS,
}
# The targets as shares of torch's rate: in large squares, or in the products of the step.
SHARES = {
    "124m-bf16": ("square", 0.9, "the rate of large squares"),
    "6x384-bf16": ("step", 0.96, "the rate of the step's products"),
}
# The target as a share of torch.compile's peak memory.
MEMORY = 0.8


def verdicts(found: JsonObject) -> list[str]:
    """Return a line for each target of a row, with the ratio reached."""
    rate = {
        subject["subject"]: subject["tokens_per_second"]
        for subject in found["subjects"]
        if "missing" not in subject
    }
    lines = []
    for target in TARGETS.get(found["row"], ()):
        if target.subject in rate and target.other in rate:
            reached = rate[target.subject] / rate[target.other]
            lines.append(verdict(f"{target.subject}, of {target.other}", reached, target.least))
    if found["row"] in SHARES and found["rates"] and "clusterctl" in rate:
        key, least, name = SHARES[found["row"]]
        reached = rate["clusterctl"] * found["flops_a_token"] / found["rates"][key]
        lines.append(verdict(f"share of {name}", reached, least))
    if found["row"] == "memory" and {"clusterctl", COMPILE} <= rate.keys():
        memory = {subject["subject"]: subject.get("memory", 0.0) for subject in found["subjects"]}
        reached = memory["clusterctl"] / memory[COMPILE]
        missed = "" if reached <= MEMORY else ": MISSED"
        lines.append(f"  memory, of {COMPILE}'s: {reached:.2f}, at most {MEMORY} wanted{missed}")
    return lines


def verdict(target: str, reached: float, least: float) -> str:
    return f"  {target}: {reached:.2f}, at least {least:.2f} wanted{'' if reached >= least else ': MISSED'}"


def is_ours(subject: JsonObject) -> bool:
    return str(subject["subject"]).startswith("clusterctl")


def not_there(found: JsonObject) -> list[str]:
    missing = [subject for subject in found["subjects"] if "missing" in subject]
    return [f"  {subject['subject']:<30}not measured: {subject['missing']}" for subject in missing]


def speed(name: str, options: argparse.Namespace) -> tuple[JsonObject, str]:
    if options.without:
        with scratch("train") as folder:
            rows = contributions(Field(folder, WORKS[name]), options.without, log)
        return {"row": name, "ops": [asdict(each) for each in rows]}, contributions_table(name, rows)
    found = measure(name, options)
    return found, table(found)


def losses(name: str, options: argparse.Namespace) -> tuple[JsonObject, str]:
    from bench.train.losses import losses_row, losses_table

    with scratch("train") as folder:
        found = losses_row(folder, log)
    return found, losses_table(found)


TUNED = ("124m-bf16-tuned", "124m-fp32-tuned", "6x384-bf16-tuned")
ROWS: dict[str, Callable[[str, argparse.Namespace], tuple[JsonObject, str]]] = {
    **dict.fromkeys((*WORKS, *TUNED), speed),
    "losses": losses,
}
DEFAULT = (
    "124m-bf16",
    "124m-fp32",
    "6x384-bf16",
    "ranks-bf16",
    "llama-124m-bf16",
    "memory",
    "losses",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; by default {', '.join(DEFAULT)}"
    )
    parser.add_argument(
        "--peers", default=sys.executable, metavar="PYTHON", help="has transformers and megatron-core"
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="seconds per row, including starts")
    parser.add_argument(
        "--cpu", action="store_true", help="measure one thread by processor time, for a busy machine"
    )
    parser.add_argument(
        "--only", action="append", default=[], choices=KINDS, help="only this subject; may be repeated"
    )
    parser.add_argument(
        "--without", nargs="+", default=(), metavar="OP", help="show what these ops contribute to the rows"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to this file")
    options = parser.parse_args()
    end_by_signal()
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        parser.error(f"there is no row {', '.join(unknown)}; rows are {', '.join(ROWS)}")
    found = []
    for name in options.rows or DEFAULT:
        log(name)
        result, text = ROWS[name](name, options)
        found.append(result)
        print(f"{text}\n", flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=2))
    return int(
        any(is_ours(subject) and "missing" in subject for row in found for subject in row.get("subjects", ()))
    )


if __name__ == "__main__":
    sys.exit(main())
