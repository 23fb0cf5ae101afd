"""Configurations of MindFormers: the model and the recomputation that they ask for, or why they are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterctl.document import parse_document
from clusterctl.errors import InputFaults
from clusterctl.migrate import read
from clusterctl.migrate.translate import translate
from clusterctl.migrate.translation import Translation
from clusterctl.migrate.write import job_text
from trainer.plan.summary import check

LLAMA = {"type": "LlamaConfig", "seq_length": 4096, "eos_token_id": 2, "compute_dtype": "bfloat16"}


def converted(
    folder: Path, model: dict[str, Any], arch: str = "LlamaForCausalLM", **more: Any
) -> Translation:
    value = {
        "runner_config": {"epochs": 2, "batch_size": 1},
        "parallel_config": {"data_parallel": 8, "model_parallel": 1, "pipeline_stage": 1},
        "model": {"model_config": model, "arch": {"type": arch}},
        **more,
    }
    (folder / "run.yaml").write_text(json.dumps(value))
    return translate(read.read(str(folder / "run.yaml")))


# The sizes are those of the published models.
@pytest.mark.parametrize(
    ("model", "more", "billions"),
    [
        ({"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "multiple_of": 256}, {}, 6.74),
        (
            {"hidden_size": 8192, "num_layers": 80, "num_heads": 64, "n_kv_heads": 8, "multiple_of": 256}
            | {"ffn_dim_multiplier": 1.3},
            {},
            68.98,
        ),
        (
            {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "n_kv_heads": 8, "vocab_size": 128256}
            | {"intermediate_size": 14336, "theta": 500000},
            {},
            8.03,
        ),
        (
            {"hidden_size": 3584, "num_layers": 28, "num_heads": 28, "n_kv_heads": 4, "vocab_size": 152064}
            | {"intermediate_size": 18944, "qkv_has_bias": True, "eos_token_id": [151645, 151643]},
            {},
            7.62,
        ),
        (
            {
                "hidden_size": 4096,
                "num_layers": 32,
                "num_heads": 32,
                "n_kv_heads": 8,
                "intermediate_size": 14336,
            },
            {"moe_config": {"expert_num": 8, "num_experts_chosen": 2}},
            46.70,
        ),
    ],
    ids=["llama2-7b", "llama2-70b", "llama3-8b", "qwen2-7b", "mixtral-8x7b"],
)
def test_a_model_of_llamas_family_has_its_size(
    model: dict[str, Any], more: dict[str, Any], billions: float, tmp_path: Path
) -> None:
    text = job_text(converted(tmp_path, {**LLAMA, **model}, **more))
    train = {
        key: value for key, value in parse_document(text, "job").value["train"].items() if key != "length"
    }
    summary: Any = check({"train": {**train, "steps": 10}, "world_size": 8})["summary"]
    assert summary["parameters"] / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("BloomLMHeadModel", "BloomConfig"),
        ("Baichuan13BV2ForCausalLM", "LlamaConfig"),
        ("GPT2ForSequenceClassification", "GPT2Config"),
    ],
)
def test_an_architecture_that_is_not_trained_here_is_refused(arch: str, config: str, tmp_path: Path) -> None:
    with pytest.raises(InputFaults, match=f"{arch} is not trained here"):
        converted(tmp_path, {"type": config, "hidden_size": 64, "num_layers": 2, "num_heads": 4}, arch)


def test_recomputation_of_some_layers_and_exchanges_is_named(tmp_path: Path) -> None:
    switches = {"recompute": [3, 2, 0, 0], "select_recompute": [1, 0], "select_comm_recompute": [1, 0]}
    switches |= {"mp_comm_recompute": True, "parallel_optimizer_comm_recompute": False}
    found = converted(
        tmp_path,
        {**LLAMA, "hidden_size": 64, "num_layers": 8, "num_heads": 4},
        recompute_config=switches,
        optimizer={"type": "AdamW", "betas": [0.9, 0.95]},
        runner_wrapper={"use_clip_grad": True, "max_grad_norm": 0.5},
    )
    assert found.values["train.recompute.mode"].value == "full"
    assert any("here all layers are recomputed" in note for note in found.notes)
    assert dict(found.unmapped)["recompute_config.select_comm_recompute"].startswith(
        "exchanges of a recomputed"
    )
    assert found.values["train.optimizer.betas"].value == [0.9, 0.95]
    assert found.values["train.optimizer.clip"].value == 0.5
    off = converted(
        tmp_path,
        {**LLAMA, "hidden_size": 64, "num_layers": 8, "num_heads": 4},
        recompute_config={"recompute": False, "select_recompute": [[0, 0], [1, 2]]},
    )
    assert off.values["train.recompute.mode"].value == "selective"


def test_llama3s_scaling_is_read_with_its_numbers(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    model = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "extend_method": "LLAMA3"}
    values = converted(tmp_path, {**LLAMA, **model, "scaling_factor": scaling}).values
    assert values["train.model.rope.scaling"].value == "llama3"
    assert values["train.model.rope.factor"].value == 8 and values["train.model.rope.original"].value == 8192
    with pytest.raises(InputFaults, match="no scaling 'ntk'"):
        converted(tmp_path, {**LLAMA, **model, "extend_method": "NTK", "scaling_factor": 2.0})
    plain = converted(tmp_path, {**LLAMA, **model, "extend_method": "None", "scaling_factor": 1.0}).values
    assert "train.model.rope.factor" not in plain
