"""The two commands: detect a format, read it, and write another, with progress."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from clusterctl.wire.requests import ExportRequest, ImportRequest
from clusterctl.wire.saved import MANIFEST
from trainer.checkpoint.keep import in_use
from trainer.checkpoint.manifest import Origin
from trainer.config.model import ModelConfig
from trainer.errors import CheckpointError, InputError
from trainer.side_files import SideFiles
from trainer.weights.contents import Contents
from trainer.weights.files.deepspeed import step_folder
from trainer.weights.glm import is_glm, read_glm
from trainer.weights.huggingface import is_huggingface, read_huggingface, write_huggingface
from trainer.weights.megatron.core import is_megatron_core, read_megatron_core, write_megatron_core
from trainer.weights.megatron.ranks import is_megatron, iteration_folder, read_megatron, write_megatron
from trainer.weights.mindspore import is_mindspore, read_mindformers, write_ckpt, write_ms_safetensors
from trainer.weights.named.dcp import is_dcp, read_dcp, write_dcp
from trainer.weights.named.deepspeed import is_deepspeed, read_deepspeed, write_universal
from trainer.weights.oneflow import is_oneflow, read_oneflow
from trainer.weights.ours import read_ours, write_ours
from trainer.weights.target import Report, Target, identity_of, open_target, rehearsal, silent

# Seconds between two lines of progress.
REDRAW = 0.2


@dataclass(frozen=True)
class Format:
    """The format of another program; None instead of a function means that it is not supported."""

    title: str
    recognises: Callable[[Path], bool] | None = None
    read: Callable[[Path, ImportRequest], Contents] | None = None
    write: Callable[[Contents, Target, ExportRequest], None] | None = None
    state: bool = False
    """Whether the format can contain the optimizer's state."""
    divided: bool = False
    """Whether a folder is for a fixed number of tensor parallel ranks and stages."""

    def is_of(self, source: Path) -> bool:
        """Return whether a file or folder has this format, as far as it can be read."""
        with contextlib.suppress(CheckpointError):
            return self.recognises is not None and self.recognises(source)
        return False


FORMATS: Mapping[str, Format] = {
    "hf": Format("Hugging Face", is_huggingface, read_huggingface, write_huggingface),
    "megatron": Format("Megatron", is_megatron, read_megatron, write_megatron, divided=True),
    "megatron-core": Format(
        "Megatron-core", is_megatron_core, read_megatron_core, write_megatron_core, divided=True
    ),
    "glm": Format("GLM", is_glm, read_glm),
    "deepspeed": Format("DeepSpeed", is_deepspeed, read_deepspeed, write_universal, state=True),
    "dcp": Format("torch's distributed checkpoints", is_dcp, read_dcp, write_dcp, state=True),
    "oneflow": Format("OneFlow", is_oneflow, read_oneflow),
    "mindspore": Format("MindSpore", is_mindspore, read_mindformers, write_ckpt, state=True),
    "mindspore-safetensors": Format(
        "MindSpore's safetensors", None, read_mindformers, write_ms_safetensors, state=True
    ),
}


@dataclass(frozen=True)
class Conversion:
    """The result of an import or an export, or of its dry run."""

    output: str
    format: str
    """The name of the other program's format."""
    source: Origin
    model: ModelConfig
    tensors: int
    bytes: int
    """The size of all tensors in fp32."""
    step: int
    state: bool
    """Whether the optimizer's state is also converted."""
    notes: tuple[str, ...]
    wanted: ExportRequest | None = None
    """The options of an export; None for an import."""
    resumed_files: int = 0
    """How many files were already finished by an earlier conversion that was stopped."""
    seconds: float | None = None
    """The time of the conversion; None if nothing was written."""

    @property
    def parameters(self) -> int:
        return self.model.parameters()

    def as_json(self) -> dict[str, object]:
        direction = (
            {"from": self.format} if self.wanted is None else {"to": self.format, **asdict(self.wanted)}
        )
        ended = {"resumed_files": self.resumed_files, "seconds": self.seconds}
        return {
            "output": self.output,
            **direction,
            "source": self.source.as_json(),
            "model": asdict(self.model),
            "parameters": self.parameters,
            "tensors": self.tensors,
            "bytes": self.bytes,
            "step": self.step,
            "state": self.state,
            "notes": list(self.notes),
            **(ended if self.seconds is not None else {}),
        }


def import_weights(
    source: Path,
    output: Path,
    name: str = "",
    request: ImportRequest = ImportRequest(),
    dry_run: bool = False,
    formats: Mapping[str, Format] = FORMATS,
) -> Conversion:
    """Convert another program's checkpoint to ours; return the result."""
    began = time.monotonic()
    name = _as_named(name, source, formats) if name else detected(source, formats)
    if request.base and name != "peft":
        raise InputError(f"--base {request.base}: {source} contains no adapters", "leave out --base")
    read = formats[name].read
    if read is None:
        raise InputError(f"{formats[name].title} cannot be imported", "name another format with --from")
    contents = read(source, request)
    if not contents.files:
        # Our exports to formats without such files write them next to the weights.
        contents = replace(contents, files=SideFiles.beside(source).files)
    for option, given, found in (
        ("--heads", request.heads, contents.model.heads),
        ("--vocab", request.vocab, contents.model.vocab),
    ):
        if given and given != found:
            raise InputError(f"{option} is {given}, and {source} records {found}", f"leave out {option}")
    planned = _conversion(contents, output, name)
    if dry_run:
        write_ours(contents, rehearsal(output, planned.bytes))
        return planned
    identity = identity_of(source, {"format": name, **asdict(request), "version": 1})
    with open_target(output, identity, planned.bytes, _shown("import")) as target:
        write_ours(contents, target)
        target.publish()
    return replace(planned, resumed_files=target.resumed, seconds=time.monotonic() - began)


