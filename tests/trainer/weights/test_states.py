"""States of Megatron's and GLM's optimizers, in files written here by the documented layouts."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clusterctl.wire.requests import ExportRequest, ImportRequest
from tests.support.weights import GLM, GPT, assert_equal, checkpoint, random_state, state_of, write_glm
from tests.trainer.weights.test_megatron import flat, write_megatron
from trainer.checkpoint.part import MOMENTS
from trainer.checkpoint.store import open_checkpoint
from trainer.config.model import ModelConfig
from trainer.errors import CheckpointError, InputError
from trainer.weights.convert import export_weights, import_weights
from trainer.weights.files.distcp import Chunk, Item, read_distcp, write_distcp
from trainer.weights.lazy import in_memory

KINDS = ("", *MOMENTS)
"""Weights, and their averages."""


def part_of(state: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return the weights of a state, or one of its averages under the weights' names."""
    names = [name for name in state if not name.startswith(MOMENTS)]
    return {name: state[f"{kind}.{name}" if kind else name] for name in names}


# -- Megatron -------------------------------------------------------------------------------------------------


def megatron_with(
    folder: Path, model: ModelConfig, form: str, tensor: int, pipeline: int, pieces: int
) -> dict[str, Tensor]:
    """Write Megatron's files with the state of an optimizer of this form; return the state under our names."""
    state = random_state(model, moments=True)
    for kind in KINDS:
        write_megatron(folder / (kind or "x"), model, part_of(state, kind), 3.0, tensor, pipeline, pieces)
    for file in (folder / "x").glob("iter_0000070/*/model_optim_rng.pt"):
        place = file.relative_to(folder / "x")
        document, *averages = (
            torch.load(folder / (kind or "x") / place, weights_only=False) for kind in KINDS
        )
        keys = ["model"] if pieces == 1 else [f"model{at}" for at in range(pieces)]
        rows = [[dict(flat(each[key])) for key in keys] for each in (document, *averages)]
        document["args"].consumed_train_samples = 280
        if form in ("numbered", "masters"):
            document["optimizer"] = numbered(rows, form == "masters")
            if form == "masters":
                for key in keys:
                    document[key] = narrow(document[key])
        else:
            document["optimizer"] = {"optimizer": {"param_groups": [{"step": 65}, {"step": 65}]}}
            torch.save(in_rows(rows, form), file.with_name("distrib_optim.pt"))
        torch.save(document, file)
    return state


def numbered(rows: list[list[dict[str, Tensor]]], masters: bool) -> dict[str, Any]:
    """Return the state of an optimizer with matrices first, vectors then."""
    names = [(piece, name) for piece in range(len(rows[0])) for name in rows[0][piece]]
    groups = [
        [entry for entry in names if (rows[0][entry[0]][entry[1]].dim() > 1) is wanted]
        for wanted in (True, False)
    ]
    order = [entry for group in groups for entry in group]
    inner = {
        "state": {
            at: {"exp_avg": rows[1][piece][name], "exp_avg_sq": rows[2][piece][name]}
            for at, (piece, name) in enumerate(order)
        },
        "param_groups": [{"params": [order.index(entry) for entry in group], "step": 65} for group in groups],
    }
    copies = [[rows[0][piece][name].clone() for piece, name in group] for group in groups]
    return {"optimizer": inner, "fp32_from_fp16_params": copies} if masters else inner


def narrow(document: Any) -> Any:
    """Return a state dict in bf16."""
    if isinstance(document, dict):
        return {key: narrow(value) for key, value in document.items()}
    return document.bfloat16()


def in_rows(rows: list[list[dict[str, Tensor]]], form: str) -> dict[Any, Any]:
    """Return the file of a distributed optimizer: each piece's parameters in the reverse order."""
    found: dict[Any, Any] = {"buckets_coalesced": True}
    for piece in range(len(rows[0])):
        own = {}
        for kind, each in zip(("param", *MOMENTS), rows, strict=True):
            row = torch.zeros(0)
            for tensor in reversed(each[piece].values()):
                gap = -len(row) % 64 if form == "aligned" else 0
                row = torch.cat([row, torch.zeros(gap), tensor.flatten()])
            own[kind] = [row[:3000], row[3000:]] if form == "buckets" else row
        found[piece] = {torch.float32 if form == "buckets" else (torch.float32, torch.float32): own}
    return found


