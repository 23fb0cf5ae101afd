"""Options of newer trainers: experts, stages after the pretraining, TOML files; and models that are refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from clusterctl.document import parse_document
from clusterctl.errors import UsageError
from clusterctl.migrate import read
from clusterctl.migrate.translate import translate
from clusterctl.migrate.write import job_text
from trainer.plan.resolve import plan_config

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1"
    " --global-batch-size 16 --train-iters 5 --lr 1e-4 --attention-dropout 0.0 --hidden-dropout 0.0"
)


def made(text: str, ranks: int = 8) -> tuple[Any, list[str]]:
    """Return the train part of a job, which the trainer must accept, and the notes."""
    result = translate(read.read(text))
    train = parse_document(job_text(result), "job.yaml").value["train"]
    planned = plan_config({"steps": 5, **train}, ranks)
    assert not planned.faults, job_text(result)
    return train, result.notes


def test_experts_with_one_number_in_every_layer() -> None:
    experts = (
        "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-layer-freq '([1]*2)' --swiglu"
        " --moe-grouped-gemm --first-k-dense-replace 0 --n-shared-experts 2 --deepspeed"
    )
    train, notes = made(f"pretrain_gpt.py {MODEL} {experts}")
    assert {key: train["model"][key] for key in ("experts", "top_k", "ffn", "shared_ffn")} == {
        **{"experts": 8, "top_k": 2, "ffn": 96, "shared_ffn": 192},
    }
    assert "engine" not in train and any("engine torch is used" in note for note in notes)
    train, _ = made(f"pretrain_gpt.py {MODEL} --num-experts 1 --topk 1")
    assert not {"experts", "top_k"} & set(train["model"])


def test_a_layout_that_does_not_go_together_is_decided_and_said() -> None:
    train, notes = made(f"pretrain_gpt.py {MODEL} --context-parallel-size 2 --reset-attention-mask")
    assert "parallel" not in train and train["data"]["reset_attention"] is True
    assert any("--context-parallel-size is left out" in note for note in notes)
    train, notes = made(f"pretrain_gpt.py {MODEL} --ds-sequence-parallel-size 2 --deepspeed")
    assert train["parallel"] == {"context": 2} and "engine" not in train


def test_stages_after_the_pretraining_become_tasks() -> None:
    lora = "--lora-r 8 --lora-alpha 16 --lora-target-modules linear_qkv linear_fc1 --load /w --finetune"
    train, _ = made(
        f"posttrain_gpt.py {MODEL} --swiglu --stage sft --is-instruction-dataset --data-path d {lora}"
    )
    assert train["tune"] == {
        **{"task": "chat", "train": "{data}/train.jsonl"},
        "lora": {"rank": 8, "alpha": 16.0, "targets": ["qkv", "gate_up"]},
    }
    assert train["init"] == "/w"
    train, _ = made(
        f"posttrain_gpt.py {MODEL} --stage dpo --dpo-beta 0.2 --tensor-model-parallel-size 2 --sequence-parallel"
    )
    assert (
        train["tune"]["task"] == "dpo" and train["tune"]["beta"] == 0.2 and train["parallel"] == {"tensor": 2}
    )


def test_rotary_positions_and_windows() -> None:
    rope = "--position-embedding-type rope --rope-scaling-type llama3 --rope-scaling-factor 8 --low-freq-factor 1"
    train, _ = made(
        f"pretrain_gpt.py {MODEL} {rope} --original-max-position-embeddings 32 --window-size '(15,0)'"
    )
    assert train["model"]["rope"] == {"factor": 8.0, "low_freq": 1.0, "original": 32, "scaling": "llama3"}
    # Megatron counts the tokens before the own one.
    assert train["model"]["window"] == 16


REFUSED = [
    ("--multi-latent-attention --kv-lora-rank 512", "latent projections"),
    ("--num-experts 8 --first-k-dense-replace 3", "only some of its layers have experts"),
    ("--num-experts 64 128", "one number of experts"),
    ("--num-experts 8 --moe-router-score-function sigmoid", "is not softmax"),
    ("--hybrid-layer-pattern M-M*", "state space"),
    ("--kd --load-teacher /t", "distillation"),
    ("--rope-scaling-type longrope", "no scaling 'longrope'"),
    ("--stage prm", "no task for 'prm'"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_a_model_that_is_not_trained_here_is_refused_by_its_option(options: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        translate(read.read(f"pretrain_gpt.py {MODEL} {options}"))
    assert "the command:1 --" in str(caught.value)


def test_a_task_or_a_number_that_is_none_is_an_error_and_no_traceback() -> None:
    for wrong in (
        "--task rte --epochs 3",
        "--task copa --epochs many",
        "--task copa --epochs $N --data-dir d",
    ):
        try:
            translate(read.read(f"finetune_glm.py {MODEL} {wrong}"))
        except UsageError as error:
            assert "rte" in str(error) or "many" in str(error)
    with pytest.raises(UsageError, match="its configuration is Python"):
        translate(read.read("torchrun -m torchtitan.train --module llama3 --config llama3_8b"))


TITAN = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
lr = 3e-4
[lr_scheduler]
warmup_steps = 20
[training]
local_batch_size = 2
seq_len = 4096
steps = 100
[parallelism]
tensor_parallel_degree = 2
data_parallel_shard_degree = -1
[checkpoint]
enable = false
interval = 500
[activation_checkpoint]
mode = "full"
[validation]
enable = false
freq = 5
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no reader of TOML")
def test_a_toml_file_of_torchtitan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama.toml").write_text(TITAN)
    Path("run.sh").write_text(
        'CONFIG_FILE=${CONFIG_FILE:-"./llama.toml"}\n'
        'torchrun -m torchtitan.train --job.config_file ${CONFIG_FILE} "$@"\n'
    )
    for text in ("llama.toml", "run.sh"):
        train, _ = made(text)
        assert train["model"] == {"name": "llama3.1-8B", "sequence": 4096}
        assert (train["micro_batch"], train["steps"], train["zero"], train["recompute"]) == (
            2,
            100,
            3,
            {"mode": "full"},
        )
        assert train["optimizer"]["lr"] == 3e-4 and train["parallel"] == {"tensor": 2} and "save" not in train
    Path("other.toml").write_text('[model]\nname = "flux"\nflavor = "dev"\n')
    with pytest.raises(UsageError, match="there is no model flux dev here"):
        made("other.toml")


def test_a_sentencepiece_model_becomes_its_tokenizer_json() -> None:
    command = "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --tokenizer-model /x/tok.model"
    value = translate(read.read(command)).values["train.data.tokenizer"]
    assert value.value == "{data}/tokenizer.json" and "which transformers writes" in value.origin


@pytest.mark.parametrize(("there", "zero"), [(True, 1), (False, None)])
def test_a_configuration_made_from_a_template_that_is_missing_is_named(
    there: bool, zero: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if there:
        (tmp_path / "template.json").write_text('{"zero_optimization": {"stage": STAGE}}')
    (tmp_path / "start.sh").write_text(
        "CONFIG=made.json\nsed 's/STAGE/1/' template.json > $CONFIG\n"
        f"deepspeed pretrain_gpt.py {MODEL} --deepspeed --deepspeed_config $CONFIG\n"
    )
    found = translate(read.read("start.sh"))
    assert getattr(found.values.get("train.zero"), "value", None) == zero
    named = "made.json is made by $(cat template.json), which cannot be read"
    assert any(named in note for note in found.notes) != there
