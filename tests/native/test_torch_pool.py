"""The pool for torch's buffers. A process has one pool, so each case runs in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PRELOADED = os.environ.get("LD_PRELOAD", "")
not_with_tsan = pytest.mark.skipif(
    "libtsan" in PRELOADED,
    reason="ThreadSanitizer has its own heap and ends a forked child that starts threads",
)

PREAMBLE = """
import ctypes, os, random, sys, threading
from native.compiled.library import load

functions = load().functions
take, give = functions.native_pool_take, functions.native_pool_give
take.restype, take.argtypes = ctypes.c_void_p, [ctypes.c_int64]
give.restype, give.argtypes = ctypes.c_int64, [ctypes.c_void_p]

def figures():
    out = (ctypes.c_int64 * 5)()
    functions.native_pool_figures(out)
    return dict(zip(("used", "kept", "most", "returned", "spans"), out))

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def passes(code: str, **environment: str) -> str:
    done = run(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


OPEN = "assert functions.native_pool_open(ctypes.c_int64(256 << 20))\n"


def test_buffers_never_overlap_and_gaps_never_take_more_than_the_buffers_once_did(compiled: object) -> None:
    passes(
        OPEN
        + """
draw, live, used = random.Random(1), {}, 0
take(1 << 18), figures()
before, refused = resident(), 0
for turn in range(6000):
    if live and (draw.random() < 0.5 or used > 120 << 20):
        at = draw.choice(list(live))
        size, mark = live.pop(at)
        # Both ends still have this buffer's own mark.
        assert ctypes.string_at(at, 64) == ctypes.string_at(at + size - 64, 64) == bytes([mark]) * 64
        assert give(at) == 1
        used -= size
    else:
        size = draw.choice([1, 3, 17, 64, 500]) * 8192 + draw.randrange(64, 4096)
        at = take(size)
        if at is None:
            refused += 1
            continue
        assert at % 64 == 0
        mark = turn % 251
        ctypes.memset(at, mark, size)
        live[at] = size, mark
        used += size
    now = figures()
    assert now["used"] + now["kept"] <= now["most"]
    assert used <= now["used"] <= used + (len(live) + 65) * 8192
    if turn % 500 == 0:
        assert resident() - before <= now["most"] + (4 << 20)
assert not refused and now["returned"] > 0
for at in live:
    give(at)
assert figures()["used"] == 1 << 18, figures()
# Free neighbours are joined, except where one has pages and the other has none.
assert figures()["spans"] <= 200, figures()
"""
    )


def test_a_full_pool_refuses_and_goes_on(compiled: object) -> None:
    passes(
        OPEN
        + """
assert take(257 << 20) is None and take(0) is None and take(-1) is None
buffers = []
while (at := take(10 << 20)) is not None:
    buffers.append(at)
assert len(buffers) in (24, 25)
give(buffers.pop())
assert take(9 << 20) is not None
assert give(ctypes.addressof(ctypes.create_string_buffer(8))) == 0
"""
    )


def test_threads_and_forked_children_use_it(compiled: object) -> None:
    passes(
        OPEN
        + """
stop, wrong = threading.Event(), []

def work(number):
    draw = random.Random(number)
    while not stop.is_set():
        size = draw.randrange(1 << 18, 3 << 20)
        at = take(size)
        ctypes.memset(at, number, size)
        if ctypes.string_at(at, size) != bytes([number]) * size:
            wrong.append(number)
        give(at)

threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for each in threads:
    each.start()
for _ in range(40):
    child = os.fork()
    if child == 0:
        at = take(1 << 20)
        ctypes.memset(at, 9, 1 << 20)
        os._exit(0 if give(at) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for each in threads:
    each.join()
assert not wrong and figures()["used"] == 0
"""
    )


def test_a_buffer_that_is_freed_twice_ends_the_process(compiled: object) -> None:
    done = run(OPEN + "at = take(1 << 20)\ngive(at)\ngive(at)")
    assert done.returncode == -signal.SIGABRT


TORCH = """
import torch
old = torch.ones(1 << 20)
from native.memory.torch_pool import serve_torch
assert serve_torch() == "", serve_torch()
"""


@not_with_tsan
def test_large_tensors_come_from_the_pool_and_return_to_it(compiled: object) -> None:
    pytest.importorskip("torch")
    passes(
        TORCH
        + """
import io, pickle
# A forked child cannot use the parent's threads.
torch.set_num_threads(1)
empty = figures()
small, large = torch.ones(1000), torch.ones(1 << 20)
assert figures()["used"] - empty["used"] in range(4 << 20, (4 << 20) + 8193)
assert large.data_ptr() % 64 == 0 and float(large.sum()) == 1 << 20
large.resize_(3 << 20)
assert float(large[: 1 << 20].sum()) == 1 << 20
array, copy, shared = large.numpy(), pickle.loads(pickle.dumps(large)), large.clone().share_memory_()
assert torch.equal(copy, shared)
saved = io.BytesIO()
torch.save(large, saved)
saved.seek(0)
assert torch.equal(torch.load(saved), large)
child = os.fork()
if child == 0:
    os._exit(0 if float((large + 1)[: 1 << 20].sum()) == 2 << 20 else 1)
assert os.waitpid(child, 0)[1] == 0
# A tensor from before keeps its memory and returns it to glibc.
assert float(old.sum()) == 1 << 20
del old, large, copy, shared, small
assert figures()["used"] > empty["used"]
del array
assert figures()["used"] == empty["used"]
x = torch.randn(512, 512, requires_grad=True)
for _ in range(3):
    (x @ x).sum().backward()
# Tensors that exist at the end are freed while Python and torch are shut down.
kept = torch.ones(1 << 20)
"""
    )


@not_with_tsan
def test_gaps_of_tensors_do_not_add_up(compiled: object) -> None:
    pytest.importorskip("torch")
    code = """
torch.set_num_threads(1)
before = resident()
held = [torch.zeros(1 << 18) for _ in range(200)]
for turn in range(8):
    # Every second one is freed, and the next ones, which are a little larger, do not fit.
    for at in range(turn % 2, len(held), 2):
        held[at] = None
    for at in range(turn % 2, len(held), 2):
        held[at] = torch.zeros((1 << 18) + (turn + 1) * 3000)
print((resident() - before) / (200 << 20))
"""
    tuned = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
    pooled = float(passes(TORCH + code, **tuned))
    heap = float(passes("import torch\n" + code, **tuned))
    # The last buffers take 1.09 times what the first ones took.
    assert pooled < 1.2
    assert heap > pooled + 0.2


def test_the_reason_is_given_where_torch_does_not_use_it(compiled: object) -> None:
    ask = "from native.memory.torch_pool import serve_torch\nprint(serve_torch())"
    assert passes(ask) == "torch is not loaded\n"
    never = passes(ask, CLUSTERCTL_NATIVE_POOL="never")
    assert never == "CLUSTERCTL_NATIVE_POOL is never\n"
    if "libasan" in PRELOADED or "libtsan" in PRELOADED:
        pytest.skip("a sanitizer needs more addresses than the limit below allows")
    limited = (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))\nimport torch\n" + ask
    )
    pytest.importorskip("torch")
    assert passes(limited) == "the system does not give a process 1 TiB of addresses\n"