@pytest.mark.parametrize(
    ("form", "tensor", "pipeline", "pieces"),
    [
        ("numbered", 1, 1, 1),
        ("numbered", 2, 2, 1),
        ("masters", 1, 2, 2),
        ("aligned", 2, 1, 1),
        ("aligned", 1, 2, 2),
        ("buckets", 1, 1, 1),
    ],
)
def test_the_state_of_megatron_is_imported(
    tmp_path: Path, form: str, tensor: int, pipeline: int, pieces: int
) -> None:
    state = megatron_with(tmp_path, GPT, form, tensor, pipeline, pieces)
    done = import_weights(tmp_path / "x", tmp_path / "ours", request=ImportRequest(state=True))
    assert (done.step, done.state) == (70, True)
    assert_equal(state_of(tmp_path / "ours"), state)
    manifest = open_checkpoint(tmp_path / "ours").manifest
    assert (manifest.optimizer_steps, manifest.consumed_samples) == (65, 280)


def test_rows_of_other_parameters_are_refused(tmp_path: Path) -> None:
    megatron_with(tmp_path, GPT, "aligned", 1, 1, 1)
    file = next((tmp_path / "x").glob("iter_0000070/*/distrib_optim.pt"))
    document = torch.load(file, weights_only=False)
    (rows,) = document[0].values()
    rows["param"] = rows["param"].flip(0)
    torch.save(document, file)
    asked = ImportRequest(state=True)
    with pytest.raises(
        CheckpointError, match="is not at the place where Megatron's distributed optimizer stores it"
    ):
        import_weights(tmp_path / "x", tmp_path / "ours", request=asked)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"state in distrib_optim\.pt is missing"):
        import_weights(tmp_path / "x", tmp_path / "ours", request=asked)
    write_megatron(tmp_path / "without", GPT, random_state(GPT))
    with pytest.raises(InputError, match="contains no optimizer state"):
        import_weights(tmp_path / "without", tmp_path / "ours", request=asked)


# -- Megatron-core's distributed checkpoints ----------------------------------------------------------------------


MODULES = (
    "input_layernorm",
    "attention.dense",
    "attention.query_key_value",
    "post_attention_layernorm",
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
)


def in_order(piece: dict[str, Tensor]) -> list[str]:
    """Return the names of a piece of the model in the order of Megatron-core's modules."""

    def place(name: str) -> tuple[int, ...]:
        kind = int(name.endswith("bias"))
        if ".layers." in name:
            number, module = name.split(".layers.")[1].split(".", 1)
            return (1, int(number), MODULES.index(module.rpartition(".")[0]), kind)
        outside = ("word_embeddings.", "position_embeddings.", "final_layernorm.", "for_head.")
        at = next(at for at, end in enumerate(outside) if end in name)
        return (0 if at < 2 else 2, at, kind)

    return sorted(piece, key=place)


