from __future__ import annotations

import io
import json
import resource
import time
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.wire.metrics import ChosenBackend, Ended, Evaluated, Saved, Started, StepDone
from trainer.env import Drill, Env
from trainer.errors import InputError
from trainer.train.collectives import Collectives
from trainer.train.events import StepBegan
from trainer.train.observers import (
    Console,
    DrillObserver,
    Heartbeat,
    Metrics,
)

START = Started(
    step=0,
    resumed_from=None,
    steps=10,
    run="r",
    attempt=1,
    world=2,
    layout={"data": 2, "tensor": 1, "pipeline": 1},
    parameters=100,
    engine="torch",
    zero=0,
    precision="fp32",
    native=(ChosenBackend("gelu", "cpu", "one pass"),),
    device="cpu",
    threads=1,
    torch="2",
    config={},
    notes=("note: x",),
    startup={"python": 0.1},
)


def step(number: int, loss: float = 2.0) -> StepDone:
    return StepDone(number, 10, loss, 1e-3, 0.5, number * 100, 1000.0, 0.1, skipped=False)


def test_metrics_are_whole_lines_of_json_that_go_on_after_a_resume(tmp_path: Path) -> None:
    for _ in range(2):
        watch = Metrics(tmp_path / "run" / "metrics.jsonl")
        for event in (
            START,
            StepBegan(1),
            step(1, float("nan")),
            Evaluated(1, 1.0, 0.1),
            Saved(1, Path("x"), 5, 0.1),
        ):
            watch(event)
        watch(Ended(1, False, 2.0, 1.0, 3.0))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", "step", "eval", "checkpoint", "end"] * 2
    assert lines[0]["native"] == [{"op": "gelu", "backend": "cpu", "reason": "one pass"}]
    assert lines[1]["loss"] is None and lines[1]["lr"] == 1e-3
    assert lines[2]["perplexity"] == pytest.approx(2.71828, rel=1e-4)
    assert all(line["time"] > 1e9 for line in lines)


