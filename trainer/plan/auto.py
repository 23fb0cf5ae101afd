"""`parallel: auto`: compare all legal layouts by planned memory and time, and report why the others are worse.

A layout that recomputes more, or cuts the model into more parts, must be faster by more than the model's error to win.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from clusterctl.wire.train_summary import AutoChoice, CandidateLayout, Hardware
from trainer.config.layout import Layout
from trainer.config.parts import RecomputeConfig
from trainer.config.rules import between_keys
from trainer.config.train_config import TrainConfig
from trainer.plan.hardware import hardware_of
from trainer.plan.memory import stages
from trainer.plan.time import Cost, cost

# Times that differ by less than this fraction count as equal.
TRUSTED = 0.03
SHOWN = 5


@dataclass(frozen=True)
class Candidate:
    """One layout of a job."""

    config: TrainConfig
    layout: Layout
    memory: int
    """Bytes on the device that needs most memory."""
    cost: Cost

    @property
    def cuts(self) -> tuple[int, int]:
        """Return how the model is cut: (tensor, pipeline)."""
        return self.layout.tensor, self.layout.pipeline

    @property
    def complexity(self) -> tuple[float, ...]:
        """Return a key that is smaller for a simpler layout."""
        config, parallel = self.config, self.config.parallel
        recompute = ("none", "selective", "full").index(config.recompute.mode)
        cuts = self.layout.tensor * self.layout.pipeline
        return (config.offload, recompute, cuts, config.zero, parallel.interleave, parallel.sequence)

    def summary(self, why: str = "") -> CandidateLayout:
        """Return the layout and its cost; `why` it is worse than the chosen one."""
        config, layout = self.config, self.layout
        return CandidateLayout(
            data=layout.data,
            tensor=layout.tensor,
            pipeline=layout.pipeline,
            context=layout.context,
            interleave=config.parallel.interleave,
            sequence=config.parallel.sequence,
            zero=config.zero,
            offload=config.offload,
            recompute=config.recompute.mode,
            memory=self.memory,
            seconds=self.cost.seconds,
            tokens_per_second=self.cost.tokens_per_second,
            why=why,
        )


@dataclass(frozen=True)
class Choice:
    """The result: the layouts that fit, best first, and why each other layout was not chosen."""

    fitting: tuple[Candidate, ...]
    others: tuple[tuple[Candidate, str], ...]
    tried: int
    refused: int

    def summary(self) -> AutoChoice:
        """Return the best layouts and the others with their reasons."""
        return AutoChoice(
            tried=self.tried,
            illegal=self.refused,
            best=tuple(candidate.summary() for candidate in _best_of_each(self.fitting)[:SHOWN]),
            losing=tuple(candidate.summary(why) for candidate, why in self.others),
        )


def choose(config: TrainConfig, world: int, fixed: frozenset[str]) -> tuple[TrainConfig, Choice]:
    """Return the config with the best layout, and the comparison.

    `fixed`: the keys of the train part that the job sets itself; they are not changed.
    """
    config = (
        config
        if config.global_batch
        else replace(config, global_batch=config.micro_batch * world // config.parallel.context)
    )
    given = config.hardware
    # All ranks must make the same choice, although their processors may differ.
    if (given.kind or "cpu") == "cpu" and not given.chip:
        config = replace(config, hardware=replace(given, chip="cpu"))
    hardware = hardware_of(config, world)
    room = hardware.room or float("inf")
    legal: list[Candidate] = []
    refused = 0
    for layout, variants in _all(config, world, fixed):
        for candidate in variants:
            if any(between_keys(candidate, layout)):
                refused += 1
                continue
            legal.append(_candidate(candidate, layout, hardware))
            if legal[-1].memory <= room:
                # The later variants of a layout only save memory.
                break
    fitting = sorted(
        (candidate for candidate in legal if candidate.memory <= room),
        key=_seconds,
    )
    fitting = _simplest_first(fitting)
    best = fitting[0] if fitting else min(legal, key=_memory, default=None)
    choice = Choice(tuple(fitting), tuple(_losing(fitting, legal, room)), len(legal) + refused, refused)
    chosen = replace(config, parallel=replace(config.parallel, auto=False)) if best is None else best.config
    return replace(chosen, hardware=given), choice


def _all(
    config: TrainConfig, world: int, fixed: frozenset[str]
) -> Iterator[tuple[Layout, list[TrainConfig]]]:
    """Yield each layout with its variants; each variant needs less memory and more time than the one before."""
    zeros = (config.zero,) if "zero" in fixed else (0, 1, 2, 3)
    modes = [config.recompute]
    if "recompute" not in fixed:
        modes = [RecomputeConfig(mode) for mode in ("none", "selective", "full")]
    moves = "offload" not in fixed and config.hardware.kind not in ("", "cpu")
    places = (False, True) if moves else (config.offload,)
    for tensor in _divisors(world, config.model.heads):
        for pipeline in _divisors(world // tensor, config.model.layers):
            if world // (tensor * pipeline) % config.parallel.context:
                continue
            layout = Layout.of(world, tensor, pipeline, config.parallel.context)
            plain = replace(config.parallel, auto=False, tensor=tensor, pipeline=pipeline)
            for interleave in (1, 2, 4) if pipeline > 1 else (1,):
                pieces = replace(plain, interleave=interleave)
                ways = [
                    replace(pieces, sequence=divided)
                    for divided in ((False, True) if tensor > 1 else (False,))
                ]
                for zero in zeros if layout.data > 1 else (0,):
                    yield (
                        layout,
                        [
                            replace(config, parallel=way, zero=zero, recompute=mode, offload=away)
                            for away in places
                            for mode in modes
                            for way in ways
                        ],
                    )


def _divisors(whole: int, most: int) -> list[int]:
    return [n for n in range(1, min(whole, most) + 1) if whole % n == 0]


def _candidate(config: TrainConfig, layout: Layout, hardware: Hardware) -> Candidate:
    need = max(stage.memory.total for stage in stages(config, layout, ends=True))
    return Candidate(config, layout, need, cost(config, layout, hardware))


def _seconds(candidate: Candidate) -> float:
    return candidate.cost.seconds


def _memory(candidate: Candidate) -> int:
    return candidate.memory


def _simplest_first(ordered: list[Candidate]) -> list[Candidate]:
    """Return the layouts sorted by time; among equally fast ones, the simplest comes first."""
    result, left = [], list(ordered)
    while left:
        bound = left[0].cost.seconds * (1 + TRUSTED)
        alike = [candidate for candidate in left if candidate.cost.seconds <= bound]
        result += sorted(alike, key=lambda candidate: (candidate.complexity, candidate.cost.seconds))
        left = left[len(alike) :]
    return result


def _best_of_each(ordered: Sequence[Candidate]) -> list[Candidate]:
    """Return the first layout for each way to cut the model."""
    found: dict[tuple[int, int], Candidate] = {}
    for candidate in ordered:
        found.setdefault(candidate.cuts, candidate)
    return list(found.values())


def _losing(fitting: list[Candidate], legal: list[Candidate], room: float) -> Iterator[tuple[Candidate, str]]:
    """Yield the chosen cut with other ZeRO levels, then the cuts that are not among the best, each with the reason."""
    best = fitting[0] if fitting else None
    groups: dict[tuple[int, ...], list[Candidate]] = {}
    shown: set[tuple[int, ...]] = {candidate.cuts for candidate in _best_of_each(fitting)[:SHOWN]}
    shown |= {(*best.cuts, best.config.zero)} if best else set()
    for candidate in legal:
        alike = best is not None and candidate.cuts == best.cuts
        groups.setdefault((*candidate.cuts, candidate.config.zero) if alike else candidate.cuts, []).append(
            candidate
        )
    losing = [_why(group, best, room) for key, group in groups.items() if key not in shown]
    same_cut = [candidate for candidate in losing if best and candidate[0].cuts == best.cuts]
    other_cuts = [candidate for candidate in losing if not (best and candidate[0].cuts == best.cuts)]
    yield from same_cut
    yield from sorted(
        other_cuts, key=lambda candidate: (candidate[0].memory > room, candidate[0].cost.seconds)
    )


def _why(group: list[Candidate], best: Candidate | None, room: float) -> tuple[Candidate, str]:
    """Return the best layout of a group, and why it was not chosen."""
    usable = sorted(
        (candidate for candidate in group if candidate.memory <= room),
        key=_seconds,
    )
    if best is None or not usable:
        least = min(group, key=_memory)
        return least, f"needs at least {least.memory / 1e9:.1f} GB of {room / 1e9:.1f}"
    candidate = _simplest_first(usable)[0]
    if candidate.cost.seconds <= best.cost.seconds * (1 + TRUSTED):
        return candidate, "not faster, and less simple"
    return candidate, _slower_by(best, candidate)


def _slower_by(best: Candidate, other: Candidate) -> str:
    """Describe how much slower `other` is, and the part of the step in which it loses most."""
    names = {
        "compute": "computation",
        "tensor": "tensor parallel",
        "pipeline": "messages between stages",
        "bubble": "the pipeline's bubble",
        "data": "data parallel",
        "update": "the optimizer",
    }
    more = {phrase: getattr(other.cost, name) - getattr(best.cost, name) for name, phrase in names.items()}
    worst, seconds = max(more.items(), key=lambda item: item[1])
    ratio, mode = other.cost.seconds / best.cost.seconds, other.config.recompute.mode
    slower = f"{ratio:.2g} times as slow" if ratio >= 2 else f"{ratio - 1:.0%} slower"
    if worst == names["compute"] and mode not in ("none", best.config.recompute.mode):
        worst = f"recompute {mode}"
    if worst == names["update"] and other.config.offload and not best.config.offload:
        worst = "the optimizer in CPU memory"
    return f"{slower}: {seconds:.2g} s more for {worst}"