def core_with(
    folder: Path, tensor: int, pipeline: int, pieces: int, state: dict[str, Tensor], order: int = 1
) -> None:
    """Write a distributed checkpoint whose optimizer is rows of each rank's parameters, two buckets each."""
    source = checkpoint(folder / "weights", GPT, part_of(state, ""))
    export_weights(source, folder / "core", "megatron-core", ExportRequest(tensor=tensor))
    release = folder / "core" / "release"
    items = [
        Item(key, lazy.shape, [Chunk((0,) * len(lazy.shape), lazy)])
        for key, lazy in read_distcp(release).items()
    ]
    for kind in KINDS:
        write_megatron(folder / (kind or "x"), GPT, part_of(state, kind), 3.0, tensor, pipeline, pieces)
    for file in sorted((folder / "x").glob("iter_0000070/*/model_optim_rng.pt")):
        place = file.relative_to(folder / "x")
        rank, stage = (int(part) for part in (*file.parent.name.split("_")[2:], "0")[:2])
        documents = [torch.load(folder / (kind or "x") / place, weights_only=False) for kind in KINDS]
        for at in range(pieces):
            own = [dict(flat(each["model" if pieces == 1 else f"model{at}"])) for each in documents]
            names = in_order(own[0])[::-order]
            prefix = f"optimizer.distributed.dp_group_idx_{stage * tensor + rank}.gbuf_idx_{at}"
            for bucket, half in enumerate((names[:5], names[5:])):
                for kind, each in zip(("param", *MOMENTS), own, strict=True):
                    row = torch.zeros(0)
                    for name in half:
                        row = torch.cat([row, torch.full((-len(row) % 64,), 7.0), each[name].flatten()])
                    key = f"{prefix}.dtype_(torch.float32, torch.float32).bucket_idx_{bucket}.{kind}"
                    items.append(Item(key, tuple(row.shape), [Chunk((0,), in_memory(row))]))
    steps = [{"param_groups": [{"step": 65.0}, {"step": 65.0}]}]
    items.append(Item("optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1", value=steps))
    _, metadata = write_distcp(release / "data", items, lambda size: None)
    (release / ".metadata").write_bytes(metadata)
    common = torch.load(release / "common.pt", weights_only=False)
    common["args"].tensor_model_parallel_size, common["args"].pipeline_model_parallel_size = tensor, pipeline
    common["args"].consumed_train_samples = 280
    kind = {"param_state_sharding_type": "dp_reshardable"}
    torch.save({**common, "iteration": 70, "optimizer": kind}, release / "common.pt")


@pytest.mark.parametrize(("tensor", "pipeline", "pieces"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2)])
def test_rows_of_a_distributed_checkpoint_are_imported(
    tmp_path: Path, tensor: int, pipeline: int, pieces: int
) -> None:
    state = random_state(GPT, moments=True)
    # Weights alike, as norms are in the beginning: their order tells them apart.
    for name in [name for name in state if name.startswith("blocks") and ".norm_1." in name]:
        state[name] = torch.ones(GPT.hidden)
    core_with(tmp_path, tensor, pipeline, pieces, state)
    done = import_weights(tmp_path / "core", tmp_path / "ours", request=ImportRequest(state=True))
    assert (done.format, done.step, done.state) == ("megatron-core", 70, True)
    assert_equal(state_of(tmp_path / "ours"), state)
    manifest = open_checkpoint(tmp_path / "ours").manifest
    assert (manifest.optimizer_steps, manifest.consumed_samples) == (65, 280)


def test_rows_in_another_order_are_taken_only_if_no_two_weights_are_alike(tmp_path: Path) -> None:
    state = random_state(GPT, moments=True)
    asked = ImportRequest(state=True)
    core_with(tmp_path / "a", 1, 1, 1, state, order=-1)
    import_weights(tmp_path / "a" / "core", tmp_path / "ours", request=asked)
    assert_equal(state_of(tmp_path / "ours"), state)
    for name in [name for name in state if name.startswith("blocks") and ".norm_1." in name]:
        state[name] = torch.ones(GPT.hidden)
    core_with(tmp_path / "b", 1, 1, 1, state, order=-1)
    with pytest.raises(
        CheckpointError, match=r"gbuf_idx_0: the numbers of bucket \d from [\d,]+ on match no"
    ):
        import_weights(tmp_path / "b" / "core", tmp_path / "again", request=asked)


def test_a_state_that_a_distributed_checkpoint_has_not_is_refused_with_its_key(tmp_path: Path) -> None:
    asked = ImportRequest(state=True)
    state = random_state(GPT, moments=True)
    core_with(tmp_path, 1, 1, 1, state)
    release = tmp_path / "core" / "release"
    common = torch.load(release / "common.pt", weights_only=False)
    common["args"].tensor_model_parallel_size = 2
    torch.save(common, release / "common.pt")
    with pytest.raises(CheckpointError, match="has rows of 1 ranks; its args name 2 tensor parallel ranks"):
        import_weights(tmp_path / "core", tmp_path / "ours", request=asked)
    kept = [
        Item(key, lazy.shape, [Chunk((0,) * len(lazy.shape), lazy)])
        for key, lazy in read_distcp(release).items()
        if not key.startswith("optimizer")
    ]
    flattened = in_memory(torch.zeros(32))
    for key, problem in (
        ("optimizer.state.exp_avg.decoder.final_layernorm.bias", "lacks optimizer.state.exp_avg.decoder"),
        ("optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight", "a weight of shape"),
        ("optimizer.state.exp_avg.no.such.weight", "belongs to no weight"),
        ("chained_0.optimizer.state.exp_avg.x", "an unknown optimizer"),
        ("", "contains no optimizer state"),
    ):
        items = [*kept, *([Item(key, (32,), [Chunk((0,), flattened)])] if key else [])]
        _, metadata = write_distcp(tmp_path / "data", items, lambda size: None)
        (release / ".metadata").write_bytes(metadata)
        (release / "data").write_bytes((tmp_path / "data").read_bytes())
        with pytest.raises(InputError, match=re.escape(problem)):
            import_weights(tmp_path / "core", tmp_path / "ours", request=asked)
        assert not (tmp_path / "ours").exists()


