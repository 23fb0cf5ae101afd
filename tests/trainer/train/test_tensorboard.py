"""metrics.jsonl as TensorBoard's files: read back by a reader of the test's own, and by TensorBoard's where it is."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.__main__ import main
from trainer.train.tensorboard import EventFile, convert


def crc(content: bytes) -> int:
    """CRC-32C bit by bit, as its definition has it, and the format's mask."""
    value = 0xFFFFFFFF
    for byte in content:
        for bit in range(8):
            low = (value ^ byte >> bit) & 1
            value = value >> 1 ^ (0x82F63B78 if low else 0)
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def fields(body: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a protocol buffer."""

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = body[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    at = 0
    while at < len(body):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
        elif key & 7 == 2:
            size = varint()
            yield key >> 3, body[at : at + size]
            at += size
        else:
            kind, size = ("<d", 8) if key & 7 == 1 else ("<f", 4)
            yield key >> 3, struct.unpack(kind, body[at : at + size])[0]
            at += size


def events(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """(step, tag -> value) of all records, each with the checksums that it must have."""
    found = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack("<Q", data[at : at + 8])
            body = data[at + 12 : at + 12 + size]
            assert struct.unpack("<I", data[at + 8 : at + 12]) == (crc(data[at : at + 8]),)
            assert struct.unpack("<I", data[at + 12 + size : at + 16 + size]) == (crc(body),)
            at += 16 + size
            told = dict(fields(body))
            values = [dict(fields(value)) for _, value in fields(told.get(5, b""))]
            found.append((told.get(2, 0), {one[1].decode(): one.get(2, one.get(8)) for one in values}))
    return found


LINES: list[dict[str, Any]] = [
    {
        "event": "start",
        "step": 0,
        "world": 4,
        "config": {"optimizer": {"lr": 1e-3}, "name": "a|b"},
        "time": 1e9,
    },
    {"event": "eval", "step": 0, "loss": 4.0, "perplexity": 54.5, "time": 1e9},
    {
        "event": "step",
        "step": 1,
        "loss": 3.5,
        "lr": 1e-3,
        "grad_norm": None,
        "samples": 8,
        "consumed": 8,
        "step_seconds": 0.5,
        "own_seconds": 0.375,
        "tokens": 128,
        "tokens_per_second": 256.0,
        "tflops": {"model": 0.25, "palm": 0.3},
        "time": 1e9 + 1,
    },
    {"event": "memory", "step": 1, "bytes": [5, 7], "planned": [6, 6], "time": 1e9 + 1},
    {"event": "eval", "step": 1, "loss": 3.0, "perplexity": 20.0, "time": 1e9 + 2},
    {"event": "checkpoint", "step": 1, "seconds": 2.0, "stall": 0.5, "time": 1e9 + 2},
    {"event": "start", "step": 1, "world": 2, "time": 1e9 + 3},
]
STEP = {"lm loss": 3.5, "learning-rate": pytest.approx(1e-3), "batch-size": 8.0}
TIMERS = {"timers/own-work": 0.375, "timers/waiting": 0.125}
# The protocol buffer of a tensor with one string.
TABLE = rb"""| key | value |
|---|---|
| optimizer.lr | 0.001 |
| name | a\|b |"""
TEXT = b"\x08\x07\x12\x04\x12\x02\x08\x01" + b"\x42" + bytes([len(TABLE)]) + TABLE
EXPECTED = [
    (0, {"world-size": 4.0}),
    (0, {"config/text_summary": TEXT}),
    (0, {"lm loss validation": 4.0, "lm loss validation ppl": 54.5}),
    (1, {**STEP, "iteration-time": 0.5, "tokens-per-second": 256.0, "throughput": 0.25, **TIMERS}),
    (8, {**{f"{tag} vs samples": value for tag, value in STEP.items()}, "throughput vs samples": 0.25}),
    (128, {**{f"{tag} vs tokens": value for tag, value in STEP.items()}, "throughput vs tokens": 0.25}),
    (1, {"mem-max-allocated-bytes": 7.0}),
    (1, {"lm loss validation": 3.0, "lm loss validation ppl": 20.0}),
    (8, {"lm loss validation vs samples": 3.0, "lm loss validation ppl vs samples": 20.0}),
    (128, {"lm loss validation vs tokens": 3.0, "lm loss validation ppl vs tokens": 20.0}),
    (1, {"timers/checkpoint": 2.0, "timers/checkpoint-stall": 0.5}),
    (1, {"world-size": 2.0}),
]


def write(folder: Path) -> Path:
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in LINES) + '{"event": "st'
    )
    return folder / "metrics.jsonl"


def test_metrics_become_megatrons_tags_with_right_checksums(tmp_path: Path) -> None:
    assert convert(write(tmp_path), tmp_path / "tb") == len(LINES)
    # A file a start.
    assert len(list((tmp_path / "tb").iterdir())) == 2
    assert [event for event in events(tmp_path / "tb") if event[1]] == EXPECTED


def test_tensorboard_itself_reads_them(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    convert(write(tmp_path), tmp_path / "tb")
    found = accumulators.EventAccumulator(str(tmp_path / "tb"))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("lm loss validation")] == [(0, 4.0), (1, 3.0)]
    assert [(one.step, one.value) for one in found.Scalars("lm loss vs samples")] == [(8, 3.5)]
    assert [(one.step, one.value) for one in found.Scalars("lm loss vs tokens")] == [(128, 3.5)]
    assert found.Tensors("config/text_summary")[0].tensor_proto.string_val == [TABLE]
    assert found.SummaryMetadata("config/text_summary").plugin_data.plugin_name == "text"


def test_a_training_writes_them_while_it_goes_on_and_a_trace_of_each_cycle(
    tmp_path: Path,
    train_here: Callable[..., Any],
    metrics: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    train_here(tmp_path, tensorboard=True, profile={"repeat": 2, "wait": 1, "warmup": 1, "active": 1})
    steps = {step: values for step, values in events(tmp_path / "tensorboard") if "lm loss" in values}
    assert list(steps) == list(range(1, 9))
    for line in metrics(tmp_path, "step"):
        assert steps[line["step"]]["lm loss"] == pytest.approx(line["loss"], rel=1e-6)
    said = capsys.readouterr().out
    assert f"tensorboard --logdir {tmp_path / 'tensorboard'}" in said
    assert "profiled steps 3 to 3 of rank 0" in said and "profiled steps 6 to 6 of rank 0" in said
    traces = sorted((tmp_path / "profile").glob("rank-0.*.pt.trace.json.gz"))
    assert len(traces) == 2
    names = {event["name"] for event in json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]}
    assert any(name.startswith("aten::") for name in names)


def test_a_line_that_was_cut_by_a_nodes_end_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text('{"event": "step", "st\n' + path.read_text())
    assert convert(path, tmp_path / "tb") == len(LINES)


def test_an_event_file_is_whole_after_every_line(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    for count, line in enumerate(LINES, 1):
        file.add(line)
        assert len([event for event in events(tmp_path) if event[1]]) >= count
    file.close()


def test_a_run_that_is_over_is_converted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    assert main(["tensorboard", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(f"tensorboard --logdir {tmp_path / 'tensorboard'}\n")
    assert main(["tensorboard", str(tmp_path)]) == 2
    assert "would be drawn twice" in capsys.readouterr().err
    assert main(["tensorboard", str(tmp_path / "none")]) == 2
