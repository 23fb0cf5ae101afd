"""Folders of Hugging Face, judged by transformers where it is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clusterctl.wire.requests import ExportRequest, ImportRequest
from tests.support.building import small_tokenizer
from tests.support.weights import kill_during_import, state_of
from trainer.checkpoint.store import open_checkpoint, verify
from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import CheckpointError, InputError
from trainer.generate.loading import load_model
from trainer.weights import huggingface, ours
from trainer.weights.convert import export_weights, import_weights

HIDDEN, LAYERS, VOCAB = 32, 2, 300
CONFIG = {
    "model_type": "gpt2",
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 24,
    "vocab_size": VOCAB,
}
BLOCK = {
    "ln_1.weight": (HIDDEN,),
    "ln_1.bias": (HIDDEN,),
    "attn.c_attn.weight": (HIDDEN, 3 * HIDDEN),
    "attn.c_attn.bias": (3 * HIDDEN,),
    "attn.c_proj.weight": (HIDDEN, HIDDEN),
    "attn.c_proj.bias": (HIDDEN,),
    "ln_2.weight": (HIDDEN,),
    "ln_2.bias": (HIDDEN,),
    "mlp.c_fc.weight": (HIDDEN, 4 * HIDDEN),
    "mlp.c_fc.bias": (4 * HIDDEN,),
    "mlp.c_proj.weight": (4 * HIDDEN, HIDDEN),
    "mlp.c_proj.bias": (HIDDEN,),
}


def gpt2_tensors(prefix: str = "transformer.", seed: int = 1) -> dict[str, Tensor]:
    """Return the tensors of a small GPT-2 as transformers names them."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"wte.weight": (VOCAB, HIDDEN), "wpe.weight": (24, HIDDEN)}
    shapes |= {f"h.{n}.{name}": shape for n in range(LAYERS) for name, shape in BLOCK.items()}
    shapes |= {"ln_f.weight": (HIDDEN,), "ln_f.bias": (HIDDEN,)}
    return {f"{prefix}{name}": torch.randn(shape, generator=random) * 0.2 for name, shape in shapes.items()}


