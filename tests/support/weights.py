"""Small models with random weights as checkpoints of ours, for the tests of imports and exports."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint.manifest import Origin
from trainer.checkpoint.part import MOMENTS
from trainer.checkpoint.store import verify
from trainer.config.model import ModelConfig
from trainer.generate.loading import load_model
from trainer.weights.contents import Contents, Progress
from trainer.weights.lazy import in_memory
from trainer.weights.ours import shapes_for, write_ours
from trainer.weights.target import open_target

GPT = ModelConfig(layers=4, hidden=32, heads=4, sequence=24, vocab=300)
GLM = replace(GPT, kind="glm", positions=24)


def random_state(model: ModelConfig, moments: bool = False, seed: int = 1) -> dict[str, Tensor]:
    """Return random tensors of a model under our names."""
    random = torch.Generator().manual_seed(seed)
    shapes = shapes_for(model)
    state = {name: torch.randn(shape, generator=random) * 0.2 for name, shape in shapes.items()}
    for moment in MOMENTS if moments else ():
        state |= {f"{moment}.{name}": torch.rand(shape, generator=random) for name, shape in shapes.items()}
    return state


def checkpoint(
    path: Path, model: ModelConfig, state: dict[str, Tensor], progress: Progress = Progress()
) -> Path:
    """Write a checkpoint of ours."""
    tensors = {name: in_memory(tensor) for name, tensor in state.items()}
    contents = Contents(model, tensors, Origin("test", ""), progress=progress)
    with open_target(path, {}, 0) as target:
        write_ours(contents, target)
        target.publish()
    return path


def state_of(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint of ours, verified."""
    found = verify(path)
    return found.read(list(found.table))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare two states bit for bit."""
    assert set(found) == set(expected)
    wrong = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not wrong


@torch.no_grad()
def logits_of(path: Path, tokens: Tensor) -> Tensor:
    """Return the logits of a GPT in a checkpoint of ours."""
    found: Tensor = load_model(verify(path))(tokens)  # type: ignore[operator]
    return found


def kill_during_import(source: Path, output: Path, least_file: int, state: bool = False) -> None:
    """Import in another process, which is killed in the middle of its third file."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from clusterctl.wire import requests\n"
        "from trainer.weights import convert, ours, target\n"
        f"ours.LEAST_FILE = {least_file}\n"
        "real = target.Target.write\n"
        "def write(self, name, work):\n"
        "    if len(self.entries) == 2:\n"
        "        (self.aside / name).write_bytes(b'half a file')\n"
        "        print('two', flush=True); time.sleep(60)\n"
        "    return real(self, name, work)\n"
        "target.Target.write = write\n"
        f"request = requests.ImportRequest(state={state})\n"
        f"convert.import_weights(Path({str(source)!r}), Path({str(output)!r}), request=request)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"two\n"
    process.send_signal(signal.SIGKILL)
    process.wait()


GLM_NAMES = {
    "norm_1": "input_layernorm",
    "attention.qkv": "attention.query_key_value",
    "attention.out": "attention.dense",
    "norm_2": "post_attention_layernorm",
    "feed_forward.up": "mlp.dense_h_to_4h",
    "feed_forward.down": "mlp.dense_4h_to_h",
}


def write_glm(folder: Path, state: dict[str, Tensor], ranks: int) -> Path:
    """Write the files of THUDM's GLM with so many model parallel ranks."""
    folder.mkdir(parents=True)
    tokens = state["tokens.weight"]
    layers = len([name for name in state if name.endswith("norm_1.weight")])
    table = torch.zeros(-(-len(tokens) // 256) * 256, tokens.shape[1])
    table[: len(tokens)] = tokens
    for rank in range(ranks):
        module = {
            "word_embeddings.weight": table.chunk(ranks)[rank].clone(),
            "transformer.position_embeddings.weight": state["positions.weight"],
            "transformer.block_position_embeddings.weight": state["block_positions.weight"],
        }
        for leaf in ("weight", "bias"):
            module[f"transformer.final_layernorm.{leaf}"] = state[f"norm.{leaf}"]
            for number in range(layers):
                for ours, theirs in GLM_NAMES.items():
                    part = state[f"blocks.{number}.{ours}.{leaf}"]
                    if ours == "attention.qkv":
                        part = torch.cat([each.chunk(ranks)[rank] for each in part.chunk(3)])
                    elif ours == "feed_forward.up":
                        part = part.chunk(ranks)[rank].clone()
                    elif leaf == "weight" and "norm" not in ours:
                        part = part.chunk(ranks, 1)[rank].clone()
                    module[f"transformer.layers.{number}.{theirs}.{leaf}"] = part
        document = {"module": module, "optimizer": None, "global_steps": 7, "mp_world_size": ranks}
        torch.save(document, folder / f"mp_rank_{rank:02d}_model_states.pt")
    return folder
