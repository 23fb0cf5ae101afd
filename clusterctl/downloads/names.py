"""Files that `data fetch` knows by name: those that the documents under docs/guide/sources use.

A hash is given only where its owner publishes it. Without one, the first download records the hash that it found.
"""

from __future__ import annotations

from dataclasses import dataclass

OPENAI = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
ONEFLOW = "https://oneflow-public.oss-cn-beijing.aliyuncs.com/GPT/data"
DUMPS = "https://dumps.wikimedia.org"


@dataclass(frozen=True)
class NamedFile:
    """A file that `data fetch NAME` knows."""

    url: str
    file: str
    """The name of the local file."""
    text: str
    sha256: str = ""
    sums: str = ""
    """URL of a list of SHA-1 hashes that the owner publishes with it."""


def _wikipedia(code: str, language: str) -> NamedFile:
    folder = f"{DUMPS}/{code}wiki/latest/{code}wiki-latest"
    file = f"{code}wiki-latest-pages-articles.xml.bz2"
    text = f"{language} Wikipedia, all articles, newest dump"
    return NamedFile(f"{folder}-pages-articles.xml.bz2", file, text, sums=f"{folder}-sha1sums.txt")


NAMES = {
    # tiktoken publishes these two hashes.
    "gpt2-vocab": NamedFile(
        f"{OPENAI}/encoder.json",
        "gpt2-vocab.json",
        "GPT-2's vocabulary",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
    "gpt2-merges": NamedFile(
        f"{OPENAI}/vocab.bpe",
        "gpt2-merges.txt",
        "GPT-2's merges",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
    "oneflow-gpt-bin": NamedFile(
        f"{ONEFLOW}/gpt_sample_dataset_text_document.bin",
        "gpt_sample_dataset_text_document.bin",
        "OneFlow's sample corpus, tokens",
    ),
    "oneflow-gpt-idx": NamedFile(
        f"{ONEFLOW}/gpt_sample_dataset_text_document.idx",
        "gpt_sample_dataset_text_document.idx",
        "OneFlow's sample corpus, index",
    ),
    "enwiki": _wikipedia("en", "English"),
    "zhwiki": _wikipedia("zh", "Chinese"),
    "simplewiki": _wikipedia("simple", "Simple English"),
}
