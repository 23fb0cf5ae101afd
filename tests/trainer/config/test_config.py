from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainer.config.parts import ParallelConfig
from trainer.errors import ConfigFaults
from trainer.plan.resolve import read_config, try_config
from trainer.plan.summary import check
from trainer.splits import split_fractions

Make = Callable[..., dict[str, Any]]


def faults_of(raw: object, world: int = 1) -> dict[str, str]:
    return {fault.key: str(fault) for fault in try_config(raw, world)[1]}


def test_a_good_config_is_read_with_its_defaults_filled_in(raw_config: Make) -> None:
    raw = raw_config()
    del raw["global_batch"]
    config = read_config(raw, world_size=4)
    assert config.global_batch == 8
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.model.padded_vocab == 128


def test_every_fault_is_told_at_once(raw_config: Make) -> None:
    raw = raw_config(
        stepss=3,
        micro_batch=3,
        precision="bf61",
        engine="torhc",
        zero=4,
        seed=True,
        deterministic="yes",
        optimizer={"lr": "1e-3", "min_lr": -1, "betas": [0.9], "warmup_steps": 9},
        model={"name": "gpt-tiny", "heads": 3, "sequense": 5},
        data={"split": "a,b"},
    )
    found = faults_of(raw)
    assert set(found) == {
        "train.stepss",
        "train.global_batch",
        "train.precision",
        "train.engine",
        "train.zero",
        "train.seed",
        "train.deterministic",
        "train.optimizer.lr",
        "train.optimizer.min_lr",
        "train.optimizer.betas",
        "train.optimizer.warmup_steps",
        "train.model.heads",
        "train.model.sequense",
        "train.data.prefix",
        "train.data.split",
    }
    assert "did you mean 'steps'?" in found["train.stepss"]
    assert "did you mean 'sequence'?" in found["train.model.sequense"]
    assert "without quotes" in found["train.optimizer.lr"]
    assert "did you mean 'torch'?" in found["train.engine"]


def test_remainders_need_bf16_weights_next_to_them(raw_config: Make) -> None:
    wanted = {"masters": "remainder"}
    assert not faults_of(raw_config(optimizer=wanted, precision="bf16", offload=False))
    for changes in ({"precision": "fp16"}, {"engine": "deepspeed"}, {"offload": True}):
        raw = raw_config(**{"optimizer": wanted, "precision": "bf16", **changes})
        assert "use fp32" in faults_of(raw)["train.optimizer.masters"]


def test_a_batch_that_does_not_divide_names_the_nearest_that_do(raw_config: Make) -> None:
    found = faults_of(raw_config(micro_batch=4, global_batch=30), world=2)
    assert "use 24 or 32" in found["train.global_batch"]


@pytest.mark.parametrize("raw", [None, [], "gpt-tiny", 3])
def test_what_is_no_mapping_is_refused(raw: object) -> None:
    assert "a mapping is needed" in faults_of(raw)["train"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, None, [1], -0.1])
def test_a_rate_that_is_no_positive_number_is_refused(raw_config: Make, value: object) -> None:
    assert "train.optimizer.lr" in faults_of(raw_config(optimizer={"lr": value}))


def test_an_unknown_model_names_a_near_one(raw_config: Make) -> None:
    assert "gpt2-124M" in faults_of(raw_config(model="gpt2-124"))["train.model"]


def test_unknown_ops_and_backends_are_refused_before_a_start(raw_config: Make) -> None:
    found = faults_of(raw_config(native={"liner": "cpu", "gelu": "fast"}))["train.native"]
    assert "no op 'liner'; did you mean 'linear'?" in found and "no backend 'fast'" in found
    assert "no backend 'nonsense'" in faults_of(raw_config(native="nonsense"))["train.native"]
    # Whether a device has a backend is known on its node.
    assert not faults_of(raw_config(native={"linear": "cuda", "attention": "torch"}))


def test_nothing_is_told_of_a_default_that_stands_for_what_could_not_be_read(raw_config: Make) -> None:
    raw = raw_config(
        model="gpt2-14b", precision="bf61", loss_scale=4096, parallel={"tensor": 3}, global_batch=7
    )
    assert set(faults_of(raw, 8)) == {"train.model", "train.precision", "train.parallel"}
    raw = raw_config(precision="bf16", loss_scale={"initial": 4096})
    assert set(faults_of(raw)) == {"train.loss_scale"}


@pytest.mark.parametrize(
    ("given", "gigabytes"),
    [(32, 32.0), ("32GB", 32.0), ("64 GiB", 68.719476736), ("500 MB", 0.5), ("32", None)],
)
def test_memory_has_units(raw_config: Make, given: object, gigabytes: float | None) -> None:
    config, faults = try_config(raw_config(hardware={"memory": given}), 1)
    assert [fault.key for fault in faults] == ([] if gigabytes else ["train.hardware.memory"])
    assert config.hardware.memory == (gigabytes or 0)


