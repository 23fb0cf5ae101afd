"""The path to torch_npu without an NPU: a stand-in as torch's private device, whose calls are kept (npu_node/)."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.checks.query import touch_text
from tests.support import npu_library, weights
from tests.support.npu_library import NODE
from tests.trainer.conftest import ROOT, free_port
from trainer.corpus.tokenizer import train_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Read = Callable[..., list[dict[str, Any]]]
# The model computes on the CPU's own kernels behind another device: only those of attention and AdamW differ.
SAME = 2e-5


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The device and libraries by CANN's names."""
    return npu_library.build(tmp_path_factory.mktemp("cann"))


Ended = tuple[str, list[dict[str, Any]]]


def environment(folder: Path, built: Path) -> dict[str, str]:
    """Return what the launcher sets on a node with NPUs; calls are written into the folder."""
    return {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        "PYTHONPATH": f"{NODE}:{ROOT}",
        "LD_LIBRARY_PATH": str(built),
        "NPU_LIBRARY": str(built / "npu.so"),
        "NPU_CALLS": str(folder / "calls"),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "CLUSTERCTL_DEVICE_KIND": "npu",
    }


@pytest.fixture
def on_npus(tmp_path: Path, built: Path) -> Callable[..., Ended]:
    """Run a command of the trainer with so many ranks as the launcher starts them on a node with NPUs.

    Returns what rank 0 wrote on stdout, and the calls that torch_npu saw.
    """

    def run(ranks: int, argv: list[str], run_dir: Path, **more: str) -> Ended:
        shared = {
            **environment(tmp_path, built),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "CLUSTERCTL_RUN_DIR": str(run_dir),
            **more,
        }
        (tmp_path / "calls").write_text("")
        command = [sys.executable, "-m", "trainer", *argv]
        started = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (
                (tmp_path / f"rank-{rank}").open("w") as out,
                (tmp_path / f"rank-{rank}.err").open("w") as err,
            ):
                started.append(subprocess.Popen(command, env={**shared, **own}, stdout=out, stderr=err))
        codes = [one.wait() for one in started]
        assert codes == [0] * ranks, [
            (tmp_path / f"rank-{rank}.err").read_text()[-3000:] for rank in range(ranks)
        ]
        calls = (tmp_path / "calls").read_text().splitlines()
        return (tmp_path / "rank-0").read_text(), [json.loads(line) for line in calls]

    return run


@pytest.fixture
def train_on_npus(tmp_path: Path, on_npus: Callable[..., Ended]) -> Callable[..., list[dict[str, Any]]]:
    """Train with so many ranks; the calls that torch_npu saw."""

    def run(ranks: int, config: dict[str, Any], run_dir: Path, **more: str) -> list[dict[str, Any]]:
        (tmp_path / "train.json").write_text(json.dumps(config))
        return on_npus(ranks, ["train", str(tmp_path / "train.json")], run_dir, **more)[1]

    return run


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines]


