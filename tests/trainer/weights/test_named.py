"""torch's distributed checkpoints, judged by torch, and DeepSpeed's files, written here by hand.

`make judges` has DeepSpeed itself judge them (tests/judges/test_deepspeed.py).
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from clusterctl.wire.requests import ExportRequest, ImportRequest
from tests.support.weights import (
    GPT,
    assert_equal,
    checkpoint,
    kill_during_import,
    random_state,
    state_of,
)
from trainer.checkpoint.part import MOMENTS
from trainer.checkpoint.store import open_checkpoint
from trainer.errors import CheckpointError, InputError
from trainer.weights import ours
from trainer.weights.contents import Progress
from trainer.weights.convert import export_weights, import_weights
from trainer.weights.files.safetensors import read_safetensors

STEPS = Progress(7, 7, 56)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def state() -> dict[str, Tensor]:
    return random_state(GPT, moments=True)


@pytest.fixture
def source(tmp_path: Path, state: dict[str, Tensor]) -> Path:
    return checkpoint(tmp_path / "ours", GPT, state, STEPS)


@pytest.fixture
def theirs(tmp_path: Path, source: Path, state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return weights and averages by the names of transformers."""
    found = {}
    for kind in ("", *MOMENTS):
        own = {
            name: state[f"{kind}.{name}" if kind else name]
            for name in state
            if name.split(".")[0] not in MOMENTS
        }
        folder = checkpoint(tmp_path / f"own{kind}", GPT, own)
        export_weights(folder, tmp_path / f"hf{kind}", "hf", ExportRequest())
        read = read_safetensors(tmp_path / f"hf{kind}" / "model.safetensors")
        found[kind] = {name: tensor.whole() for name, tensor in read.items()}
    return found


def described(folder: Path, tmp_path: Path) -> Path:
    """Put the model's config.json into a folder."""
    (folder / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    return folder


# -- torch's distributed checkpoints --------------------------------------------------------------------------


def test_torch_loads_an_export_bit_for_bit(
    tmp_path: Path, source: Path, theirs: dict[str, dict[str, Tensor]], state: dict[str, Tensor]
) -> None:
    done = export_weights(source, tmp_path / "dcp", "dcp", ExportRequest(state=True))
    assert done.state and done.step == 7
    names = list(theirs[""])
    averages = {name: {m: torch.zeros_like(theirs[m][name]) for m in MOMENTS} for name in names}
    wanted: dict[str, Any] = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in theirs[""].items()},
        "optim": {
            "state": {name: {**averages[name], "step": torch.tensor(0.0)} for name in names},
            "param_groups": [],
        },
    }
    wanted["model"]["lm_head.weight"] = torch.zeros_like(theirs[""]["transformer.wte.weight"])
    dcp.load(wanted, checkpoint_id=str(tmp_path / "dcp"))
    for name, tensor in theirs[""].items():
        assert torch.equal(wanted["model"][name], tensor)
        for moment in MOMENTS:
            assert torch.equal(wanted["optim"]["state"][name][moment], theirs[moment][name])
        assert float(wanted["optim"]["state"][name]["step"]) == 7.0
    assert torch.equal(wanted["model"]["lm_head.weight"], wanted["model"]["transformer.wte.weight"])
    assert wanted["optim"]["param_groups"][0]["params"] == names
    done = import_weights(tmp_path / "dcp", tmp_path / "again", request=ImportRequest(state=True))
    assert done.format == "dcp" and done.step == 7
    assert_equal(state_of(tmp_path / "again"), state)


@pytest.mark.parametrize("wrapper", ["", "model.", "app.model."])
def test_what_torch_saves_is_imported_with_its_state(
    tmp_path: Path, theirs: dict[str, dict[str, Tensor]], state: dict[str, Tensor], wrapper: str
) -> None:
    optimizer = wrapper.replace("model.", "optim.") or "optim."
    saved: dict[str, Any] = {f"{wrapper}{name}": tensor for name, tensor in theirs[""].items()}
    for name in theirs[""]:
        for moment in MOMENTS:
            saved[f"{optimizer}state.{name}.{moment}"] = theirs[moment][name]
        saved[f"{optimizer}state.{name}.step"] = torch.tensor(7.0)
    dcp.save(saved, checkpoint_id=str(tmp_path / "dcp"))
    described(tmp_path / "dcp", tmp_path)
    import_weights(tmp_path / "dcp", tmp_path / "again", request=ImportRequest(state=True))
    assert_equal(state_of(tmp_path / "again"), state)
    import_weights(tmp_path / "dcp", tmp_path / "weights")
    assert set(state_of(tmp_path / "weights")) == {name for name in state if not name.startswith(MOMENTS)}