def test_a_whole_number_written_as_a_float_says_how_to_write_it(raw_config: Make) -> None:
    assert "write 8" in faults_of(raw_config(steps=8.0))["train.steps"]


def test_reading_raises_all_faults_in_one_error(raw_config: Make) -> None:
    with pytest.raises(ConfigFaults) as caught:
        read_config(raw_config(a=1, b=2))
    assert len(caught.value.faults) == 2 and caught.value.exit_code == 2


def test_a_config_survives_its_own_json(raw_config: Make) -> None:
    config = read_config(raw_config(native={"attention": "reference"}))
    assert read_config(config.as_json()) == config


def test_a_split_is_normalised_and_padded() -> None:
    assert split_fractions("3,1") == [0.75, 0.25, 0.0]
    with pytest.raises(ValueError, match="not all zero"):
        split_fractions("0,0")


def test_a_word_or_a_number_says_a_whole_section(raw_config: Make) -> None:
    short = {"parallel": "auto", "recompute": "full", "loss_scale": 4096}
    config, _ = try_config(raw_config(**short), 1)
    # Auto is what it chose.
    assert config.parallel == ParallelConfig() and config.recompute.mode == "full"
    assert (config.loss_scale.initial, config.loss_scale.dynamic) == (4096.0, False)


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_fp16_goes_with_every_engine_zero_stage_and_device(
    engine: str, zero: int, kind: str, raw_config: Make
) -> None:
    raw = raw_config(engine=engine, zero=zero, precision="fp16", hardware={"kind": kind})
    assert not faults_of(raw, world=4)


RAMP = {"start": 4, "increment": 4, "samples": 100}
LAYOUTS: list[tuple[int, dict[str, Any], str, str]] = [
    (6, {"parallel": {"tensor": 4}}, "train.parallel", "tensor x pipeline must divide 6"),
    (4, {"parallel": {"tensor": 4}}, "train.parallel.tensor", "heads: 2 is not divisible by 4 ranks"),
    (
        2,
        {"parallel": {"tensor": 2}, "model": {"hidden": 32, "heads": 4, "ffn": 33}},
        "train.parallel.tensor",
        "ffn",
    ),
    (2, {"parallel": {"sequence": True}}, "train.parallel.sequence", "tensor is 1"),
    (4, {"parallel": {"pipeline": 4}}, "train.parallel.pipeline", "2 layers"),
    (2, {"parallel": {"pipeline": 2, "layers": [2, 1]}}, "train.parallel.layers", "add up to 2"),
    (3, {"parallel": {"pipeline": 3, "layers": [1, 0, 1]}}, "train.parallel.layers", "without a layer"),
    (1, {"parallel": {"interleave": 2}}, "train.parallel.interleave", "no pipeline"),
    (2, {"parallel": {"pipeline": 2}, "engine": "deepspeed", "zero": 2}, "train.zero", "0 and 1 only"),
    (1, {"recompute": {"mode": "selective", "every": 2}}, "train.recompute.every", "mode: full"),
    (1, {"recompute": {"mode": "full", "split": True}}, "train.recompute.split", "leave it out"),
    (1, {"recompute": {"mode": "full", "every": 3}}, "train.recompute.every", "use 2 or less"),
    (1, {"loss_scale": 4096}, "train.loss_scale", "fp16's"),
    (1, {"optimizer": {"warmup": "60%", "decay": "0 steps"}}, "train.optimizer.decay", "is 0"),
    (1, {"optimizer": {"warmup": "64 samples"}}, "train.optimizer.warmup", "leaves nothing"),
    (1, {"optimizer": {"warmup": "1%", "warmup_steps": 3}}, "train.optimizer.warmup", "keep one"),
    (1, {"batch_ramp": {"start": 4}}, "train.batch_ramp", "increment and samples"),
    (2, {"profile": {"repeat": 1, "ranks": [0, 2]}}, "train.profile.ranks", "there is no rank 2"),
    (1, {"profile": {"repeat": 1, "ranks": []}}, "train.profile.ranks", "names no rank"),
    (1, {"profile": {"repeat": 1, "active": 9}}, "train.profile", "do not fit into 8"),
    (
        2,
        {"batch_ramp": RAMP, "parallel": {"pipeline": 2, "interleave": 2}, "micro_batch": 4},
        "train.batch_ramp.start",
        "multiple of 8",
    ),
    (1, {"batch_ramp": {**RAMP, "start": 3}}, "train.batch_ramp.start", "multiple of 2"),
    (1, {"batch_ramp": {**RAMP, "increment": 6}}, "train.batch_ramp.increment", "divisor"),
    (1, {"model": {"heads": 4, "query_groups": 3}}, "train.model.query_groups", "divisor"),
    (1, {"model": {"kind": "glm", "rotary": True, "swiglu": True}}, "train.model.rotary", "learned"),
    (1, {"model": {"hidden": 12, "heads": 4, "rotary": True}}, "train.model.rotary", "pairs"),
    (1, {"model": {"sequence": 64, "positions": 32}}, "train.model.positions", "64 or more"),
]


