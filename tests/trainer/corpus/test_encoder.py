"""The C++ encoder returns the ids of `tokenizers`, or the reason why it does not encode."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterctl.wire.data_requests import BuildRequest
from native.compiled import library
from native.compiled.library import LibraryMissing
from tests.conftest import Cases
from tests.support.hostile_texts import hostile
from trainer.corpus import encoder as encoder_module
from trainer.corpus.build import build as build_data
from trainer.corpus.encoder import (
    Encoder,
    LibraryEncoder,
    NotExact,
    NotText,
    encoder_for,
)
from trainer.corpus.tokenizer import (
    END_OF_DOCUMENT,
    GLM_TOKENS,
    Tokenizer,
    add_glm_tokens,
    train_tokenizer,
)

pytestmark = pytest.mark.usefixtures("compiled")

# The real GPT-2 vocabulary is not part of the repository; it is read from the folder in the variable, or next to it.
BESIDE = Path(__file__).resolve().parents[4] / "shared" / "data" / "gpt2-tokenizer.json"
GPT2 = Path(os.environ.get("GPT2_TOKENIZER", BESIDE))
needs_gpt2 = pytest.mark.skipif(
    not GPT2.is_file(), reason="no GPT-2 vocabulary; name its tokenizer.json in $GPT2_TOKENIZER"
)


# One contains another, one is the start of another, one has two-byte characters, and one is for the second pass.
ADDED = (END_OF_DOCUMENT, "<|end", "<|", "<pad>", "中文", "|>", "\n\n<mask>")
LATE = ("<|", "<mask>")


def trained(folder: Path, vocab: int, prefix_space: bool = False, added: Sequence[str] = ()) -> Path:
    """Train a tokenizer on some of the hostile texts."""
    path = folder / "tokenizer.json"
    train_tokenizer((hostile(-n) for n in range(1, 3000)), vocab, path)
    data = json.loads(path.read_text())
    data["pre_tokenizer"]["add_prefix_space"] = prefix_space
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "special": False}
    known = {entry["content"] for entry in data["added_tokens"]}
    first = len(data["model"]["vocab"])
    for number, content in enumerate(token for token in added if token not in known):
        late = content in LATE
        data["added_tokens"].append({"id": first + number, "content": content, "normalized": late, **flags})
    path.write_text(json.dumps(data))
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("plain"), 700)


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("special"), 500, True, ADDED)


def differing(path: Path, numbers: Iterable[int], added: tuple[str, ...], threads: int = 1) -> list[int]:
    """Return the numbers of the texts that the two encoders encode differently."""
    tokenizer = Tokenizer.load(path)
    encoder, left, found = Encoder.load(tokenizer, threads), iter(numbers), []
    while some := list(islice(left, 2000)):
        texts = [hostile(number, added) for number in some]
        ids, lengths = encoder.encode_many(texts)
        ends = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        theirs = tokenizer.encode_many(texts)
        for number, own, (start, end) in zip(some, theirs, pairwise(ends), strict=True):
            if ids[start:end].tolist() != own:
                found.append(number)
    return found


@pytest.mark.parametrize("kind", ["plain", "special", pytest.param("gpt2", marks=needs_gpt2)])
def test_hostile_texts_get_the_ids_of_tokenizers(kind: str, plain: Path, special: Path, cases: Cases) -> None:
    """`--cases 1000000` compares so many texts with each vocabulary."""
    path = {"plain": plain, "special": special, "gpt2": GPT2}[kind]
    assert differing(path, (number for number, _ in cases(3000)), ADDED, 2 if kind == "special" else 1) == []


@needs_gpt2
def test_gpt2_says_hello() -> None:
    ids, lengths = Encoder.load(Tokenizer.load(GPT2)).encode_many(["Hello world"], append_eod=True)
    assert ids.tolist() == [15496, 995, 50256] and lengths.tolist() == [3]


@pytest.fixture(scope="module")
def pair(special: Path) -> tuple[Tokenizer, Encoder]:
    tokenizer = Tokenizer.load(special)
    return tokenizer, Encoder.load(tokenizer)


@settings(max_examples=500, deadline=None)
@given(
    text=st.text()
    | st.text(alphabet="a1!' \n\u00a0\u0301中<|>endoftxpa")
    | st.from_regex(r"( ?'(s|re|ll|x))+", fullmatch=True)
)
def test_any_text_gets_the_ids_of_tokenizers(pair: tuple[Tokenizer, Encoder], text: str) -> None:
    tokenizer, encoder = pair
    assert encoder.encode_many([text])[0].tolist() == tokenizer.encode(text)


def both(path: Path) -> list[Encoder | LibraryEncoder]:
    tokenizer = Tokenizer.load(path)
    return [Encoder.load(tokenizer), LibraryEncoder(tokenizer, "asked for")]


def test_both_encoders_answer_alike(plain: Path) -> None:
    tokenizer = Tokenizer.load(plain)
    texts = ["", "one two", "中文 and more", "", "\n"]
    data = [text.encode() for text in texts]
    ends = np.cumsum([len(one) for one in data])
    starts = ends - [len(one) for one in data]
    for one in both(plain):
        ids, lengths = one.encode_many(texts, append_eod=True)
        wanted = [[*row, tokenizer.eod] if row else [] for row in tokenizer.encode_many(texts)]
        assert [row.tolist() for row in np.split(ids, np.cumsum(lengths)[:-1])] == wanted
        assert (ids.dtype, lengths.dtype) == (np.uint16, np.int32)
        again, _ = one.encode_bytes(b"".join(data), starts, ends, append_eod=True)
        assert np.array_equal(ids, again)
        nothing, lengths = one.encode_many([])
        assert len(nothing) == len(lengths) == 0


def test_half_a_surrogate_pair_is_named_by_both(plain: Path) -> None:
    for one in both(plain):
        with pytest.raises(NotText, match=r"document 1: not text: .*surrogates") as caught:
            one.encode_many(["good", json.loads(r'"\ud83d"')])
        assert caught.value.document == 1
        with pytest.raises(NotText, match="document 1: not UTF-8"):
            one.encode_bytes(b"good\xffbad", np.array([0, 4]), np.array([4, 8]))


def test_a_large_vocabulary_has_wide_ids(plain: Path, tmp_path: Path) -> None:
    data = json.loads(plain.read_text())
    # The ids of the merged tokens lie far apart, as in a vocabulary of which much is unused.
    vocab = data["model"]["vocab"]
    data["model"]["vocab"] = {token: i if i < 300 else i + 100_000 for token, i in vocab.items()}
    (tmp_path / "wide.json").write_text(json.dumps(data))
    one, other = both(tmp_path / "wide.json")
    ids, _ = one.encode_many(["the heat of the other"])
    assert ids.dtype == np.int32 and ids.max() > 100_000
    assert np.array_equal(ids, other.encode_many(["the heat of the other"])[0])


def changed(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        place, *rest = key.split(".")
        part = data if not rest else data[place]
        part[rest[0] if rest else place] = value

    return change


def without_a_byte(data: dict[str, Any]) -> None:
    data["model"]["vocab"]["other"] = data["model"]["vocab"].pop("ÿ")
    data["model"]["merges"] = [merge for merge in data["model"]["merges"] if "ÿ" not in "".join(merge)]


def lstrip(data: dict[str, Any]) -> None:
    data["added_tokens"][0].update(lstrip=True, single_word=True)


SPLIT = {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (changed("normalizer", {"type": "NFC"}), "it has a normalizer"),
        (changed("pre_tokenizer", SPLIT), "splits words by Split, unlike GPT-2"),
        (changed("pre_tokenizer", None), "splits words by nothing"),
        (changed("pre_tokenizer.use_regex", False), "splits words by ByteLevel, unlike"),
        (changed("model.ignore_merges", True), "its model has ignore_merges"),
        (changed("model.dropout", 0.1), "its model has dropout"),
        (changed("model.end_of_word_suffix", "</w>"), "its model has end_of_word_suffix"),
        (lstrip, "its added token '<|endoftext|>' is single_word and lstrip"),
        (without_a_byte, "1 of the 256 bytes are not in its vocabulary"),
        (
            changed("truncation", {"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}),
            "it has truncation",
        ),
    ],
)  # fmt: skip
def test_another_kind_of_tokenizer_goes_to_the_library_and_says_so(
    plain: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], why: str
) -> None:
    data = json.loads(plain.read_text())
    change(data)
    if why.endswith("</w>"):
        data["model"]["merges"] = []
    (tmp_path / "other.json").write_text(json.dumps(data))
    tokenizer = Tokenizer.load(tmp_path / "other.json")
    with pytest.raises(NotExact, match=why):
        Encoder.load(tokenizer)
    found = encoder_for(tokenizer)
    assert isinstance(found, LibraryEncoder)
    assert found.describe().startswith("tokenizers ") and why in found.describe()
    # Which is drawn anew each time.
    if "dropout" not in why:
        assert found.encode_many(["the end"])[0].tolist() == tokenizer.encode("the end")


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
}
ROBERTA = {
    "type": "RobertaProcessing",
    "sep": ["<|endoftext|>", 0],
    "cls": ["<|endoftext|>", 0],
    "trim_offsets": True,
    "add_prefix_space": False,
}
TWICE = {**TEMPLATE, "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2}


@pytest.mark.parametrize(
    "after", [TEMPLATE, ROBERTA, {"type": "Sequence", "processors": [ROBERTA, TEMPLATE]}]
)
def test_special_tokens_that_are_not_asked_for_do_not_matter(
    plain: Path, tmp_path: Path, after: dict[str, Any]
) -> None:
    data = json.loads(plain.read_text())
    data["post_processor"] = after
    (tmp_path / "other.json").write_text(json.dumps(data))
    one, other = both(tmp_path / "other.json")
    texts = ["the end", "", " of it<|endoftext|>"]
    assert np.array_equal(one.encode_many(texts)[0], other.encode_many(texts)[0])


def test_a_template_that_says_the_text_twice_is_refused(plain: Path, tmp_path: Path) -> None:
    data = json.loads(plain.read_text())
    data["post_processor"] = TWICE
    (tmp_path / "other.json").write_text(json.dumps(data))
    with pytest.raises(NotExact, match="it has a TemplateProcessing after the model"):
        Encoder.load(Tokenizer.load(tmp_path / "other.json"))


def test_glm_tokens_laid_on_top_are_found_in_text(plain: Path, tmp_path: Path) -> None:
    add_glm_tokens(plain, tmp_path / "glm.json")
    assert differing(tmp_path / "glm.json", range(1000), tuple(GLM_TOKENS.values())) == []


def test_all_reasons_are_said_at_once(plain: Path, tmp_path: Path) -> None:
    data = json.loads(plain.read_text())
    changed("normalizer", {"type": "NFC"})(data)
    lstrip(data)
    (tmp_path / "other.json").write_text(json.dumps(data))
    with pytest.raises(NotExact, match="it has a normalizer; its added token"):
        Encoder.load(Tokenizer.load(tmp_path / "other.json"))


def test_another_unicode_version_is_noticed(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library in which one more block has letters, as the next version of Unicode may have."""

    class Newer:
        def __init__(self, **_: object) -> None:
            self.inner = real(add_prefix_space=False)

        def pre_tokenize_str(self, text: str) -> Any:
            return self.inner.pre_tokenize_str(text.replace("\U00016e00", "x" * 4))

    real = encoder_module.pre_tokenizers.ByteLevel
    monkeypatch.setattr(encoder_module.pre_tokenizers, "ByteLevel", Newer)
    with pytest.raises(NotExact, match="follows another Unicode version"):
        Encoder.load(Tokenizer.load(plain))


