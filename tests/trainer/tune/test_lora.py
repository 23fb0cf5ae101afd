"""Adapters: their arithmetic, what is learned and saved, the model that they make with their base, and ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import native
from clusterctl.wire.requests import ExportRequest, ImportRequest
from tests.support.tuning import config_for, learn, losses_of
from trainer.__main__ import main
from trainer.checkpoint.store import found, open_checkpoint
from trainer.config.lora import LoraConfig, adapted, adapter_parameters
from trainer.config.model import ModelConfig
from trainer.engine.rank_state import load_parameters, norms_of
from trainer.errors import CheckpointError, InputError
from trainer.generate.loading import load_network
from trainer.model.adapter import Adapters, adapt
from trainer.model.gpt import GPT
from trainer.plan.resolve import plan_config, read_config
from trainer.plan.summary import summary
from trainer.tune.chat import ChatData
from trainer.tune.chat_model import ChatModel
from trainer.weights.adapters.merge import read_whole, whole, with_adapters
from trainer.weights.adapters.peft import ALL_FORMATS
from trainer.weights.convert import export_weights, import_weights
from trainer.weights.files.safetensors import read_safetensors
from trainer.weights.lazy import in_memory

LLAMA = {
    "rotary": True,
    "query_groups": 2,
    "norm": "rms",
    "bias": "none",
    "swiglu": True,
    "tied": False,
    "ffn": 64,
}
LLAMA4 = {**LLAMA, "heads": 4}
MIXTURE = {**LLAMA4, "experts": 4, "ffn": 24, "aux_loss": 0.1}
SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocab": 60}


@pytest.fixture(scope="module")
def base(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a short training."""
    folder: Path = tmp_path_factory.mktemp("base")
    learn(folder, config_for(material, model=LLAMA4, steps=3))
    return found(folder / "checkpoints")[0]


