"""Megatron's folders: files written here by other means than ours, and what other programs read of our exports."""

from __future__ import annotations

import argparse
import re
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import format_utils

from clusterctl.wire.requests import ExportRequest, ImportRequest
from tests.support.weights import GLM, GPT, assert_equal, checkpoint, random_state, state_of
from trainer.config.model import ModelConfig
from trainer.config.model_sizes import sized
from trainer.errors import CheckpointError, InputError
from trainer.weights.convert import FORMATS, export_weights, import_weights
from trainer.weights.files.distcp import Chunk, Item, read_distcp, write_distcp
from trainer.weights.lazy import in_memory

OLD_NAMES = {
    "norm_1": "input_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.out": "attention.dense",
    "norm_2": "post_attention_layernorm",
    "feed_forward.up": "mlp.dense_h_to_4h",
    "feed_forward.down": "mlp.dense_4h_to_h",
}
BY_ROWS = ("attention.qkv.weight", "attention.qkv.bias", "feed_forward.up.weight", "feed_forward.up.bias")
BY_COLUMNS = ("attention.out.weight", "feed_forward.down.weight")


def qkv_of_rank(whole: Tensor, model: ModelConfig, rank: int, ranks: int, version: float) -> Tensor:
    """Return a rank's rows of queries, keys and values in the order of a version."""
    heads = whole.unflatten(0, (3, model.heads, model.head_size)).chunk(ranks, 1)[rank]
    if version >= 2:
        heads = heads.transpose(0, 1)
    elif version >= 1:
        heads = heads.permute(1, 2, 0, *range(3, heads.dim()))
    return heads.flatten(0, 2).clone()


def write_megatron(
    folder: Path,
    model: ModelConfig,
    state: dict[str, Tensor],
    version: float = 3.0,
    tensor: int = 1,
    pipeline: int = 1,
    pieces: int = 1,
    **arguments: Any,
) -> Path:
    """Write the files of all ranks as Megatron's older generation does, with `pieces` of the model on each stage."""
    each = model.layers // (pipeline * pieces)
    padded = torch.zeros(model.padded(tensor), model.hidden)
    padded[: model.vocab] = state["tokens.weight"]
    for stage in range(pipeline):
        for rank in range(tensor):
            chunks = []
            for piece in range(pieces):
                first = (piece * pipeline + stage) * each
                language: dict[str, Any] = {"encoder": {}}
                if first == 0:
                    words = {"weight": padded.chunk(tensor)[rank].clone()}
                    positions = {"weight": state["positions.weight"]}
                    language["embedding"] = {"word_embeddings": words, "position_embeddings": positions}
                for number in range(each):
                    for ours, theirs in OLD_NAMES.items():
                        for leaf in ("weight", "bias"):
                            part = state[f"blocks.{first + number}.{ours}.{leaf}"]
                            if ours == "attention.qkv":
                                part = qkv_of_rank(part, model, rank, tensor, version)
                            elif f"{ours}.{leaf}" in BY_ROWS:
                                part = part.chunk(tensor, 0)[rank].clone()
                            elif f"{ours}.{leaf}" in BY_COLUMNS:
                                part = part.chunk(tensor, 1)[rank].clone()
                            language["encoder"][f"layers.{number}.{theirs}.{leaf}"] = part
                chunk: dict[str, Any] = {"language_model": language}
                if first + each == model.layers:
                    for leaf in ("weight", "bias"):
                        language["encoder"][f"final_layernorm.{leaf}"] = state[f"norm.{leaf}"]
                    if first:
                        chunk["word_embeddings_for_head"] = {"weight": padded.chunk(tensor)[rank].clone()}
                chunks.append(chunk)
            given = {
                "num_attention_heads": model.heads,
                "layernorm_epsilon": 1e-5,
                "vocab_size": 300,
                **arguments,
            }
            document: dict[str, Any] = {"args": argparse.Namespace(**given), "iteration": 70}
            if version:
                document["checkpoint_version"] = version
            document |= (
                {"model": chunks[0]}
                if pieces == 1
                else {f"model{at}": chunk for at, chunk in enumerate(chunks)}
            )
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")
            (folder / "iter_0000070" / name).mkdir(parents=True)
            torch.save(document, folder / "iter_0000070" / name / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("70")
    return folder


@pytest.mark.parametrize(
    ("version", "tensor", "pipeline", "pieces"),
    [
        (0, 1, 1, 1),
        (0, 2, 2, 1),
        (1.0, 2, 1, 1),
        (2.0, 4, 1, 1),
        (3.0, 1, 1, 1),
        (3.0, 2, 2, 1),
        (3.0, 1, 2, 2),
    ],
)
def test_every_version_and_division_gives_the_same_tensors(
    tmp_path: Path, version: float, tensor: int, pipeline: int, pieces: int
) -> None:
    state = random_state(GPT)
    write_megatron(tmp_path / "megatron", GPT, state, version, tensor, pipeline, pieces)
    done = import_weights(tmp_path / "megatron", tmp_path / "ours")
    assert done.format == "megatron" and done.model.activation == "gelu_tanh"
    assert_equal(state_of(tmp_path / "ours"), state)


def test_files_of_old_versions_of_torch_are_read(tmp_path: Path) -> None:
    state = random_state(GPT)
    write_megatron(tmp_path / "megatron", GPT, state, version=0)
    file = tmp_path / "megatron/iter_0000070/mp_rank_00/model_optim_rng.pt"
    document = torch.load(file, weights_only=False)
    torch.save(document, file, _use_new_zipfile_serialization=False)
    import_weights(tmp_path / "megatron", tmp_path / "ours")
    assert_equal(state_of(tmp_path / "ours"), state)


def test_arguments_of_megatron_lm_0_16_are_read(tmp_path: Path) -> None:
    state = random_state(GPT)
    write_megatron(tmp_path / "megatron", GPT, state, exit_signal=signal.SIGTERM)
    import_weights(tmp_path / "megatron", tmp_path / "ours")
    assert_equal(state_of(tmp_path / "ours"), state)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (2, 2), (1, 4)])
