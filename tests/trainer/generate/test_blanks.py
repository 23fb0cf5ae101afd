from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.random import RandomState

import native
from trainer.config.model import ModelConfig
from trainer.corpus.tokenizer import Tokenizer, train_tokenizer
from trainer.errors import InputError
from trainer.generate.batcher import Batcher
from trainer.generate.blanks import Filling
from trainer.generate.decoder import Text
from trainer.generate.network import of_model
from trainer.generate.request import Fed, Request
from trainer.generate.sampling import Sampling
from trainer.model.glm import GLM
from trainer.samples.glm_blanks import blanked, continued
from trainer.samples.glm_windows import GlmTokens

TEXTS = ["one two three four five six seven eight nine ten. " * 12] * 12


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("counting")
    train_tokenizer(iter(TEXTS), 300, folder / "tokenizer.json")
    return Tokenizer.load(folder / "tokenizer.json")


def filled(
    words: Tokenizer, prompt: str, blanks: list[str], sequence: int = 32, most: int = 64
) -> tuple[Filling, list[Fed], GlmTokens]:
    """A prompt whose blanks get these texts, each up to the end of its piece, and all that the model is given."""
    tokens = GlmTokens.above(words.vocab, words.eod)
    config = ModelConfig("glm", layers=1, hidden=8, heads=1, sequence=sequence, vocab=tokens.vocab)
    course = Filling(config, words, tokens, prompt, Sampling(most))
    fed = course.begin()
    for number in (number for blank in blanks for number in (*words.encode(blank), tokens.eop)):
        taken = course.take(number)
        fed += taken.feed
        if taken.end:
            break
    assert len(fed) <= course.most()
    return course, fed, tokens


def test_a_glm_fills_in_blanks_as_training_made_them(words: Tokenizer) -> None:
    course, fed, tokens = filled(
        words, "one two [MASK] five [MASK] eight nine.", [" three four", " six seven"]
    )
    assert course.text() == "one two three four five six seven eight nine."
    assert [blank["text"] for blank in course.as_json()] == [" three four", " six seven"]
    assert {blank["ended"] for blank in course.as_json()} == {"end of piece"}
    text = np.array([tokens.enc, *words.encode(course.text()), tokens.eos])
    # Of a token each, behind ENC.
    spans = [(3, 5), (6, 8)]
    row = blanked(text, spans, tokens.mask, tokens, RandomState(1), "words", shuffle=False)
    assert [token.id for token in fed] == row.tokens.tolist() and course.source == row.separator
    assert [[token.first for token in fed], [token.second for token in fed]] == row.positions.tolist()


def test_a_glm_goes_on_with_a_prompt_that_has_no_blank(words: Tokenizer) -> None:
    for prompt in ("one two", "one two [gMASK]"):
        course, fed, tokens = filled(words, prompt, [" three four five"])
        assert course.text() == "one two three four five" and course.as_json()[0]["mask"] == "[gMASK]"
        row = continued(np.array([tokens.enc, *words.encode("one two three four five x")]), 3, tokens)
        assert [token.id for token in fed] == row.tokens.tolist()[: len(fed)]
        assert [token.second for token in fed] == row.positions[1].tolist()[: len(fed)]


def test_a_blank_ends_where_the_model_has_no_more_positions(words: Tokenizer) -> None:
    for most, ended in ((64, "position"), (3, "max tokens")):
        course, *_ = filled(words, "one [MASK]", [" two" * 40], 8, most)
        (blank,) = course.as_json()
        assert blank["ended"] == ended and blank["tokens"] == min(8, most)
    with pytest.raises(InputError, match="the prompt makes 9 tokens, and the model was trained on 8 at most"):
        filled(words, "one two three four five six [MASK]", [" seven"], 8)
    with pytest.raises(InputError, match=r"the prompt has \[mask\], \[GMSK\], which is not a mask"):
        filled(words, "one [mask] [GMSK] [MASK] [ok]", [" two"])


def test_the_cache_computes_what_the_model_does_for_blanks_in_a_batch(words: Tokenizer) -> None:
    tokens = GlmTokens.above(words.vocab, words.eod)
    config = ModelConfig("glm", layers=2, hidden=32, heads=2, sequence=32, vocab=tokens.vocab, init_std=0.3)
    model = GLM(config, native.choose("cpu")).eval()
    network = of_model(model, 40)
    sampling = Sampling(4, temperature=0)
    batcher, courses, sinks = Batcher(network, 40), [], []
    for prompt in ("one [MASK] three [MASK] five", "six seven [gMASK]", "[sMASK] ten."):
        course = Filling(config, words, tokens, prompt, sampling)
        courses.append(course)
        sinks.append(Text(words))
        batcher.submit(Request(course, sampling, sinks[-1]))
    while not batcher.idle:
        batcher.step()
    assert batcher.pages.free == 40
    for course in courses:
        again = Filling(config, words, tokens, "", sampling)
        again.__dict__ |= {**course.__dict__, "_at": 0, "blanks": [type(b)(b.mask) for b in course.blanks]}
        fed, end = again.begin(), None
        while end is None:
            ids = torch.tensor([[token.id for token in fed]])
            positions = torch.tensor([[[t.first for t in fed], [t.second for t in fed]]])
            with torch.no_grad():
                logits = model(ids, positions, torch.tensor([again.source]))[0, -1]
            logits[list(again.banned())] = float("-inf")
            taken = again.take(int(logits.argmax()))
            fed, end = [*fed, *taken.feed], taken.end
        assert [blank.ids for blank in again.blanks] == [blank.ids for blank in course.blanks]