# -- GLM ------------------------------------------------------------------------------------------------------


def glm_with(folder: Path, ranks: int, readers: int, old: bool) -> dict[str, Tensor]:
    """Write GLM's files with those of ZeRO for so many data parallel ranks; return the state under our names.

    `old`: as versions of DeepSpeed that record no names and have another name for the files.
    """
    state = random_state(GLM, moments=True)
    for kind in KINDS:
        write_glm(folder / (kind or "x"), part_of(state, kind), ranks)
    for rank in range(ranks):
        name = f"mp_rank_{rank:02d}_model_states.pt"
        document, *averages = (torch.load(folder / (kind or "x") / name) for kind in KINDS)
        modules = [each["module"] for each in (document, *averages)]
        groups = [
            [key for key in modules[0] if (modules[0][key].dim() > 1) is wanted] for wanted in (True, False)
        ]
        rows = [[torch.cat([each[key].flatten() for key in group]) for group in groups] for each in modules]
        document |= {"iteration": 300, "skipped_steps": 2, "global_steps": 300}
        if not old:
            document["param_shapes"] = [{key: modules[0][key].shape for key in group} for group in groups]
        document["module"] = {key: tensor.half() for key, tensor in modules[0].items()}
        torch.save(document, folder / "x" / name)
        for reader in range(readers):
            parts = [[row.tensor_split(readers)[reader].clone() for row in kind] for kind in rows]
            averages_of = [dict(zip(MOMENTS, pair, strict=True)) for pair in zip(*parts[1:], strict=True)]
            optimizer = {
                "partition_count": readers,
                "single_partition_of_fp32_groups": parts[0],
                "base_optimizer_state": averages_of if old else {"state": dict(enumerate(averages_of))},
            }
            end = "optim_states.pt" if old else "_optim_states.pt"
            file = f"zero_pp_rank_{reader}_mp_rank_{rank:02d}{end}"
            torch.save({"optimizer_state_dict": optimizer}, folder / "x" / file)
    return state


@pytest.mark.parametrize(("ranks", "readers", "old"), [(1, 1, False), (2, 2, False), (2, 3, True)])
def test_the_state_of_a_glm_is_imported(tmp_path: Path, ranks: int, readers: int, old: bool) -> None:
    state = glm_with(tmp_path, ranks, readers, old)
    asked = ImportRequest(state=True, heads=4, vocab=300)
    done = import_weights(tmp_path / "x", tmp_path / "ours", request=asked)
    assert (done.format, done.step, done.state) == ("glm", 300, True)
    assert_equal(state_of(tmp_path / "ours"), state)


def test_a_glm_whose_masters_are_in_another_order_is_refused(tmp_path: Path) -> None:
    glm_with(tmp_path, 1, 1, old=True)
    file = tmp_path / "x" / "zero_pp_rank_0_mp_rank_00optim_states.pt"
    document = torch.load(file)
    masters = document["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    assert prod(masters[0].shape) > prod(masters[1].shape)
    masters[0] = masters[0].flip(0)
    torch.save(document, file)
    asked = ImportRequest(state=True, heads=4, vocab=300)
    with pytest.raises(CheckpointError, match="its masters are not in the model's order"):
        import_weights(tmp_path / "x", tmp_path / "ours", request=asked)
    file.unlink()
    with pytest.raises(InputError, match="contains no optimizer state"):
        import_weights(tmp_path / "x", tmp_path / "ours", request=asked)
