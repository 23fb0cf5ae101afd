"""The verbs of `clusterctl data`: parse arguments, print the result as text or, with --json, as one JSON
document."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from trainer.errors import InputError

if TYPE_CHECKING:
    from trainer.corpus.build import Order
    from trainer.corpus.info import CorpusInfo
    from trainer.corpus.manifest import Manifest
    from trainer.corpus.shards import PairCounts
    from trainer.corpus.tokenizer import WrittenTokenizer
    from trainer.corpus.verify import Repaired

SPREAD = (
    "With --on SET, as in --on node[1-4], each node builds a part; the result is the same and is written here. With "
    "--leave as well, the parts stay on their nodes."
)
PREFIX, PREFIXES = (
    "The path of the pair, without .bin and .idx.",
    "The paths of pairs, without .bin and .idx.",
)
OUTPUT = "The path of the new files, without endings."
PAIR_ENDINGS = (".bin", ".idx", ".manifest.json", ".hashes")
ADD = Callable[[str, Any, str], argparse.ArgumentParser]


def add_verbs(verb: ADD) -> None:
    """Add every verb with its arguments; `verb` creates one from a name, a function and a help text."""
    _tokenizer_arguments(verb)
    build = verb("data-build", _build, "Build Megatron's .bin and .idx files from texts, with a manifest.")
    build.epilog = SPREAD
    _build_arguments(build)
    shares = verb(
        "data-shares", _shares, "Divide the inputs of a build into shares, one per node; print JSON."
    )
    _build_arguments(shares)
    shares.add_argument("--count", type=int, required=True)
    shares.add_argument("--folder", type=Path, required=True)
    for parser in (*_checking_verbs(verb), *_writing_verbs(verb)):
        parser.add_argument("--json", action="store_true", help="Print one JSON document.")


def _checking_verbs(verb: ADD) -> list[argparse.ArgumentParser]:
    """Add the verbs that read a pair, or correct its index."""
    info = verb("data-info", _info, "Show the documents, tokens and epochs of a .bin/.idx pair.")
    info.add_argument("prefix", type=prefix_of, help=PREFIX)
    info.add_argument(
        "--tokenizer",
        type=Path,
        help="Show samples with this tokenizer. Default: the one that the manifest names.",
    )
    info.add_argument("--eod", default="", help="The token of the tokenizer that ends a document.")
    info.add_argument(
        "--samples", type=int, default=3, metavar="N", help="Show the beginnings of N documents. Default: 3."
    )
    info.add_argument(
        "--tokens", metavar="BUDGET", help="Show how many epochs this many tokens are: 2.5B, 300e9."
    )
    check = verb(
        "data-verify", _verify, "Check every rule for .bin/.idx pairs; exit with 1 if one is broken."
    )
    check.add_argument("prefix", type=prefix_of, nargs="+", help=PREFIXES)
    check.add_argument(
        "--tokenizer", type=Path, help="Check that every id is in the vocabulary of this tokenizer."
    )
    check.add_argument("--vocab", type=int, metavar="N", help="Check that every id is below N.")
    check.add_argument(
        "--no-hash", action="store_true", help="Compare only the sizes with the manifest, not the hashes."
    )
    mend = verb(
        "data-repair",
        _repair,
        "Correct an index that does not count the end-of-document tokens of its .bin file.",
    )
    mend.add_argument("prefix", type=prefix_of, help=PREFIX)
    mend.add_argument(
        "--output",
        type=Path,
        help="Leave the pair as it is and write another; its .bin is a hard link or, on another disk, a copy.",
    )
    mend.add_argument("--dry-run", action="store_true", help="Show what would happen; change nothing.")
    return [info, check, mend]


def _writing_verbs(verb: ADD) -> list[argparse.ArgumentParser]:
    """Add the verbs that write pairs from pairs."""
    cut = verb("data-split", _split, "Split a corpus into shards, or into train, valid and test.")
    cut.add_argument("prefix", type=prefix_of, help=PREFIX)
    cut.add_argument(
        "--parts",
        type=int,
        metavar="N",
        help="Write N shards with about equal numbers of tokens.",
    )
    cut.add_argument(
        "--split",
        default="",
        metavar="A,B,C",
        help="Write train, valid and test with these shares of the documents: 949,50,1.",
    )
    join = verb("data-merge", _merge, "Merge .bin/.idx pairs into one, in the given order.")
    join.add_argument("prefix", type=prefix_of, nargs="+", help=PREFIXES)
    join.add_argument(
        "--dedup",
        action="store_true",
        help="Drop documents that an earlier pair has; needs pairs built with --keep-hashes.",
    )
    for parser in (cut, join):
        parser.add_argument("--output", type=new_prefix, required=True, metavar="PREFIX", help=OUTPUT)
        parser.add_argument("--replace", action="store_true", help="Overwrite existing files of that name.")
    return [cut, join]


def _inputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        action="extend",
        required=True,
        type=os.fspath,
        metavar="FILE",
        help="JSON lines, text, WikiExtractor's folders, MediaWiki dumps, Parquet or GLM's .lazy; also compressed "
        "by gz, bz2, xz or zst; also patterns such as 'data/*.jsonl'; '-' for stdin.",
    )
    add("--key", default="text", help="The key or column with the text or the ids. Default: text.")
    add(
        "--format",
        default="",
        help="The format: jsonl, text, wikiextractor, mediawiki, parquet or lazy. Default: detected from name and "
        "first bytes.",
    )
    add(
        "--each",
        default="file",
        help="For plain text: make a document of each file, line or paragraph. Default: file.",
    )


def _tokenizer_arguments(verb: ADD) -> None:
    parser = verb("tokenizer-train", _tokenizer_train, "Train a byte-level BPE tokenizer on texts.")
    _inputs(parser)
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="The number of tokens.")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="PATH",
        help="FILE.json, or a folder to write vocab.json and merges.txt to.",
    )
    glm = verb("tokenizer-glm", _tokenizer_glm, "Add GLM's special tokens to a tokenizer.")
    glm.add_argument("--tokenizer", type=Path, required=True, metavar="FILE", help="The tokenizer to read.")
    glm.add_argument("--eod", default="", help="The token that ends a document. Default: <|endoftext|>.")
    glm.add_argument("--output", type=Path, required=True, metavar="FILE", help="The tokenizer to write.")
    for each in (parser, glm):
        each.add_argument("--replace", action="store_true", help="Overwrite another tokenizer of that name.")
        each.add_argument("--json", action="store_true", help="Print one JSON document.")


def _build_arguments(build: argparse.ArgumentParser) -> None:
    _inputs(build)
    add, flag = build.add_argument, partial(build.add_argument, action="store_true")
    add("--tokenizer", type=Path, required=True, help="tokenizer.json, vocab.json, or the folder of one.")
    add("--output", type=new_prefix, required=True, metavar="PREFIX", help=OUTPUT)
    flag("--append-eod", help="End each document with the end-of-document token.")
    add("--eod", default="", metavar="TOKEN", help="The end-of-document token. Default: <|endoftext|>.")
    add("--unit", default="document", help="Make a sequence of each document or each sentence.")
    add("--min-chars", type=int, default=0, metavar="N", help="Skip documents with fewer characters.")
    flag("--dedup", help="Drop exact duplicates; keep the first copy.")
    add("--language", default="", metavar="CODE", help="Keep only documents in this language: en.")
    add(
        "--language-model",
        default="",
        metavar="FILE",
        help="The model that detects languages: fastText's lid.176.bin or lid.176.ftz.",
    )
    add(
        "--min-confidence",
        type=float,
        default=0.0,
        metavar="P",
        help="Skip documents whose language is less certain: 0 to 1. Default: 0.",
    )
    add("--max-bad", type=int, default=0, metavar="N", help="Skip at most N bad lines. Default: 0.")
    add("--workers", type=int, default=0, metavar="N", help="Use N processes. Default: one per core.")
    flag("--replace", help="Overwrite existing files of that name.")
    flag("--fresh", help="Start again instead of resuming an interrupted build.")
    flag("--progress-lines", help=argparse.SUPPRESS)
    flag("--keep-hashes", help="With --dedup: keep the hashes, for `data merge --dedup`.")
    flag("--json", help="Print one JSON document.")


# -- run ----------------------------------------------------------------------------------------------------


def _tokenizer_train(arguments: argparse.Namespace) -> int:
    from trainer.corpus.documents import some_text, texts_of
    from trainer.corpus.tokenizer import train_tokenizer

    texts = texts_of(arguments.input, arguments.key, arguments.format, arguments.each)
    answer = train_tokenizer(
        some_text(texts), arguments.vocab_size, arguments.output, overwrite=arguments.replace
    )
    return _show(arguments, answer, _tokenizer_text)


def _tokenizer_glm(arguments: argparse.Namespace) -> int:
    from trainer.corpus.tokenizer import add_glm_tokens

    answer = add_glm_tokens(arguments.tokenizer, arguments.output, arguments.eod, overwrite=arguments.replace)
    return _show(arguments, answer, _tokenizer_text)


def _build(arguments: argparse.Namespace) -> int:
    from trainer.corpus.build import build

    order = _order(arguments)
    meter = Meter(arguments.progress_lines)
    try:
        manifest = build(order, meter.say, meter.show)
    except KeyboardInterrupt:
        meter.say("interrupted; the same command resumes the build")
        raise
    meter.clear()
    if arguments.json:
        _write_json({"prefix": str(arguments.output), **manifest.as_json()})
    else:
        sys.stdout.write(_build_text(str(arguments.output), manifest))
    return 0


def _shares(arguments: argparse.Namespace) -> int:
    from trainer.corpus.node_shares import make_shares

    _write_json(asdict(make_shares(_order(arguments), arguments.count, arguments.folder)))
    return 0


def _order(arguments: argparse.Namespace) -> Order:
    from trainer.corpus.build import Order
    from trainer.corpus.filters import Filters
    from trainer.corpus.worker import Recipe

    filters = Filters(
        arguments.min_chars, arguments.language, arguments.language_model, arguments.min_confidence
    )
    recipe = Recipe(
        arguments.key, arguments.each, arguments.unit, arguments.append_eod, arguments.dedup, filters
    )
    return Order(
        tuple(arguments.input),
        arguments.tokenizer,
        arguments.output,
        recipe,
        kind=arguments.format,
        eod=arguments.eod,
        workers=arguments.workers,
        max_bad=arguments.max_bad,
        replace=arguments.replace,
        fresh=arguments.fresh,
        keep_hashes=arguments.keep_hashes,
    )


def _info(arguments: argparse.Namespace) -> int:
    from trainer.corpus.info import describe, token_count

    if arguments.samples < 0:
        raise InputError(f"--samples is {arguments.samples}; at least 0 is needed", "as in --samples 3")
    budget = token_count(arguments.tokens) if arguments.tokens else 0
    return _show(
        arguments,
        describe(arguments.prefix, arguments.tokenizer, arguments.samples, budget, arguments.eod),
        _info_text,
    )


def _verify(arguments: argparse.Namespace) -> int:
    from trainer.corpus.tokenizer import Tokenizer
    from trainer.corpus.verify import verify

    if arguments.vocab is not None and arguments.vocab < 1:
        raise InputError(f"--vocab is {arguments.vocab}; at least 1 is needed", "as in --vocab 50304")
    tokenizer = Tokenizer.load(arguments.tokenizer) if arguments.tokenizer else None
    vocab = tokenizer.vocab if tokenizer else arguments.vocab
    prefixes = dict.fromkeys(arguments.prefix)
    looked = [verify(prefix, vocab, not arguments.no_hash, tokenizer) for prefix in prefixes]
    if arguments.json:
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


def _repair(arguments: argparse.Namespace) -> int:
    from trainer.corpus.verify import repair

    return _show(arguments, repair(arguments.prefix, arguments.output, arguments.dry_run), _repair_text)


def _split(arguments: argparse.Namespace) -> int:
    from trainer.corpus.shards import split

    if arguments.parts is not None and arguments.parts < 1:
        raise InputError(f"--parts is {arguments.parts}; at least 1 is needed", "as in --parts 8")
    made = split(arguments.prefix, arguments.output, arguments.parts or 0, arguments.split, arguments.replace)
    return _show_pairs(arguments, made, [asdict(pair) for pair in made])


def _merge(arguments: argparse.Namespace) -> int:
    from trainer.corpus.shards import merge

    prefixes = list(dict.fromkeys(arguments.prefix))
    made = merge(prefixes, arguments.output, arguments.replace, arguments.dedup)
    return _show_pairs(arguments, [made], asdict(made))


def _show_pairs(arguments: argparse.Namespace, made: Sequence[PairCounts], as_json: Any) -> int:
    if arguments.json:
        _write_json(as_json)
    else:
        sys.stdout.write("".join(_pair_text(pair.prefix, pair) for pair in made))
    return 0


def prefix_of(name: str) -> Path:
    """Return the prefix of a pair given its prefix or one of its files, so that a shell's `data/*` works."""
    for ending in PAIR_ENDINGS:
        if name.endswith(ending):
            return Path(name[: -len(ending)])
    return Path(name)


def new_prefix(text: str) -> Path:
    """Return the prefix of a pair to write; refuse a folder."""
    if text.endswith("/"):
        raise argparse.ArgumentTypeError(f"{text} is a folder; add the name of the pair, as in {text}corpus")
    return Path(text)


# -- show ---------------------------------------------------------------------------------------------------


class Answer(Protocol):
    """The result of a verb."""

    def as_json(self) -> Any: ...


A = TypeVar("A", bound=Answer)


def _show(arguments: argparse.Namespace, answer: A, as_text: Callable[[A], str]) -> int:
    if arguments.json:
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