def test_metrics_after_a_line_that_a_full_disk_cut_off_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    first = Metrics(path)
    first(step(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Takes a part of the next line and refuses the rest, as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            first(step(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not path.read_text().endswith("\n")
    again = Metrics(path)
    again(START)
    again(step(2))
    lines = path.read_text().splitlines()
    assert len(lines) == 4 and lines[1].startswith('{"event": "step"')
    assert [json.loads(line)["event"] for line in (lines[0], *lines[2:])] == ["step", "start", "step"]


def test_a_stop_is_told_apart_from_an_end(tmp_path: Path) -> None:
    Metrics(tmp_path / "m")(Ended(4, True, 2.0, None, 3.0))
    assert json.loads((tmp_path / "m").read_text().splitlines()[-1])["event"] == "stopped"


def test_the_heartbeat_holds_the_last_finished_step(tmp_path: Path) -> None:
    beat = Heartbeat(tmp_path / "heartbeat" / "rank-3", 7)
    assert (tmp_path / "heartbeat" / "rank-3").read_text() == "7\n"
    for number in (9, 10, 11):
        beat(StepBegan(number))
        beat(step(number))
    assert (tmp_path / "heartbeat" / "rank-3").read_text() == "11\n"


def test_the_heartbeat_says_what_the_rank_itself_took_and_is_always_whole(tmp_path: Path) -> None:
    beat, path = Heartbeat(tmp_path / "rank-0", 8), tmp_path / "rank-0"
    said = []
    for number, own in ((9, 123.45678), (10, 0.25), (11, 0.0)):
        beat(replace(step(number), own_seconds=own))
        said.append(path.read_text())
    assert said == ["9   123.4568\n", "10     0.2500\n", "11     0.2500\n"]


def test_the_heartbeat_says_that_a_checkpoint_or_an_evaluation_follows(tmp_path: Path) -> None:
    beat, path = Heartbeat(tmp_path / "rank-0", 0, lambda step: step % 2 == 0), tmp_path / "rank-0"
    said = []
    for number in (1, 2, 3):
        beat(StepBegan(number))
        said.append(path.read_text())
        beat(step(number))
        said.append(path.read_text())
    assert said == ["0\n", "1\n", "1\n", "2\npause", "2\n", "3\n"]


class Group:
    """Counts like one of torch's process groups."""

    number = 5

    def _get_sequence_number_for_group(self) -> int:
        return self.number


def test_collectives_are_counted_since_the_last_step_and_not_between_steps(tmp_path: Path) -> None:
    group, path = Group(), tmp_path / "heartbeat" / "calls-1"
    counter = Collectives(path, {"0,1": group}, 7, lambda step: step == 8)

    def written() -> tuple[int, dict[str, int]]:
        counter.write()
        value = json.loads(path.read_text())
        return value["step"], value["groups"]

    assert written() == (7, {"0,1": 0})
    group.number = 1000
    assert written() == (7, {"0,1": 995})
    counter(step(8))
    # A checkpoint follows, in which single ranks exchange messages.
    assert written() == (8, {})
    counter(StepBegan(9))
    group.number = 1002
    assert written() == (8, {"0,1": 2})
    counter(step(9))
    assert written() == (9, {"0,1": 0})
    counter(Ended(9, False, 2.0, 1.0, 3.0))


def test_collectives_are_written_while_the_loop_waits(tmp_path: Path) -> None:
    group = Group()
    counter = Collectives(tmp_path / "calls-0", {"0,1": group}, 0)
    group.number = 9
    deadline = time.monotonic() + 60
    while '{"0,1": 4}' not in (tmp_path / "calls-0").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    counter(Ended(0, True, 2.0, 1.0, 3.0))
    assert '{"0,1": 4}' in (tmp_path / "calls-0").read_text()


def test_the_console_shows_every_so_many_steps_and_the_last() -> None:
    stream = io.StringIO()
    console = Console(4, stream)
    for number in range(1, 11):
        console(step(number))
    assert [line.split("|")[0].split()[1] for line in stream.getvalue().splitlines()] == [
        "4/10",
        "8/10",
        "10/10",
    ]


def test_a_slow_drill_takes_its_time_from_its_step_on() -> None:
    drill = DrillObserver(Drill(rank=0, step=3, how="slow", number=30))
    took = []
    for number in (2, 3, 4):
        began = time.monotonic()
        drill(StepBegan(number))
        took.append(time.monotonic() - began >= 0.03)
    assert took[1:] == [True, True]
    assert Env.read({"CLUSTERCTL_FAULT": "rank1:step3:slow200"}).drill == Drill(1, 3, "slow", 200)


def test_a_drill_ends_its_step_and_no_other() -> None:
    drill = DrillObserver(Drill(rank=0, step=3, how="raise", number=0))
    drill(StepBegan(2))
    drill(step(3))
    with pytest.raises(RuntimeError, match="arranged at step 3"):
        drill(StepBegan(3))


def test_the_environment_is_read_into_one_value() -> None:
    told = {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "CLUSTERCTL_FAULT": "rank1:step3:kill9",
        "CLUSTERCTL_RUN_DIR": "/r",
    }
    env = Env.read(told)
    assert (env.rank, env.world_size, env.master_port, env.run_dir) == (1, 4, 29500, Path("/r"))
    assert env.drill == Drill(1, 3, "kill", 9)
    assert Env.read({}) == Env()


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"RANK": "x"}, "RANK is 'x'"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK is 2 but WORLD_SIZE is 2",
        ),
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR or MASTER_PORT is not set"),
        ({"CLUSTERCTL_FAULT": "rank1"}, "rank1:step3:exit7"),
        ({"CLUSTERCTL_DEVICE_KIND": "tpu"}, "use cpu, cuda or npu"),
        ({"WORLD_SIZE": "0"}, "at least 1"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(told: dict[str, str], says: str) -> None:
    with pytest.raises(InputError) as caught:
        Env.read(told)
    assert says in f"{caught.value.message} {caught.value.hint}"
