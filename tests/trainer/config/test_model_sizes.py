from __future__ import annotations

import pytest

from trainer.config.model import ModelConfig
from trainer.config.model_sizes import SIZES
from trainer.plan.resolve import plan_config

# Billions, as published or derived from the shapes; GPT-2's own exactly.
BILLIONS = {
    "gpt3-125M": 0.125,
    "gpt2-345M": 0.355,
    "gpt2-1536x16": 0.534,
    "gpt2-1.3B": 1.316,
    "gpt2-2304x24": 1.651,
    "gpt2-2.7B": 2.652,
    "gpt2-3.7B": 3.786,
    "glm-10B": 9.88,
    "gpt2-13B": 12.85,
    "gpt2-52B": 51.97,
    "gpt3-175B": 174.6,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_the_named_sizes_have_the_known_parameter_counts(name: str) -> None:
    assert SIZES[name].parameters() / 1e9 == pytest.approx(BILLIONS[name], rel=2e-3)


def test_gpt_2s_sizes_are_counted_to_the_last_number() -> None:
    assert SIZES["gpt2-124M"].parameters() == SIZES["gpt2-117M"].parameters() == 124_439_808
    assert SIZES["gpt2-345M"].parameters() == 354_823_168
    assert SIZES["gpt2-774M"].parameters() == 774_030_080 and SIZES["gpt2-1.5B"].parameters() == 1_557_611_200
    assert 0.9e6 < SIZES["gpt-tiny"].parameters() < 1.2e6
    assert SIZES["glm-tiny"].parameters() == SIZES["gpt-tiny"].parameters() + (128 + 2) * 128


def test_what_is_off_by_default_changes_the_count_as_its_matrices_do() -> None:
    plain = ModelConfig(layers=1, hidden=192, heads=6)
    grouped = ModelConfig(layers=1, hidden=192, heads=6, query_groups=2)
    # Keys and values of four heads.
    assert plain.parameters() - grouped.parameters() == 2 * 4 * 32 * 193
    assert (
        plain.parameters() - ModelConfig(layers=1, hidden=192, heads=6, rotary=True).parameters() == 128 * 192
    )
    gated = ModelConfig(layers=1, hidden=192, heads=6, swiglu=True)
    assert (gated.inner, gated.up_width) == (512, 1024)


def test_the_vocabulary_is_padded_to_what_tensor_parallel_ranks_can_share() -> None:
    model = SIZES["gpt2-124M"]
    assert [model.padded(tensor) for tensor in (1, 2, 4, 8)] == [50304, 50432, 50688, 51200]


def faults_of(model: object, **hardware: object) -> list[str]:
    data = {"prefix": "x", "tokenizer": "y"}
    raw = {"model": model, "steps": 1, "micro_batch": 1, "data": data, "hardware": hardware}
    return [str(fault) for fault in plan_config(raw, 1).faults]


def test_names_of_models_and_chips_are_known_in_large_and_small_letters() -> None:
    for name in ("gpt2-345m", "GPT2-1.5b", "gpt2-774M", "gpt2-355M"):
        assert not faults_of(name) and not faults_of({"name": name, "dropout": 0.1})
    for chip in ("910b", "h20", "H200", "950pr"):
        assert not faults_of("gpt2-124M", chip=chip)
    # YAML reads 950 as a number.
    assert faults_of("gpt2-124M", chip=950) == ["train.hardware.chip: is '950'; there are 950PR and 950DT"]
    assert (
        "did you mean" in faults_of("gpt2-346M")[0]
        and "unknown '911'" in faults_of("gpt2-124M", chip="911")[0]
    )