def write_folder(folder: Path, tensors: dict[str, Tensor], shards: int = 1, **config: Any) -> Path:
    """Write a folder of Hugging Face by hand."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {
        name: f"model-{at % shards + 1:05d}-of-{shards:05d}.safetensors" for at, name in enumerate(tensors)
    }
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(("prefix", "shards"), [("transformer.", 1), ("", 3)])
def test_a_round_trip_returns_the_same_bits(tmp_path: Path, prefix: str, shards: int) -> None:
    tensors = gpt2_tensors(prefix)
    source = write_folder(tmp_path / "hf", tensors, shards)
    done = import_weights(source, tmp_path / "ours")
    assert done.format == "hf" and done.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert verify(tmp_path / "ours").step == 0
    export_weights(tmp_path / "ours", tmp_path / "back", "hf", ExportRequest())
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert {name.removeprefix("transformer.") for name in back} == {
        name.removeprefix("transformer.") for name in tensors
    }
    assert all(
        torch.equal(back[f"transformer.{name.removeprefix('transformer.')}"], tensors[name])
        for name in tensors
    )
    assert not list(tmp_path.glob(".unfinished-*"))


def test_half_precision_survives_a_round_trip(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in gpt2_tensors().items()}
    import_weights(write_folder(tmp_path / "hf", tensors), tmp_path / "ours")
    export_weights(tmp_path / "ours", tmp_path / "back", "hf", ExportRequest(dtype="bf16"))
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"


def test_old_spellings_and_extra_tensors_of_old_files_are_understood(tmp_path: Path) -> None:
    tensors = gpt2_tensors("")
    extra = {f"h.{n}.attn.bias": torch.ones(1, 1, 24, 24, dtype=torch.uint8) for n in range(LAYERS)}
    extra["lm_head.weight"] = tensors["wte.weight"].clone()
    old = {"n_positions": None, "n_ctx": 24, "activation_function": "gelu", "n_inner": 4 * HIDDEN}
    source = write_folder(tmp_path / "hf", {**tensors, **extra}, **old)
    done = import_weights(source, tmp_path / "ours")
    assert done.model.sequence == 24 and done.model.activation == "gelu"


def test_an_output_matrix_of_its_own_is_kept_though_the_config_says_tied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "COMPARED_ROWS", 7)
    tensors = gpt2_tensors()
    head = tensors["transformer.wte.weight"].clone()
    same = write_folder(tmp_path / "same", {**tensors, "lm_head.weight": head})
    assert import_weights(same, tmp_path / "tied").model.tied
    # Only the last row differs.
    head = torch.cat([head[:-1], head[-1:] + 1])
    other = write_folder(tmp_path / "other", {**tensors, "lm_head.weight": head})
    done = import_weights(other, tmp_path / "untied")
    assert not done.model.tied and "imported untied" in done.notes[0]
    assert torch.equal(state_of(tmp_path / "untied")["output.weight"], head)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    tensors = gpt2_tensors()
    tensors["transformer.ln_f.weight"] = tensors["transformer.ln_f.weight"].to(torch.int32)
    source = write_folder(tmp_path / "hf", tensors)
    with pytest.raises(CheckpointError, match=r"whole numbers: ln_f.weight \(torch.int32\)"):
        import_weights(source, tmp_path / "ours")


def test_keys_that_nothing_reads_are_named(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", gpt2_tensors(), logit_scale=2.0, use_cache=False)
    assert "mean nothing to our gpt2: logit_scale" in import_weights(source, tmp_path / "ours").notes[0]


def test_torch_files_are_read_without_running_them(tmp_path: Path) -> None:
    tensors = gpt2_tensors("")
    for folder, zipped in (("new", True), ("old", False)):
        source = write_folder(tmp_path / folder, tensors)
        (source / "model.safetensors").unlink()
        torch.save(tensors, source / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        import_weights(source, tmp_path / f"{folder}-ours")
        found = open_checkpoint(tmp_path / f"{folder}-ours").read(["blocks.1.attention.qkv.weight"])
        assert torch.equal(found["blocks.1.attention.qkv.weight"], tensors["h.1.attn.c_attn.weight"].t())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx is True"),
        ("scale_attn_weights", False, "scale_attn_weights is False"),
        ("activation_function", "relu", "activation_function is 'relu'"),
        ("add_cross_attention", True, "add_cross_attention is True"),
        ("n_layer", -3, "n_layer is -3"),
        ("n_layer", 3, "lacks h.2.attn.c_attn.bias"),
        ("n_layer", 1, "contains h.1.attn.c_attn.bias"),
        ("vocab_size", 301, r"tokens.weight is \[300, 32\], but the config needs \[301, 32\]"),
        ("n_head", 5, "not divisible"),
        ("model_type", "mamba", "model_type is 'mamba'"),
        ("layer_norm_epsilon", "1e-5", "layer_norm_epsilon is '1e-5'"),
    ],
)
def test_what_cannot_be_mapped_is_refused_with_the_key(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    source = write_folder(tmp_path / "hf", gpt2_tensors(), **{key: value})
    with pytest.raises(CheckpointError, match=message):
        import_weights(source, tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_all_faults_of_a_config_are_reported_together(tmp_path: Path) -> None:
    source = write_folder(
        tmp_path / "hf", gpt2_tensors(), activation_function="relu", scale_attn_weights=False
    )
    with pytest.raises(CheckpointError) as caught:
        import_weights(source, tmp_path / "ours")
    assert "relu" in caught.value.message and "scale_attn_weights" in caught.value.message


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = gpt2_tensors()
    tensors["transformer.ln_f.bias"][3] = float("nan")
    with pytest.raises(CheckpointError, match=r"norm.bias holds numbers that are not finite"):
        import_weights(write_folder(tmp_path / "hf", tensors), tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", gpt2_tensors())
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="exists"):
        import_weights(source, tmp_path / "ours")
    assert (tmp_path / "ours" / "mine.txt").read_text() == "mine"
    with pytest.raises(InputError, match="contains no optimizer state"):
        import_weights(source, tmp_path / "other", request=ImportRequest(state=True))


def test_a_conversion_that_was_killed_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill an import in its third file: the next one writes only the others, and the result is the same."""
    source = write_folder(tmp_path / "hf", gpt2_tensors())
    monkeypatch.setattr(ours, "LEAST_FILE", 8000)
    import_weights(source, tmp_path / "whole")
    kill_during_import(source, tmp_path / "ours", 8000)
    assert not (tmp_path / "ours").exists()
    done = import_weights(source, tmp_path / "ours")
    assert done.resumed_files == 2
    names = [name for name in os.listdir(tmp_path / "whole") if name != "manifest.json"]
    assert len(names) > 4
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    verify(tmp_path / "ours")


