"""The environment of bench/train: subjects as processes that take steps in turn, their corpus and their results."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.train.ranks import draw_corpus, environments
from bench.train.spec import ModelWork, Spec, StepFigures
from clusterctl.wire.contract import MALLOC_TUNING
from trainer.config.train_config import TrainConfig
from trainer.plan.resolve import read_config
from trainer.samples.cache import IndexCache
from trainer.samples.dataset import Batches, Data, Share

# The first step builds and compiles; the second fills the allocator's memory.
WARM_STEPS = 2
# More steps than any subject takes.
STEPS = 1000
# How many batches the subjects repeat.
KEPT = 16
NOTHING: Mapping[str, Any] = {}


class Gone(Exception):
    """Raised if a subject cannot be measured; the message is the reason."""


@dataclass(frozen=True)
class Work:
    """The work of every subject of a row."""

    model: str | Mapping[str, object]
    batch: int
    precision: str
    ranks: int = 1
    device: str = "cpu"
    square: int = 2048
    """The side of the square matrices whose product gives the machine's rate."""
    narrow: bool = False
    """Whether peers keep everything in bf16, because fp32 masters would not fit the machine; ours has masters."""
    sequential: bool = False
    """Whether subjects run one after the other, because they do not fit the memory together."""


@dataclass
class Subject:
    """One program under measurement: its processes, and the figures of its steps after the warm-up."""

    name: str
    kind: str
    tuned: bool
    """Whether glibc keeps freed memory, as the launcher sets it for the trainer's ranks."""
    peer: bool = False
    """Whether it runs in the peers' interpreter."""
    engine: str = "torch"
    native: Mapping[str, str] = field(default_factory=dict)
    """The backends of single ops of the trainer."""
    first: float = 0.0
    """Seconds from the start of the process to the end of its first step."""
    steps: list[StepFigures] = field(default_factory=list)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    gone: str = ""

    def send(self, word: str) -> None:
        """Send a line to every rank; `answer` will report ranks that have ended."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(word + "\n")
                process.stdin.flush()

    def answer(self) -> StepFigures:
        """Return one answer for all ranks: the largest times and memory, and the rest (with the loss) from rank 0."""
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise Gone(f"ended with {process.wait()}")
            answers.append(StepFigures.parse(line))
        if answers[0].missing:
            raise Gone(answers[0].missing)
        return replace(
            answers[0],
            seconds=max(figures.seconds for figures in answers),
            cpu=max(figures.cpu for figures in answers),
            base=max(figures.base for figures in answers),
            peak=max(figures.peak for figures in answers),
        )

    def step(self) -> StepFigures:
        self.send("go")
        return self.answer()

    def finish(self) -> None:
        """Let the subject continue after the last measured step and wait for its end."""
        self.send("go")
        for process in self.processes:
            process.wait()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes.clear()

    def median(self, key: str) -> float:
        return statistics.median(getattr(step, key) for step in self.steps)

    @property
    def memory(self) -> float:
        """Return the peak memory in bytes, without the memory of the libraries."""
        return max(step.peak - step.base for step in self.steps)


class Field:
    """A row's corpus and config; it starts the subjects."""

    def __init__(
        self,
        folder: Path,
        work: Work,
        peers: str = sys.executable,
        corpus: Path | None = None,
        more: Mapping[str, Any] = NOTHING,
        threads: int = 0,
    ) -> None:
        """`peers`: an interpreter; `corpus`: replaces the random tokens; `more`: further keys of the train config."""
        self.folder, self.work, self.peers = folder, work, peers
        folder.mkdir(parents=True, exist_ok=True)
        raw = {
            "model": work.model,
            "micro_batch": work.batch,
            "precision": work.precision,
            "steps": STEPS,
            "optimizer": {"lr": 3e-4, "min_lr": 3e-4, "warmup_steps": 0, "schedule": "constant"},
            "eval": {"batches": 0},
            "save": {"every": 0},
            "resume": "never",
            **more,
        }
        without = read_config({**raw, "data": {"prefix": "tokens"}}, work.ranks)
        prefix = corpus or folder / "tokens"
        self.global_batch = without.global_batch or 0
        if corpus is None:
            draw_corpus(prefix, without.model.vocab, 64 * self.global_batch * (without.model.sequence + 1))
        self.raw = {**raw, "data": {"prefix": str(prefix), "split": "1,0,0"}}
        self.config = read_config(self.raw, work.ranks)
        self.batches = write_batches(self.config, folder)
        cores = len(os.sched_getaffinity(0))
        self.threads = threads or max(1, cores // work.ranks)

    @property
    def tokens(self) -> int:
        """Return the tokens per step of all ranks."""
        return self.global_batch * self.config.model.sequence

    def start(self, subject: Subject, nudge: int | None = None) -> StepFigures:
        """Start a subject, wait for the end of its first step, and return the figures of that step."""
        spec = self.folder / f"{subject.name.replace(' ', '-')}.json"
        self._spec(subject, nudge).write(spec)
        argv = [self.peers if subject.peer else sys.executable, "-W", "ignore"]
        argv += ["-m", "bench.train.subject", str(spec)]
        shared = self._environment(subject)
        own = environments(self.work.ranks, self.work.device.split(":")[0], self.threads)
        began = time.monotonic()
        log_file = self.folder / f"{spec.stem}.log"
        try:
            with log_file.open("wb") as log:
                for environment in own:
                    env = {**shared, **environment}
                    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
                    started = subprocess.Popen(argv, env=env, cwd=self.folder, text=True, **pipes)
                    subject.processes.append(started)
            first = subject.answer()
        except OSError as error:
            raise Gone(f"{argv[0]}: {error.strerror}") from None
        except Gone as gone:
            raise Gone(
                "; ".join([str(gone), *log_file.read_text(errors="replace").strip().splitlines()[-1:]])
            ) from None
        subject.first = time.monotonic() - began
        return first

    def _spec(self, subject: Subject, nudge: int | None) -> Spec:
        config = self.config
        model = {key: getattr(config.model, key) for key in MODEL_KEYS} | {
            "rope_base": config.model.rope.base
        }
        lr = config.optimizer.lr
        return Spec(
            subject=subject.kind,
            train={
                **self.raw,
                "engine": subject.engine,
                **({"native": dict(subject.native)} if subject.native else {}),
            },
            run_dir=str(self.folder / f"run-{subject.name.replace(' ', '-')}"),
            batches=str(self.batches),
            threads=self.threads,
            tokens=self.tokens // self.work.ranks,
            square=self.work.square,
            work=ModelWork(model, config.precision, self.work.device, config.seed, lr, self.work.narrow),
            nudge=nudge,
        )

    def _environment(self, subject: Subject) -> dict[str, str]:
        """Return the environment that a launch gives its ranks; the malloc settings only for tuned subjects."""
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "CLUSTERCTL_"))
        }
        # Start with an empty inductor cache, so that the warm-up includes compilation, as in a first run.
        return {
            **environment,
            **(MALLOC_TUNING if subject.tuned else {}),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }


