"""GLM's, OneFlow's and MindSpore's files, written here by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clusterctl.wire.requests import ExportRequest, ImportRequest
from tests.support.building import small_tokenizer
from tests.support.weights import GLM, GPT, assert_equal, checkpoint, random_state, state_of, write_glm
from trainer.errors import CheckpointError, InputError
from trainer.generate.loading import open_decoder
from trainer.side_files import SideFiles
from trainer.weights.convert import FORMATS, export_weights, import_weights, writable
from trainer.weights.files import protobuf
from trainer.weights.files.protobuf import read_mindspore
from trainer.weights.ours import read_ours
from trainer.weights.target import open_target

# -- GLM ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_glm_of_any_model_parallel_size_is_imported(tmp_path: Path, ranks: int) -> None:
    state = random_state(GLM)
    write_glm(tmp_path / "glm" / "200", state, ranks)
    (tmp_path / "glm" / "latest").write_text("200")
    done = import_weights(tmp_path / "glm", tmp_path / "ours", request=ImportRequest(heads=4, vocab=300))
    assert done.format == "glm" and done.model.kind == "glm" and done.model.positions == 24
    assert_equal(state_of(tmp_path / "ours"), state)


def test_the_heads_of_a_glm_are_asked_for_where_they_cannot_be_known(tmp_path: Path) -> None:
    write_glm(tmp_path / "glm", random_state(GLM), 1)
    with pytest.raises(InputError, match="number of attention heads"):
        import_weights(tmp_path / "glm", tmp_path / "ours")


def test_the_pointer_of_a_glm_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    write_glm(tmp_path / "elsewhere", random_state(GLM), 1)
    (tmp_path / "glm").mkdir()
    (tmp_path / "glm" / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match="not the name of a folder"):
        import_weights(tmp_path / "glm", tmp_path / "ours", name="glm")


# -- OneFlow --------------------------------------------------------------------------------------------------

ONEFLOW_NAMES = {
    "norm_1": "layernorm_1",
    "attention.qkv": "attn-c_attn",
    "attention.out": "attn-c_proj",
    "norm_2": "layernorm_2",
    "feed_forward.up": "mlp-c_fc",
    "feed_forward.down": "mlp-c_proj",
}


def write_oneflow(folder: Path, state: dict[str, Tensor]) -> Path:
    """Write a snapshot of OneFlow's GPT with the averages of its optimizer."""
    for key, tensor in state.items():
        moment, name = next(
            ((m, key[len(m) + 1 :]) for m in ("exp_avg_sq", "exp_avg") if key.startswith(f"{m}.")), ("", key)
        )
        stem, _, leaf = name.rpartition(".")
        if stem in ("tokens", "positions"):
            theirs = {"tokens": "model-wte", "positions": "model-wpe"}[stem]
        else:
            _, number, part = stem.split(".", 2) if stem != "norm" else ("", "", "")
            leaf = {"weight": "gamma", "bias": "beta"}[leaf] if "norm" in stem else leaf
            theirs = (
                f"model-h{number}-{ONEFLOW_NAMES[part]}-{leaf}" if number else f"model-layernorm_f-{leaf}"
            )
        if "c_attn" in theirs:
            tensor = tensor.unflatten(0, (3, GPT.heads, GPT.head_size)).transpose(0, 1).flatten(0, 2)
        if tensor.dim() == 2 and "model-w" not in theirs:
            tensor = tensor.t().contiguous()
        theirs += {"exp_avg": "-m", "exp_avg_sq": "-v", "": ""}[moment]
        (folder / theirs).mkdir(parents=True)
        (folder / theirs / "out").write_bytes(tensor.numpy().tobytes())
        dims = "".join(f"  dim: {size}\n" for size in tensor.shape)
        (folder / theirs / "meta").write_text(f"shape {{\n{dims}}}\ndata_type: kFloat\n")
    return folder


def test_the_newest_snapshot_of_oneflow_is_imported_with_its_state(tmp_path: Path) -> None:
    state = random_state(GPT, moments=True)
    write_oneflow(tmp_path / "save" / "iter_000100_snapshot", random_state(GPT, moments=True, seed=2))
    write_oneflow(tmp_path / "save" / "iter_000200_snapshot", state)
    done = import_weights(tmp_path / "save", tmp_path / "ours", request=ImportRequest(state=True, heads=4))
    assert done.format == "oneflow" and done.step == 200
    assert_equal(state_of(tmp_path / "ours"), state)
    import_weights(
        tmp_path / "save" / "iter_000200_snapshot", tmp_path / "weights", request=ImportRequest(heads=4)
    )
    assert_equal(
        state_of(tmp_path / "weights"),
        {name: one for name, one in state.items() if not name.startswith("exp")},
    )


def test_a_snapshot_whose_sizes_are_wrong_is_refused(tmp_path: Path) -> None:
    folder = write_oneflow(tmp_path / "iter_1_snapshot", random_state(GPT))
    (folder / "model-wpe" / "out").write_bytes(b"12345678")
    with pytest.raises(CheckpointError, match="model-wpe/out: has 8 bytes"):
        import_weights(folder, tmp_path / "ours", request=ImportRequest(heads=4))


# -- MindSpore ------------------------------------------------------------------------------------------------

