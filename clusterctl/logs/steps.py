"""Find the steps of a training in its output: of Megatron-LM, DeepSpeed, Hugging Face, MindFormers, nanoGPT, or others.

A parser is fed the bytes of one rank's streams and yields lines of metrics, in the form of the embedded trainer's.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from clusterctl.jobs.job import NAMES, compiled
from clusterctl.jobs.run_lines import Metric, read_metric

# Ratio of a duration to the resolution of its clock from which it counts: the error is then at most 5 %.
EXACT = 20
# Seconds: when the last bytes of a file were written, as its node's kernel records it.
ARRIVAL = 0.01
_STAMP = re.compile(r"\b(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{3,6}))?")
# First characters of a line in which a time of day is searched.
STAMPED = 100
_EPOCH = datetime(1970, 1, 1)


@dataclass
class Pace:
    """The seconds of a step, measured by one clock."""

    seconds: float | None = None
    """The last measured value; None before there are two moments that are far enough apart."""
    _moment: float = 0.0
    _step: int = -1

    def note(self, moment: float, step: int, resolution: float) -> None:
        """Record the moment at which a step was complete, by a clock with this resolution in seconds."""
        passed = moment - self._moment
        if self._step < 0 or step <= self._step or passed < 0:
            self._moment, self._step = moment, step
        elif passed >= EXACT * resolution:
            self.seconds = passed / (step - self._step)
            self._moment, self._step = moment, step


def stamp_of(line: str) -> tuple[float, float] | None:
    """Return the time that a program wrote into its line, and its resolution in seconds; None if there is none."""
    match = _STAMP.search(line, 0, STAMPED)
    if match is None:
        return None
    fraction = match[3] or ""
    try:
        whole = datetime.fromisoformat(f"{match[1]} {match[2]}")
    except ValueError:
        return None
    return (whole - _EPOCH).total_seconds() + float(f"0.{fraction or 0}"), 10.0 ** -len(fraction)


# Limit of bytes of a line that are searched; step lines are shorter.
LONGEST = 4000
_N = r"(-?[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|nan|NaN|inf|-inf)"
# The first bytes of an escape sequence that erases a progress bar.
_BLANK = b"        "
# Limit of lines that wait for the position of a progress bar.
HELD = 1000
Values = dict[str, float]
Read = Callable[[str], Values | None]


@dataclass(frozen=True)
class Format:
    """The step lines of one program."""

    name: str
    hints: tuple[bytes, ...]
    """A line without any of these is none of this format."""
    read: Read


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def _fields(line: str, patterns: Mapping[str, re.Pattern[str]]) -> Values:
    return {name: _number(match[1]) for name, pattern in patterns.items() if (match := pattern.search(line))}


_MEGATRON = re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)\s*\|")
_MEGATRON_FIELDS = {
    "loss": re.compile(rf"\blm loss:\s*{_N}"),
    "lr": re.compile(rf"\blearning rate:\s*{_N}"),
    "grad_norm": re.compile(rf"\bgrad norm:\s*{_N}"),
    "step_ms": re.compile(rf"\belapsed time per iteration \(ms\):\s*{_N}"),
    "batch": re.compile(rf"\bglobal batch size:\s*{_N}"),
}
_MEGATRON_EVAL = re.compile(rf"\bvalidation loss at iteration (\d+)\b.*?\blm loss value:\s*{_N}")


def _megatron(line: str) -> Values | None:
    if match := _MEGATRON_EVAL.search(line):
        return {"step": float(match[1]), "eval_loss": _number(match[2])}
    match = _MEGATRON.search(line)
    if match is None:
        return None
    values = _fields(line, _MEGATRON_FIELDS)
    batch, spent = values.pop("batch", 0.0), values.get("step_ms", 0.0)
    rate = {"samples_per_second": 1000 * batch / spent} if batch and spent else {}
    return {"step": float(match[1]), "steps": float(match[2]), **values, **rate}


_PIPELINE = re.compile(rf"\bsteps: (\d+) loss: {_N} iter time \(s\): {_N} samples/sec: {_N}")
_TIMER = re.compile(rf"\bglobal_step=(\d+),.*?CurrSamplesPerSec={_N}")
_RANK_STEP = re.compile(rf"\bstep=(\d+), skipped=\d+, lr=\[{_N}")


def _deepspeed(line: str) -> Values | None:
    if match := _PIPELINE.search(line):
        numbers = [_number(text) for text in match.groups()]
        return dict(zip(("step", "loss", "step_seconds", "samples_per_second"), numbers, strict=True))
    if match := _TIMER.search(line):
        return {"step": float(match[1]), "samples_per_second": _number(match[2])}
    if match := _RANK_STEP.search(line):
        return {"step": float(match[1]), "lr": _number(match[2])}
    return None


_HF = re.compile(r"^\s*\{.*'(?:loss|eval_loss)':.*\}\s*$")
_HF_FIELDS = {
    "loss": re.compile(rf"'loss': '?{_N}"),
    "eval_loss": re.compile(rf"'eval_loss': '?{_N}"),
    "lr": re.compile(rf"'learning_rate': '?{_N}"),
    "grad_norm": re.compile(rf"'grad_norm': '?{_N}"),
}
_BAR = re.compile(r"\d+%\|[^|]*\|\s*(\d+)/(\d+) \[(?:[^\]]*?, *([0-9.]+)(it/s|s/it))?")
# Written after a bar below another one, such as that of an evaluation: it moves the cursor up again.
_UP = "\x1b[A"


def _hugging_face(line: str) -> Values | None:
    match = _BAR.search(line)
    if match and _UP in line[match.end() :]:
        return None
    if match:
        rate = _number(match[3])
        spent = {"step_seconds": 1 / rate if match[4] == "it/s" else rate} if rate > 0 else {}
        return {"bar": float(match[1]), "steps": float(match[2]), **spent}
    return _fields(line, _HF_FIELDS) if _HF.match(line) else None


_MINDFORMERS = re.compile(
    r"(?:Epoch:\s*\[\s*(?P<epoch>\d+)\s*/\s*(?P<epochs>\d+)\s*\],?\s*)?step:\s*\[\s*(?P<step>\d+)\s*/\s*(?P<steps>\d+)\s*\]"
)
_MINDFORMERS_FIELDS = {
    "loss": re.compile(rf"\bloss:\s*\[?{_N}"),
    "lr": re.compile(rf"\blr:\s*\[?{_N}"),
    "grad_norm": re.compile(rf"\bglobal_norm:\s*\[?{_N}"),
    "step_ms": re.compile(rf"\bper_step_time:\s*{_N}\s*ms"),
}


def _mindformers(line: str) -> Values | None:
    match = _MINDFORMERS.search(line)
    if match is None:
        return None
    # Its steps begin again in each epoch.
    per_epoch = int(match["steps"])
    step = (int(match["epoch"] or 1) - 1) * per_epoch + int(match["step"])
    steps = int(match["epochs"] or 1) * per_epoch
    return {"step": float(step), "steps": float(steps), **_fields(line, _MINDFORMERS_FIELDS)}


_NANOGPT = re.compile(rf"^iter (\d+): loss {_N}, time {_N}\s*ms")
_NANOGPT_EVAL = re.compile(rf"^step (\d+): train loss {_N}, val loss {_N}")


def _nanogpt(line: str) -> Values | None:
    if match := _NANOGPT.match(line):
        return {"step": float(match[1]), "loss": _number(match[2]), "step_ms": _number(match[3])}
    if match := _NANOGPT_EVAL.match(line):
        return {"step": float(match[1]), "eval_loss": _number(match[3])}
    return None


# `step 4/2000 | loss 3.2`, `[rank 0] Iter: 4, train loss = 3.2`: the output of users' own training loops.
_PLAIN = re.compile(
    r"(?:^|[\s\])|,])(?:step|iter|iteration)\s*[:=#]?\s*(\d+)(?:\s*/\s*(\d+))?(?![\w.])", re.IGNORECASE
)
_PLAIN_FIELDS = {
    "loss": re.compile(rf"(?:^|[\s,;|(]|\btrain_)loss\s*[:=]?\s*{_N}", re.IGNORECASE),
    "eval_loss": re.compile(rf"\b(?:val|valid|validation|eval)[ _]loss\s*[:=]?\s*{_N}", re.IGNORECASE),
    "lr": re.compile(rf"\b(?:lr|learning rate)\s*[:=]?\s*{_N}", re.IGNORECASE),
}


def _plain(line: str) -> Values | None:
    # With epochs the steps may begin again in each.
    match = None if "epoch" in line.lower() else _PLAIN.search(line)
    if match is None:
        return None
    # The loss of a validation is not also that of the step.
    evaluation = _fields(line, {"eval_loss": _PLAIN_FIELDS["eval_loss"]})
    rest = _PLAIN_FIELDS["eval_loss"].sub("", line[match.end() :])
    found = evaluation | _fields(rest, {name: _PLAIN_FIELDS[name] for name in ("loss", "lr")})
    if not found.keys() & {"loss", "eval_loss"}:
        return None
    total = {"steps": float(match[2])} if match[2] else {}
    return {"step": float(match[1]), **total, **found}


def _json_line(line: str) -> Values | None:
    if not line.startswith("{"):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        return None
    return {name: float(value[name]) for name in NAMES if isinstance(value.get(name), (int, float))}


FORMATS = (
    Format("Megatron-LM", (b"iteration",), _megatron),
    Format("DeepSpeed", (b"samples/sec:", b"global_step=", b"skipped="), _deepspeed),
    Format("MindFormers", (b"step:[", b"step: ["), _mindformers),
    Format("nanoGPT", (b"iter ", b"step "), _nanogpt),
    Format("Hugging Face", (b"loss':", b"%|"), _hugging_face),
    Format("JSON lines", (b'"step"',), _json_line),
    Format("steps and losses", (b"loss", b"Loss", b"LOSS"), _plain),
)


def pattern_format(pattern: str) -> Format:
    """Return the format of a user's pattern; raise ValueError if it cannot be used."""
    found = compiled(pattern)

    def read(line: str) -> Values | None:
        match = found.search(line)
        if match is None:
            return None
        return {name: _number(text) for name, text in match.groupdict().items() if text is not None}

    return Format("pattern", (), read)


