"""Counters in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.generate.batcher import Batcher
    from trainer.serve.guard import Counts

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
PREFIX = "clusterctl_serve"


@dataclass
class Histogram:
    """A Prometheus histogram: for each bound, the number of values up to it."""

    counts: Counter[float] = field(default_factory=Counter)
    sum: float = 0.0
    total: int = 0

    def add(self, value: float) -> None:
        self.sum += value
        self.total += 1
        for bound in BUCKETS:
            self.counts[bound] += value <= bound

    def lines(self, name: str, text: str) -> Iterable[str]:
        yield from (f"# HELP {name} {text}", f"# TYPE {name} histogram")
        for bound in BUCKETS:
            yield f'{name}_bucket{{le="{bound:g}"}} {self.counts[bound]}'
        yield f'{name}_bucket{{le="+Inf"}} {self.total}'
        yield f"{name}_sum {self.sum:.6f}"
        yield f"{name}_count {self.total}"


@dataclass
class Metrics:
    """The server's own counters."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)
    first_token: Histogram = field(default_factory=Histogram)
    request: Histogram = field(default_factory=Histogram)

    def add_request(self, first: float, seconds: float) -> None:
        """Count a request that took `seconds`; `first`: seconds until its first token, 0 if there was none."""
        if first:
            self.first_token.add(first)
        self.request.add(seconds)

    def text(self, batcher: Batcher, counts: Counts, active: int) -> str:
        """Return all counters as text for Prometheus."""
        name = f"{PREFIX}_answers_total"
        lines = [f"# HELP {name} Answers by path and status.", f"# TYPE {name} counter"]
        lines += [f'{name}{{path="{p}",status="{s}"}} {n}' for (p, s), n in sorted(self.answers.items())]
        totals = {
            "prompt_tokens": (batcher.prompt_tokens, "Prompt tokens."),
            "reused_tokens": (batcher.reused_tokens, "Prompt tokens whose pages were shared."),
            "generated_tokens": (batcher.generated_tokens, "Generated tokens."),
            "steps": (batcher.steps, "Steps of the model."),
            "refused_connections": (counts.refused, "Connections refused because of the limit."),
            "slow_connections": (
                counts.slow,
                "Connections closed because their request did not arrive in time.",
            ),
        }
        for key, (value, text) in totals.items():
            lines += _figure(f"{key}_total", "counter", value, text)
        running = len(batcher.running)
        gauges = {
            "running": (running, "Requests that are running."),
            "waiting": (max(0, active - running), "Requests that wait in the queue."),
            "pages": (batcher.pages.count, "Pages of the cache."),
            "free_pages": (batcher.pages.free, "Pages that no request uses."),
            "connections": (counts.open, "Open connections."),
        }
        for key, (value, text) in gauges.items():
            lines += _figure(key, "gauge", value, text)
        lines += self.first_token.lines(
            f"{PREFIX}_first_token_seconds", "Seconds until the first piece of text."
        )
        lines += self.request.lines(f"{PREFIX}_request_seconds", "Seconds until the end of a text.")
        return "\n".join(lines) + "\n"


def _figure(name: str, kind: str, value: float, text: str) -> list[str]:
    whole = f"{PREFIX}_{name}"
    return [f"# HELP {whole} {text}", f"# TYPE {whole} {kind}", f"{whole} {value}"]