def test_tensors_of_an_unknown_model_are_refused(tmp_path: Path) -> None:
    dcp.save({"some.weight": torch.ones(2, 2)}, checkpoint_id=str(tmp_path / "dcp"))
    with pytest.raises(CheckpointError, match=r"contains some.weight and more, but no config.json") as found:
        import_weights(tmp_path / "dcp", tmp_path / "again")
    assert "config.json of Hugging Face" in found.value.hint


# -- DeepSpeed ------------------------------------------------------------------------------------------------


def write_zero(folder: Path, theirs: dict[str, dict[str, Tensor]], stage: int, world: int) -> Path:
    """Write the files of ZeRO with matrices and vectors in groups of their own, as DeepSpeed divides them."""
    folder.mkdir(parents=True)
    groups = [[n for n, p in theirs[""].items() if (p.dim() > 1) is many] for many in (True, False)]
    rows: list[list[dict[str, Tensor]]] = [[] for _ in range(world)]
    addresses: list[list[dict[str, Any]]] = [[] for _ in range(world)]
    for group in groups:
        for rank in range(world):
            rows[rank].append({})
            addresses[rank].append({})
        for kind in ("", *MOMENTS):
            flat = [theirs[kind][name].flatten() for name in group]
            if stage == 3:
                each = [math.ceil(len(one) / world) for one in flat]
                padded = [
                    torch.cat([one, torch.full((world * size - len(one),), 9e9)])
                    for one, size in zip(flat, each, strict=True)
                ]
                for rank in range(world):
                    own = [one[rank * n : (rank + 1) * n] for one, n in zip(padded, each, strict=True)]
                    rows[rank][-1][kind] = torch.cat(own)
            else:
                joined = torch.cat(flat)
                each_rank = math.ceil(len(joined) / (2 * world)) * 2
                for rank in range(world):
                    rows[rank][-1][kind] = joined[rank * each_rank : (rank + 1) * each_rank].clone()
    shapes = [OrderedDict((name, theirs[""][name].shape) for name in group) for group in groups]
    for rank in range(world):
        states = {
            at: {"step": torch.tensor(7.0), **{m: row[m] for m in MOMENTS}}
            for at, row in enumerate(rows[rank])
        }
        masters = [row[""] for row in rows[rank]]
        document: dict[str, Any] = {"partition_count": world}
        if stage == 3:
            document |= {"fp32_flat_groups": masters, "optimizer_state_dict": {"state": states}}
        else:
            document |= {
                "single_partition_of_fp32_groups": masters,
                "base_optimizer_state": {"state": states},
            }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": document}, folder / name)
        module = {name: tensor.bfloat16() for name, tensor in theirs[""].items()} if stage < 3 else {}
        model = {"module": module, "param_shapes": shapes, "global_steps": 7, "global_samples": 56}
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(model, folder / f"{prefix}mp_rank_00_model_states.pt")
    return folder


@pytest.mark.parametrize(("stage", "world"), [(1, 1), (1, 3), (2, 4), (3, 1), (3, 3)])
def test_masters_and_averages_of_zero_are_imported(
    tmp_path: Path, theirs: dict[str, dict[str, Tensor]], state: dict[str, Tensor], stage: int, world: int
) -> None:
    write_zero(tmp_path / "ds" / "global_step7", theirs, stage, world)
    (tmp_path / "ds" / "latest").write_text("global_step7")
    described(tmp_path / "ds", tmp_path)
    done = import_weights(tmp_path / "ds", tmp_path / "again", request=ImportRequest(state=True))
    assert done.format == "deepspeed" and done.step == 7
    assert_equal(state_of(tmp_path / "again"), state)
    manifest = open_checkpoint(tmp_path / "again").manifest
    assert manifest.optimizer_steps == 7 and manifest.consumed_samples == 56