def test_an_export_is_what_megatron_would_have_written(tmp_path: Path, tensor: int, pipeline: int) -> None:
    state = random_state(GPT)
    source = checkpoint(tmp_path / "ours", GPT, state)
    export_weights(source, tmp_path / "export", "megatron", ExportRequest(tensor=tensor, pipeline=pipeline))
    write_megatron(tmp_path / "expected", GPT, state, 3.0, tensor, pipeline)
    assert (tmp_path / "export/latest_checkpointed_iteration.txt").read_text() == "release"
    for file in (tmp_path / "expected").glob("iter_0000070/*/model_optim_rng.pt"):
        with torch.serialization.safe_globals([argparse.Namespace]):
            own = torch.load(tmp_path / "export/release" / file.parent.name / file.name, weights_only=True)
            expected = torch.load(file, weights_only=True)
        assert own["checkpoint_version"] == 3.0 and own["args"].num_layers == 4
        own_tensors, expected_tensors = dict(flat(own["model"])), dict(flat(expected["model"]))
        renamed = {
            name.replace(".attention.", ".self_attention."): one for name, one in expected_tensors.items()
        }
        assert_equal(own_tensors, renamed)
    import_weights(tmp_path / "export", tmp_path / "again")
    assert_equal(state_of(tmp_path / "again"), state)


def flat(document: dict[str, Any], prefix: str = "") -> Any:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is True",
        ),
        ({"squared_relu": True}, "squared_relu is True"),
        ({"num_experts": 8}, "num_experts is 8"),
        ({"num_attention_heads": 5}, "not divisible"),
        ({"hidden_dropout": "often"}, "hidden_dropout is 'often'"),
    ],
)
def test_variants_that_cannot_be_mapped_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_megatron(tmp_path / "megatron", GPT, random_state(GPT), **change)
    with pytest.raises(CheckpointError, match=message):
        import_weights(tmp_path / "megatron", tmp_path / "ours")


def test_a_missing_rank_and_a_wrong_version_are_named(tmp_path: Path) -> None:
    folder = write_megatron(tmp_path / "megatron", GPT, random_state(GPT), 3.0, 2, 2)
    (folder / "iter_0000070/mp_rank_01_001/model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match="lacks mp_rank_01_001"):
        import_weights(folder, tmp_path / "ours")
    other = write_megatron(tmp_path / "other", GPT, random_state(GPT), 4.0)
    with pytest.raises(CheckpointError, match=re.escape("checkpoint_version is 4.0")):
        import_weights(other, tmp_path / "ours")


def test_what_the_file_does_not_record_can_be_named(tmp_path: Path) -> None:
    state = random_state(GPT)
    write_megatron(tmp_path / "megatron", GPT, state)
    file = tmp_path / "megatron/iter_0000070/mp_rank_00/model_optim_rng.pt"
    document = torch.load(file, weights_only=False)
    del document["args"]
    torch.save(document, file)
    with pytest.raises(InputError, match="number of attention heads"):
        import_weights(tmp_path / "megatron", tmp_path / "ours")
    import_weights(tmp_path / "megatron", tmp_path / "ours", request=ImportRequest(heads=4, vocab=300))
    assert_equal(state_of(tmp_path / "ours"), state)


def test_an_export_refuses_sizes_that_do_not_divide(tmp_path: Path) -> None:
    model = replace(GPT, heads=8)
    source = checkpoint(tmp_path / "ours", model, random_state(model))
    for dry_run in (False, True):
        for form in ("megatron", "megatron-core"):
            with pytest.raises(InputError, match="--tensor 3 does not divide 8 heads") as caught:
                export_weights(
                    source, tmp_path / "export", form, ExportRequest(tensor=3, pipeline=3), dry_run
                )
            assert "--pipeline 3 does not divide 4 layers" in caught.value.message
        with pytest.raises(InputError, match="not for --to hf"):
            export_weights(source, tmp_path / "export", "hf", ExportRequest(tensor=2), dry_run)
        assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("form", FORMATS)
def test_a_dry_run_of_an_export_makes_the_checks_of_the_export_and_writes_nothing(
    tmp_path: Path, form: str
) -> None:
    source = checkpoint(tmp_path / "ours", GPT, random_state(GPT))
    if form in ("glm", "oneflow"):
        with pytest.raises(InputError, match="cannot be exported"):
            export_weights(source, tmp_path / "out", form, ExportRequest(), dry_run=True)
        return
    done = export_weights(source, tmp_path / "out", form, ExportRequest(), dry_run=True)
    assert done.format == form and [path.name for path in tmp_path.iterdir()] == ["ours"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(InputError, match="exists"):
        export_weights(source, tmp_path / "out", form, ExportRequest(), dry_run=True)
    glm = checkpoint(tmp_path / "glm", GLM, random_state(GLM))
    with pytest.raises(InputError, match=r"glm|GPT-2"):
        export_weights(glm, tmp_path / "other", form, ExportRequest(), dry_run=True)


NEWER = {
    "llama": sized("llama-tiny", hidden=64, ffn=96, vocab=300, query_groups=2),
    "qwen3": sized(
        "qwen3-0.6B", layers=4, hidden=64, heads=4, query_groups=2, head_dim=24, ffn=96, vocab=300
    ),
    "qwen2": sized("qwen2.5-7B", layers=4, hidden=64, heads=4, query_groups=2, ffn=96, vocab=300),
}


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 2)])
@pytest.mark.parametrize("name", NEWER)
def test_newer_models_go_out_and_come_back(tmp_path: Path, name: str, tensor: int, pipeline: int) -> None:
    model = NEWER[name]
    state = random_state(model)
    source = checkpoint(tmp_path / "ours", model, state)
    export_weights(source, tmp_path / "export", "megatron", ExportRequest(tensor=tensor, pipeline=pipeline))
    done = import_weights(tmp_path / "export", tmp_path / "again")
    assert_equal(state_of(tmp_path / "again"), state)
    changed = {key: value for key, value in asdict(done.model).items() if value != asdict(model)[key]}
    assert not set(changed) - {"sequence", "positions"}


