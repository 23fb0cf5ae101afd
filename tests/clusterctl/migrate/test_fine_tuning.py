"""A folder of weights becomes the job that fine-tunes its model: nothing of the model is typed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from clusterctl.document import parse_document
from clusterctl.migrate.fine_tuning import tuned
from clusterctl.migrate.write import job_text
from clusterctl.wire.results import Weights
from tests.clusterctl.conftest import Run
from tests.support.building import small_tokenizer
from trainer.plan.check_init import check_init
from trainer.plan.resolve import plan_config

# Sizes that no preset has.
CONFIG = {
    **{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 300, "hidden_size": 16},
    **{"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"intermediate_size": 24, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 50_000.0},
    **{"tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False},
}


def write_folder(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    layer = {
        "self_attn.q_proj": (32, 16),
        "self_attn.k_proj": (16, 16),
        "self_attn.v_proj": (16, 16),
        "self_attn.o_proj": (16, 32),
        "self_attn.q_norm": (8,),
        "self_attn.k_norm": (8,),
        "mlp.gate_proj": (24, 16),
        "mlp.up_proj": (24, 16),
        "mlp.down_proj": (16, 24),
        "input_layernorm": (16,),
        "post_attention_layernorm": (16,),
    }
    shapes = {f"layers.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"embed_tokens": (300, 16), "norm": (16,)}
    tensors = {f"model.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    small_tokenizer(folder).rename(folder / "tokenizer.json")


def test_a_folder_of_hugging_face_becomes_the_job_that_tunes_it(command_line: Run, tmp_path: Path) -> None:
    write_folder(tmp_path / "data" / "own")
    code, _, err = command_line("init", "--from", "data/own")
    assert code == 0, err
    assert "wrote own-sft.yaml; then: clusterctl plan own-sft.yaml" in err
    job = parse_document((tmp_path / "own-sft.yaml").read_text(), "job.yaml").value
    train = job["train"]
    assert job["data"] == "./data" and train["init"] == {"source": "{data}/own"}
    assert train["data"]["tokenizer"] == "{data}/own/tokenizer.json"
    # The folder's positions, not those of a preset.
    assert (train["model"]["positions"], train["model"]["sequence"], train["model"]["vocab"]) == (
        512,
        512,
        300,
    )
    assert train["model"]["rope"] == {"base": 50_000.0} and train["model"]["qk_norm"] is True
    train["init"]["source"], train["steps"] = "data/own", 3
    train["data"]["tokenizer"] = "data/own/tokenizer.json"
    planned = plan_config(train, 1)
    assert not planned.faults
    faults, notes = check_init(planned.config, tmp_path)
    assert not faults and "begins with the weights" in notes[0]


def test_a_folder_in_the_current_one_is_pushed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    result = tuned(Path("own"), Weights({"layers": 1}, 4096, ""))
    job = parse_document(job_text(result), "job.yaml").value
    assert (job["data"], job["train"]["init"]["source"]) == ("./own", "{data}")
    # Rows are shorter than what the model can read.
    assert (job["train"]["model"]["sequence"], job["train"]["model"]["positions"]) == (2048, 4096)


def test_a_folder_without_weights_is_refused(command_line: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = command_line("init", "--from", "empty")
    assert code == 2 and "empty" in err and "Traceback" not in err


def test_a_command_longer_than_any_path_is_no_folder(command_line: Run) -> None:
    options = " ".join(f"--data-path corpus_{number}" for number in range(400))
    code, out, err = command_line("init", "--from", f"pretrain_gpt.py --num-layers 2 {options}", "--dry-run")
    assert code == 0 and "layers: 2" in out, err