def test_another_source_does_not_continue_what_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_folder(tmp_path / "hf", gpt2_tensors())
    (tmp_path / ".unfinished-ours").mkdir()
    (tmp_path / ".unfinished-ours" / ".journal").write_text(
        '{"source": "elsewhere"}\n{"name": "part-00000.safe'
    )
    (tmp_path / ".unfinished-ours" / "part-00000.safetensors").write_bytes(b"old")
    done = import_weights(source, tmp_path / "ours")
    assert done.resumed_files == 0
    verify(tmp_path / "ours")


def test_all_missing_files_of_an_index_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", gpt2_tensors(), 5)
    for number in (1, 2, 4, 5):
        (folder / f"model-{number:05d}-of-00005.safetensors").unlink()
    files = ", ".join(f"model-{number:05d}-of-00005.safetensors" for number in (1, 2, 4))
    with pytest.raises(CheckpointError, match=f"hf: 4 of 5 files of .*json are missing: {files} and 1 more"):
        huggingface.read_huggingface(folder, ImportRequest())


def test_large_exports_have_several_files_and_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = gpt2_tensors()
    import_weights(write_folder(tmp_path / "hf", tensors), tmp_path / "ours")
    monkeypatch.setattr(huggingface, "SHARD", 40_000)
    export_weights(tmp_path / "ours", tmp_path / "back", "hf", ExportRequest())
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in tensors.values())
    assert set(index["weight_map"]) == set(tensors) and len(set(index["weight_map"].values())) > 2
    import_weights(tmp_path / "back", tmp_path / "again")
    shutil.rmtree(tmp_path / "ours")
    for name, tensor in gpt2_tensors("").items():
        if name == "h.0.mlp.c_fc.weight":
            found = open_checkpoint(tmp_path / "again").read(["blocks.0.feed_forward.up.weight"])
            assert torch.equal(found["blocks.0.feed_forward.up.weight"], tensor.t())


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", gpt2_tensors())
    done = import_weights(source, tmp_path / "ours", dry_run=True)
    assert done.bytes == 4 * done.parameters and not (tmp_path / "ours").exists()


def test_an_export_of_a_training_has_its_tokenizer_and_says_how_it_was_trained(
    tmp_path: Path, train_here: Callable[..., Any], prefix: Path
) -> None:
    tokenizer = small_tokenizer(tmp_path)
    config = {
        "model": {"layers": 1, "hidden": 16, "heads": 2, "sequence": 16, "vocab": 300},
        "data": {"prefix": str(prefix), "split": "80,20,0", "tokenizer": str(tokenizer)},
        "optimizer": {"lr": 1e-2},
        "global_batch": 4,
    }
    train_here(tmp_path / "run", steps=2, **config)
    export_weights(tmp_path / "run/checkpoints/step-00000002", tmp_path / "hf", "hf", ExportRequest())
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "| optimizer steps | 2 |" in card and "| samples | 8 |" in card and "tiny_text_document" in card
    assert str(tmp_path) not in card
    eod = Tokenizer.load(tokenizer).eod
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == eod
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == eod
    named = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert named["eos_token"] == "<|endoftext|>" and named["model_max_length"] == 16
    # And back: the tokenizer comes along.
    import_weights(tmp_path / "hf", tmp_path / "again")
    assert open_checkpoint(tmp_path / "again").files["tokenizer.json"].bytes == tokenizer.stat().st_size


