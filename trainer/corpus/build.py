"""Build `.bin`, `.idx` and a manifest from texts: on all cores, in constant memory, resumable, with
identical bytes."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clusterctl.wire.arguments import wrong_options
from clusterctl.wire.data_requests import TEXT_FORMATS, BuildRequest
from clusterctl.wire.pair import FileRecord, Manifest, TokenizerRecord
from trainer.corpus.dedup import drop_duplicates
from trainer.corpus.indexed import (
    bin_path,
    idx_path,
    load_manifest,
    manifest_path,
    token_type,
    write_index,
    write_manifest,
)
from trainer.corpus.inputs import (
    PART_BYTES,
    Input,
    Part,
    Reader,
    find_inputs,
)
from trainer.corpus.open import STDIN
from trainer.corpus.pool import make_all
from trainer.corpus.store import (
    MANIFEST,
    PLAN,
    BuildPlan,
    Lock,
    Store,
    hashes_path,
    put_in_place,
    work_folder,
)
from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import DataError, DataFailed, Together, TrainerError, machine_error
from trainer.files import sha256, sync

DROPPED = ("bad", "short", "language", "duplicate")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Tell = Callable[[str], None]
Progress = Callable[[int, int, int], None]
"""Called with the bytes read so far, the bytes of all inputs, and the documents made."""


def _check(order: BuildRequest) -> None:
    """Raise one error that lists all faults of the options."""
    faults = []
    for ending in (".bin", ".idx"):
        if order.output.name.endswith(ending):
            faults.append(f"--output {order.output}: is a prefix; leave out {ending}, which is added to it")
    above = next((path for path in order.output.parents if path.exists()), None)
    if above is not None and not above.is_dir():
        faults.append(f"--output {order.output}: {above} is a file, not a folder")
    faults += wrong_options(order)
    model = order.recipe.filters.language_model
    if model and not Path(model).is_file():
        faults.append(f"--language-model {model}: no such file")
    if faults:
        raise DataError("\n".join(faults), "see `clusterctl data build --help`")


def build(
    order: BuildRequest, tell: Tell = lambda text: None, progress: Progress = lambda *_: None
) -> Manifest:
    """Build, or resume an interrupted build; return the manifest."""
    inputs, tokenizer = opened(order)
    plan = make_plan(order, inputs, tokenizer)
    folder = work_folder(order.output)
    try:
        lock = Lock(folder)
        try:
            return _build(order, inputs, tokenizer, plan, folder, tell, progress)
        finally:
            lock.release()
            _remove_empty_work_folder(folder)
    except OSError as error:
        raise _as_build_error(error, folder) from None


def opened(order: BuildRequest) -> tuple[list[Input], Tokenizer]:
    """Return the inputs found and the tokenizer loaded; raise one error that lists all faults."""
    together = Together(DataError)
    inputs: list[Input] = []
    tokenizer: Tokenizer | None = None
    with together.collected():
        _check(order)
    with together.collected():
        inputs = find_inputs(order.input, order.format if order.format in TEXT_FORMATS else "")
    with together.collected():
        tokenizer = Tokenizer.load(order.tokenizer, order.eod)
    together.check()
    assert tokenizer is not None
    return inputs, tokenizer


def _build(
    order: BuildRequest,
    inputs: Sequence[Input],
    tokenizer: Tokenizer,
    plan: BuildPlan,
    folder: Path,
    tell: Tell,
    progress: Progress,
) -> Manifest:
    if order.fresh:
        (folder / PLAN).unlink(missing_ok=True)
    if not (_is_finished(folder, plan)):
        _refuse_to_replace(order)
        store = Store(folder, plan, np.dtype(token_type(tokenizer.vocab)), tokenizer.vocab)
        try:
            if store.note:
                tell(store.note)
            reader = Reader(inputs, order.recipe.each)
            _make(order, reader, store, tokenizer, tell, progress)
            _finish(order, reader, store, tokenizer)
        finally:
            store.close()
    if order.keep_hashes and (folder / "hashes").exists():
        os.replace(folder / "hashes", hashes_path(order.output))
    elif not order.keep_hashes:
        # Part of an earlier, interrupted build.
        hashes_path(order.output).unlink(missing_ok=True)
    put_in_place(folder, order.output)
    manifest = load_manifest(manifest_path(order.output))
    assert manifest is not None
    return manifest


def make_plan(order: BuildRequest, inputs: Sequence[Input], tokenizer: Tokenizer) -> BuildPlan:
    """Return everything that determines the bytes of the result."""
    filters = order.recipe.filters
    return BuildPlan(
        inputs=[[source.name, source.kind, *_stamp(source.name)] for source in inputs],
        tokenizer=tokenizer.sha256,
        eod=tokenizer.eod,
        recipe=order.recipe,
        language_model=_stamp(filters.language_model) if filters.language else [],
        part_bytes=PART_BYTES,
    )


def _stamp(name: str) -> list[int]:
    if name == STDIN:
        return []
    status = Path(name).stat()
    return [0 if stat.S_ISDIR(status.st_mode) else status.st_size, status.st_mtime_ns]


def _is_finished(folder: Path, plan: BuildPlan) -> bool:
    """Return whether all parts were made before and only the final files are missing."""
    return (folder / MANIFEST).is_file() and plan.changes(folder) == []


def _refuse_to_replace(order: BuildRequest) -> None:
    existing = [path for path in (bin_path(order.output), idx_path(order.output)) if path.exists()]
    if existing and not order.replace:
        names = " and ".join(str(path) for path in existing)
        raise DataError(f"{names}: exists already", "use --replace to build it again, or another --output")


def _make(
    order: BuildRequest, reader: Reader, store: Store, tokenizer: Tokenizer, tell: Tell, progress: Progress
) -> None:
    _stop_at_bad(order, store)
    recipe = order.recipe
    workers = order.workers or len(os.sched_getaffinity(0))
    warning = ""
    total = sum(stamp[0] for stamp in map(_stamp, [source.name for source in reader.inputs]) if stamp)
    for made in make_all(_new_parts(reader, store), recipe, tokenizer, workers):
        if made.slow and not warning:
            warning = f"encoding with `tokenizers`, about ten times slower than compiled code: {made.slow}"
            tell(warning)
        store.append(made)
        _stop_at_bad(order, store)
        progress(sum(source.bytes for source in reader.seen), total, store.documents)


def _new_parts(reader: Reader, store: Store) -> Iterator[Part]:
    """Yield the parts that are not made yet; check that the finished ones are unchanged."""
    known = list(store.marks)
    number = -1
    changed = DataError(
        "the input has changed since this build started", "use --fresh to drop what was built and start again"
    )
    for part in reader.parts():
        number = part.number
        if number >= len(known):
            yield part
        elif part.mark != known[number]:
            raise changed
    if number + 1 < len(known):
        raise changed


def _stop_at_bad(order: BuildRequest, store: Store) -> None:
    count = store.facts["bad"]
    if count <= order.max_bad:
        return
    shown = list(store.bad[:20])
    more = [f"... and {count - len(shown)} more"] if count > len(shown) else []
    summary = f"{count} bad {'line' if count == 1 else 'lines'} so far, and --max-bad is {order.max_bad}"
    raise DataError(
        "\n".join([*shown, *more, summary]),
        "fix them, or skip them with --max-bad N; what is built is kept and the build resumes",
    )


def _finish(order: BuildRequest, reader: Reader, store: Store, tokenizer: Tokenizer) -> None:
    """Drop duplicates, then write the index and the manifest next to the tokens."""
    if not store.tokens:
        shutil.rmtree(store.folder)
        raise DataError(_why_empty(store), "check the files, --key and the filters")
    if order.recipe.dedup:
        store.facts["duplicate"] = drop_duplicates(store)
    with (
        store.path("idx").open("wb") as index,
        store.path("lengths").open("rb") as lengths,
        store.path("marks").open("rb") as marks,
    ):
        write_index(index, store.dtype, lengths, marks)
    sync(store.path("bin"))
    sync(store.path("idx"))
    write_manifest(store.path(MANIFEST), make_manifest(order, reader, store, tokenizer))


def _why_empty(store: Store) -> str:
    gone = [f"{store.facts[why]} {why}" for why in DROPPED if store.facts[why]]
    gone += [f"{store.facts['empty']} empty"] if store.facts["empty"] else []
    return "the input has no document with text in it" + (f" ({', '.join(gone)})" if gone else "")


def make_manifest(order: BuildRequest, reader: Reader, store: Store, tokenizer: Tokenizer) -> Manifest:
    """Return the manifest; nothing in it depends on time, on the workers or on interruptions."""
    recipe = order.recipe
    filters = asdict(recipe.filters) if recipe.filters != type(recipe.filters)() else {}
    if recipe.filters.language:
        filters["language_model_sha256"] = sha256(Path(recipe.filters.language_model))
    size = store.path("bin").stat().st_size
    return Manifest(
        documents=store.documents,
        empty_documents=store.facts["empty"],
        sequences=store.sequences,
        tokens=store.tokens,
        characters=store.facts["characters"],
        bytes=size,
        token_type=store.dtype.name,
        unit=recipe.unit,
        append_eod=recipe.append_eod,
        vocab=tokenizer.vocab,
        largest_id=int(store.counts.nonzero()[0][-1]),
        eod=tokenizer.eod,
        eod_token=tokenizer.token_of(tokenizer.eod),
        glm=tokenizer.glm_ids(),
        tokenizer=TokenizerRecord(str(order.tokenizer), tokenizer.sha256, tokenizer.fingerprint),
        dropped={why: store.facts[why] for why in DROPPED},
        bad=tuple(store.bad),
        filters={**filters, "dedup": recipe.dedup},
        unigram_entropy_nats=entropy(store.counts),
        inputs=tuple(source.record() for source in reader.seen),
        outputs={
            "bin": FileRecord(size, store.digest.hexdigest()),
            "idx": FileRecord(store.path("idx").stat().st_size, sha256(store.path("idx"))),
        },
    )


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy of the token frequencies in nats per token: the lowest loss of a model that sees
    no context."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def _remove_empty_work_folder(folder: Path) -> None:
    """Remove the work folder of a build that was refused before it made anything."""
    names = set(os.listdir(folder)) if folder.is_dir() else set()
    if names and names <= {"lock"}:
        shutil.rmtree(folder)


def _as_build_error(error: OSError, folder: Path) -> TrainerError:
    """Return the error of a build for a failure of a disk, or for a file that cannot be used."""
    where = error.filename or folder
    if error.errno in FULL:
        return DataFailed(
            f"{where}: {error.strerror}: the disk (or a limit) is full",
            "free some space and run the same command again: the build resumes",
        )
    return machine_error(error) or DataFailed(
        f"{where}: {error.strerror or error}", "run the same command again: the build resumes"
    )
