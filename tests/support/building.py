"""Helpers of the tests of builds: a small tokenizer, texts, and the contents of a pair."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from clusterctl.wire.data_requests import BuildRequest, Filters, Recipe
from trainer.__main__ import main
from trainer.corpus.build import build
from trainer.corpus.indexed import open_corpus
from trainer.corpus.tokenizer import Tokenizer, train_tokenizer

SAYINGS = [
    "the cat sat on the mat; " * 20,
    "naïve café, 中文, \U0001f600 and\ttabs\n" * 10,
    "One. Two! Three? " * 9,
]


def small_tokenizer(folder: Path, vocab: int = 300) -> Path:
    train_tokenizer(iter(SAYINGS), vocab, folder / "tokenizer.json")
    return folder / "tokenizer.json"


def with_prefix(file: Path, template: str, *tokens: str) -> Path:
    """Let the post-processor of a tokenizer.json put tokens before a text, as those of Llama and GLM-4 do."""
    inner = tokenizers.Tokenizer.from_file(str(file))
    inner.add_special_tokens(list(tokens))
    pairs = [(token, inner.token_to_id(token)) for token in tokens]
    inner.post_processor = processors.TemplateProcessing(
        single=template, pair=template + " $B:1", special_tokens=pairs
    )
    inner.save(str(file))
    config = {
        "bos_token": tokens[0],
        "eos_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    file.with_name("tokenizer_config.json").write_text(json.dumps(config))
    return file


def write_lines(path: Path, texts: Sequence[Any], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def built(output: Path, tokenizer: Path, *inputs: Path | str, **options: Any) -> dict[str, Any]:
    """Build a pair and return its manifest; options of the order, the recipe and the filters by their names."""
    for kind, name in ((Filters, "filters"), (Recipe, "recipe")):
        names = kind.__dataclass_fields__.keys() & options.keys()
        options[name] = kind(**{each: options.pop(each) for each in names})
    request = BuildRequest(input=tuple(map(str, inputs)), tokenizer=tokenizer, output=output, **options)
    manifest = build(request)
    found: dict[str, Any] = json.loads(json.dumps(manifest.as_json()))
    return found


def texts_in(prefix: Path, tokenizer: Path) -> list[str]:
    """Every document decoded."""
    corpus, words = open_corpus(prefix), Tokenizer.load(tokenizer)
    return [words.decode(corpus.document(number).tolist()) for number in range(corpus.documents)]


def pair_bytes(prefix: Path) -> tuple[bytes, bytes]:
    return prefix.with_name(prefix.name + ".bin").read_bytes(), prefix.with_name(
        prefix.name + ".idx"
    ).read_bytes()


def verb(*words: str, stdin: bytes = b"", **more: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "trainer", *words], input=stdin, capture_output=True, **more)


def refused(*words: str) -> str:
    """Run a verb that refuses its input, in this process; return what it writes on stderr."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        assert main(words) == 2, told.getvalue()
    return told.getvalue()
