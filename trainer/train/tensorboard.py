"""Write metrics as TensorBoard's event files with Megatron's tags, during a training or afterwards.

This module writes the format itself, because importing TensorBoard's writer takes 1.7 s on a rank. A file is a sequence
of records: a length, a body (an `Event` protocol buffer), and a checksum of each.
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

# The keys of each event in metrics.jsonl, and their TensorBoard tags.
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
# Tags that are not also drawn against samples.
TIMED = {"iteration-time", "tokens-per-second"}


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of one line of metrics by their tags."""
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
    """One event file in `folder`, written from lines of metrics in their order.

    A resume does not delete later steps of an earlier file (SessionLog.START would): some curves count samples, and
    repeated steps give the same losses.
    """

    def __init__(self, folder: Path, began: float | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        began = time.time() if began is None else began
        name = f"events.out.tfevents.{int(began):010d}.{socket.gethostname()}.{os.getpid()}"
        self._handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        # Samples consumed after the last step.
        self._consumed: dict[int, int] = {}
        self._samples = 0
        self._write(_event(began, 0, _bytes(3, b"brain.Event:2")))

    def add(self, line: Mapping[str, Any]) -> None:
        """Write the values of one line of metrics."""
        at, step = float(line.get("time") or 0.0), int(line.get("step") or 0)
        values = scalars(line)
        if line.get("event") == "step":
            self._samples = int(line.get("consumed") or 0)
        if values:
            self._write(_event(at, step, _summary(values)))
        if values and self._samples and line.get("event") in TAGS:
            against = {f"{tag} vs samples": value for tag, value in values.items() if tag not in TIMED}
            self._write(_event(at, self._samples, _summary(against)))

    def _write(self, body: bytes) -> None:
        length = struct.pack("<Q", len(body))
        os.write(self._handle, length + _checksum(length) + body + _checksum(body))

    def close(self) -> None:
        os.close(self._handle)


def convert(metrics: Path, folder: Path) -> int:
    """Write a run's metrics as event files, one per start; return the number of lines."""
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
    """Yield the complete lines; the last one may be unfinished."""
    for text in path.read_bytes().split(b"\n")[:-1]:
        try:
            line = json.loads(text)
        except ValueError:
            # A node died within this line.
            continue
        if isinstance(line, dict):
            yield line


def _event(at: float, step: int, content: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", at) + b"\x10" + _varint(step) + content


def _summary(values: Mapping[str, float]) -> bytes:
    entries = [_bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value) for tag, value in values.items()]
    return _bytes(5, b"".join(_bytes(1, entry) for entry in entries))


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
    """Return the table of CRC-32C (Castagnoli), by bytes."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


TABLE = _table()


def _checksum(content: bytes) -> bytes:
    """Return the masked CRC of the format."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