def test_a_training_computes_the_same_with_and_without_it(compiled: object, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import numpy as np

    from trainer.corpus.indexed import Writer

    with Writer(tmp_path / "tokens", np.uint16) as writer:
        writer.add_document([np.random.RandomState(1).randint(0, 1000, 40_000).astype(np.uint16)])
    model = {"layers": 2, "hidden": 256, "heads": 4, "sequence": 128, "vocab": 2048}
    config = {
        "model": model,
        "micro_batch": 8,
        "global_batch": 8,
        "steps": 3,
        "eval": {"batches": 0},
        "data": {"prefix": str(tmp_path / "tokens"), "split": "1,0,0"},
    }
    losses, notes = {}, {}
    for name, value in (("pool", "yes"), ("heap", "never")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.json").write_text(json.dumps(config))
        done = subprocess.run(
            [sys.executable, "-m", "trainer", "train", str(folder / "train.json")],
            env={**os.environ, "PYTHONPATH": str(ROOT), "CLUSTERCTL_NATIVE_POOL": value},
            capture_output=True,
            text=True,
            timeout=300,
            cwd=folder,
        )
        assert done.returncode == 0, done.stderr
        notes[name] = "freed buffers stay in glibc's heap" in done.stdout + done.stderr
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        losses[name] = [line["loss"] for line in lines if line["event"] == "step"]
    assert len(losses["pool"]) == 3
    # Products depend a little on where their matrices lie.
    assert losses["pool"] == pytest.approx(losses["heap"], rel=1e-6)
    assert notes["heap"]
    # ThreadSanitizer leaves a process 1.5 TiB of addresses, and often less than 1 TiB of them in one piece.
    assert not notes["pool"] or "libtsan" in PRELOADED