@pytest.mark.parametrize("form", ["deepspeed", "dcp"])
def test_an_import_with_state_that_was_killed_continues(
    tmp_path: Path,
    source: Path,
    theirs: dict[str, dict[str, Tensor]],
    state: dict[str, Tensor],
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "theirs"
    if form == "dcp":
        export_weights(source, folder, "dcp", ExportRequest(state=True))
    else:
        write_zero(folder / "global_step7", theirs, 1, 3)
        (folder / "latest").write_text("global_step7")
        described(folder, tmp_path)
    kill_during_import(folder, tmp_path / "again", 100_000, state=True)
    assert not (tmp_path / "again").exists()
    monkeypatch.setattr(ours, "LEAST_FILE", 100_000)
    done = import_weights(folder, tmp_path / "again", request=ImportRequest(state=True))
    assert done.format == form and done.resumed_files == 2
    assert len(list((tmp_path / "again").glob("part-*.safetensors"))) > 4
    # state_of verifies every byte.
    assert_equal(state_of(tmp_path / "again"), state)
    assert open_checkpoint(tmp_path / "again").manifest.optimizer_steps == 7


def test_a_missing_rank_is_named(tmp_path: Path, theirs: dict[str, dict[str, Tensor]]) -> None:
    folder = described(write_zero(tmp_path / "ds", theirs, 1, 3), tmp_path)
    (folder / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="2 files of an optimizer that was divided among 3 ranks"):
        import_weights(folder, tmp_path / "again")
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="lacks some of zero_pp_rank_X_mp_rank_00"):
        import_weights(folder, tmp_path / "again")


def test_weights_of_a_pipeline_are_imported_from_the_files_of_its_layers(
    tmp_path: Path, state: dict[str, Tensor]
) -> None:
    own = {name: tensor for name, tensor in state.items() if not name.startswith(MOMENTS)}
    source = checkpoint(tmp_path / "weights", GPT, own)
    export_weights(source, tmp_path / "megatron", "megatron", ExportRequest())
    file = next((tmp_path / "megatron").glob("release/*/model_optim_rng.pt"))
    saved = torch.load(file, weights_only=False)
    language = saved["model"]["language_model"]
    folder = tmp_path / "ds"
    folder.mkdir()
    layers: dict[int, dict[str, Tensor]] = {
        1: {
            f"{table}_embeddings.weight": language["embedding"][f"{table}_embeddings"]["weight"]
            for table in ("word", "position")
        }
    }
    for name, tensor in language["encoder"].items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            layers.setdefault(3 + int(number), {})[rest] = tensor
        else:
            layers.setdefault(9, {})[name.removeprefix("final_layernorm.")] = tensor
    for at, layer in layers.items():
        torch.save(layer, folder / f"layer_{at:02d}-model_00-model_states.pt")
    for rank in range(2):
        document = {"module": None, "args": saved["args"], "checkpoint_version": 3.0, "global_steps": 7}
        torch.save(document, folder / f"mp_rank_{rank:02d}_model_states.pt")
    done = import_weights(folder, tmp_path / "again")
    assert done.format == "deepspeed"
    assert_equal(state_of(tmp_path / "again"), own)
    with pytest.raises(InputError, match="contains no optimizer state"):
        import_weights(folder, tmp_path / "state", request=ImportRequest(state=True))


def test_a_universal_checkpoint_goes_both_ways(
    tmp_path: Path, source: Path, state: dict[str, Tensor]
) -> None:
    export_weights(source, tmp_path / "universal", "deepspeed", ExportRequest(state=True))
    assert (tmp_path / "universal" / "latest_universal").read_text() == "global_step7_universal"
    file = tmp_path / "universal/global_step7_universal/zero/transformer.wte.weight/exp_avg.pt"
    found = torch.load(file, weights_only=True)
    assert torch.equal(found["param"], state["exp_avg.tokens.weight"])
    done = import_weights(tmp_path / "universal", tmp_path / "again", request=ImportRequest(state=True))
    assert done.format == "deepspeed" and done.step == 7
    assert_equal(state_of(tmp_path / "again"), state)