@pytest.mark.parametrize(("world", "changes", "key", "says"), LAYOUTS)
def test_what_cannot_be_laid_out_is_refused_with_what_can(
    raw_config: Make, world: int, changes: dict[str, Any], key: str, says: str
) -> None:
    found = {fault.key: str(fault) for fault in try_config(raw_config(**changes), world)[1]}
    assert says in found[key]


def test_ranks_that_share_samples_need_a_plain_gpt_and_a_sequence_that_divides() -> None:
    raw = {"steps": 1, "data": {"prefix": "x"}, "parallel": {"context": 3}}
    model = {"name": "llama-tiny", "window": 5, "experts": 2}
    _, faults = try_config({**raw, "model": model}, 6)
    found = [fault.what for fault in faults if fault.key == "train.parallel.context"]
    assert len(found) == 3 and "128 tokens are not divisible by 3 ranks" in found[0]
    config, faults = try_config({**raw, "model": {"name": "llama-tiny", "sequence": 126}}, 6)
    assert not faults and config.layout(6).readers == 2 and config.global_batch == 16


def test_a_length_becomes_steps_rounded_up(raw_config: Make) -> None:
    raw = raw_config()
    del raw["steps"]
    sequence = raw["model"]["sequence"]
    for length, steps in {
        f"{8 * sequence * 3} tokens": 3,
        f"{8 * sequence * 3 + 1} tokens": 4,
        "17 samples": 3,
        "5 steps": 5,
    }.items():
        config, faults = try_config({**raw, "length": length}, 1)
        assert (config.steps, faults) == (steps, []), length
    # The document's 125M: 2.5 billion tokens are 4,769 steps.
    model = {"name": "gpt3-125M", "vocab": 60}
    config, _ = try_config({**raw, "model": model, "global_batch": 256, "length": "2.5B tokens"}, 1)
    assert config.steps == 4769
    assert read_config(config.as_json()) == config


def test_epochs_are_counted_in_the_corpus(raw_config: Make) -> None:
    raw = raw_config(length="2 epochs")
    del raw["steps"]
    config, faults = try_config(raw, 1)
    assert not faults
    plan = check({"train": raw, "world_size": 1, "check_data": True})
    assert plan["summary"]["epochs"] == pytest.approx(2, abs=8 / config.steps)
    assert plan["summary"]["steps"] == config.steps > 8
    ramped, _ = try_config({**raw, "batch_ramp": {"start": 4, "increment": 4, "samples": 40}}, 1)
    assert ramped.steps > config.steps


LENGTHS = [
    ({"length": "2.5B tokens", "steps": 3}, "in addition to `steps`"),
    ({"length": "0 tokens"}, "too little"),
    ({"length": "1%"}, "2 epochs"),
    ({"length": 5}, "2 epochs"),
    ({"length": "1 epoch", "data": {"prefix": "nowhere"}}, "missing or empty"),
    (
        {"length": "1 epoch", "model": {"name": "glm-tiny"}, "data": {"prefix": "x", "eod": 1}},
        "no fixed length",
    ),
]


@pytest.mark.parametrize(("changes", "says"), LENGTHS)
def test_a_length_that_says_nothing_is_refused(raw_config: Make, changes: dict[str, Any], says: str) -> None:
    raw = raw_config()
    if "steps" not in changes:
        del raw["steps"]
    assert says in faults_of({**raw, **changes})["train.length"]
    answer = check({"train": {**raw, **changes}, "world_size": 1})
    assert not answer["ok"]


def test_schedules_that_cannot_end_are_refused(raw_config: Make) -> None:
    found = faults_of(raw_config(optimizer={"schedule": "exponential", "power": 2.0}))
    assert (
        "never reaches" in found["train.optimizer.min_lr"] and "polynomial" in found["train.optimizer.power"]
    )


def test_a_choice_that_may_be_left_out_is_not_listed_as_nothing(raw_config: Make) -> None:
    faults = try_config(raw_config(tune={"task": "nonsense"}), 1)[1]
    assert any("one of copa, choice" in str(fault) for fault in faults)
