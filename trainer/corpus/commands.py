"""The verbs of `clusterctl data`: print the result as text or, with --json, as one JSON document."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from clusterctl.wire.data_requests import (
    BuildRequest,
    GlmTokenizerRequest,
    InfoRequest,
    MergeRequest,
    RepairRequest,
    SharesRequest,
    SplitRequest,
    TrainTokenizerRequest,
    VerifyRequest,
)
from clusterctl.wire.pair import Manifest, PairCounts
from clusterctl.wire.requests import Printed
from clusterctl.wire.typed_json import encode

if TYPE_CHECKING:
    from trainer.corpus.info import CorpusInfo
    from trainer.corpus.tokenizer import WrittenTokenizer
    from trainer.corpus.verify import Repaired


def tokenizer_train(request: TrainTokenizerRequest) -> int:
    """Train a tokenizer; return 0."""
    from trainer.corpus.documents import some_text, texts_of
    from trainer.corpus.tokenizer import train_tokenizer

    texts = texts_of(request.input, request.reading.key, request.format, request.reading.each)
    answer = train_tokenizer(some_text(texts), request.vocab_size, request.output, overwrite=request.replace)
    return _show(request, answer, _tokenizer_text)


def tokenizer_glm(request: GlmTokenizerRequest) -> int:
    """Add GLM's tokens to a tokenizer; return 0."""
    from trainer.corpus.tokenizer import add_glm_tokens

    answer = add_glm_tokens(request.tokenizer, request.output, request.eod, overwrite=request.replace)
    return _show(request, answer, _tokenizer_text)


def build_pair(request: BuildRequest) -> int:
    """Build a pair; return 0."""
    from trainer.corpus.build import build

    meter = Meter(request.progress_lines)
    try:
        manifest = build(request, meter.say, meter.show)
    except KeyboardInterrupt:
        meter.say("interrupted; the same command resumes the build")
        raise
    meter.clear()
    if request.json:
        _write_json({"prefix": str(request.output), **manifest.as_json()})
    else:
        sys.stdout.write(_build_text(str(request.output), manifest))
    return 0


def divide_inputs(request: SharesRequest) -> int:
    """Divide the inputs of a build; return 0."""
    from trainer.corpus.node_shares import make_shares

    _write_json(encode(make_shares(request, request.count, request.folder)))
    return 0


def describe_pair(request: InfoRequest) -> int:
    """Describe a pair; return 0."""
    from trainer.corpus.info import describe, token_count

    budget = token_count(request.tokens) if request.tokens else 0
    return _show(
        request,
        describe(request.prefix, request.tokenizer, request.samples, budget, request.eod),
        _info_text,
    )


def verify_pairs(request: VerifyRequest) -> int:
    """Check pairs; return 1 if a rule is broken, 2 if a pair is absent."""
    from trainer.corpus.tokenizer import Tokenizer
    from trainer.corpus.verify import verify

    tokenizer = Tokenizer.load(request.tokenizer) if request.tokenizer else None
    vocab = tokenizer.vocab if tokenizer else request.vocab
    prefixes = dict.fromkeys(request.prefix)
    looked = [verify(prefix, vocab, not request.no_hash, tokenizer) for prefix in prefixes]
    if request.json:
        _write_json([pair.as_json() for pair in looked])
    else:
        for pair in looked:
            for finding in pair.findings:
                sys.stdout.write(
                    f"{finding.what}\n" + (f"  try: {finding.remedy}\n" if finding.remedy else "")
                )
            if not pair.findings:
                counts = f"{_some(pair.documents, 'document')}, {_some(pair.tokens, 'token')}"
                looked_at = f"largest id {pair.largest_id}; {', '.join(pair.checked)} checked"
                sys.stdout.write(f"{pair.prefix}: good ({counts}, {looked_at})\n")
    if any(not pair.is_there for pair in looked):
        return 2
    return 1 if any(pair.findings for pair in looked) else 0


def repair_pair(request: RepairRequest) -> int:
    """Correct a pair's index; return 0."""
    from trainer.corpus.verify import repair

    return _show(request, repair(request.prefix, request.output, request.dry_run), _repair_text)


def split_pair(request: SplitRequest) -> int:
    """Write parts of a pair; return 0."""
    from trainer.corpus.shards import split

    made = split(request.prefix, request.output, request.parts or 0, request.split, request.replace)
    return _show_pairs(request, made, [asdict(pair) for pair in made])


def merge_pairs(request: MergeRequest) -> int:
    """Write one pair from several; return 0."""
    from trainer.corpus.shards import merge

    prefixes = list(dict.fromkeys(request.prefix))
    made = merge(prefixes, request.output, request.replace, request.dedup)
    return _show_pairs(request, [made], asdict(made))


def _show_pairs(request: Printed, made: Sequence[PairCounts], as_json: Any) -> int:
    if request.json:
        _write_json(as_json)
    else:
        sys.stdout.write("".join(_pair_text(pair.prefix, pair) for pair in made))
    return 0


