"""Every layout that a config accepts gives the losses of one process, and continues any other's checkpoints.

    python -m pytest tests/trainer/engine/test_every_layout.py -s -k one_process --cases 2000
    python -m pytest tests/trainer/engine/test_every_layout.py -s -k any_other --cases 400
    ... -k "one_process and deepspeed and glm and pipeline2 and zero1" --cases 2000

A tiny GPT, one with rotary positions and SwiGLU ("newer") and a tiny GLM train 12 steps in fp32 without dropout, on 1,
2, 4 and 8 ranks, with real process groups on loopback. Without --cases only a few layouts are tested; the largest
relative difference of a loss is printed at the end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from trainer.plan.resolve import try_config

STEPS, BATCH, VOCAB = 12, 8, 60
HALF = STEPS // 2
SHAPE = {"layers": 4, "hidden": 64, "heads": 8, "sequence": 32}
MODELS = {
    "gpt": {**SHAPE, "vocab": VOCAB},
    "newer": {**SHAPE, "vocab": VOCAB, "rotary": True, "swiglu": True, "ffn": 128},
    "glm": {**SHAPE, "kind": "glm", "vocab": VOCAB + 9},
}
# Relative differences of losses from those of one process, of gradient norms, and of losses after a change of layout.
OFF, NORM_OFF, CHANGED_OFF = 1e-5, 1e-4, 1e-6
# Mode, `every` and `split` of recomputation in the backward pass.
NONE, WHOLE = ("none", 1, False), ("full", 1, False)
KEEPING = (NONE, ("selective", 1, False), WHOLE, ("full", 2, False), ("full", 1, True))


@dataclass(frozen=True)
class Case:
    """A model, its ranks, and the division of the work among them."""

    model: str
    ranks: int
    engine: str = "torch"
    tensor: int = 1
    pipeline: int = 1
    interleave: int = 1
    sequence: bool = False
    layers: tuple[int, ...] = ()
    zero: int = 0
    offload: bool = False
    recompute: tuple[str, int, bool] = NONE

    def config(self, prefix: Path) -> dict[str, Any]:
        parallel = {"tensor": self.tensor, "pipeline": self.pipeline, "interleave": self.interleave}
        mode, every, split = self.recompute
        return {
            "model": MODELS[self.model],
            "data": {"prefix": str(prefix), "split": "1", **({"eod": 3} if self.model == "glm" else {})},
            "steps": STEPS,
            "micro_batch": 1,
            "global_batch": BATCH,
            "optimizer": {"lr": 3e-3, "warmup_steps": 2},
            "eval": {"batches": 0},
            "save": {"every": HALF, "keep": 9},
            "engine": self.engine,
            "parallel": {**parallel, "sequence": self.sequence, "layers": list(self.layers)},
            "zero": self.zero,
            "offload": self.offload,
            "recompute": {
                "mode": mode,
                **({"every": every} if every > 1 else {}),
                **({"split": True} if split else {}),
            },
        }

    @property
    def is_legal(self) -> bool:
        return not try_config(self.config(Path("x")), self.ranks)[1]

    def __str__(self) -> str:
        parts = [
            self.model,
            self.engine,
            f"{self.ranks}ranks",
            f"data{self.ranks // self.tensor // self.pipeline}",
        ]
        parts += [
            f"{name}{getattr(self, name)}"
            for name in ("tensor", "pipeline", "interleave")
            if getattr(self, name) > 1
        ]
        parts += ["sequence"] * self.sequence + [f"layers{'+'.join(map(str, self.layers))}"] * bool(
            self.layers
        )
        parts += [f"zero{self.zero}"] * bool(self.zero) + ["offload"] * self.offload
        mode, every, split = self.recompute
        parts += [f"recompute_{mode}{every if every > 1 else ''}{'_split' * split}"] * (mode != "none")
        return "-".join(parts)


def candidates(model: str, engine: str, ranks: int) -> Iterator[Case]:
    """Yield layouts; the config's rules decide later which are legal on this number of ranks.

    On up to 4 ranks the first model gets every kind of recomputation, otherwise only that of whole blocks: with ZeRO 0,
    and with ZeRO 3, which gathers and frees weights. There is ZeRO only with several data parallel ranks. The newer GPT
    gets only the shapes, without ZeRO or recomputation.
    """
    kinds = KEEPING if model == "gpt" and ranks < 8 else (NONE,) if model == "newer" else (NONE, WHOLE)
    for tensor, pipeline, interleave, sequence in product((1, 2, 4, 8), (1, 2, 4), (1, 2), (False, True)):
        shape = Case(model, ranks, engine, tensor, pipeline, interleave, sequence)
        levels = range(4) if model != "newer" and ranks > tensor * pipeline else range(1)
        for zero, recompute in product(levels, kinds):
            if recompute == NONE or zero == 0 or (zero == 3 and recompute == WHOLE):
                yield replace(shape, zero=zero, recompute=recompute)
        if model != "newer" and not sequence:
            yield from [replace(shape, layers=(1, 3))] * ((pipeline, interleave) == (2, 1))
            yield from (replace(shape, zero=zero, offload=True) for zero in levels)


def every_layout() -> list[Case]:
    cases = product(MODELS, ("torch", "deepspeed"), (1, 2, 4, 8))
    return [case for given in cases for case in candidates(*given) if case.is_legal]


def every_pair() -> list[tuple[Case, Case]]:
    one = [Case("gpt", 1), *(Case("gpt", 2, zero=zero) for zero in (1, 3)), Case("gpt", 2, tensor=2)]
    one += [Case("gpt", 2, pipeline=2), *(Case("gpt", 2, "deepspeed", zero=zero) for zero in (0, 1, 3))]
    one += [Case("gpt", 4), Case("gpt", 4, tensor=2, pipeline=2), Case("gpt", 4, "deepspeed", zero=2)]
    one += [Case("gpt", 4, tensor=2, sequence=True, zero=1), Case("gpt", 4, pipeline=2, interleave=2, zero=2)]
    each = [[replace(case, model=model) for case in one] for model in ("gpt", "glm")]
    return [pair for own in each for pair in product([case for case in own if case.is_legal], repeat=2)]


FEW = [Case("gpt", 4, tensor=2, pipeline=2, recompute=WHOLE), Case("glm", 2, zero=3)]
FEW_PAIRS = [(Case("gpt", 2, zero=3), Case("gpt", 2, tensor=2)), (Case("gpt", 2, zero=3),) * 2]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each layout, or pair of layouts, that the command line chooses, in a random order."""
    numbers, seed = map(metafunc.config.getoption, ("--cases", "--seed"))
    for name, few, every in (("case", FEW, every_layout), ("pair", FEW_PAIRS, every_pair)):
        if name in metafunc.fixturenames:
            chosen: list[Any] = few
            if numbers:
                chosen = every()
                Random(seed).shuffle(chosen)
                chosen = chosen[numbers.start : numbers.stop]
            ids = [str(case) if name == "case" else "-to-".join(map(str, case)) for case in chosen]
            metafunc.parametrize(name, chosen, ids=ids)


