"""The steps of `clusterctl demo`: corpus, tokenizer, training data, job and generated text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

from clusterctl import extras
from clusterctl.errors import UsageError
from clusterctl.files import replace_file
from clusterctl.jobs.ask_trainer import ask_trainer
from clusterctl.wire.typed_json import decode

VOCABULARY = 1024
# Characters. The 79 topics are too few documents for a validation part; 300 pieces are enough.
DOCUMENT_SIZE = 1500

JOB = """\
# Written by `clusterctl demo`. Try: clusterctl plan {job}
name: demo
nodes: node[1-2]            # two nodes with two devices each: four ranks
data: ./data                # pushed to every node; {{data}} below is its path there
rank_table: always          # built from the answers of hccn_tool on each node
collect: [checkpoints]      # logs and metrics are always fetched
grace: 10
train:
  model: {{name: gpt-tiny, vocab: {vocabulary}}}
  data: {{prefix: "{{data}}/pydoc_text_document", tokenizer: "{{data}}/tokenizer.json", split: "90,10,0"}}
  steps: {steps}
  micro_batch: 4
  global_batch: 16          # = micro_batch x 4 data parallel ranks x 1 accumulation
  precision: fp32           # or bf16, where the device computes it fast
  optimizer: {{lr: 3e-3, min_lr: 1e-4, warmup_steps: {warmup}}}
  eval: {{every: 50, batches: 4}}
  save: {{every: 100, keep: 2}}
"""


def ready() -> None:
    """Raise UsageError if the libraries of the trainer are missing."""
    missing = extras.missing(("trainer", *extras.OF_TRAINER))
    if missing:
        hint = f"{extras.command('train')}\nor, in a checkout: make demo"
        raise UsageError(f"the demo trains a model, and {', '.join(missing)} is not installed here", hint)


def documents() -> Iterator[str]:
    """Yield the language reference that is part of every Python, in pieces of about a page."""
    for name in sorted(topics):
        piece = ""
        for paragraph in topics[name].split("\n\n"):
            piece += paragraph + "\n\n"
            if len(piece) > DOCUMENT_SIZE:
                yield piece
                piece = ""
        if piece.strip():
            yield piece


@dataclass(frozen=True)
class Corpus:
    """The texts of the demo."""

    documents: int
    characters: int


@dataclass(frozen=True)
class BuiltData:
    """What the trainer reports about the data that it built."""

    tokens: int
    unigram_entropy_nats: float


def write_corpus(path: Path) -> Corpus:
    """Write the corpus as JSON lines, shuffled by hash so that the validation part resembles the rest."""
    texts = sorted(documents(), key=lambda text: hashlib.sha256(text.encode()).digest())
    replace_file(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Corpus(len(texts), sum(map(len, texts)))


def train_tokenizer(corpus: Path, output: Path, size: int = VOCABULARY) -> int:
    """Train a tokenizer on the corpus; return the size of its vocabulary."""
    argv = [
        "tokenizer-train",
        "--input",
        str(corpus),
        "--vocab-size",
        str(size),
        "--output",
        str(output),
        "--replace",
        "--json",
    ]
    return ask_trainer(lambda answer: int(answer["vocab"]), argv)


def build_data(corpus: Path, tokenizer: Path, prefix: Path) -> BuiltData:
    """Build .bin and .idx files."""
    argv = [
        "data-build",
        "--input",
        str(corpus),
        "--tokenizer",
        str(tokenizer),
        "--output",
        str(prefix),
        "--append-eod",
        "--replace",
        "--json",
    ]
    return ask_trainer(partial(decode, BuiltData), argv)


def write_job(path: Path, steps: int) -> Path:
    replace_file(
        path, JOB.format(job=path.name, steps=steps, warmup=min(30, steps // 4), vocabulary=VOCABULARY)
    )
    return path


def generate(checkpoint: Path, prompt: str, tokens: int = 60) -> str:
    """Return text that a local checkpoint generates."""
    argv = ["generate", "--checkpoint", str(checkpoint), "--prompt", prompt, "--max-tokens", str(tokens)]
    argv += ["--temperature", "0.6", "--top-k", "20", "--seed", "1", "--json"]
    return ask_trainer(lambda answer: str(answer["text"]), argv)