MODEL_KEYS = (
    "layers",
    "hidden",
    "heads",
    "groups",
    "inner",
    "up_width",
    "sequence",
    "vocab",
    "norm",
    "eps",
    "init_std",
)


def write_batches(config: TrainConfig, folder: Path) -> Path:
    """Write the trainer's global batches in its order, for subjects that cannot read its corpus; return the file."""
    count = KEPT if config.steps == STEPS else config.steps
    assert config.global_batch is not None
    data = Data(config.data, config.model.sequence, IndexCache(folder / "indices"))
    share = Share(config.global_batch, config.global_batch)
    samples = Batches(data.samples("train", config.steps * config.global_batch), share)
    path = folder / "batches.npy"
    np.save(
        path, np.stack([samples.at(n * config.global_batch)[0][0] for n in range(count)]).astype(np.int32)
    )
    return path


def start_all(ground: Field, subjects: Sequence[Subject], log: Any) -> list[Subject]:
    """Start the subjects and run their warm-up; return those that work. The others have the reason in `gone`."""
    started = []
    for subject in subjects:
        log(f"{subject.name}: starts")
        try:
            ground.start(subject)
            for _ in range(WARM_STEPS - 1):
                subject.step()
            subject.send("reset")
            started.append(subject)
        except Gone as gone:
            subject.gone = str(gone)
            subject.end()
    return started


def take_turns(subjects: Sequence[Subject], until: float, least: int) -> None:
    """Run one step of each subject in turn, then in reverse order, until `until` and for at least `least` rounds.

    A subject that ends (for example because of too little memory) has the reason in `gone`; the others continue.
    """
    rounds, active = 0, list(subjects)
    while active and (rounds < least or time.monotonic() < until):
        for subject in list(active if rounds % 2 == 0 else reversed(active)):
            try:
                subject.steps.append(subject.step())
            except Gone as gone:
                subject.gone = str(gone)
                subject.end()
                active.remove(subject)
        rounds += 1
