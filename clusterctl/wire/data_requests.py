"""What the launcher asks of the trainer about training data: the options of each command of `data`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterctl.wire.fields import Checked, Problem, setting
from clusterctl.wire.requests import Printed

TEXT_FORMATS = ("jsonl", "text", "wikiextractor", "mediawiki", "parquet", "lazy")
PAIR_ENDINGS = (".bin", ".idx", ".manifest.json", ".hashes")


def pair_prefix(name: object) -> Path:
    """Return the prefix of a pair given its prefix or one of its files, so that a shell's `data/*` works."""
    text = str(name)
    return Path(next((text[: -len(ending)] for ending in PAIR_ENDINGS if text.endswith(ending)), text))


def new_prefix(name: object) -> Path:
    """Return the prefix of a pair to write; refuse a folder."""
    if str(name).endswith("/"):
        raise ValueError(f"{name} is a folder; add the name of the pair, as in {name}corpus")
    return Path(str(name))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How texts are found in files."""

    key: str = setting("text", metavar="KEY")
    """The key or column with the text or the ids. Default: text."""
    each: str = setting("file", choices=("file", "line", "paragraph"), metavar="EACH")
    """For plain text: make a document of each file, line or paragraph. Default: file."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Files with texts."""

    input: tuple[str, ...] = setting(required=True, read=os.fspath, metavar="FILE")
    """JSON lines, text, WikiExtractor's folders, MediaWiki dumps, Parquet or GLM's .lazy; also compressed by gz, bz2,
    xz or zst; also patterns such as 'data/*.jsonl'; '-' for stdin."""


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """The format of the files."""

    format: str = setting("", choices=("", *TEXT_FORMATS), metavar="FORMAT")
    """The format: jsonl, text, wikiextractor, mediawiki, parquet or lazy. Default: detected from name and first
    bytes."""


@dataclass(frozen=True, kw_only=True)
class Filters(Checked):
    """The conditions that a document must meet."""

    min_chars: int = setting(0, least=0)
    """Skip documents with fewer characters."""
    language: str = setting("", metavar="CODE")
    """Keep only documents in this language: en."""
    language_model: str = setting("", metavar="FILE")
    """The model that detects languages: fastText's lid.176.bin or lid.176.ftz."""
    min_confidence: float = setting(0.0, least=0, most=1, metavar="P")
    """Skip documents whose language is less certain: 0 to 1. Default: 0."""

    def problems(self) -> Iterator[Problem]:
        if self.language and not self.language_model:
            problem = f"{self.language} needs --language-model FILE, fastText's lid.176.bin or lid.176.ftz"
            yield "language", problem, ""
        if self.language_model and not self.language:
            yield "language_model", "needs --language, as in --language en", ""


@dataclass(frozen=True, kw_only=True)
class Recipe(Reading):
    """Everything that determines the tokens of a document; the same for all parts of a build."""

    unit: str = setting("document", choices=("document", "sentence"), metavar="UNIT")
    """Make a sequence of each document or each sentence."""
    append_eod: bool = setting(False)
    """End each document with the end-of-document token."""
    dedup: bool = setting(False)
    """Drop exact duplicates; keep the first copy."""
    filters: Filters = Filters()


@dataclass(frozen=True, kw_only=True)
class BuildOptions(TextFormat):
    """The options of a build that are the same on every node."""

    recipe: Recipe = Recipe()
    eod: str = setting("", metavar="TOKEN")
    """The end-of-document token. Default: <|endoftext|>."""
    max_bad: int = setting(0, least=0)
    """Skip at most N bad lines. Default: 0."""
    workers: int = setting(0, least=0)
    """Use N processes. Default: one per core."""
    fresh: bool = setting(False)
    """Start again instead of resuming an interrupted build."""
    keep_hashes: bool = setting(False)
    """With --dedup: keep the hashes, for `data merge --dedup`."""


@dataclass(frozen=True, kw_only=True)
class NewPair(Printed):
    """A pair to write."""

    output: Path = setting(read=new_prefix, metavar="PREFIX")
    """The path of the new files, without endings."""
    replace: bool = setting(False)
    """Overwrite existing files of that name."""


