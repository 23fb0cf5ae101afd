"""metrics.jsonl as TensorBoard's event files, under Megatron's tags: while a training goes on, or afterwards.

A file is written by hand, since TensorBoard's own writer loads for 1.7 s on a rank: records of a length, a body (an
`Event` of its protocol buffer) and checksums.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Of each event of metrics.jsonl: its key and TensorBoard's tag.
TAGS = {
    "step": {
        "loss": "lm loss",
        "lr": "learning-rate",
        "grad_norm": "grad-norm",
        "loss_scale": "loss-scale",
        "samples": "batch-size",
        "step_seconds": "iteration-time",
        "tokens_per_second": "tokens-per-second",
    },
    "eval": {"loss": "lm loss validation", "perplexity": "lm loss validation ppl"},
}
# Not against samples.
TIMED = {"iteration-time", "tokens-per-second"}


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Tag -> value of one line of metrics."""
    kind = str(line.get("event"))
    found = {tag: line.get(key) for key, tag in TAGS.get(kind, {}).items()}
    if kind == "step":
        found["throughput"] = (line.get("tflops") or {}).get("model")
    elif kind == "memory":
        found["mem-max-allocated-bytes"] = max(line.get("bytes") or [0])
    elif kind == "start":
        found["world-size"] = line.get("world")
    return {tag: float(value) for tag, value in found.items() if isinstance(value, (int, float))}


class EventFile:
    """One event file in `folder`; fed with lines of metrics in their order.

    A resume does not void later steps of an earlier file (SessionLog.START would): TensorBoard compares them with
    samples too, and steps that are taken again give the same losses.
    """

    def __init__(self, folder: Path, began: float | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        began = time.time() if began is None else began
        name = f"events.out.tfevents.{int(began):010d}.{socket.gethostname()}.{os.getpid()}"
        self._handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        # Samples by the last steps.
        self._consumed: dict[int, int] = {}
        self._samples = 0
        self._write(_event(began, 0, _bytes(3, b"brain.Event:2")))

    def add(self, line: Mapping[str, Any]) -> None:
        """One line of metrics."""
        at, step = float(line.get("time") or 0.0), int(line.get("step") or 0)
        found = scalars(line)
        if line.get("event") == "step":
            self._samples = int(line.get("consumed") or 0)
        if found:
            self._write(_event(at, step, _summary(found)))
        if found and self._samples and line.get("event") in TAGS:
            against = {f"{tag} vs samples": value for tag, value in found.items() if tag not in TIMED}
            self._write(_event(at, self._samples, _summary(against)))

    def _write(self, body: bytes) -> None:
        length = struct.pack("<Q", len(body))
        os.write(self._handle, length + _checksum(length) + body + _checksum(body))

    def close(self) -> None:
        os.close(self._handle)


def convert(metrics: Path, folder: Path) -> int:
    """Write a run's metrics as event files, one a start; gives the number of lines."""
    file, count = None, 0
    for line in _lines(metrics):
        if file is None or line.get("event") == "start":
            if file is not None:
                file.close()
            file = EventFile(folder, float(line.get("time") or 0.0) + count * 1e-6)
        file.add(line)
        count += 1
    if file is not None:
        file.close()
    return count


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; the last may still be on its way."""
    for text in path.read_bytes().split(b"\n")[:-1]:
        try:
            line = json.loads(text)
        except ValueError:
            # Cut by a node's end, and ended later.
            continue
        if isinstance(line, dict):
            yield line


def _event(at: float, step: int, what: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", at) + b"\x10" + _varint(step) + what


def _summary(values: Mapping[str, float]) -> bytes:
    each = [_bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value) for tag, value in values.items()]
    return _bytes(5, b"".join(_bytes(1, one) for one in each))


def _bytes(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _table() -> list[int]:
    """CRC-32C (Castagnoli), by bytes."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


TABLE = _table()


def _checksum(content: bytes) -> bytes:
    """The format's masked CRC."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