def export_weights(
    checkpoint: Path,
    output: Path,
    name: str,
    wanted: ExportRequest,
    dry_run: bool = False,
    form: Format | None = None,
    read: Callable[[Path, bool], Contents] = read_ours,
) -> Conversion:
    """Convert our checkpoint to another format; return the result. `read` returns the checkpoint's contents."""
    began = time.monotonic()
    form = form or FORMATS[name]
    if form.write is None:
        raise InputError(
            f"a checkpoint cannot be exported to {form.title}", f"use one of {', '.join(writable())}"
        )
    if wanted.state and not form.state:
        raise InputError(f"{form.title} cannot contain the optimizer's state", "leave out --state")
    if max(wanted.tensor, wanted.pipeline) > 1 and not form.divided:
        problem = f"--tensor and --pipeline are for files of Megatron, not for --to {name}"
        raise InputError(problem, "leave out both")
    contents = read(checkpoint, wanted.state)
    planned = _conversion(contents, output, name, wanted)
    if dry_run:
        form.write(contents, rehearsal(output, planned.bytes), wanted)
        return planned
    identity = identity_of(checkpoint, {"format": name, **asdict(wanted), "version": 1})
    with in_use(checkpoint), open_target(output, identity, planned.bytes, _shown("export")) as target:
        form.write(contents, target, wanted)
        target.publish()
    return replace(planned, resumed_files=target.resumed, seconds=time.monotonic() - began)


def readable() -> list[str]:
    """Return the names of the formats that can be imported."""
    return [name for name, form in FORMATS.items() if form.read]


def writable() -> list[str]:
    """Return the names of the formats that a checkpoint can be exported to."""
    return [name for name, form in FORMATS.items() if form.write]


def detected(source: Path, formats: Mapping[str, Format] = FORMATS) -> str:
    """Return the name of the format of a folder or file."""
    if not source.exists():
        raise InputError(f"{source}: no such file or folder", "check the path")
    if (source / MANIFEST).is_file():
        raise InputError(f"{source} is already our checkpoint", "use it without an import")
    found = _recognised(source, formats)
    if not found:
        for pointed in (iteration_folder(source), step_folder(source)):
            if not pointed.exists():
                problem = f"{source}: its pointer names {pointed.name}, and there is no such folder"
                raise InputError(problem, "copy that folder too, or correct the pointer")
        if source.is_dir() and os.access(source, os.R_OK) and not any(source.iterdir()):
            raise InputError(f"{source}: the folder is empty", "check the path")
        titles = ", ".join(FORMATS[name].title for name in readable())
        raise InputError(
            f"{source}: the format is not known: it is none of {titles}", "name its format with --from"
        )
    return found[0]


def _as_named(name: str, source: Path, formats: Mapping[str, Format]) -> str:
    """Return the format that the user named; refuse it if the source is recognised as another one."""
    if not source.exists():
        raise InputError(f"{source}: no such file or folder", "check the path")
    form = formats[name]
    if form.recognises is not None and not form.is_of(source):
        found = _recognised(source, formats)
        if found:
            raise InputError(f"--from {name}: {source} has the format {found[0]}", "leave out --from")
        if name == "hf" and not source.is_dir():
            raise InputError(f"--from hf: {source} is not a folder", "name the folder with config.json")
    return name


def _recognised(source: Path, formats: Mapping[str, Format]) -> list[str]:
    return [name for name, form in formats.items() if form.is_of(source)]


def _conversion(
    contents: Contents, output: Path, name: str, wanted: ExportRequest | None = None
) -> Conversion:
    """Return the result as far as it is known before anything is written."""
    return Conversion(
        str(output),
        name,
        contents.origin,
        contents.model,
        len(contents.tensors),
        sum(4 * tensor.bytes // tensor.dtype.itemsize for tensor in contents.tensors.values()),
        contents.progress.step,
        contents.with_state,
        contents.notes,
        wanted,
    )


def _shown(verb: str) -> Report:
    """Return a function that draws the progress on a terminal."""
    if not sys.stderr.isatty():
        return silent
    began = last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        # A conversion that ends before the first line is due draws none.
        if now - last < REDRAW and (done < total or last == began):
            return
        last = now
        rate = done / max(now - began, 1e-9)
        line = (
            f"{verb} {done / total:4.0%}  {done / 1e6:,.1f} of {total / 1e6:,.1f} MB  {rate / 1e6:,.0f} MB/s"
        )
        sys.stderr.write(f"\r\x1b[K{line}" + ("\n" if done >= total else ""))
        sys.stderr.flush()

    return report