def missing(*wanted: object) -> library.Library:
    raise LibraryMissing("it was not compiled here")


def test_without_a_compiled_library_the_reason_is_said(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module.bpe, "function", missing)
    found = encoder_for(Tokenizer.load(plain))
    assert isinstance(found, LibraryEncoder) and "it was not compiled here" in found.describe()


def test_what_encodes_is_described(plain: Path) -> None:
    assert encoder_for(Tokenizer.load(plain), threads=2).describe().endswith(", 2 threads")
    assert encoder_for(Tokenizer.load(plain)).describe().startswith("C++, ")


def test_a_vocabulary_of_bytes_alone(tmp_path: Path) -> None:
    train_tokenizer(iter([]), 257, tmp_path / "bytes.json")
    one, other = both(tmp_path / "bytes.json")
    text = ["any text: 中 \x00"]
    assert np.array_equal(one.encode_many(text)[0], other.encode_many(text)[0])


def test_a_build_says_once_that_it_is_slow_and_writes_the_same(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.corpus.inputs.Reader.__init__.__defaults__", ("file", 3000, 1 << 20))
    rows = [json.dumps({"text": hostile(number)}) for number in range(100)]
    (tmp_path / "some.jsonl").write_text("\n".join(rows))
    said: list[str] = []
    sizes = []
    for name in ("fast", "slow"):
        if name == "slow":
            monkeypatch.setattr(encoder_module.bpe, "function", missing)
        rows_file = str(tmp_path / "some.jsonl")
        order = BuildRequest(input=(rows_file,), tokenizer=plain, output=tmp_path / name, workers=1)
        build_data(order, said.append)
        sizes.append((tmp_path / f"{name}.bin").read_bytes() + (tmp_path / f"{name}.idx").read_bytes())
    assert sizes[0] == sizes[1]
    assert len(said) == 1 and said[0].endswith("it was not compiled here")
