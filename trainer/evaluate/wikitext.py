"""WikiText: perplexity of articles per word.

`lm-eval`: a JSON-lines file with one article per line; disjoint windows in each article; words and bytes are counted
before detokenization. `megatron`: the corpus as one text; overlapping windows over the whole stream; perplexity per
token, and the same adjusted to the words of the original text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from clusterctl.wire.results import Figure
from trainer.errors import DataError
from trainer.evaluate.request import Example, Score
from trainer.evaluate.rows import read_records, read_text
from trainer.evaluate.statistics import exp, ratio_perplexity
from trainer.evaluate.task import Inputs, Task, sums

CONVENTIONS = ("lm-eval", "megatron")
EXAMPLE = '{"page": "the text of one article"}'
# Megatron limits the exponent, so that the perplexity of a diverged model is finite.
MOST_LOSS = 20.0


# Apply in this order. The second pattern is the same as theirs: because of its slashes it matches nothing in WikiText,
# and a corrected pattern would give other results.
_REPLACEMENTS: tuple[tuple[str, str], ...] = (
    (r"s '", "s'"),
    (r"/' [0-9]/", "/'[0-9]/"),
    (r" @-@ ", "-"),
    (r" @,@ ", ","),
    (r" @\.@ ", "."),
    (r" : ", ": "),
    (r" ; ", "; "),
    (r" \. ", ". "),
    (r" ! ", "! "),
    (r" \? ", "? "),
    (r" , ", ", "),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (r" ° ", "°"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)
_COMPILED = tuple((re.compile(pattern), text) for pattern, text in _REPLACEMENTS)


def detokenized(text: str) -> str:
    """Return a text of the WikiText corpora as normal running text."""
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    return text


def wikitext(inputs: Inputs) -> Task:
    """Return the task for a file: articles as JSON lines, or the corpus as one text."""
    is_lines = inputs.data.suffix in (".jsonl", ".json")
    chosen = inputs.pick("wikitext", CONVENTIONS) if inputs.convention else CONVENTIONS[0 if is_lines else 1]
    return Articles(inputs) if chosen == "lm-eval" else Stream(inputs)


class Articles:
    """Articles scored one by one, as lm-eval's task `wikitext` does."""

    convention = "lm-eval"

    def __init__(self, inputs: Inputs) -> None:
        records = read_records(inputs.data, {"page": str}, EXAMPLE)[: inputs.limit or None]
        pages = [str(record.value["page"]) for record in records]
        self.words = [float(len(re.split(r"\s+", page))) for page in pages]
        self.bytes = [float(len(page.encode())) for page in pages]
        reader = inputs.reader
        self.examples = [reader.rolling(reader.encode(detokenized(page)), reader.start) for page in pages]

    def metrics(self, scores: Sequence[Sequence[Score]]) -> dict[str, Figure]:
        totals = sums(scores)
        bits = -sum(totals) / sum(self.bytes) / 0.6931471805599453
        return {
            "word_perplexity": ratio_perplexity(totals, self.words),
            "byte_perplexity": ratio_perplexity(totals, self.bytes),
            "bits_per_byte": Figure(bits),
        }


@dataclass(frozen=True)
class _Counts:
    """The numbers of words in the original text and of the tokenizer's ids."""

    original: int
    encoded: int


class Stream:
    """A corpus scored as one stream, as Megatron's zero-shot task `WIKITEXT103` does."""

    convention = "megatron"

    def __init__(self, inputs: Inputs) -> None:
        text = read_text(inputs.data)
        ids = inputs.reader.tokenizer.encode(detokenized(text))
        self.counts = _Counts(len(text.strip().split(" ")), len(ids))
        if min(self.counts.original, self.counts.encoded) < 2:
            raise DataError(f"{inputs.data}: contains fewer than two words")
        requests = inputs.reader.overlapping(ids, min(inputs.stride, inputs.reader.window))
        self.examples = [Example((request,)) for request in requests][: inputs.limit or None]

    def metrics(self, scores: Sequence[Sequence[Score]]) -> dict[str, Figure]:
        counted = sum(len(request.target) for example in self.examples for request in example.requests)
        loss = -sum(sums(scores)) / counted
        adjusted = loss * (self.counts.encoded - 1) / (self.counts.original - 1)
        return {
            "loss": Figure(loss),
            "perplexity": Figure(exp(min(MOST_LOSS, loss))),
            "adjusted_perplexity": Figure(exp(min(MOST_LOSS, adjusted))),
        }
