"""The families of Hugging Face: transformers' own folders in, ours out, judged by transformers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clusterctl.wire.requests import ExportRequest
from tests.support.weights import assert_equal, checkpoint, logits_of, random_state, state_of
from trainer.checkpoint.manifest import Origin
from trainer.checkpoint.store import verify
from trainer.config.model_sizes import sized
from trainer.config.rope import RopeConfig
from trainer.errors import CheckpointError, InputError
from trainer.generate.loading import load_model
from trainer.weights.contents import Contents
from trainer.weights.convert import export_weights, import_weights
from trainer.weights.families.registry import FAMILIES
from trainer.weights.files.quantized import as_numbers
from trainer.weights.huggingface import named_by
from trainer.weights.lazy import in_memory

SHARED = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 48,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": kind, **more}}


LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
HALF = {"partial_rotary_factor": 0.5}
QWEN3_MOE = {
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12, "rope_theta": 5e5}
ABSENT = "absent"
GROUPED = {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 28,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
OSS = {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 28,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 12,
    },
}
DEEPSEEK = {
    **GROUPED,
    "num_key_value_heads": 4,
    "head_dim": ABSENT,
    "kv_lora_rank": 20,
    "q_lora_rank": 36,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
}
MSCALE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 12,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
FALCON = {"new_decoder_architecture": True, "num_key_value_heads": ABSENT, "intermediate_size": ABSENT}
GEMMA = {"num_key_value_heads": 2, "head_dim": 12, "hidden_size": 60, "query_pre_attn_scalar": 12}


def by_layers(full: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary positions of models whose layers with a window have their own."""
    own = {"rope_type": "default", "rope_theta": 10_000.0}
    return {"rope_parameters": {"full_attention": {"rope_theta": 1e6, **full}, "sliding_attention": own}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3.1": ("Llama", {"num_key_value_heads": 2, **rope("llama3", factor=8.0, **LLAMA_3)}),
    "llama linear": ("Llama", rope("linear", factor=2.0)),
    "llama dynamic": ("Llama", {"max_position_embeddings": 16, **rope("dynamic", factor=2.0)}),
    "llama yarn": ("Llama", rope("yarn", factor=4.0, original_max_position_embeddings=12)),
    "llama tied": ("Llama", {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 7}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 24}),
    "gpt-neox": ("GPTNeoX", rope(partial_rotary_factor=0.25)),
    "gpt-neox serial": ("GPTNeoX", {"use_parallel_residual": False, "hidden_act": "gelu_new"}),
    "starcoder2": ("Starcoder2", {"num_key_value_heads": 2, "sliding_window": 9}),
    "starcoder2 untied": ("Starcoder2", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "glm-4": ("Glm", {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True, **rope(**HALF)}),
    "glm-4-0414": (
        "Glm4",
        {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": False, **rope(**HALF)},
    ),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "sliding_window": 9, **rope(**HALF)}),
    "phi3 tied": ("Phi3", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "olmo2 tied": ("Olmo2", {"tie_word_embeddings": True}),
    "olmo3": ("Olmo3", {"sliding_window": 9, "num_hidden_layers": 5, **by_layers(YARN)}),
    "smollm3": ("SmolLM3", {"num_key_value_heads": 2, "num_hidden_layers": 5}),
    "smollm3 untied": (
        "SmolLM3",
        {"no_rope_layers": [0, 1], "tie_word_embeddings": False, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "falcon": ("Falcon", {**FALCON, "num_kv_heads": 2}),
    "falcon untied": (
        "Falcon",
        {**FALCON, "num_kv_heads": 4, "bias": True, "ffn_hidden_size": 90, "tie_word_embeddings": False},
    ),
    "gemma2": ("Gemma2", {**GEMMA, "sliding_window": 9, "query_pre_attn_scalar": 21}),
    "gemma2 untied": (
        "Gemma2",
        {
            **GEMMA,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
            "layer_types": ["full_attention"] * 2,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **GEMMA,
            "sliding_window": 7,
            "num_hidden_layers": 7,
            **by_layers({"rope_type": "linear", "factor": 8.0}),
        },
    ),
    "gemma3 untied": (
        "Gemma3Text",
        {
            **GEMMA,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 5,
            "final_logit_softcapping": 3.0,
        },
    ),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": None}),
    "glm4-moe": ("Glm4Moe", {**GROUPED, "use_qk_norm": True, "first_k_dense_replace": 1}),
    "deepseek-v3": ("DeepseekV3", {**DEEPSEEK, "rope_parameters": MSCALE}),
    "deepseek-v3 tied": (
        "DeepseekV3",
        {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "rope_parameters": {**MSCALE, "mscale_all_dim": 0.707, "mscale": 0.707},
        },
    ),
    "deepseek-v2 tied": (
        "DeepseekV2",
        {**DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "tie_word_embeddings": True},
    ),
    "gpt-oss": ("GptOss", {**OSS, "num_hidden_layers": 3, "sliding_window": 9}),
    "gpt-oss tied": ("GptOss", {**OSS, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True}),
    "glm4-moe tied": (
        "Glm4Moe",
        {
            **GROUPED,
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 24, "norm_topk_prob": True, **QWEN3_MOE}),
    "qwen3-moe without renormalizing": ("Qwen3Moe", {"head_dim": 16, "norm_topk_prob": False, **QWEN3_MOE}),
}


# The families whose gradients are compared.
COMPARED = (
    "deepseek-v3",
    "deepseek-v2",
    "glm4-moe",
    "gpt-oss",
    "phi3",
    "olmo2",
    "olmo3",
    "smollm3",
    "falcon",
    "gemma2",
    "gemma3",
)


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip(
        "transformers", reason="transformers is not installed (pip install -e '.[judges]')"
    )


def peer(transformers: Any, name: str) -> Any:
    """Return a model of transformers with random weights, biases and norms too."""
    kind, given = CASES[name]
    torch.manual_seed(5)
    values = {"num_key_value_heads": 4, **SHARED, **given}
    config = getattr(transformers, f"{kind}Config")(
        **{key: values[key] for key in values if values[key] != ABSENT}
    )
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_a_family_comes_in_and_goes_out_unchanged(tmp_path: Path, transformers: Any, name: str) -> None:
    model = peer(transformers, name)
    model.save_pretrained(tmp_path / "hf")
    done = import_weights(tmp_path / "hf", tmp_path / "ours")
    assert done.source.family == model.config.model_type
    tokens = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(logits_of(tmp_path / "ours", tokens), expected, rtol=1e-5, atol=1e-5)
    # Back: the same tensors bit for bit, and a config that computes the same.
    export_weights(tmp_path / "ours", tmp_path / "back", "hf", ExportRequest())
    assert_equal(load_file(tmp_path / "back/model.safetensors"), load_file(tmp_path / "hf/model.safetensors"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(again) is type(model)
    with torch.no_grad():
        assert (again(tokens).logits - expected).abs().max() < 1e-6


@pytest.mark.parametrize("name", [name for name in CASES if name.split()[0] in COMPARED])
def test_the_gradients_are_those_of_transformers(tmp_path: Path, transformers: Any, name: str) -> None:
    model = peer(transformers, name)
    model.save_pretrained(tmp_path / "hf")
    import_weights(tmp_path / "hf", tmp_path / "ours")
    tokens = torch.randint(0, 128, (2, 41), generator=torch.Generator().manual_seed(2))
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    found = verify(tmp_path / "ours")
    own = load_model(found)
    for parameter in own.parameters():
        parameter.requires_grad_()
    own_loss: Any = own(tokens[:, :-1], tokens[:, 1:])  # type: ignore[operator]
    assert own_loss.item() == pytest.approx(loss.item(), abs=1e-6)
    own_loss.backward()
    slopes = {
        name: parameter.grad for name, parameter in own.named_parameters() if parameter.grad is not None
    }
    vocab = own.config.vocab
    held = {
        key: in_memory(slope[:vocab] if "tokens" in key or "output" in key else slope)
        for key, slope in slopes.items()
    }
    contents = Contents(own.config, held, Origin("test", ""))
    family = FAMILIES[model.config.model_type]
    mapped = named_by(family, contents).weights
    wanted = {key: parameter.grad for key, parameter in model.named_parameters()}
    # transformers joins the experts' matrices.
    split = {key: slope for key, slope in wanted.items() if ".experts." not in key}
    assert split.keys() <= mapped.keys() and len(split) > 10
    for key, slope in split.items():
        torch.testing.assert_close(mapped[key].whole(), slope, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("llama3.1", {"rope_theta": 10_000.0, "rope_scaling": {"type": "llama3", "factor": 8.0, **LLAMA_3}}),
        ("llama", {"rope_theta": 10_000.0, "rope_scaling": None}),
        ("gpt-neox", {"rotary_pct": 0.25, "rotary_emb_base": 10_000}),
        ("glm-4", {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}),
    ],
)
def test_the_old_spelling_of_rotary_positions_is_understood(
    tmp_path: Path, transformers: Any, name: str, old: dict[str, Any]
) -> None:
    peer(transformers, name).save_pretrained(tmp_path / "hf")
    new = import_weights(tmp_path / "hf", tmp_path / "new", dry_run=True)
    file = tmp_path / "hf/config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    file.write_text(json.dumps({**config, **old}))
    assert import_weights(tmp_path / "hf", tmp_path / "old", dry_run=True).model == new.model


# -- without transformers -------------------------------------------------------------------------------------

BACK = {"llama2-7B": "llama", "mistral-7B-v0.1": "mistral", "qwen2.5-0.5B": "qwen2", "qwen3-0.6B": "qwen3"}
BACK |= {"pythia-70M": "gpt_neox", "starcoder2-3B": "starcoder2", "glm4-9B": "glm", "glm4-9B-0414": "glm4"}


@pytest.mark.parametrize("name", BACK)
def test_our_named_sizes_are_written_as_their_family_and_read_again(tmp_path: Path, name: str) -> None:
    small = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 128, "sequence": 48, "positions": 0}
    groups = 4 if name in ("llama2-7B", "pythia-70M") else 2
    dropout = 0.0 if name != "starcoder2-3B" else 0.1
    model = sized(name, **small, head_dim=0, query_groups=groups % 4, dropout=dropout)
    state = random_state(model)
    source = checkpoint(tmp_path / "ours", model, state)
    export_weights(source, tmp_path / "hf", "hf", ExportRequest())
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == BACK[name]
    done = import_weights(tmp_path / "hf", tmp_path / "again")
    assert_equal(state_of(tmp_path / "again"), state)
    changed = {
        key for key, value in asdict(done.model).items() if value != getattr(model, key) and key != "rope"
    }
    assert not changed


def test_kimi_k2_has_the_layers_of_deepseek_v3(tmp_path: Path) -> None:
    latent: dict[str, Any] = {"kv_rank": 20, "q_rank": 24, "rope_dim": 8, "value_dim": 12, "head_dim": 20}
    experts: dict[str, Any] = {"experts": 6, "top_k": 2, "scoring": "sigmoid", "router_bias": True}
    more: dict[str, Any] = {"shared_ffn": 28, "dense_layers": 1, "dense_ffn": 52, "aux_loss": 0.0}
    small = {"layers": 3, "hidden": 60, "heads": 4, "ffn": 28, "vocab": 96, "query_groups": 0}
    model = sized("llama-tiny", **small, **latent, **experts, **more, rope=RopeConfig(interleaved=True))
    state = random_state(model)
    source = checkpoint(tmp_path / "ours", model, state)
    export_weights(source, tmp_path / "hf", "hf", ExportRequest())
    file = tmp_path / "hf/config.json"
    config = json.loads(file.read_text())
    assert config["model_type"] == "deepseek_v3"
    file.write_text(json.dumps({**config, "model_type": "kimi_k2", "num_nextn_predict_layers": 0}))
    import_weights(tmp_path / "hf", tmp_path / "again")
    assert_equal(state_of(tmp_path / "again"), state)
    export_weights(tmp_path / "again", tmp_path / "back", "hf", ExportRequest())
    assert json.loads((tmp_path / "back/config.json").read_text())["model_type"] == "kimi_k2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}, "rope_parameters": None}, "rope_type is 'su'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "has mscale"),
        ({"hidden_act": "relu2"}, "hidden_act is 'relu2'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"use_sliding_window": True, "sliding_window": 16}, "same window"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
        ({"num_key_value_heads": 3}, "4 heads are not divisible by 3 groups"),
        ({"head_dim": -1}, "head_dim is -1"),
    ],
)
def test_variants_that_cannot_be_mapped_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    model = sized("llama-tiny", layers=1, hidden=64, heads=4, ffn=96, vocab=128, query_groups=0)
    source = checkpoint(tmp_path / "ours", model, random_state(model))
    export_weights(source, tmp_path / "hf", "hf", ExportRequest())
    file = tmp_path / "hf/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        import_weights(tmp_path / "hf", tmp_path / "again")