class Trained(NamedTuple):
    """Loss and gradient norm of every step, the hashes of the last checkpoint's files, the checkpoint of the middle."""

    losses: list[float]
    norms: list[float]
    files: dict[str, str]
    middle: Path


@pytest.fixture(scope="session")
def kept() -> dict[Case, Trained]:
    return {}


@pytest.fixture(scope="session")
def largest() -> Iterator[dict[str, float]]:
    found: dict[str, float] = {}
    yield found
    for name, off in found.items():
        print(f"\n{name}: losses differ by at most {off:.1e}")


@pytest.fixture
def train(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    prefix: Path,
    run_ranks: Callable[..., Any],
    metrics: Callable[..., Any],
    kept: dict[Case, Trained],
) -> Callable[..., Trained]:
    """Return a function that trains all steps of a case, once, or those after a checkpoint."""

    def run(case: Case, middle: Path | None = None) -> Trained:
        if middle is None and case in kept:
            return kept[case]
        if case.engine == "deepspeed":
            pytest.importorskip("deepspeed")
        folder = tmp_path / "run"
        if middle:
            shutil.copytree(middle, folder / "checkpoints" / middle.name)
        done = run_ranks(case.ranks, case.config(prefix), folder)
        assert not any(rank.returncode for rank in done), next(rank.stderr for rank in done if rank.stderr)
        steps, found = metrics(folder, "step"), sorted((folder / "checkpoints").glob("step-*"))
        listed = json.loads((found[-1] / "manifest.json").read_text())["files"]
        copy = shutil.copytree(found[0], tmp_path_factory.mktemp("middle") / found[0].name)
        files = {name: entry["sha256"] for name, entry in listed.items()}
        shutil.rmtree(folder)
        trained = Trained(
            [step["loss"] for step in steps], [step["grad_norm"] for step in steps], files, copy
        )
        return trained if middle else kept.setdefault(case, trained)

    return run


def gap(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))


def test_a_layout_gives_the_losses_of_one_process_and_resumes_with_the_same_bits(
    case: Case, train: Callable[..., Trained], largest: dict[str, float]
) -> None:
    alone, done = train(Case(case.model, 1)), train(case)
    off = gap(done.losses, alone.losses)
    print(f"{case}: {off:.1e}")
    largest[f"{case.engine}, {case.model}"] = max(off, largest.get(f"{case.engine}, {case.model}", 0.0))
    assert off <= OFF and gap(done.norms, alone.norms) <= NORM_OFF
    if case.recompute != NONE:
        assert done.losses == train(replace(case, recompute=NONE)).losses
    else:
        rest = train(case, done.middle)
        assert rest[:3] == (done.losses[HALF:], done.norms[HALF:], done.files)


def test_a_checkpoint_of_a_layout_continues_in_any_other(
    pair: tuple[Case, Case], train: Callable[..., Trained], largest: dict[str, float]
) -> None:
    source, target = pair
    whole = train(source)
    rest = train(target, whole.middle)
    off = gap(rest.losses, whole.losses[HALF:])
    largest[f"changes, {source.model}"] = max(off, largest.get(f"changes, {source.model}", 0.0))
    assert off <= CHANGED_OFF
    if source == target:
        assert rest[:3] == (whole.losses[HALF:], whole.norms[HALF:], whole.files)