def test_a_training_on_an_npu_is_that_on_a_cpu_and_calls_its_fused_kernels(
    tmp_path: Path,
    raw_config: Callable[..., dict[str, Any]],
    train_on_npus: Callable[..., Any],
    train_here: Callable[..., Any],
    metrics: Read,
) -> None:
    calls = train_on_npus(1, raw_config(), tmp_path / "npu")
    train_here(tmp_path / "cpu")
    npu, cpu = (metrics(tmp_path / name, "step") for name in ("npu", "cpu"))
    assert losses(npu) == pytest.approx(losses(cpu), rel=SAME)
    start = metrics(tmp_path / "npu", "start")[0]
    assert start["device"] == "npu"
    backends = {one["op"]: one["backend"] for one in start["native"]}
    assert {op for op, backend in backends.items() if backend != "npu"} == {
        "square_sum",
        "dropout_add",
        "embedding",
        "linear",
        "route",
        "vocabulary_cross_entropy",
    }
    assert {"npu_gelu", "npu_gelu_backward", "npu_cross_entropy_loss"} <= {each["call"] for each in calls}
    assert {"call": "set_device", "rank": "0", "index": 0} in calls
    attention = next(one for one in calls if one["call"] == "npu_fusion_attention")
    assert attention == {
        **attention,
        "head_num": 2,
        "input_layout": "BSND",
        "scale": pytest.approx(16**-0.5),
        "sparse_mode": 3,
    }
    updates = [one for one in calls if one["call"] == "npu_apply_adam_w"]
    assert [one["lr"] for one in updates[:: len(updates) // 8]] == [line["lr"] for line in npu]
    assert updates[0]["beta1_power"] == 1.0 and updates[-1]["beta1_power"] == pytest.approx(0.9**7)
    assert {one["weight_decay"] for one in updates} == {0.1, 0.0}
    # By the device's events.
    assert all(0 < one["own_seconds"] <= one["step_seconds"] for one in npu)
    taken = metrics(tmp_path / "npu", "memory")[-1]
    assert 0 < taken["bytes"][0] < 50e6


@pytest.mark.parametrize("chip, precision", [("Ascend910B3", "bf16"), ("Ascend910A", "fp16")])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_each_generation_trains_in_16_bits_with_the_kernels_that_it_has(
    kind: str,
    chip: str,
    precision: str,
    tmp_path: Path,
    raw_config: Callable[..., dict[str, Any]],
    train_on_npus: Callable[..., Any],
    metrics: Read,
) -> None:
    """The stand-in refuses what a chip's documents do not list, in the backward pass too."""
    config = raw_config(steps=3, precision=precision)
    config["model"].update(
        {"norm": "rms", "swiglu": True, "rotary": True} if kind == "llama" else {}, dropout=0
    )
    train_on_npus(1, config, tmp_path / "npu", NPU_CHIP=chip)
    backends = {one["op"]: one["backend"] for one in metrics(tmp_path / "npu", "start")[0]["native"]}
    assert {backends[op] for op in ("gelu", "layer_norm", "rotary")} == {"npu"}
    later = {backends[op] for op in ("attention", "rms_norm", "add_layer_norm", "swiglu", "cross_entropy")}
    assert ("npu" in later) is (chip != "Ascend910A")
    assert len(metrics(tmp_path / "npu", "step")) == 3


@pytest.mark.parametrize(
    "changes", [{"parallel": {"tensor": 2}}, {"zero": 1}], ids=["tensor2", "data2-zero1"]
)
def test_ranks_on_npus_meet_by_hccl_each_on_its_device_with_what_the_launcher_set(
    changes: dict[str, Any],
    tmp_path: Path,
    raw_config: Callable[..., dict[str, Any]],
    train_on_npus: Callable[..., Any],
    train_here: Callable[..., Any],
    metrics: Read,
) -> None:
    set_by_launcher = {
        "RANK_TABLE_FILE": "/run/rank_table.json",
        "HCCL_IF_IP": "10.0.0.1",
        "ASCEND_RT_VISIBLE_DEVICES": "0,1",
    }
    calls = train_on_npus(2, raw_config(**changes), tmp_path / "npu", **set_by_launcher)
    train_here(tmp_path / "cpu")
    npu, cpu = (losses(metrics(tmp_path / name, "step")) for name in ("npu", "cpu"))
    assert npu == pytest.approx(cpu, rel=SAME)
    groups = [one for one in calls if one["call"] == "hccl" and one["size"] == 2]
    assert {one["rank"] for one in groups} == {"0", "1"}
    for one in groups:
        assert set_by_launcher.items() <= one.items() and one["CPU_AFFINITY_CONF"] == "1"
        assert one["device"] == int(one["rank"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = replace(
        weights.GPT, sequence=64, query_groups=2, rotary=True, swiglu=True, norm="rms", tied=False, vocab=310
    )
    folder = tmp_path_factory.mktemp("npu") / "model"
    weights.checkpoint(folder, model, weights.random_state(model))
    train_tokenizer(iter(["one two three " * 50] * 5), 300, folder / "tokenizer.json")
    return folder


GREEDY = ("--temperature", "0", "--max-tokens", "24", "--ignore-end", "--logprobs", "1")
PROMPTS = tuple(f"--prompt-line={text}" for text in ("one two", "three " * 20, "two", "one two three one"))


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, ()), (2, ("--tensor", "2")), (2, ("--pipeline", "2"))], ids=str
)
def test_npus_generate_what_a_cpu_does(
    ranks: int, layout: tuple[str, ...], checkpoint: Path, tmp_path: Path, on_npus: Callable[..., Ended]
) -> None:
    argv = ["generate", "--checkpoint", str(checkpoint), *PROMPTS, *GREEDY]
    here, _ = on_npus(1, [*argv, "--device", "cpu"], tmp_path)
    there, calls = on_npus(ranks, [*argv, *layout, "--weights", "fp32"], tmp_path)
    own, expected = ([json.loads(line) for line in text.splitlines()] for text in (there, here))
    assert len(own) == 4 and [line["text"] for line in own] == [line["text"] for line in expected]
    seen = {one["call"] for one in calls}
    assert {"npu_fusion_attention", "npu_rms_norm", "npu_swiglu"} <= seen
    groups = [one for one in calls if one["call"] == "hccl" and one["size"] == 2]
    assert {one["rank"] for one in groups} == ({"0", "1"} if ranks == 2 else set())


def test_an_npu_generates_in_bf16_by_default_with_its_own_attention_over_pages(
    checkpoint: Path, tmp_path: Path, on_npus: Callable[..., Ended]
) -> None:
    argv = ["generate", "--checkpoint", str(checkpoint), *PROMPTS, *GREEDY]
    here, _ = on_npus(1, [*argv, "--device", "cpu"], tmp_path)
    there, calls = on_npus(1, argv, tmp_path)
    assert "npu_fused_infer_attention_score" in {one["call"] for one in calls}
    for own, expected in zip(there.splitlines(), here.splitlines(), strict=True):
        (mine, *_), (theirs, *_) = (json.loads(line)["logprobs"] for line in (own, expected))
        assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=0.1), (mine, theirs)