def test_the_command_reports_a_wrong_format_and_exits_with_2(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", gpt2_tensors())
    command = [
        sys.executable,
        "-m",
        "trainer",
        "checkpoint-import",
        str(source),
        "--output",
        str(tmp_path / "o"),
    ]
    done = subprocess.run([*command, "--from", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2 and "--from: unknown 'nonsense' (one of hf, " in done.stderr
    done = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["output"] == str(tmp_path / "o")


def test_a_refused_conversion_leaves_nothing_but_what_can_be_continued(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", gpt2_tensors())
    import_weights(source, tmp_path / "ours")
    for wanted in (ExportRequest(tensor=3), ExportRequest(pipeline=5)):
        with pytest.raises(InputError, match="does not divide"):
            export_weights(tmp_path / "ours", tmp_path / "out", "megatron", wanted)
        assert not list(tmp_path.glob(".unfinished-*"))
    part = next((tmp_path / "ours").glob("*.safetensors"))
    os.truncate(part, part.stat().st_size - 4)
    with pytest.raises(InputError, match=r"tensor tokens\.weight"):
        export_weights(tmp_path / "ours", tmp_path / "out", "hf", ExportRequest())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]


def test_options_that_contradict_the_source_are_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", gpt2_tensors())
    for request, problem in (
        (ImportRequest(heads=7), "--heads is 7"),
        (ImportRequest(vocab=10**8), "--vocab is 1"),
    ):
        with pytest.raises(InputError, match=problem):
            import_weights(source, tmp_path / "ours", request=request)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_format_or_a_pointer_that_does_not_fit_is_named(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", gpt2_tensors())
    with pytest.raises(InputError, match=r"--from megatron: .*hf has the format hf") as caught:
        import_weights(source, tmp_path / "ours", "megatron")
    assert caught.value.hint == "leave out --from"
    with pytest.raises(InputError, match=r"--base x: .* contains no adapters"):
        import_weights(source, tmp_path / "ours", request=ImportRequest(base="x"))
    for name, tag in (("latest_checkpointed_iteration.txt", "7"), ("latest", "global_step7")):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text(tag)
        with pytest.raises(InputError, match=r"its pointer names .*7, and there is no such folder"):
            import_weights(folder, tmp_path / "ours")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="Not a directory") as caught:
        import_weights(source, tmp_path / "file" / "x")
    assert caught.value.hint == "name another folder with -o"


# -- transformers as the judge -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip(
        "transformers", reason="transformers is not installed (pip install -e '.[judges]')"
    )


def ids(vocab: int) -> Tensor:
    return torch.randint(0, vocab, (2, 20), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits_of(checkpoint: Path, tokens: Tensor) -> Tensor:
    found: Tensor = load_model(verify(checkpoint))(tokens)  # type: ignore[operator]
    return found


@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_logits_of_an_import_equal_those_of_transformers(
    tmp_path: Path, transformers: Any, activation: str
) -> None:
    source = write_folder(tmp_path / "hf", gpt2_tensors(), activation_function=activation)
    import_weights(source, tmp_path / "ours")
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(source).eval()(ids(VOCAB)).logits
    assert (logits_of(tmp_path / "ours", ids(VOCAB)) - theirs).abs().max() < 1e-5


def test_transformers_loads_an_export_with_its_tokenizer(
    tmp_path: Path, transformers: Any, train_here: Callable[..., Any], prefix: Path
) -> None:
    tokenizer = small_tokenizer(tmp_path)
    config = {
        "model": {"layers": 2, "hidden": 32, "heads": 4, "sequence": 24, "vocab": 300, "activation": "gelu"},
        "data": {"prefix": str(prefix), "split": "80,20,0", "tokenizer": str(tokenizer)},
        "optimizer": {"lr": 1e-2},
    }
    train_here(tmp_path / "run", steps=3, **config)
    checkpoint = tmp_path / "run/checkpoints/step-00000003"
    export_weights(checkpoint, tmp_path / "hf", "hf", ExportRequest())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        theirs = model(ids(300)).logits
    assert (logits_of(checkpoint, ids(300)) - theirs).abs().max() < 1e-5
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "the cat sat on the mat; naïve café"
    assert loaded(text)["input_ids"] == Tokenizer.load(tokenizer).encode(text)
    assert loaded.eos_token == "<|endoftext|>"


def test_what_transformers_saves_is_imported_and_returned_bit_for_bit(
    tmp_path: Path, transformers: Any
) -> None:
    torch.manual_seed(5)
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=24, n_embd=HIDDEN, n_layer=3, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    import_weights(tmp_path / "hf", tmp_path / "ours")
    export_weights(tmp_path / "ours", tmp_path / "back", "hf", ExportRequest())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
