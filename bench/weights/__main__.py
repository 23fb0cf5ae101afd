"""`python -m bench.weights --peer PYTHON --megatron PYTHON`: compare imports and exports with other programs.

The model is a random GPT-2. Each step runs in a process of its own, which reports its seconds and the largest resident
memory that it or one of its child processes had. `--peer` is a Python with transformers. `--megatron` is one with
megatron-core and psutil: it builds the model, loads a distributed checkpoint into it, and saves it.
`--megatron-lm` is a folder with Megatron-LM core_v0.16.1. Its `tools/checkpoint/convert.py` divides the same checkpoint
among two tensor parallel ranks, without a GPU, and we import what it wrote and export ours in that form. The Python of
`--megatron` also needs pydantic, pyyaml, regex, six and triton for it.
After the first step the files are in the page cache. The last line shows the size of the largest tensor, and the memory
that our side may use.
"""

from __future__ import annotations

import filecmp
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import field
from bench.field import Option, read_options, scratch

REPORT = """
import json, resource, sys, time
def report(began):
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1e3
    print(json.dumps({"seconds": time.monotonic() - began, "peak_mb": peak}))
"""
# Writes the folder that the others read, without having the model in memory.
MAKE = """
from pathlib import Path
import torch
from trainer.checkpoint.manifest import Origin
from trainer.config.model_sizes import sized
from clusterctl.wire.requests import ExportRequest
from trainer.weights.contents import Contents
from trainer.weights.huggingface import write_huggingface
from trainer.weights.lazy import Lazy
from trainer.weights.ours import shapes_for
from trainer.weights.target import open_target
def random(shape):
    return Lazy(shape, torch.float32, lambda a, b: torch.randn((b - a, *shape[1:])) * 0.02)
model = sized(sys.argv[1])
tensors = {name: random(shape) for name, shape in shapes_for(model).items()}
with open_target(Path(sys.argv[2]), {}, 0) as target:
    write_huggingface(Contents(model, tensors, Origin("bench", "")), target, ExportRequest())
    target.publish()
"""
IMPORT = """
from pathlib import Path
from trainer.weights.convert import import_weights
began = time.monotonic()
import_weights(Path(sys.argv[1]), Path(sys.argv[2]))
report(began)
"""
LARGEST = """
from math import prod
from trainer.config.model_sizes import sized
from trainer.weights.ours import shapes_for
print(json.dumps({"largest_mb": max(4 * prod(shape) for shape in shapes_for(sized(sys.argv[1])).values()) / 1e6}))
"""
EXPORT = """
from pathlib import Path
from clusterctl.wire.requests import ExportRequest
from trainer.weights.convert import export_weights
began = time.monotonic()
export_weights(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], ExportRequest(tensor=int(sys.argv[4])))
report(began)
"""
LOAD = """
from transformers import AutoModelForCausalLM
began = time.monotonic()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
# The file is mapped: read every number, as an import does.
for parameter in model.parameters():
    parameter.sum()
report(began)
"""
SAVE = """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
began = time.monotonic()
model.save_pretrained(sys.argv[2])
report(began)
"""
# The writer starts processes that import the main program, so that must be a file.
CONVERT = """
import contextlib, json, os, resource, sys, time
import torch
torch.cuda.synchronize = lambda *a, **k: None
torch.cuda.current_device = lambda: "cpu"
import megatron.core.tensor_parallel.random as random
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig
random.CudaRNGStatesTracker.fork = lambda self, *a, **k: contextlib.nullcontext()
def main():
    began = time.monotonic()
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    given = vars(dist_checkpointing.load_common_state_dict(sys.argv[1])["args"])
    shape = {key: given[key] for key in ("num_layers", "hidden_size", "num_attention_heads")}
    config = TransformerConfig(**shape, use_cpu_initialization=True, perform_initialization=False)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=given["padded_vocab_size"],
        max_sequence_length=given["max_position_embeddings"],
        share_embeddings_and_output_weights=True,
    )
    loaded = dist_checkpointing.load(model.sharded_state_dict(), sys.argv[1])
    model.load_state_dict({name: value for name, value in loaded.items() if name in model.state_dict()})
    del loaded
    os.makedirs(sys.argv[2])
    dist_checkpointing.save(model.sharded_state_dict(), sys.argv[2])
    report(began)
if __name__ == "__main__":
    main()
"""
# Runs Megatron-LM's converter as it is, with stand-ins for what needs a GPU or is not installed.
MEGATRON_LM = """
import importlib.metadata, runpy, types
folder, source, target = sys.argv[1:]
sys.path[:0] = [folder, folder + "/tools/checkpoint"]
import torch
import torch.distributed as dist
# What asks for a GPU, for compiled kernels or for Transformer Engine.
version, tensor = importlib.metadata.version, torch.tensor
importlib.metadata.version = lambda name: "2.0" if name == "transformer-engine" else version(name)
torch.tensor = lambda *a, device=None, **k: tensor(*a, **k)
torch.cuda.get_device_properties = lambda *a: types.SimpleNamespace(major=10)
torch.cuda.get_rng_state = torch.get_rng_state
import gpt_builders
import model_provider
from megatron.core import parallel_state
from megatron.legacy import fused_kernels
from megatron.training import checkpointing
# The loader calls this function without its first argument.
provide = model_provider.model_provider
provide.__defaults__ = (gpt_builders.gpt_builder, *provide.__defaults__)
# Arguments that our export does not have, and plain torch in place of Apex.
MORE = {
    "tokenizer_type": "NullTokenizer",
    "sequence_parallel": False,
    "apply_query_key_layer_scaling": False,
    "no_persist_layer_norm": True,
    "gradient_accumulation_fusion": False,
}
read_arguments = checkpointing.load_args_from_checkpoint
def read_more(given):
    found = read_arguments(given)
    for arguments in found:
        vars(arguments).update(MORE)
    return found
checkpointing.load_args_from_checkpoint = read_more
def start_groups(arguments):
    # In place of a build of kernels: the groups that a model and a distributed checkpoint need.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    names = ("_TENSOR_MODEL_PARALLEL_GROUP", "_EXPERT_MODEL_PARALLEL_GROUP")
    kept = {name: vars(parallel_state)[name] for name in names}
    vars(parallel_state).update(dict.fromkeys(names))
    parallel_state.initialize_model_parallel()
    vars(parallel_state).update(kept)
fused_kernels.load = start_groups
options = {
    "model-type": "GPT",
    "loader": "core",
    "saver": "core",
    "load-dir": source,
    "save-dir": target,
    "loader-transformer-impl": "local",
    "saver-transformer-impl": "local",
    "target-tensor-parallel-size": "2",
}
if __name__ == "__main__":
    began = time.monotonic()
    sys.argv = ["convert.py", *(f"--{name}={value}" for name, value in options.items())]
    runpy.run_path(folder + "/tools/checkpoint/convert.py", run_name="__main__")
    report(began)
"""


