"""What a roll call reads of torch's flight recorder, and what a file in its place cannot do."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.ranks.flight import ask, recorded

# Two ranks that call a collective with another size, without waiting for it. NCCL's groups write the file themselves.
PROGRAM = """
import os, sys, torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
dist.all_reduce(torch.ones(4))
works = [dist.all_reduce(torch.ones(4), async_op=True)] if rank else []
with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank), "wb") as file:
    file.write(_dump_fr_trace())
os._exit(0)
"""


def test_the_collectives_of_real_groups_are_read(tmp_path: Path) -> None:
    pytest.importorskip("torch._C._distributed_c10d", exc_type=ImportError)
    prefix = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace-"), "TORCH_FR_BUFFER_SIZE": "100"}
    argv = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    started = time.time()
    ranks = [subprocess.Popen(argv, env={**os.environ, **prefix, "RANK": str(rank)}) for rank in range(2)]
    assert [rank.wait(300) for rank in ranks] == [0, 0]
    group = "0,1/0"
    call = "all_reduce [[4]]"
    assert recorded(prefix, 0, started) == {"calls": {group: 1}, "recent": {group: {"1": call}}}
    assert recorded(prefix, 1, started) == {"calls": {group: 2}, "recent": {group: {"1": call, "2": call}}}
    assert recorded(prefix, 1, time.time() + 60) == {}, "an earlier attempt wrote it"


def trace(*calls: str, **config: Any) -> dict[str, Any]:
    entries = [
        {
            "process_group": ("7", "data"),
            "collective_seq_id": number,
            "profiling_name": f"nccl:{call}",
            "input_sizes": [[4]],
            "is_p2p": call == "send",
        }
        for number, call in enumerate(calls, 1)
    ]
    return {"entries": entries, "pg_config": {"7": {"ranks": "[2, 5]", **config}}}


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("evil",)


def test_sizes_count_where_all_ranks_have_the_same_and_messages_do_not_count(tmp_path: Path) -> None:
    value = trace("all_reduce", "all_to_all", "all_to_all_v_single", "send")
    (tmp_path / "trace-2").write_bytes(pickle.dumps(value, protocol=2))
    environ = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "trace-")}
    assert recorded(environ, 2, 0.0) == {
        "calls": {"2,5/7": 3},
        "recent": {"2,5/7": {"1": "all_reduce [[4]]", "2": "all_to_all", "3": "all_to_all_v_single"}},
    }


def test_a_group_whose_ranks_are_not_known_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "trace-2").write_bytes(pickle.dumps(trace("all_reduce", ranks="[]")))
    found = recorded({"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace-")}, 2, 0.0)
    assert found == {"calls": {}, "recent": {}}


def test_the_default_path_is_read(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "comm_lib_trace_rank_3").write_bytes(pickle.dumps(trace("all_reduce")))
    assert recorded({"XDG_CACHE_HOME": str(tmp_path)}, 3, 0.0)["calls"] == {"2,5/7": 1}


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Evil()),
        pickle.dumps({**trace("all_reduce"), "more": Evil()}),
        pickle.dumps({"entries": [], "pg_config": {}}),
        pickle.dumps({"entries": 3}),
        pickle.dumps([1, 2]),
        pickle.dumps(trace("all_reduce", ranks="none"))[:-9],
        b"",
        b"\x80",
        b'{"entries": []}',
    ],
)
def test_other_files_say_nothing_and_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace-2").write_bytes(content)
    assert recorded({"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace-")}, 2, 0.0) == {}
    assert not (tmp_path / "evil").exists()
    assert recorded({"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "none-")}, 2, 0.0) == {}


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps(trace("all_reduce")))
    (tmp_path / "trace-2").symlink_to("file")
    assert recorded({"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "trace-")}, 2, 0.0) == {}


def test_a_rank_that_reads_a_pipe_is_asked_for_its_file(tmp_path: Path) -> None:
    environ = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "pipe-")}
    assert not ask(environ, 3), "no pipe"
    (tmp_path / "pipe-4.pipe").touch()
    assert not ask(environ, 4), "no pipe but a file"
    os.mkfifo(tmp_path / "pipe-3.pipe")
    assert not ask(environ, 3), "nobody reads it"
    read: list[bytes] = []
    reader = threading.Thread(
        target=lambda: read.append((tmp_path / "pipe-3.pipe").read_bytes()), daemon=True
    )
    reader.start()
    deadline = time.monotonic() + 60
    while not ask(environ, 3) and time.monotonic() < deadline:
        time.sleep(0.05)
    reader.join(60)
    assert read and set(read[0]) == {ord("1")}
    assert not ask({}, 3)
