"""Estimate the cost of a fan-out at sizes that were not measured, by lines fitted to the measured sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The target in seconds for a thousand nodes: users lose attention after a longer wait.
ENOUGH = 10.0


@dataclass(frozen=True)
class Line:
    """A line: start + each * N."""

    start: float
    each: float

    def at(self, count: float) -> float:
        return self.start + self.each * count


@dataclass(frozen=True)
class Point:
    """The medians, in seconds, for one measured size."""

    nodes: int
    wall: float
    client: float
    """Processor time of the launcher."""
    server: float
    """Processor time of all nodes together."""


def fit(pairs: Sequence[tuple[float, float]]) -> Line:
    """Return the line through (N, value) with the least relative squares.

    Relative errors count, so a millisecond at 8 nodes weighs as much as 32 milliseconds at 256 nodes.
    """
    weights = [1 / value**2 if value else 1.0 for _, value in pairs]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, pairs, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, pairs, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, pairs, strict=True))
    if spread == 0:
        return Line(mean_y, 0.0)
    each = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, pairs, strict=True)) / spread
    return Line(mean_y - each * mean_x, each)


@dataclass(frozen=True)
class Model:
    """The work of the launcher and of the nodes, and the wall time, as lines over the number of nodes."""

    client: Line
    server: Line
    wall: Line
    cores: int
    """The number of cores of the measured machine, which launcher and nodes shared."""

    @property
    def kept_busy(self) -> float:
        """Return the fraction of the cores' time that is used for work, for large N."""
        return min(1.0, (self.client.each + self.server.each) / self.cores / self.wall.each)

    def here(self, count: float) -> float:
        """Return the time on the measured machine according to the model, to compare with the measured time."""
        return self.wall.start + (self.client.each + self.server.each) * count / self.cores / self.kept_busy

    def flat(self, count: float) -> float:
        """Return the time with a launcher on one core and nodes that are separate machines.

        More cores do not help, because a Python interpreter uses only one at a time.
        """
        # Also wait for the work of the last node.
        one_node = self.server.each
        return self.wall.start + self.client.each * count / self.kept_busy + one_node

    def tree(self, count: float, gateways: int) -> float:
        """Return the time through gateways, each of which handles its share of the nodes like a launcher."""
        return self.flat(gateways) + self.flat(count / gateways)

    def best_tree(self, count: int) -> tuple[int, float]:
        """Return the number of gateways with the shortest time, and that time."""
        tried = {g: self.tree(count, g) for g in range(2, max(3, count // 2))}
        chosen = min(tried, key=lambda g: tried[g])
        return chosen, tried[chosen]


def model_of(points: Sequence[Point], cores: int) -> Model:
    return Model(
        fit([(point.nodes, point.client) for point in points]),
        fit([(point.nodes, point.server) for point in points]),
        fit([(point.nodes, point.wall) for point in points]),
        cores,
    )


def report(points: Sequence[Point], model: Model) -> str:
    """Return the fit with its residuals, and the estimate for 256, 1,000 and 10,000 nodes."""
    ms = 1000
    lines = [
        f"launcher {model.client.start * ms:.0f} ms + {model.client.each * ms:.2f} ms a node; "
        f"nodes {model.server.each * ms:.2f} ms each; wall {model.wall.start * ms:.0f} ms + "
        f"{model.wall.each * ms:.2f} ms a node on {model.cores} cores, {model.kept_busy:.0%} of them at work",
        f"{'nodes':>7}{'wall s':>9}{'model':>9}{'off by':>9}{'launcher':>10}{'model':>9}{'nodes':>9}{'model':>9}",
    ]
    for point in points:
        expected = model.here(point.nodes)
        lines.append(
            f"{point.nodes:>7}{point.wall:>9.3f}{expected:>9.3f}{(expected / point.wall - 1) * 100:>8.0f}%"
            f"{point.client:>10.3f}{model.client.at(point.nodes):>9.3f}{point.server:>9.3f}{model.server.at(point.nodes):>9.3f}"
        )
    if len(points) > 2:
        last = points[-1]
        expected = model_of(points[:-1], model.cores).here(last.nodes)
        lines.append(
            f"fitted without the largest size, the model predicts {expected:.2f} s for {last.nodes} nodes, "
            f"which took {last.wall:.2f} s ({(expected / last.wall - 1) * 100:+.0f}%)"
        )
    lines.append(
        "nodes that are machines of their own, a launcher (and gateways) with one core, seconds by the model:"
    )
    lines.append(f"{'nodes':>7}{'flat':>9}{'tree':>9}{'gateways':>10}")
    for count in (256, 1_000, 10_000):
        gateways, tree = model.best_tree(count)
        lines.append(f"{count:>7}{model.flat(count):>9.2f}{tree:>9.2f}{gateways:>10}")
    return "\n".join([*lines, conclusion(model)])


def conclusion(model: Model, count: int = 1_000) -> str:
    """Return a sentence that says whether `count` nodes need a tree of gateways."""
    flat, (gateways, tree) = model.flat(count), model.best_tree(count)
    word = "flat is enough" if flat <= ENOUGH else "flat is not enough"
    return (
        f"{word} for {count:,} nodes: {flat:.1f} s, at most {ENOUGH:.0f} s wanted; "
        f"{gateways} gateways would make it {tree:.1f} s"
    )