def test_a_mixture_of_settings_that_no_family_has_is_refused(tmp_path: Path) -> None:
    model = sized("llama-tiny", layers=1, hidden=64, heads=4, ffn=96, vocab=128, parallel_residual=True)
    source = checkpoint(tmp_path / "ours", model, random_state(model))
    with pytest.raises(InputError, match="parallel_residual"):
        export_weights(source, tmp_path / "hf", "hf", ExportRequest())


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("qwen2_moe", "shared_expert_gate"),
        ("deepseek_v32", "index_topk"),
        ("kimi_linear", "linear_attn_config"),
    ],
)
def test_a_family_that_our_layers_cannot_compute_is_refused_with_the_key(
    tmp_path: Path, kind: str, key: str
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"model_type is '{kind}': {key}"):
        import_weights(tmp_path / "hf", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_four_bit_experts_are_read_as_transformers_reads_them(tmp_path: Path, transformers: Any) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    values = {**SHARED, **OSS, "intermediate_size": 96}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**values)).eval()
    model.save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    random, state = torch.Generator().manual_seed(1), dict(model.state_dict())
    found = dict(state)
    for name, tensor in state.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=random, dtype=torch.uint8)
            scales = torch.randint(118, 124, shape, generator=random, dtype=torch.uint8)
            state[name] = convert_moe_packed_tensors(blocks, scales).float()
            del found[name]
            found |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(found, tmp_path / "hf/model.safetensors", {"format": "pt"})
    model.load_state_dict(state)
    import_weights(tmp_path / "hf", tmp_path / "ours")
    tokens = torch.randint(0, 128, (2, 40), generator=random)
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(logits_of(tmp_path / "ours", tokens), expected, rtol=1e-5, atol=1e-5)
    export_weights(tmp_path / "ours", tmp_path / "back", "hf", ExportRequest())
    back = load_file(tmp_path / "back/model.safetensors")
    assert_equal(back, {name: tensor for name, tensor in state.items() if name in back})


def test_fp8_blocks_are_multiplied_by_their_factors() -> None:
    random = torch.Generator().manual_seed(1)
    matrix = torch.randn(300, 200, generator=random).to(torch.float8_e4m3fn)
    factors = torch.rand(3, 2, generator=random)
    named = {"w": in_memory(matrix), "w_scale_inv": in_memory(factors), "norm": in_memory(torch.ones(3))}
    found = as_numbers(named)
    assert set(found) == {"w", "norm"}
    wide = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :200]
    expected = (matrix.float() * wide).bfloat16()
    assert torch.equal(found["w"].whole(), expected)
    assert torch.equal(found["w"].read(130, 290), expected[130:290])