def test_an_npu_serves_and_says_what_computes(checkpoint: Path, tmp_path: Path, built: Path) -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("jinja2")
    argv = [sys.executable, "-u", "-m", "trainer", "serve", "--checkpoint", str(checkpoint), "--port", "0"]
    own = environment(tmp_path, built)
    server = subprocess.Popen(argv, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        lines = list[str]()
        while not (
            found := re.search(r"serving model at http://127.0.0.1:(\d+)", lines[-1] if lines else "")
        ):
            lines.append(server.stdout.readline())
            assert lines[-1], lines
        assert any("loaded model on npu:0 with weights in bf16, in " in line for line in lines), lines
        body = {"prompt": "one two", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = json.loads(connection.getresponse().read())
        assert answer["usage"]["completion_tokens"] == 5, answer
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()


def test_an_npu_evaluates_what_a_cpu_does(
    checkpoint: Path, tmp_path: Path, on_npus: Callable[..., Ended]
) -> None:
    lines = ["one two three one two", "three two one " * 9, "two"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    data, tokenizer = f"ppl={tmp_path / 'texts.jsonl'}", str(checkpoint / "tokenizer.json")
    argv = ["evaluate", "--checkpoint", str(checkpoint), "--tokenizer", tokenizer, "--task", data, "--json"]
    losses = []
    for ranks, more in ((1, ["--device", "cpu"]), (2, []), (1, ["--weights", "bf16"])):
        text, calls = on_npus(
            ranks, [*argv, *more, "--output", str(tmp_path / f"out{len(losses)}")], tmp_path
        )
        (result,) = json.loads(text)
        losses.append(result["metrics"]["loss"]["value"])
        assert ("npu_fusion_attention" in {one["call"] for one in calls}) == bool(losses[1:])
        assert result["options"].get("weights", "fp32") == ("bf16" if "bf16" in more else "fp32")
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-2) and losses[2] != losses[1]


def test_doctor_uses_the_npus_of_a_node(tmp_path: Path, built: Path) -> None:
    words = [sys.executable, "-c", touch_text(), "npu", "4", "6"]
    done = subprocess.run(words, env=environment(tmp_path, built), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert (found["devices"], found["sum"]) == ({"4": "", "6": ""}, "")
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    seen = {(one["device"], one["ASCEND_RT_VISIBLE_DEVICES"]) for one in calls if one["call"] == "hccl"}
    assert seen == {(0, "4,6"), (1, "4,6")}


def test_where_cann_is_missing_the_fault_is_told_before_torch_is_loaded(tmp_path: Path, built: Path) -> None:
    (tmp_path / "train.json").write_text("{}")
    code = "from trainer.device import npu_fault, prepare_import; print(prepare_import() == npu_fault(), npu_fault())"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{NODE}:{ROOT}", "NPU_LIBRARY": str(built / "npu.so")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("True libascendcl.so is not on the library path (source CANN's set_env.sh)")
    code += "; import torch, sys; print('torch_npu' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
