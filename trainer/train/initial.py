"""Start a training with the weights of another training or program, at step 0 with a new optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

from clusterctl.wire.saved import MANIFEST
from trainer.checkpoint.board import Board
from trainer.checkpoint.folders import meet_at
from trainer.checkpoint.manifest import BaseWeights
from trainer.checkpoint.part import MOMENTS, HasParts, Part
from trainer.checkpoint.resume import Loader
from trainer.checkpoint.store import Checkpoint
from trainer.config.same_model import init_faults
from trainer.config.train_config import TrainConfig
from trainer.errors import CheckpointError, ConfigFaults
from trainer.files import replace_file
from trainer.parallel.group import Group
from trainer.side_files import GENERATION, SideFiles
from trainer.train.draw import TABLES
from trainer.weights.adapters.merge import base_at
from trainer.weights.initial import checkpoints_in, open_source, weights_folder
from trainer.weights.lazy import Lazy


class HasFixedParts(HasParts, Protocol):
    """An engine that may have frozen weights."""

    def fixed_parts(self) -> list[Part]:
        """Return the parts of the frozen weights."""


class _Fixed:
    """The frozen weights to which adapters are added: a source fills these, and not the learned adapters."""

    optimizer_steps = 0

    def __init__(self, engine: HasFixedParts) -> None:
        self.parts = engine.fixed_parts

    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        fill(self.parts())


def load_initial(config: TrainConfig, engine: HasFixedParts, group: Group, run_dir: Path) -> str:
    """Load the weights that `train.init` names into the engine; return a note. A collective of all ranks."""
    return _load(config, _Fixed(engine) if config.tune.lora.rank else engine, group, run_dir)


def base_of(config: TrainConfig, group: Group, run_dir: Path) -> BaseWeights:
    """Return the record of the base weights for checkpoints of adapters. A collective of all ranks."""
    found = {}
    if group.rank == 0:
        found = asdict(base_at(source_path(config.init.source, run_dir)))
    return BaseWeights(**group.share(found))


def generation_file(config: TrainConfig, group: Group, run_dir: Path) -> Path | None:
    """Return a copy, in `run_dir`, of the generation_config.json of the initial weights, or None. A collective of all
    ranks, because some nodes may not have the source."""
    content, copy = b"", run_dir / GENERATION
    if group.rank == 0 and config.init.source:
        source = weights_folder(source_path(config.init.source, run_dir))
        file = SideFiles.beside(source).files.get(GENERATION)
        content = file.read_bytes() if isinstance(file, Path) else b""
    content = group.share(content)
    if content:
        run_dir.mkdir(parents=True, exist_ok=True)
        replace_file(copy, content)
    return copy if copy.is_file() else None


def _load(config: TrainConfig, engine: HasParts, group: Group, run_dir: Path) -> str:
    path = source_path(config.init.source, run_dir)
    # Rank 0 decides: files of our checkpoints, and even the folder, may be only on some of the nodes.
    found = group.share(_kind_of(path))
    if found == "other":
        return _load_contents(config, engine, path)
    folder = path if found == "checkpoint" else Path(found)
    weights = _Weights(config, engine)
    named = folder if found == "checkpoint" else None
    board = Board(group, f"init-{group.share(str(folder))}")
    loader = Loader(meet_at(folder.parent if named else folder, group), board, group)
    try:
        checkpoint = loader.load(named, weights, weights.check)
    except CheckpointError as error:
        raise CheckpointError(f"train.init: {error.message}", "name another source, or repair it") from None
    if checkpoint is None:
        raise CheckpointError(f"train.init: {folder} holds no checkpoint", "name another source")
    return f"begins with the weights of {checkpoint.path} (its step {checkpoint.step})"


def source_path(source: str, run_dir: Path) -> Path:
    """Return the path of a source; the name of a run means its folder on this node, next to this run's."""
    path = Path(source)
    if path.exists() or len(path.parts) > 1:
        return path
    # The launcher's folders are runs/NAME/NODE.
    neighbour = run_dir.resolve().parent.parent / source / run_dir.name
    return neighbour if neighbour.is_dir() else run_dir.resolve().parent / source


def _kind_of(path: Path) -> str:
    """Return `checkpoint` for a checkpoint of ours, the folder of several, or `other`."""
    if (path / MANIFEST).is_file():
        return "checkpoint"
    folder = checkpoints_in(path)
    return "other" if folder is None else str(folder)


class _Weights:
    """The weights of an engine with the shapes of the source; the engine's moments stay at zero."""

    def __init__(self, config: TrainConfig, engine: HasParts) -> None:
        self.config, self.engine = config, engine
        self.rows = config.model.vocab

    optimizer_steps = 0

    def check(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of another shape; remember how many rows its tables have."""
        model = checkpoint.model
        self.rows = model.vocab
        faults = list(init_faults(self.config.model, model, self.config.init.extend_vocabulary))
        if faults:
            raise CheckpointError("; ".join(map(str, faults)))

    def parts(self) -> list[Part]:
        return list(self._cut(self.engine.parts()))

    def load_parts(self, fill: Callable[[Sequence[Part]], None], optimizer_steps: int) -> None:
        self.engine.load_parts(lambda parts: fill(list(self._cut(parts))), 0)

    def _cut(self, parts: Sequence[Part]) -> Iterator[Part]:
        return weights_of(parts, self.rows)


def weights_of(parts: Sequence[Part], rows: int) -> Iterator[Part]:
    """Yield the parts of weights; of a table with one row per token, only the rows before `rows`."""
    for part in parts:
        # The head of a task is new.
        if part.key.startswith((*MOMENTS, "classifier.")):
            continue
        (first, last), *others = part.box
        if part.key not in TABLES or part.shape[0] == rows:
            yield part
        elif first < rows:
            last = min(last, rows)
            yield replace(
                part,
                shape=(rows, *part.shape[1:]),
                box=((first, last), *others),
                tensor=part.tensor.narrow(0, 0, last - first),
            )


def _load_contents(config: TrainConfig, engine: HasParts, path: Path) -> str:
    source = open_source(path, config.model.heads)
    faults = list(init_faults(config.model, source.model, config.init.extend_vocabulary))
    if faults:
        raise ConfigFaults(faults)
    assert source.contents is not None
    tensors = source.contents.parameters

    def fill(parts: Sequence[Part]) -> None:
        for part in weights_of(parts, source.model.vocab):
            _fill_part(part, tensors)

    engine.load_parts(fill, 0)
    return f"begins with the weights of {path} ({source.contents.origin.format})"


def _fill_part(part: Part, tensors: Mapping[str, Lazy]) -> None:
    (first, last), *others = part.box
    rows = tensors[part.key].read(first, last)
    index = [slice(None), *(slice(start, stop) for start, stop in others)]
    part.tensor.copy_(rows[tuple(index)])