@dataclass(frozen=True)
class StepLine:
    """The content of a line of output."""

    kind: str
    """`step` or `eval`."""
    step: int
    values: Values
    program: str = ""
    """The name of its format."""

    def as_metric(self, moment: float, seconds: float | None) -> Metric | None:
        """Return it as a line of metrics; `seconds` is the time of a step if the line does not say it."""
        measured = {"step_seconds": seconds} if self.kind == "step" and seconds is not None else {}
        name = {"format": self.program} if self.program else {}
        return read_metric(
            {"event": self.kind, "step": self.step, **measured, **self.values, **name, "time": moment}
        )


Held = tuple[Format, Values, str, int]
"""A line without a step: its format, values and text, and where the progress bar was when it came."""


# What torchrun writes before each line of a worker.
_WORKER = re.compile(rb"^\[(?:rank|default)\d+\]:")


@dataclass
class StepParser:
    """Reads the streams of one rank; remembers the format that fits and the values of earlier lines."""

    formats: tuple[Format, ...] = FORMATS
    clock: Callable[[], float] = time.time
    chosen: Format | None = None
    step: int = -1
    """The last step that was reported."""
    steps: int = 0
    """Total number of steps of the training; 0 if unknown."""
    _carried: Values = field(default_factory=dict)
    """Values of a step from other lines: rates, the position of a progress bar."""
    _count: int = 0
    _held: deque[Held] = field(default_factory=deque)
    _positions: deque[int] = field(default_factory=deque)
    """Where the progress bar stood at lines that have not come yet."""
    _erases: bool = False
    """Whether the program erases its bar before it writes a line, and then draws it again."""
    _erased: bool = False
    _stamps: Pace = field(default_factory=Pace)
    """By the times that the program wrote into its lines."""
    _arrivals: Pace = field(default_factory=Pace)
    """By the times at which its lines were written."""

    def feed(self, block: bytes, age: float | None = 0.0) -> Iterator[Metric]:
        """Yield a line of metrics for each new step or evaluation in a block of whole lines.

        The end of the block was written `age` seconds ago; None if that is not known. All lines of a block were written
        together: a program's output may be buffered.
        """
        candidates = [self.chosen] if self.chosen else self.formats
        wanted = [known for known in candidates if known and self._may_hold(known, block)]
        if not wanted and _BLANK not in block:
            return
        now, before, waiting = self.clock() - (age or 0.0), self.step, len(self._held)
        lines = [
            line
            for raw in block.replace(b"\r", b"\n").split(b"\n")
            if raw and len(raw) <= LONGEST
            for line in self._line(raw, wanted)
        ]
        # Its stream has come so far, and no bar was erased for these lines; or there is no bar.
        late = not self._erases and (b"%|" in block or (waiting and "bar" not in self._carried))
        if late or len(self._held) > HELD:
            lines += self._released()
        if self.step > before and age is not None:
            self._arrivals.note(now, self.step, ARRIVAL)
        for line in lines:
            metric = line.as_metric(now, self._arrivals.seconds)
            if metric is not None:
                yield metric

    def end(self) -> Iterator[Metric]:
        """Yield the steps that still wait for the position of a progress bar, at the end of the output."""
        now = self.clock()
        for line in list(self._released()):
            metric = line.as_metric(now, self._arrivals.seconds)
            if metric is not None:
                yield metric

    @staticmethod
    def _may_hold(known: Format, data: bytes) -> bool:
        return not known.hints or any(hint in data for hint in known.hints)

    def _line(self, raw: bytes, wanted: list[Format]) -> Iterator[StepLine]:
        raw = _WORKER.sub(b"", raw)
        if raw.isspace() and len(raw) > len(_BLANK):
            self._erases = self._erased = True
            return
        for known in wanted:
            text = raw.decode("utf-8", "replace") if self._may_hold(known, raw) else ""
            values = known.read(text) if text else None
            if values:
                # A progress bar alone may belong to a download.
                if "bar" not in values:
                    self.chosen = known
                yield from self._metrics(known, values, text)
                return

    def _metrics(self, known: Format, values: Values, text: str) -> Iterator[StepLine]:
        # After the first step, another total is that of another bar.
        if "bar" in values and self.step >= 0 and int(values["steps"]) != self.steps:
            return
        if "steps" in values:
            self.steps = int(values["steps"])
        if "bar" in values:
            self._carried |= {name: value for name, value in values.items() if name != "steps"}
            yield from self._bar(int(values["bar"]))
        elif "step" in values:
            yield from self._reported(known, int(values["step"]), values, text)
        elif self._positions:
            yield from self._reported(known, self._positions.popleft(), values, text)
        else:
            # The rate that the bar shows now.
            facts = {**self._carried, **values}
            self._held.append((known, facts, text, int(facts.pop("bar", 0))))

    def _bar(self, position: int) -> Iterator[StepLine]:
        """Take the position of the progress bar: if it had been erased, a line was written at this step.

        Such a line stands in another stream, and may be read before or after.
        """
        if not self._erased:
            return
        self._erased = False
        if self._held:
            known, values, text, _ = self._held.popleft()
            yield from self._reported(known, position, values, text)
        else:
            self._positions.append(position)

    def _released(self) -> Iterator[StepLine]:
        """Yield the lines that waited for the bar, at the position that was known when they came."""
        while self._held:
            known, values, text, position = self._held.popleft()
            yield from self._reported(known, position or self._count + 1, values, text)

    def _reported(self, known: Format, step: int, values: Values, text: str) -> Iterator[StepLine]:
        """Yield the metrics of a step in a line."""
        if "eval_loss" in values:
            yield StepLine("eval", step, {"loss": values["eval_loss"]})
            if "loss" not in values:
                return
        if step <= self.step and "loss" not in values:
            # A second line about the same step: it counts for the next one.
            self._carried |= {name: value for name, value in values.items() if name != "step"}
            return
        if step <= self.step:
            return
        if stamp := stamp_of(text):
            self._stamps.note(stamp[0], step, stamp[1])
        yield self._step(known, step, values)

    def _step(self, known: Format, step: int, values: Values) -> StepLine:
        facts = {**{name: value for name, value in self._carried.items() if name != "bar"}, **values}
        if "step_ms" in facts:
            facts["step_seconds"] = facts.pop("step_ms") / 1000
        elif "step_seconds" not in facts and self._stamps.seconds is not None:
            facts["step_seconds"] = self._stamps.seconds
        self._count = self._count + 1 if "step" not in values else step
        self.step, bar = step, self._carried.get("bar")
        self._carried = {} if bar is None else {"bar": bar}
        numbers = {name: value for name, value in facts.items() if name not in ("step", "steps", "eval_loss")}
        total = {"steps": self.steps} if self.steps else {}
        return StepLine("step", step, {**total, **numbers}, known.name)
