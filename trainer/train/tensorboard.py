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

from clusterctl.wire.metrics import metric_objects
from trainer.files import varint

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
        "own_seconds": "timers/own-work",
    },
    "eval": {
        "loss": "lm loss validation",
        "perplexity": "lm loss validation ppl",
        "seconds": "timers/validation",
    },
    "checkpoint": {"seconds": "timers/checkpoint", "stall": "timers/checkpoint-stall"},
}
# Tags that are not also drawn against samples and tokens; nor are those of timers.
TIMED = {"iteration-time", "tokens-per-second"}
TIMERS = "timers/"
# The tag of the configuration, in TensorBoard's text view.
CONFIG = "config/text_summary"


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of one line of metrics by their tags."""
    kind = str(line.get("event"))
    found = {tag: line.get(key) for key, tag in TAGS.get(kind, {}).items()}
    if kind == "step":
        found["throughput"] = (line.get("tflops") or {}).get("model")
        found["timers/waiting"] = _waiting(line)
    elif kind == "memory":
        found["mem-max-allocated-bytes"] = max(line.get("bytes") or [0])
    elif kind == "start":
        found["world-size"] = line.get("world")
    return {tag: float(value) for tag, value in found.items() if isinstance(value, (int, float))}


def _waiting(line: Mapping[str, Any]) -> float | None:
    """Return the seconds of a step in which this rank waited for others."""
    whole, own = line.get("step_seconds"), line.get("own_seconds")
    both = isinstance(whole, (int, float)) and isinstance(own, (int, float))
    return max(0.0, float(whole or 0.0) - float(own or 0.0)) if both else None


def config_table(config: Mapping[str, Any]) -> str:
    """Return a configuration as a table in Markdown, with dotted keys."""
    rows = [f"| {key} | {_cell(value)} |" for key, value in _flat(config, "")]
    return "\n".join(["| key | value |", "|---|---|", *rows])


def _flat(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.replace("|", "\\|").replace("\n", " ")


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
        # Samples and tokens consumed after the last step.
        self._samples = self._tokens = 0
        self._write(_event(began, 0, _bytes(3, b"brain.Event:2")))

    def add(self, line: Mapping[str, Any]) -> None:
        """Write the values of one line of metrics."""
        at, step = float(line.get("time") or 0.0), int(line.get("step") or 0)
        values = scalars(line)
        if line.get("event") == "step":
            self._samples = int(line.get("consumed") or 0)
            self._tokens = int(line.get("tokens") or 0)
        if values:
            self._write(_event(at, step, _summary(values)))
        if line.get("event") == "start" and isinstance(line.get("config"), dict):
            self._write(_event(at, step, _text_summary(CONFIG, config_table(line["config"]))))
        curves = {
            tag: value for tag, value in values.items() if tag not in TIMED and not tag.startswith(TIMERS)
        }
        for axis, place in (("samples", self._samples), ("tokens", self._tokens)):
            if curves and place and line.get("event") in TAGS:
                against = {f"{tag} vs {axis}": value for tag, value in curves.items()}
                self._write(_event(at, place, _summary(against)))

    def _write(self, body: bytes) -> None:
        length = struct.pack("<Q", len(body))
        os.write(self._handle, length + _checksum(length) + body + _checksum(body))

    def close(self) -> None:
        os.close(self._handle)


def convert(metrics: Path, folder: Path) -> int:
    """Write a run's metrics as event files, one per start; return the number of lines."""
    file, count = None, 0
    for line in metric_objects(metrics):
        if file is None or line.get("event") == "start":
            if file is not None:
                file.close()
            file = EventFile(folder, float(line.get("time") or 0.0) + count * 1e-6)
        file.add(line)
        count += 1
    if file is not None:
        file.close()
    return count


def _event(at: float, step: int, content: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", at) + b"\x10" + varint(step) + content


def _summary(values: Mapping[str, float]) -> bytes:
    entries = [_bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value) for tag, value in values.items()]
    return _bytes(5, b"".join(_bytes(1, entry) for entry in entries))


def _text_summary(tag: str, text: str) -> bytes:
    """Return a summary that holds one text, as TensorBoard's own writer makes it: a tensor of one string."""
    metadata = _bytes(1, _bytes(1, b"text"))
    shape = _bytes(2, b"\x08\x01")
    # 7 is the type of strings.
    tensor = b"\x08\x07" + _bytes(2, shape) + _bytes(8, text.encode("utf-8", "replace"))
    return _bytes(5, _bytes(1, _bytes(1, tag.encode()) + _bytes(8, tensor) + _bytes(9, metadata)))


def _bytes(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2]) + varint(len(content)) + content


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