@dataclass(frozen=True, kw_only=True)
class BuildRequest(Texts, BuildOptions, NewPair):
    """A pair to build from texts."""

    tokenizer: Path = setting(metavar="TOKENIZER")
    """tokenizer.json, vocab.json, or the folder of one."""
    progress_lines: bool = setting(False, hidden=True)
    """Also write the progress for another program."""


@dataclass(frozen=True, kw_only=True)
class SharesRequest(BuildRequest):
    """A build whose inputs are divided among nodes."""

    count: int = setting()
    """The number of nodes."""
    folder: Path = setting(metavar="DIR")
    """Where the shares are written."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A pair to read."""

    prefix: Path = setting(positional=True, read=pair_prefix)
    """The path of the pair, without .bin and .idx."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs to read."""

    prefix: tuple[Path, ...] = setting(positional=True, read=pair_prefix)
    """The paths of pairs, without .bin and .idx."""


@dataclass(frozen=True, kw_only=True)
class InfoRequest(Pair, Printed):
    """A pair to describe."""

    tokenizer: Path | None = setting(None, metavar="TOKENIZER")
    """Show samples with this tokenizer. Default: the one that the manifest names."""
    eod: str = setting("", metavar="TOKEN")
    """The token of the tokenizer that ends a document."""
    samples: int = setting(3, least=0)
    """Show the beginnings of N documents. Default: 3."""
    tokens: str | None = setting(None, metavar="BUDGET")
    """Show how many epochs this many tokens are: 2.5B, 300e9."""


@dataclass(frozen=True, kw_only=True)
class VerifyRequest(Pairs, Printed):
    """Pairs to check."""

    tokenizer: Path | None = setting(None, metavar="TOKENIZER")
    """Check that every id is in the vocabulary of this tokenizer."""
    vocab: int | None = setting(None, least=1)
    """Check that every id is below N."""
    no_hash: bool = setting(False)
    """Compare only the sizes with the manifest, not the hashes."""


@dataclass(frozen=True, kw_only=True)
class RepairRequest(Pair, Printed):
    """A pair whose index is to be corrected."""

    output: Path | None = setting(None, metavar="PREFIX")
    """Leave the pair as it is and write another; its .bin is a hard link or, on another disk, a copy."""
    dry_run: bool = setting(False)
    """Show what would happen; change nothing."""


@dataclass(frozen=True, kw_only=True)
class SplitRequest(Pair, NewPair):
    """A pair to cut into parts."""

    parts: int | None = setting(None, least=1)
    """Write N shards with about equal numbers of tokens."""
    split: str = setting("", metavar="A,B,C")
    """Write train, valid and test with these shares of the documents: 949,50,1."""


@dataclass(frozen=True, kw_only=True)
class MergeRequest(Pairs, NewPair):
    """Pairs to join."""

    dedup: bool = setting(False)
    """Drop documents that an earlier pair has; needs pairs built with --keep-hashes."""


@dataclass(frozen=True, kw_only=True)
class NewTokenizer(Printed):
    """A tokenizer to write."""

    replace: bool = setting(False)
    """Overwrite another tokenizer of that name."""


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerRequest(Texts, TextFormat, NewTokenizer):
    """A tokenizer to train on texts."""

    reading: Reading = Reading()
    vocab_size: int = setting()
    """The number of tokens."""
    output: Path = setting(metavar="PATH")
    """FILE.json, or a folder to write vocab.json and merges.txt to."""


@dataclass(frozen=True, kw_only=True)
class GlmTokenizerRequest(NewTokenizer):
    """A tokenizer to complete by GLM's special tokens."""

    tokenizer: Path = setting(metavar="FILE")
    """The tokenizer to read."""
    eod: str = setting("", metavar="TOKEN")
    """The token that ends a document. Default: <|endoftext|>."""
    output: Path = setting(metavar="FILE")
    """The tokenizer to write."""