# -- show ---------------------------------------------------------------------------------------------------


class Answer(Protocol):
    """The result of a verb."""

    def as_json(self) -> Any: ...


A = TypeVar("A", bound=Answer)


def _show(request: Printed, answer: A, as_text: Callable[[A], str]) -> int:
    if request.json:
        _write_json(answer.as_json())
    else:
        sys.stdout.write(as_text(answer))
    return 0


def _write_json(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer, indent=2, ensure_ascii=False) + "\n")


def _tokenizer_text(made: WrittenTokenizer) -> str:
    text = f"{made.output}: {made.vocab} tokens, a document ends with {made.eod_token} (id {made.eod})\n"
    return text + "".join(f"  {name:7} {number}\n" for name, number in (made.glm or {}).items())


def _pair_text(prefix: str, pair: PairCounts | Manifest) -> str:
    numbers = {"document": pair.documents, "token": pair.tokens, "byte": pair.bytes}
    counts = ", ".join(_some(number, noun) for noun, number in numbers.items() if number is not None)
    return f"{prefix}: {counts}\n"


def _some(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _build_text(prefix: str, made: Manifest) -> str:
    lines = [_pair_text(prefix, made).rstrip()]
    gone = [f"{count:,} {why}" for why, count in (made.dropped or {}).items() if count]
    if gone:
        lines.append(f"  left out: {', '.join(gone)}")
    lines += [f"  bad: {line}" for line in made.bad]
    if made.empty_documents:
        lines.append(f"  empty: {_some(made.empty_documents, 'document')}; --min-chars 1 leaves them out")
    end = f"{made.eod_token} (id {made.eod})"
    lines.append(
        f"  each ends with {end}" if made.append_eod else f"  no {end} after documents: --append-eod adds it"
    )
    return "\n".join(lines) + "\n"


def _repair_text(answer: Repaired) -> str:
    if answer.why:
        return f"{answer.prefix}: {answer.why}\n"
    verb = "counts" if answer.repaired else "would count"
    return (
        f"{answer.prefix}: {verb} the end of {answer.documents:,} documents (id {answer.end_of_document}): "
        f"{answer.tokens_before:,} tokens become {answer.tokens:,}\n"
    )


def _info_text(info: CorpusInfo) -> str:
    lines = [
        info.prefix,
        f"  documents   {info.documents:,}"
        + (f" ({info.empty_documents:,} empty)" if info.empty_documents else ""),
        f"  sequences   {info.sequences:,}",
        f"  tokens      {info.tokens:,} ({info.token_type}, {info.bytes:,} bytes)",
        f"  largest id  {info.largest_id}" + (f" of {info.vocab}" if info.vocab else ""),
        f"  ends in     {_end_text(info)}",
        f"  entropy     {info.unigram_entropy_nats:.3f} nats per token by frequency alone",
    ]
    if info.epochs:
        times = info.epochs.epochs
        lines.append(
            f"  {info.epochs.tokens:,} tokens are {times:.2f} epochs" if times else "  no tokens, no epochs"
        )
    lines.append(f"  tokens of a document (median {info.median_document:,}):")
    most = max((entry.documents for entry in info.document_lengths), default=1)
    for entry in info.document_lengths:
        bar = "#" * -(-entry.documents * 40 // most)
        lines.append(f"    {entry.first:>9,} - {entry.below - 1:<9,} {entry.documents:>10,} {bar}")
    for sample in info.samples:
        text = " ".join(_printable(sample.text).split())
        lines.append(f"  document {sample.document:,} ({sample.tokens:,} tokens): {text[:120]}")
    return "\n".join(lines) + "\n"


def _end_text(info: CorpusInfo) -> str:
    if info.ends_in is None:
        return "no common token"
    return f"{info.ends_in}" + (", the end of a document" if info.eod == info.ends_in else "")


def _printable(text: str) -> str:
    """Return the text without control characters, which could move the cursor of a terminal."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text
    )


class Meter:
    """Progress on standard error: one redrawn line on a terminal, nothing elsewhere."""

    def __init__(self, lines: bool = False) -> None:
        """`lines`: also write `progress BYTES DOCUMENTS` every second, for a program that reads it."""
        self._lines = lines
        self._began = self._drawn = time.monotonic()
        self._live = sys.stderr.isatty()

    def say(self, text: str) -> None:
        self.clear()
        sys.stderr.write(f"{text}\n")

    def show(self, done: int, total: int, documents: int) -> None:
        now = time.monotonic()
        if self._lines and now - self._drawn > 1.0:
            self._drawn = now
            sys.stderr.write(f"progress {done} {documents}\n")
            sys.stderr.flush()
        if not self._live or now - self._drawn < 0.2 or now - self._began < 1.0:
            return
        self._drawn = now
        rate = done / (now - self._began)
        left = f", {(total - done) / rate:,.0f} s left" if total > done and rate else ""
        text = f"{done / 1e6:,.0f} MB read, {documents:,} documents, {rate / 1e6:.1f} MB/s{left}"
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

    def clear(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