def run(python: str, code: str, *arguments: object) -> dict[str, float]:
    """Run a step and return its report."""
    return report_of([python, "-c", REPORT + code, *map(str, arguments)])


def run_file(folder: Path, python: str, code: str, *arguments: object) -> dict[str, float]:
    """Run a step whose program must be a file, and return its report."""
    file = folder / "step.py"
    file.write_text(REPORT + code)
    return report_of([python, str(file), *map(str, arguments)])


def report_of(argv: Sequence[str]) -> dict[str, float]:
    lines = field.run(argv).output.splitlines()
    found: dict[str, float] = json.loads(lines[-1]) if lines else {}
    return found


def show(name: str, row: dict[str, float]) -> None:
    print(f"{name:18} {row['seconds']:7.1f} s  {row['peak_mb']:8,.0f} MB", flush=True)


def compare_megatron(folder: Path, ours: Path, python: str, program: str) -> None:
    """Show the rows of Megatron-core, and those of Megatron-LM if `program` is its folder."""
    core, saved, again = folder / "core", folder / "saved", folder / "again"
    show("to megatron-core", run(sys.executable, EXPORT, ours, core, "megatron-core", 1))
    shutil.rmtree(ours)
    show("from megatron-core", run(sys.executable, IMPORT, core, ours))
    show("its load and save", run_file(folder, python, CONVERT, core / "release", saved))
    shutil.rmtree(saved)
    if program:
        show("its convert.py", run_file(folder, python, MEGATRON_LM, program, core, saved))
        show("from its ranks", run(sys.executable, IMPORT, saved, again))
        shutil.rmtree(saved)
        same = all(filecmp.cmp(part, again / part.name, shallow=False) for part in ours.glob("*.safetensors"))
        print(f"its numbers are {'' if same else 'NOT '}ours bit by bit", flush=True)
        shutil.rmtree(again)
        show("to ranks", run(sys.executable, EXPORT, ours, saved, "megatron", 2))
        shutil.rmtree(saved)
    shutil.rmtree(core)


def main() -> None:
    arguments = read_options(
        __doc__,
        model=Option("gpt2-1.3B", "a named size of GPT-2"),
        peer=Option("", "a Python that has transformers"),
        megatron=Option("", "a Python that has megatron-core"),
        megatron_lm=Option("", "a folder with Megatron-LM"),
        folder=Option(Path, "where the files go (default: the temporary folder)"),
    )
    if arguments.megatron_lm and not arguments.megatron:
        sys.exit("--megatron-lm needs --megatron")
    with scratch("weights", arguments.folder) as folder:
        source, ours = folder / "hf", folder / "ours"
        run(sys.executable, MAKE, arguments.model, source)
        show("import", run(sys.executable, IMPORT, source, ours))
        show("export", run(sys.executable, EXPORT, ours, folder / "back", "hf", 1))
        shutil.rmtree(folder / "back")
        if arguments.megatron:
            compare_megatron(folder, ours, arguments.megatron, arguments.megatron_lm)
        shutil.rmtree(ours)
        if arguments.peer:
            show("from_pretrained", run(arguments.peer, LOAD, source))
            show("save_pretrained", run(arguments.peer, SAVE, source, folder / "peer"))
        largest = run(sys.executable, LARGEST, arguments.model)["largest_mb"]
        print(f"largest tensor {largest:,.0f} MB; 1.2 of it and 300 MB: {1.2 * largest + 300:,.0f} MB")


if __name__ == "__main__":
    main()
