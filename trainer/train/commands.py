"""The verbs of the trainer that check and train, and those that read a run or a checkpoint."""

from __future__ import annotations

import faulthandler
import gc
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clusterctl.wire.requests import (
    DiffQuestion,
    NoOptions,
    TensorboardRequest,
    TrainRequest,
    VerifyCheckpointRequest,
)
from clusterctl.wire.typed_json import decode, parse
from trainer.env import Env
from trainer.errors import ConfigFaults, InputError


def check(_: NoOptions) -> int:
    """Print the faults and the summary of a config; return 1 if it has faults."""
    from trainer.plan.summary import check as checked

    try:
        document = json.load(sys.stdin)
    except ValueError as error:
        raise InputError(f"stdin: not JSON: {error}") from None
    answer = checked(document)
    _show(answer)
    return 0 if answer["ok"] else 1


def rehearse(_: NoOptions) -> int:
    """Print what one rank of a layout took here; return 0."""
    from trainer.device import prepare_import
    from trainer.plan.resolve import plan_config

    document = json.load(sys.stdin)
    found = plan_config(document["train"], document["world_size"])
    if found.faults:
        raise ConfigFaults(found.faults)
    prepare_import()
    from trainer.train.rehearse import rehearse as rehearsed

    _show(rehearsed(found.config, document["world_size"]))
    return 0


def schema(_: NoOptions) -> int:
    """Print the JSON schema of the train part; return 0."""
    from trainer.config.schema import train_schema

    _show(train_schema())
    return 0


def train(request: TrainRequest) -> int:
    """Train; return 0."""
    from trainer.device import keep_freed_memory, prepare_import
    from trainer.plan.resolve import read_config
    from trainer.train.startup import Startup

    startup = Startup()
    startup.done("python")
    # A supervisor sends this signal to a hung rank to get the stacks of all threads.
    faulthandler.register(signal.SIGUSR1)
    environment = Env.read()
    config = read_config(_read_json(request.config), environment.world_size)
    run_dir = request.run_dir or environment.run_dir or request.config.resolve().parent
    keep_freed_memory()
    prepare_import()
    # Garbage collections during these imports free nothing and take 0.2 s of a core.
    gc.disable()
    from trainer.parallel.group import leave
    from trainer.train.assemble import StopOnSigterm, run_training

    gc.freeze()
    gc.enable()
    _, group = run_training(config, environment, run_dir, StopOnSigterm(), startup)
    leave(group, 0)
    return 0


def checkpoint_verify(request: VerifyCheckpointRequest) -> int:
    """Compare a checkpoint with its manifest, print what it is, and return 0."""
    from trainer.device import prepare_import

    prepare_import()
    from trainer.checkpoint.store import verify

    found = verify(request.folder)
    _show(
        {
            "ok": True,
            "path": str(found.path),
            "step": found.step,
            "bytes": found.bytes,
            "files": list(found.files),
        }
    )
    return 0


def checkpoint_diff(_: NoOptions) -> int:
    """Print the differences between the tensors of two checkpoints; return 0."""
    from trainer.device import prepare_import

    question = decode(DiffQuestion, parse(sys.stdin.read()))
    prepare_import()
    from trainer.checkpoint.compare import compare

    found = compare(question.first, question.second, question.pairs)
    _show({name: asdict(difference) for name, difference in found.items()})
    return 0


def tensorboard(request: TensorboardRequest) -> int:
    """Write a run's metrics as files of TensorBoard; return 0."""
    from clusterctl.wire.contract import METRICS_FILE, TENSORBOARD_DIR
    from trainer.train.tensorboard import convert

    metrics = request.run / METRICS_FILE if request.run.is_dir() else request.run
    folder = request.output or metrics.parent / TENSORBOARD_DIR
    if not metrics.is_file():
        raise InputError(f"{metrics} does not exist", "name the folder of a run that trains")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output {folder}: is a file, not a folder", "name another folder")
    if folder.is_dir() and any(folder.iterdir()):
        problem = f"{folder} is not empty: a curve would be drawn twice"
        raise InputError(problem, "remove it, or name another by --output")
    lines = convert(metrics, folder)
    sys.stdout.write(f"{lines} lines of {metrics}\ntensorboard --logdir {folder}\n")
    return 0


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from None


def _show(answer: object) -> None:
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")
