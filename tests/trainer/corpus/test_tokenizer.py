from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.support.building import with_prefix
from trainer.corpus.tokenizer import (
    END_OF_DOCUMENT,
    Tokenizer,
    add_glm_tokens,
    train_tokenizer,
)
from trainer.errors import DataError, InputError

# The real GPT-2 vocabulary is not part of the repository; it is compared if it is next to it.
GPT2 = Path(__file__).resolve().parents[4] / "shared" / "data" / "gpt2-tokenizer.json"
TEXTS = ["the cat sat on the mat; " * 20, "naïve café, 中文, \U0001f600 and\ttabs\n" * 10]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    train_tokenizer(iter(TEXTS), 300, path)
    return path


def test_any_text_survives_encoding(words: Path) -> None:
    tokenizer = Tokenizer.load(words)
    for text in (*TEXTS, " leading", "never seen: Ωß\x00", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_many(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_the_end_of_a_document_is_recorded_beside_the_tokenizer(words: Path) -> None:
    info = json.loads(words.with_name("tokenizer.json.info.json").read_text())
    tokenizer = Tokenizer.load(words)
    assert info["eod"] == tokenizer.eod and info["vocab"] == tokenizer.vocab <= 300


def test_training_again_gives_the_same_file(words: Path, tmp_path: Path) -> None:
    train_tokenizer(iter(TEXTS), 300, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == words.read_bytes()


def test_a_vocabulary_without_room_for_every_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="256 is too small"):
        train_tokenizer(iter(TEXTS), 256, tmp_path / "small.json")


@pytest.mark.parametrize(
    "content", ["", "{}", '{"model": 3}', '{"model": {"vocab": [], "merges": []}}', "\x00"]
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(DataError, match="not a tokenizer"):
        Tokenizer.load(tmp_path / "bad.json")


def pair_of(words: Path, folder: Path) -> Path:
    """The same tokenizer as GPT-2's two files."""
    folder.mkdir()
    model = json.loads(words.read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    return folder


def test_vocab_and_merges_are_the_same_tokenizer(words: Path, tmp_path: Path) -> None:
    folder = pair_of(words, tmp_path / "pair")
    one = Tokenizer.load(words)
    for path in (folder, folder / "vocab.json"):
        two = Tokenizer.load(path)
        assert (two.eod, two.vocab) == (one.eod, one.vocab) and len(two.sha256) == 64
        for text in (*TEXTS, f"a{END_OF_DOCUMENT}b", "  \n x"):
            assert two.encode(text) == one.encode(text)
    (folder / "vocab.json").rename(folder / "gpt2-vocab.json")
    (folder / "merges.txt").rename(folder / "gpt2-merges.txt")
    assert Tokenizer.load(folder).encode(TEXTS[1]) == one.encode(TEXTS[1])


def test_a_pair_of_files_that_do_not_belong_together_is_refused(words: Path, tmp_path: Path) -> None:
    folder = pair_of(words, tmp_path / "pair")
    (folder / "merges.txt").write_text("zz qq\none two three\n")
    with pytest.raises(DataError) as caught:
        Tokenizer.load(folder)
    assert "merge 1 has a token that is not in vocab.json" in caught.value.message
    assert "merge 2 is not two tokens" in caught.value.message
    (folder / "vocab.json").write_text('{"a": ' + "[" * 300 + "]" * 300 + "}")
    with pytest.raises(DataError, match=r"vocab\.json: not a vocabulary: the id of 'a' is \[+\.\.\.\]+\n"):
        Tokenizer.load(folder)
    (folder / "merges.txt").unlink()
    with pytest.raises(DataError, match=r"the merges belong|no such file"):
        Tokenizer.load(folder / "vocab.json")
    with pytest.raises(DataError, match="has neither"):
        Tokenizer.load(folder)


def test_the_end_of_a_document_is_the_tokenizers_own(words: Path, tmp_path: Path) -> None:
    other = words.read_text().replace(END_OF_DOCUMENT, "</s>")
    (tmp_path / "tokenizer.json").write_text(other)
    with pytest.raises(DataError, match=r"has no .*endoftext") as caught:
        Tokenizer.load(tmp_path / "tokenizer.json")
    assert "--eod" in caught.value.hint
    assert Tokenizer.load(tmp_path / "tokenizer.json", "</s>").eod == 0
    with pytest.raises(DataError, match="has no token '<none>'"):
        Tokenizer.load(tmp_path / "tokenizer.json", "<none>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert Tokenizer.load(tmp_path / "tokenizer.json").eod == 0


def test_a_trained_tokenizer_comes_as_the_files_of_other_tools_too(tmp_path: Path) -> None:
    made = train_tokenizer(iter(TEXTS), 300, tmp_path / "words")
    assert made.output == str(tmp_path / "words" / "tokenizer.json")
    names = {path.name for path in (tmp_path / "words").iterdir()}
    assert names == {"tokenizer.json", "tokenizer.json.info.json", "vocab.json", "merges.txt"}
    whole, two = Tokenizer.load(tmp_path / "words"), Tokenizer.load(tmp_path / "words" / "vocab.json")
    assert two.encode(TEXTS[1]) == whole.encode(TEXTS[1]) and two.eod == whole.eod


def test_glms_tokens_follow_the_vocabulary_in_their_order(words: Path, tmp_path: Path) -> None:
    vocab = Tokenizer.load(words).vocab
    made = add_glm_tokens(words, tmp_path / "glm.json")
    assert made.glm and list(made.glm.values()) == list(range(vocab, vocab + 9))
    glm = Tokenizer.load(tmp_path / "glm.json")
    assert glm.glm_ids() == made.glm and Tokenizer.load(words).glm_ids() is None
    assert (glm.eod, glm.vocab) == (0, vocab + 9)
    assert glm.encode("a [gMASK] b")[1:].count(vocab + 6) == 1
    assert glm.encode(TEXTS[1]) == Tokenizer.load(words).encode(TEXTS[1])
    with pytest.raises(DataError, match="already"):
        add_glm_tokens(tmp_path / "glm.json", tmp_path / "twice.json")


@pytest.mark.skipif(not GPT2.exists(), reason="the real GPT-2 tokenizer is not beside the repository")
def test_the_real_gpt2_vocabulary_gives_its_known_ids() -> None:
    tokenizer = Tokenizer.load(GPT2)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert (tokenizer.vocab, tokenizer.eod) == (50257, 50256)


@pytest.mark.skipif(not GPT2.exists(), reason="the real GPT-2 tokenizer is not beside the repository")
def test_glms_tokens_on_gpt2s_vocabulary_have_the_ids_that_glm_has(tmp_path: Path) -> None:
    made = add_glm_tokens(GPT2, tmp_path / "glm.json")
    assert made.glm == {"sop": 50257, "eop": 50258, "cls": 50259, "mask": 50260, "sep": 50261, "unk": 50262,
                           "gmask": 50263, "smask": 50264, "dblock": 50265}  # fmt: skip


@pytest.mark.parametrize(
    ("template", "tokens"),
    [("<s> $A", ("<s>",)), ("[gMASK] <sop> $A", ("[gMASK]", "<sop>")), ("<s> $A </s>", ("<s>", "</s>"))],
)
def test_prompts_begin_with_the_tokens_of_the_post_processor(
    words: Path, tmp_path: Path, template: str, tokens: tuple[str, ...]
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(words.read_bytes())
    file = with_prefix(tmp_path / "tokenizer.json", template, *tokens)
    tokenizer = Tokenizer.load(file)
    expected = [tokenizer.id_of(token) for token in tokens if token != "</s>"]
    assert list(tokenizer.prefix()) == expected == list(tokenizer.prefix(True))
    assert tokenizer.prefix(False) == ()
    # Training data are encoded without.
    assert tokenizer.encode("the cat") == Tokenizer.load(words).encode("the cat")


def test_a_bos_token_can_be_added_and_must_exist(words: Path, tmp_path: Path) -> None:
    assert Tokenizer.load(words).prefix() == ()
    with pytest.raises(DataError, match="has no bos_token"):
        Tokenizer.load(words).prefix(True)
    (tmp_path / "tokenizer.json").write_bytes(words.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": END_OF_DOCUMENT}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.prefix() == () and tokenizer.prefix(True) == (tokenizer.eod,)


def test_unigram_is_read_and_other_kinds_are_named(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(
        models.Unigram(
            [
                ("<unk>", 0.0),
                ("</s>", 0.0),
                ("\u2581the", -1.0),
                ("\u2581", -2.0),
                ("c", -3.0),
                ("a", -3.0),
                ("t", -3.0),
            ],
            0,
        )
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    file = tmp_path / "tokenizer.json"
    inner.save(str(file))
    tokenizer = Tokenizer.load(file, "</s>")
    assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat" and tokenizer.vocab == 7
    assert tokenizer.bytes_of(2) == b" the"
    document = json.loads(file.read_text())
    document["model"]["vocab"][3] = ["x"]
    file.write_text(json.dumps(document))
    with pytest.raises(DataError, match="damaged parts, of the kind Unigram"):
        Tokenizer.load(file, "</s>")
    tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1})).save(str(file))
    with pytest.raises(DataError, match="of the kind WordPiece; BPE and Unigram can be read"):
        Tokenizer.load(file)