@pytest.mark.parametrize("name", ["mistral-7B-v0.1", "pythia-70M", "glm4-9B-0414", "llama3.2-1B", "glm-base"])
def test_models_that_megatron_has_not_are_refused(tmp_path: Path, name: str) -> None:
    model = sized(name, layers=1, hidden=64, heads=4, query_groups=0, head_dim=0, ffn=96, vocab=300)
    source = checkpoint(tmp_path / "ours", model, random_state(model))
    with pytest.raises(InputError, match="Megatron has no model with"):
        export_weights(source, tmp_path / "export", "megatron", ExportRequest())


# -- distributed checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", *NEWER])
def test_a_distributed_checkpoint_is_what_torch_reads(tmp_path: Path, name: str) -> None:
    model = NEWER.get(name, GPT)
    state = random_state(model)
    source = checkpoint(tmp_path / "ours", model, state)
    export_weights(source, tmp_path / "export", "megatron-core", ExportRequest())
    format_utils.dcp_to_torch_save(str(tmp_path / "export/release"), str(tmp_path / "one.pt"))
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    stacked = found["decoder.layers.mlp.linear_fc2.weight"]
    expected = [state[f"blocks.{number}.feed_forward.down.weight"] for number in range(4)]
    assert torch.equal(stacked, torch.stack(expected))
    assert torch.equal(found["decoder.final_layernorm.weight"], state["norm.weight"])
    done = import_weights(tmp_path / "export", tmp_path / "again")
    assert done.format == "megatron-core" and done.model.vocab == 300
    assert_equal(state_of(tmp_path / "again"), state)


def test_a_tensor_in_several_boxes_is_put_together(tmp_path: Path) -> None:
    whole = torch.arange(60.0).view(6, 10)
    boxes = [(0, 4, 0, 3), (0, 4, 3, 10), (4, 6, 0, 10)]
    chunks = [Chunk((a, c), in_memory(whole[a:b, c:d].contiguous())) for a, b, c, d in boxes]
    _, metadata = write_distcp(tmp_path / "data", [Item("w", (6, 10), chunks)], lambda size: None)
    (tmp_path / ".metadata").write_bytes(metadata)
    found = read_distcp(tmp_path)["w"]
    assert torch.equal(found.whole(), whole)
    assert torch.equal(found.read(3, 5), whole[3:5])
    _, metadata = write_distcp(tmp_path / "data", [Item("w", (6, 10), chunks[:2])], lambda size: None)
    (tmp_path / ".metadata").write_bytes(metadata)
    with pytest.raises(CheckpointError, match="do not cover the whole tensor"):
        read_distcp(tmp_path)


@pytest.mark.parametrize("form", ["megatron", "megatron-core", "mindspore"])
def test_a_mixture_of_experts_is_not_exported_in_part(tmp_path: Path, form: str) -> None:
    model = sized("llama-tiny", layers=1, hidden=64, heads=4, query_groups=0, ffn=96, vocab=128, experts=4)
    source = checkpoint(tmp_path / "ours", model, random_state(model))
    with pytest.raises(InputError, match=r"has no place for|supports only"):
        export_weights(source, tmp_path / form, form, ExportRequest())
    assert not (tmp_path / form).exists()