# What MindSpore 2.10 wrote of `backbone.w` (0 to 5 in two rows), `h` (two ones), `b` (two ones) and `s` (7).
GOLDEN = bytes.fromhex(
    "0a350a0a6261636b626f6e652e771227080208031207466c6f617433321a18"
    "000000000000803f0000004000004040000080400000a040"
    "0a160a0168121108021207466c6f617431361a04003c003c"
    "0a170a016212120802120842466c6f617431361a04803f803f"
    "0a120a0173120d1205496e7433321a0407000000"
)


def test_the_bytes_of_mindspore_are_read_and_written_again(tmp_path: Path) -> None:
    (tmp_path / "golden.ckpt").write_bytes(GOLDEN)
    found = read_mindspore(tmp_path / "golden.ckpt")
    assert len(GOLDEN) == 124
    assert found["backbone.w"].whole().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["h"].dtype is torch.float16 and found["b"].whole().tolist() == [1, 1]
    assert found["s"].whole().tolist() == [7]
    del found["s"]  # It has no dims there; a tensor of ours has at least one.
    protobuf.write_mindspore(tmp_path / "own.ckpt", found, lambda size: None)
    assert (tmp_path / "own.ckpt").read_bytes() == GOLDEN[
        : -len("0a120a0173120d1205496e7433321a0407000000") // 2
    ]


@pytest.mark.parametrize("form", ["mindspore", "mindspore-safetensors"])
def test_mindspore_both_ways_with_state(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Large parameters are several values.
    monkeypatch.setattr(protobuf, "SLICE", 5000)
    state = random_state(GPT, moments=True)
    source = checkpoint(tmp_path / "ours", GPT, state)
    export_weights(source, tmp_path / "ms", form, ExportRequest(state=True))
    done = import_weights(tmp_path / "ms", tmp_path / "again", request=ImportRequest(state=True, heads=4))
    assert done.format == "mindspore"
    assert_equal(state_of(tmp_path / "again"), state)
    (file,) = (tmp_path / "ms").glob("gpt2.*")
    import_weights(file, tmp_path / "weights", request=ImportRequest(heads=4))
    assert_equal(
        state_of(tmp_path / "weights"),
        {name: one for name, one in state.items() if not name.startswith("exp")},
    )


def test_queries_keys_and_values_are_apart_in_mindspore(tmp_path: Path) -> None:
    state = random_state(GPT)
    source = checkpoint(tmp_path / "ours", GPT, state)
    export_weights(source, tmp_path / "ms", "mindspore", ExportRequest())
    found = read_mindspore(tmp_path / "ms" / "gpt2.ckpt")
    qkv = state["blocks.1.attention.qkv.weight"]
    for at in range(3):
        dense = found[f"backbone.blocks.1.attention.dense{at + 1}.weight"].whole()
        assert torch.equal(dense, qkv[at * 32 : at * 32 + 32])
    mapping = found["backbone.blocks.1.output.mapping.weight"].whole()
    assert torch.equal(mapping, state["blocks.1.feed_forward.up.weight"].t())


def test_a_checksum_is_compared(tmp_path: Path) -> None:
    import zlib

    for harm, fails in ((0, False), (1, True)):
        crc = zlib.crc32(GOLDEN) + harm
        file = tmp_path / f"{harm}.ckpt"
        file.write_bytes(GOLDEN + b"crc_num" + crc.to_bytes(10, "big"))
        if fails:
            with pytest.raises(CheckpointError, match="checksum"):
                read_mindspore(file)
        else:
            assert set(read_mindspore(file)) == {"backbone.w", "h", "b", "s"}


def test_a_glm_cannot_be_exported_as_gpt2(tmp_path: Path) -> None:
    model = replace(GLM)
    source = checkpoint(tmp_path / "ours", model, random_state(model))
    for form in ("hf", "megatron", "mindspore"):
        with pytest.raises(
            InputError, match=r"supports only|no model with kind|no family of Hugging Face fits"
        ):
            export_weights(source, tmp_path / form, form, ExportRequest())
        assert not (tmp_path / form).exists()


# -- every format ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", writable())
def test_an_import_is_the_inverse_of_an_export(tmp_path: Path, form: str) -> None:
    """Without options: heads of an unusual number, settings that shapes do not show, and the tokenizer's files."""
    model = replace(GPT, heads=2, activation="gelu", dropout=0.0)
    ours = checkpoint(tmp_path / "ours", model, random_state(model))
    small_tokenizer(ours)
    (ours / "generation_config.json").write_text('{"eos_token_id": 0}')
    (ours / "chat_template.jinja").write_text("{{ messages }}")
    (ours / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    contents = read_ours(ours, state=False)
    side = SideFiles.beside(ours).files
    with open_target(tmp_path / "out", {}, 0) as target:
        write = FORMATS[form].write
        assert write is not None
        write(replace(contents, files=side), target, ExportRequest())
        target.publish()
    done = import_weights(tmp_path / "out", tmp_path / "again")
    assert done.model == model
    assert_equal(state_of(tmp_path / "again"), state_of(ours))
    again = SideFiles.beside(tmp_path / "again").files
    assert again.keys() == side.keys()
    assert (tmp_path / "again/tokenizer.json").read_bytes() == (ours / "tokenizer.json").read_bytes()
    open_decoder(tmp_path / "again")