@pytest.fixture(scope="module")
def mixture(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a short training of a mixture of experts."""
    folder: Path = tmp_path_factory.mktemp("mixture")
    learn(folder, config_for(material, model=MIXTURE, steps=1))
    return found(folder / "checkpoints")[0]


def lora_config(material: Path, base: Path, **changes: Any) -> dict[str, Any]:
    lora = {"rank": 4, "alpha": 8, "targets": ["all"], **changes.pop("lora", {})}
    model = changes.pop("model", LLAMA4)
    raw = config_for(material, model=model, tune={"lora": lora}, init={"source": str(base)}, **changes)
    return {"steps": 3, "save": {"every": 3}, **raw, "optimizer": {"lr": 1e-2, "schedule": "constant"}}


def small(changes: dict[str, Any], targets: tuple[str, ...], dropout: float = 0.0) -> GPT:
    config = ModelConfig(**{**SHAPE, **changes})
    model = GPT(config, native.choose("cpu", "reference"))
    adapt(model, config, LoraConfig(4, 8.0, dropout, targets), 7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".b"):
                parameter.normal_(0, 0.1)
    return model


@pytest.mark.parametrize(
    ("changes", "targets", "dropout", "dtype"),
    [
        ({}, ("all",), 0.0, torch.float32),
        (LLAMA, ("all",), 0.0, torch.float32),
        (LLAMA, ("q", "v", "gate"), 0.5, torch.float32),
        (LLAMA, ("qkv", "gate_up"), 0.0, torch.float32),
        (LLAMA, ("all",), 0.5, torch.bfloat16),
    ],
)
def test_the_op_of_matrix_and_adapters_equals_both_apart(
    changes: dict[str, Any],
    targets: tuple[str, ...],
    dropout: float,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = small(changes, targets, dropout)
    for parameter in set(model.parameters()) - norms_of(model):
        parameter.data = parameter.data.to(dtype)
    tokens = torch.arange(32).view(2, 16)
    given, results, types = Adapters.one_type, [], []
    for fused in (True, False):

        def one_type(self: Adapters, x: torch.Tensor, weight: torch.Tensor, fused: bool = fused) -> Any:
            types.append(given(self, x, weight))
            return types[-1] if fused else None

        monkeypatch.setattr(Adapters, "one_type", one_type)
        model.zero_grad()
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        monkeypatch.undo()
        results.append(
            (loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad})
        )
    (first, own), (second, other) = results
    assert set(types) == {dtype}
    close = {"atol": 1e-6, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2e-3, "rtol": 5e-2}
    assert float(first) == pytest.approx(float(second), abs=close["atol"])
    assert own.keys() == other.keys() and all(".adapter." in name for name in own)
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, other[name], **close)
        assert gradient is not None and gradient.abs().max() > 0


def test_dropout_is_of_the_inputs_of_adapters_in_training_alone() -> None:
    model, tokens = small({}, ("all",), dropout=0.5), torch.arange(16).view(1, 16)
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_targets_follow_the_family_and_have_the_names_of_hugging_face() -> None:
    plain, llama = ModelConfig(**SHAPE), ModelConfig(**{**SHAPE, **LLAMA})
    assert adapted(plain, LoraConfig(4)) == {"attention.qkv": ("all",)}
    assert adapted(llama, LoraConfig(4)) == {"attention.qkv": ("q", "v")}
    assert adapted(llama, LoraConfig(4, targets=("v_proj", "q_proj", "down_proj"))) == {
        "attention.qkv": ("q", "v"),
        "feed_forward.down": ("all",),
    }
    assert (
        adapted(plain, LoraConfig(4, targets=("c_attn", "c_proj", "c_fc"))).keys()
        == adapted(plain, LoraConfig(4, targets=("all-linear",))).keys()
    )
    for changes in (LLAMA, {**MIXTURE, "shared_ffn": 16}):
        learned = sum(p.numel() for p in small(changes, ("all",)).parameters() if p.requires_grad)
        model = ModelConfig(**{**SHAPE, **changes})
        assert learned == 2 * adapter_parameters(model, LoraConfig(4, targets=("all",)))


@pytest.mark.parametrize("targets", [("all",), ("gate_up", "down"), ("up",), ("down",)])
def test_adapters_of_experts_change_each_expert_as_its_merged_matrix_does(targets: tuple[str, ...]) -> None:
    model = small({**MIXTURE, "shared_ffn": 16}, targets)
    plain = GPT(model.config, native.choose("cpu", "reference"))
    state, lora = model.state_dict(), LoraConfig(4, 8.0, 0.0, targets)
    pairs = {name: tensor for name, tensor in state.items() if ".adapter." in name}
    assert any(".feed_forward.shared." in name for name in pairs)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            whole = with_adapters(name, in_memory(state[name]), pairs, model.config, lora)
            parameter.copy_(whole.whole())
            if name.endswith((".up.weight", ".down.weight")) and targets == ("all",):
                assert not torch.equal(parameter, state[name]), name
    tokens = torch.arange(32).view(2, 16)
    for each in (model, plain):
        each.eval()
    with torch.no_grad():
        assert float(model(tokens, tokens)) == pytest.approx(float(plain(tokens, tokens)), abs=1e-6)


@pytest.mark.parametrize("targets", [("all",), ("gate_up", "v"), ("gate_up", "down")])
def test_adapters_of_experts_go_to_a_folder_of_peft_and_back(
    material: Path, mixture: Path, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    config = lora_config(material, mixture, model=MIXTURE, lora={"targets": list(targets)}, steps=1)
    learn(tmp_path / "run", {**config, "save": {"every": 1}})
    checkpoint = found(tmp_path / "run" / "checkpoints")[0]
    peft = ALL_FORMATS["peft"]
    export_weights(checkpoint, tmp_path / "peft", "peft", ExportRequest(), form=peft, read=read_whole)
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert "mlp.experts.gate_up_proj" in settings["target_parameters"]
    asked = ImportRequest(base=str(mixture))
    import_weights(tmp_path / "peft", tmp_path / "again", request=asked, formats=ALL_FORMATS)
    again, before = open_checkpoint(tmp_path / "again"), open_checkpoint(checkpoint)
    assert again.weights == before.weights and any(
        ".feed_forward.up.adapter." in name for name in again.weights
    )
    for name, tensor in again.read(list(again.weights)).items():
        assert torch.equal(tensor, before.read([name])[name]), name


def write_mixed_peft(folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """Write a folder of PEFT with adapters of several ranks, one in a single layer, and whole tensors."""
    random = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randn(shape, generator=random)  # noqa: E731
    vocab = settings.pop("vocab")
    tensors = {
        "base_model.model.lm_head.weight": draw(vocab, 32),
        "base_model.model.model.norm.weight": draw(32),
    }
    for layer, name, rank, outputs in ((0, "q_proj", 2, 32), (0, "v_proj", 4, 16), (1, "v_proj", 6, 16)):
        path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{path}.lora_A.weight"] = draw(rank, 32)
        tensors[f"{path}.lora_B.weight"] = draw(outputs, rank)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    document = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
    document |= {
        "rank_pattern": {"q_proj": 2, "layers.1.self_attn.v_proj": 6},
        "alpha_pattern": {"q_proj": 8},
    }
    document |= {"modules_to_save": ["lm_head", "model.norm"], **settings}
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return tensors


@pytest.mark.parametrize("by_root", [False, True])
def test_adapters_of_several_ranks_and_whole_modules_are_read_and_written(
    base: Path, tmp_path: Path, by_root: bool
) -> None:
    weights = open_checkpoint(base)
    vocab = weights.weights["output.weight"][0]
    tensors = write_mixed_peft(tmp_path / "peft", vocab=vocab, use_rslora=by_root)
    asked = ImportRequest(base=str(base))
    import_weights(tmp_path / "peft", tmp_path / "ours", request=asked, formats=ALL_FORMATS)
    expected = weights.read(list(weights.weights))
    expected["output.weight"] = tensors["base_model.model.lm_head.weight"]
    expected["norm.weight"] = tensors["base_model.model.model.norm.weight"]
    for layer, name, rank, alpha, first in (
        (0, "q_proj", 2, 8, 0),
        (0, "v_proj", 4, 6, 48),
        (1, "v_proj", 6, 6, 48),
    ):
        path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        product = tensors[f"{path}.lora_B.weight"] @ tensors[f"{path}.lora_A.weight"]
        rows = expected[f"blocks.{layer}.attention.qkv.weight"][first : first + len(product)]
        rows += product * (alpha / (rank**0.5 if by_root else rank))
    export = lambda source, target: export_weights(  # noqa: E731
        source, target, "peft", ExportRequest(), form=ALL_FORMATS["peft"], read=read_whole
    )
    export(tmp_path / "ours", tmp_path / "back")
    import_weights(tmp_path / "back", tmp_path / "again", request=asked, formats=ALL_FORMATS)
    for folder in ("ours", "again"):
        found = read_whole(tmp_path / folder, state=False).parameters
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.allclose(found[name].whole(), tensor, atol=1e-5), (folder, name)
    settings = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["lm_head", "model.norm"]
    held = read_safetensors(tmp_path / "back" / "adapter_model.safetensors")
    assert {name: lazy.shape for name, lazy in held.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"vocab": 7}, r"lm_head.weight has the shape \[7, 32\]"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern is .'q_proj': 0.: positive numbers"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is .'q_proj'.: positive numbers"),
        ({"alpha_pattern": {"q_proj(": 8}}, r"alpha_pattern: 'q_proj\(' is not a usable regular expression"),
        ({"rank_pattern": {"*.q_proj": 8}}, r"rank_pattern: '\*.q_proj' is not a usable regular expression"),
        ({"alpha_pattern": {"([a-z_.0-9]+)+x": 8}}, "it repeats a repetition"),
    ],
)
def test_what_adapters_cannot_have_is_refused(
    base: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    vocab = open_checkpoint(base).weights["output.weight"][0]
    write_mixed_peft(tmp_path / "peft", **{"vocab": vocab, **changes})
    with pytest.raises(CheckpointError, match=words):
        import_weights(
            tmp_path / "peft", tmp_path / "ours", request=ImportRequest(base=str(base)), formats=ALL_FORMATS
        )


def test_adapters_of_experts_learn_in_bf16_and_go_to_a_folder_of_peft_in_bf16_and_back(
    material: Path, mixture: Path, tmp_path: Path
) -> None:
    for precision in ("fp32", "bf16"):
        learn(tmp_path / precision, lora_config(material, mixture, model=MIXTURE, precision=precision))
    losses = [losses_of(tmp_path / precision) for precision in ("fp32", "bf16")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-2) and losses[0] != losses[1]
    checkpoint = found(tmp_path / "bf16" / "checkpoints")[0]
    wanted, peft = ExportRequest(dtype="bf16"), ALL_FORMATS["peft"]
    export_weights(checkpoint, tmp_path / "peft", "peft", wanted, form=peft, read=read_whole)
    held = read_safetensors(tmp_path / "peft" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    asked = ImportRequest(base=str(mixture))
    import_weights(tmp_path / "peft", tmp_path / "again", request=asked, formats=ALL_FORMATS)
    again, before = open_checkpoint(tmp_path / "again"), open_checkpoint(checkpoint)
    assert any(".feed_forward.down.adapter." in name for name in again.weights)
    for name, tensor in again.read(list(again.weights)).items():
        assert torch.equal(tensor, before.read([name])[name].bfloat16().float()), name


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"lora": {"targets": ["x_proj"]}}, "train.tune.lora.targets"),
        ({"lora": {"targets": ["qkv", "q"]}}, "train.tune.lora.targets"),
        ({"lora": {"rank": 0}}, "train.tune.lora.rank"),
        ({"init": {}}, "train.init.source"),
    ],
)
def test_adapters_that_cannot_be_are_refused(
    material: Path,
    base: Path,
    changes: dict[str, Any],
    key: str,
) -> None:
    raw = lora_config(material, base, **{k: v for k, v in changes.items() if k == "lora"})
    faults = plan_config({**raw, **{k: v for k, v in changes.items() if k != "lora"}}, 1).faults
    assert key in [fault.key for fault in faults], faults


def test_the_plan_counts_state_of_adapters_alone(material: Path, base: Path) -> None:
    raw = lora_config(material, base)
    config = read_config(raw)
    raw["tune"] = {key: value for key, value in raw["tune"].items() if key != "lora"}
    whole = summary(read_config(raw), 1)
    own = summary(config, 1)
    learned = 2 * adapter_parameters(config.model, config.tune.lora)
    assert own.trained_parameters == learned < whole.trained_parameters == whole.parameters
    assert own.memory_per_device_bytes["optimizer"] == 8 * learned
    assert own.checkpoints.bytes == 12 * learned
    assert own.memory_per_device_bytes["weights"] >= whole.memory_per_device_bytes["weights"]


@pytest.mark.slow
def test_blocks_with_adapters_compile_and_learn_the_same(
    material: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    for how in ("off", "blocks"):
        learn(tmp_path / how, lora_config(material, base, steps=2, compile=how))
    assert "a block was compiled in" in capsys.readouterr().out
    assert losses_of(tmp_path / "blocks") == pytest.approx(losses_of(tmp_path / "off"), rel=1e-5)


def test_adapters_alone_are_learned_and_saved_and_make_the_evaluated_model(
    material: Path,
    base: Path,
    tmp_path: Path,
) -> None:
    raw = lora_config(material, base, steps=4, save={"every": 2})
    learn(tmp_path / "run", raw)
    checkpoint = found(tmp_path / "run" / "checkpoints")[0]
    table = open_checkpoint(checkpoint).table
    assert all(".adapter." in name for name in table) and any(name.startswith("exp_avg.") for name in table)
    # The tokenizer's template comes along, for `serve` and exports.
    assert (checkpoint / "tokenizer_config.json").read_bytes() == (
        material / "tokenizer_config.json"
    ).read_bytes()
    # The loss before the first step is that of the base.
    evaluated = [json.loads(line) for line in (base.parents[1] / "metrics.jsonl").read_text().splitlines()]
    before = [line["loss"] for line in evaluated if line["event"] == "eval"][-1]
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    own = [line["loss"] for line in events if line["event"] == "eval"]
    assert own[0] == pytest.approx(before, abs=1e-6) and own[-1] < own[0] - 0.01
    # Base and adapters together are the model whose loss was measured last.
    config = read_config(raw)
    model = ChatModel(config.model, native.choose("cpu"))
    undivided = whole(open_checkpoint(checkpoint))
    load_parameters(model, undivided.read(list(undivided.weights)).items())
    order = ChatData(config).orders()["valid"]
    micro = [torch.from_numpy(part) for part in order.read(range(7))]
    model.eval()
    assert float(model(*model.arguments(micro)).detach()) == pytest.approx(own[-1], abs=1e-5)
    # What `generate` and `serve` load.
    net, *_ = load_network(checkpoint)
    weight = undivided.read(["tokens.weight"])["tokens.weight"]
    assert torch.equal(net.model.tokens(torch.arange(5)), weight[:5])
    # As a folder of PEFT and back: the same adapters, of the same base.
    peft = ALL_FORMATS["peft"]
    export_weights(checkpoint, tmp_path / "peft", "peft", ExportRequest(), form=peft, read=read_whole)
    settings = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8) and "q_proj" in settings["target_modules"]
    asked = ImportRequest(base=str(base))
    import_weights(tmp_path / "peft", tmp_path / "again", request=asked, formats=ALL_FORMATS)
    again, before = open_checkpoint(tmp_path / "again"), open_checkpoint(checkpoint)
    assert again.weights == before.weights and again.manifest.base == before.manifest.base
    for name, tensor in again.read(list(again.weights)).items():
        assert torch.equal(tensor, before.read([name])[name]), name
    with pytest.raises(InputError, match="its base weights are not at"):
        import_weights(
            tmp_path / "peft", tmp_path / "x", request=ImportRequest(base="/no"), formats=ALL_FORMATS
        )
    with pytest.raises(InputError, match="the optimizer's state belongs to the adapters"):
        read_whole(checkpoint, True)
    # A resume continues, and refuses another base.
    learn(tmp_path / "run", {**raw, "steps": 5})
    learn(tmp_path / "straight", {**raw, "steps": 5})
    last = [open_checkpoint(found(tmp_path / run / "checkpoints")[0]) for run in ("run", "straight")]
    for name, tensor in last[0].read(list(last[0].table)).items():
        assert torch.equal(tensor, last[1].read([name])[name]), name


def test_another_base_is_refused_and_one_that_moved_is_named(
    material: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = lora_config(material, base, steps=1, save={"every": 1})
    learn(tmp_path / "run", raw)
    learn(tmp_path / "other", config_for(material, model=LLAMA4, steps=1, seed=5))
    other = found(tmp_path / "other" / "checkpoints")[0]
    checkpoint = found(tmp_path / "run" / "checkpoints")[0]
    with pytest.raises(CheckpointError, match="its adapters belong to weights with the fingerprint"):
        whole(open_checkpoint(checkpoint), other)
    with pytest.raises(CheckpointError, match="adapters belong to other weights"):
        learn(tmp_path / "run", {**raw, "init": {"source": str(other)}, "steps": 2})
    moved = tmp_path / "moved"
    base.rename(moved)
    try:
        with pytest.raises(CheckpointError, match="their base weights are not at") as caught:
            whole(open_checkpoint(checkpoint))
        assert "--base" in caught.value.hint
        assert whole(open_checkpoint(checkpoint), moved).weights
        generate = ["generate", f"--checkpoint={checkpoint}", "--prompt=red", "--max-tokens=3", "--json"]
        (tmp_path / "text.txt").write_text("say red\n" * 40)
        score = [
            "evaluate",
            f"--checkpoint={checkpoint}",
            f"--task=wikitext={tmp_path / 'text.txt'}",
            "--json",
        ]
        score.append(f"--output={tmp_path / 'results'}")
        for argv, mark in ((generate, '"text"'), (score, '"task": "wikitext"')):
            assert (
                main(argv) != 0
                and "try: copy them there, or name them with --base DIR" in capsys.readouterr().err
            )
            assert main([*argv, f"--base={other}"]) != 0 and "belong to weights" in capsys.readouterr().err
            assert main([*argv, f"--base={moved}"]) == 0 and mark in capsys.readouterr().out
    finally:
        moved.rename(base)


@pytest.mark.parametrize(
    "layout",
    [
        {"zero": 1, "precision": "bf16"},
        {"zero": 3},
        {"parallel": {"tensor": 2, "sequence": True}},
        {"parallel": {"tensor": 2}, "lora": {"targets": ["qkv", "gate_up"]}},
        {"parallel": {"pipeline": 2}},
        {"engine": "deepspeed", "zero": 0, "lora": {"dropout": 0.0}},
        {"engine": "deepspeed", "zero": 1},
        {"engine": "deepspeed", "zero": 2},
        {"engine": "deepspeed", "zero": 3},
        {"engine": "deepspeed", "parallel": {"pipeline": 2}},
        {"engine": "deepspeed", "parallel": {"tensor": 2}, "zero": 1},
        {"model": MIXTURE, "zero": 3},
        {"model": MIXTURE, "parallel": {"tensor": 2}},
        {"model": MIXTURE, "parallel": {"tensor": 2, "sequence": True}, "zero": 1},
        {"model": MIXTURE, "parallel": {"pipeline": 2}, "lora": {"targets": ["gate_up", "down"]}},
    ],
)
def test_two_ranks_learn_the_adapters_that_one_learns(
    material: Path,
    base: Path,
    mixture: Path,
    tmp_path: Path,
    run_ranks: Callable[..., Any],
    layout: dict[str, Any],
) -> None:
    config = lora_config(material, mixture if "model" in layout else base, **layout)
    learn(
        tmp_path / "one",
        {key: value for key, value in config.items() if key not in ("zero", "parallel", "engine")},
    )
    done = run_ranks(2, config, tmp_path / "two")
    assert all(rank.returncode == 0 for rank in done), done[0].stderr
    close = 3e-3 if layout.get("precision") else 1e-5
    assert losses_of(tmp_path / "one") == pytest.approx(losses_of(tmp_path / "two"), abs=close)
