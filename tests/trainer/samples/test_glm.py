"""GLM's samples and blanks: held to the rules of the objective, and each row to its number alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainer.corpus.indexed import Corpus, Writer, open_corpus
from trainer.errors import DataError
from trainer.samples.glm_blanks import (
    GlmBatches,
    Infilling,
    Row,
    blanked,
    continued,
    place_spans,
    span_chances,
)
from trainer.samples.glm_windows import (
    GlmSamples,
    GlmTokens,
    Sampling,
    generator,
    sentence_ends,
)

VOCAB, EOS, DOT = 100, 99, 7
WORDS = GlmTokens.above(VOCAB, EOS)
ENDS = np.arange(VOCAB) == DOT


def corpus_of(folder: Path, lengths: list[int], dots: int = 9) -> Corpus:
    """Documents of ids from 10 up, a full stop (7) every so many tokens; two sequences each."""
    random = np.random.RandomState(1)
    with Writer(folder / "glm", np.uint16) as writer:
        for length in lengths:
            ids = random.randint(10, 90, length)
            ids[dots - 1 :: dots] = DOT
            writer.add_document([ids[: length // 2].tolist(), ids[length // 2 :].tolist()])
    return open_corpus(folder / "glm")


def samples_of(corpus: Corpus, **changes: object) -> GlmSamples:
    return GlmSamples(corpus, WORDS, ENDS, 5, Sampling(**{"length": 64, **changes}))  # type: ignore[arg-type]


@pytest.fixture
def short(tmp_path: Path) -> Corpus:
    return corpus_of(tmp_path, [3, 12, 0, 30, 25, 8, 41, 17])


@pytest.fixture
def long(tmp_path: Path) -> Corpus:
    return corpus_of(tmp_path, [400, 900, 150])


def test_the_ids_on_top_of_gpt2s_vocabulary_are_those_that_glm_has() -> None:
    tokens = GlmTokens.above(50257, 50256)
    assert (tokens.sop, tokens.eop, tokens.enc, tokens.mask) == (50257, 50258, 50259, 50260)
    assert (tokens.gap, tokens.sentence, tokens.block, tokens.vocab) == (50263, 50264, 50265, 50266)


def test_short_documents_fill_a_sample_each_behind_its_enc(short: Corpus) -> None:
    samples = samples_of(short, short_chance=0.0)
    for number in range(200):
        text = samples[number]
        assert text[0] == WORDS.enc and len(text) <= 64 and len(text) > 32
        starts = np.flatnonzero(text == WORDS.enc)
        # Each document but the last is whole.
        assert (text[starts[1:] - 1] == EOS).all()
    assert max(len(samples[number]) for number in range(200)) == 64


def test_one_document_alone_where_they_are_not_to_be_joined(short: Corpus) -> None:
    samples = samples_of(short, across_documents=False)
    for number in range(100):
        text = samples[number]
        assert (text == WORDS.enc).sum() == (text == EOS).sum() == 1 and text[-1] == EOS


def test_documents_are_drawn_by_their_length_and_empty_ones_never(short: Corpus) -> None:
    samples = samples_of(short, across_documents=False, short_chance=0.0)
    lengths = np.bincount([len(samples[number]) - 2 for number in range(3000)], minlength=42)
    want = {3: 3, 12: 12, 30: 30, 25: 25, 8: 8, 41: 41, 17: 17}
    assert set(np.flatnonzero(lengths)) == set(want)
    for length, weight in want.items():
        assert lengths[length] / 3000 == pytest.approx(weight / 136, abs=0.03)


def test_windows_of_a_long_document_begin_and_end_with_sentences(long: Corpus) -> None:
    samples, starts = samples_of(long, short_chance=0.0), 0
    whole = long.tokens.astype(np.int64)
    for number in range(300):
        text = samples[number]
        assert text[0] == WORDS.enc and 32 <= len(text) <= 64
        assert text[-1] in (DOT, EOS) and WORDS.enc not in text[1:]
        body = text[1:-1] if text[-1] == EOS else text[1:]
        places = [
            at for at in np.flatnonzero(whole == body[0]) if np.array_equal(whole[at : at + len(body)], body)
        ]
        # A piece of the corpus, unchanged.
        assert places
        starts += int(whole[places[0] - 1]) == DOT
    # The others begin at a document's start.
    assert starts > 250


def test_bounds_keep_training_and_validation_apart(long: Corpus) -> None:
    one = GlmSamples(long, WORDS, ENDS, 5, Sampling(length=64), bounds=(0, 2))
    seen = np.concatenate([one[number] for number in range(100)])
    held_out = long.document(2)
    window = np.lib.stride_tricks.sliding_window_view(seen, 20)
    assert not any((window == held_out[at : at + 20]).all(1).any() for at in range(0, 120, 20))
    with pytest.raises(DataError, match=r"\[3,3\) have no tokens"):
        GlmSamples(long, WORDS, ENDS, 5, Sampling(), bounds=(3, 3))


def test_a_row_is_the_same_in_any_company_and_after_any_restart(short: Corpus) -> None:
    once = GlmBatches(samples_of(short), Infilling())
    again = GlmBatches(samples_of(short), Infilling())
    whole = once.read(range(40, 48))
    for i, number in enumerate(range(40, 48)):
        row = again.row(number)
        length = len(row.tokens)
        assert whole.tokens[i, :length].tolist() == row.tokens.tolist() and not whole.tokens[i, length:].any()
        assert whole.positions[i, :, :length].tolist() == row.positions.tolist()
        assert whole.separators[i] == row.separator and not whole.loss_mask[i, length:].any()
    different = {tuple(once.row(number).tokens.tolist()) for number in range(200)}
    # Of so small a corpus two may be the same by chance.
    assert len(different) > 195
    other = GlmBatches(GlmSamples(short, WORDS, ENDS, 6, Sampling(length=64)), Infilling())
    assert other.row(40).tokens.tolist() != once.row(40).tokens.tolist()


def filled_in(row: Row, text: list[int], masks: set[int]) -> None:
    """Hold a row to the objective: put its pieces back in their places, and it must be the sample again."""
    source, rest = row.tokens[: row.separator], row.tokens[row.separator :]
    assert row.targets[: row.separator].tolist() == source.tolist()
    assert not row.loss_mask[: row.separator].any() and row.loss_mask[row.separator :].all()
    assert row.positions[0, : row.separator].tolist() == list(range(row.separator))
    assert not row.positions[1, : row.separator].any()
    starts = np.flatnonzero(rest == WORDS.sop)
    pieces: dict[int, list[int]] = {}
    for begin, end in zip(starts, [*starts[1:], len(rest)], strict=True):
        at = row.separator + begin
        place = int(row.positions[0, at])
        assert (row.positions[0, at : row.separator + end] == place).all() and int(source[place]) in masks
        assert row.positions[1, at : row.separator + end].tolist() == list(range(1, end - begin + 1))
        piece, told = row.targets[at : row.separator + end], row.tokens[at + 1 : row.separator + end]
        shown = piece[: len(told)]
        assert ((told == shown) | (told == WORDS.block)).all()
        pieces[place] = [int(id) for id in (piece[:-1] if piece[-1] == WORDS.eop else piece)]
    assert sorted(pieces) == [place for place, id in enumerate(source.tolist()) if id in masks]
    whole = [id for place, one in enumerate(source.tolist()) for id in pieces.get(place, [one])]
    assert whole == text


@pytest.mark.parametrize("kind", ["short", "long"])
def test_pieces_put_back_give_the_sample(kind: str, request: pytest.FixtureRequest) -> None:
    corpus = request.getfixturevalue(kind)
    samples = samples_of(corpus, short_chance=0.2)
    batches, met = GlmBatches(samples, Infilling(one_span=0.1)), dict[str, int]()
    masks = {"words": WORDS.mask, "sentences": WORDS.sentence, "rest": WORDS.gap}
    for number in range(400):
        row, text = batches.row(number), samples[number].tolist()
        filled_in(row, text, {masks[row.mode]})
        met[row.mode] = met.get(row.mode, 0) + 1
    assert [met[mode] / 400 for mode in masks] == [pytest.approx(p, abs=0.08) for p in (0.5, 0.3, 0.2)]


def test_short_spans_leave_a_token_between_them_and_take_their_part(long: Corpus) -> None:
    samples = samples_of(long, short_chance=0.0)
    batches, hidden, written = GlmBatches(samples, Infilling(words=1.0, sentences=0.0)), 0, 0
    for number in range(200):
        row = batches.row(number)
        source = row.tokens[: row.separator]
        at = np.flatnonzero(source == WORDS.mask)
        assert (np.diff(at) > 1).all()
        length = len(samples[number])
        masked = length - (row.separator - len(at))
        assert int(0.15 * length) <= masked < int(0.15 * length) + 39
        assert len(row.tokens) == length + 2 * len(at)
        assert source[0] == WORDS.enc
        hidden += int((row.tokens == WORDS.block).sum())
        written += masked
    assert written / sum(len(samples[number]) for number in range(200)) == pytest.approx(0.18, abs=0.04)
    assert hidden / written == pytest.approx(0.1, abs=0.03)


def test_sentences_are_taken_whole(long: Corpus) -> None:
    samples = samples_of(long, short_chance=0.0)
    batches = GlmBatches(samples, Infilling(words=0.0, sentences=1.0))
    for number in range(100):
        row, text = batches.row(number), samples[number].tolist()
        begins = [0, *(place + 1 for place, id in enumerate(text) if id in (DOT, WORDS.enc))]
        ends = [place for place, id in enumerate(text) if place and (text[place - 1] == DOT or id == EOS)]
        stops = np.flatnonzero(row.targets == WORDS.eop)
        assert len(stops)
        for start, stop in zip([row.separator, *(stops[:-1] + 1)], stops, strict=True):
            piece = row.targets[start:stop].tolist()
            at = [place for place in begins if text[place : place + len(piece)] == piece]
            assert any(place + len(piece) in [*ends, len(text)] for place in at)


def test_a_sample_of_several_documents_is_gone_on_with_from_the_left(short: Corpus) -> None:
    samples = samples_of(short, short_chance=0.0)
    batches = GlmBatches(samples, Infilling(words=0.0, sentences=0.0, inside=0.0))
    for number in range(100):
        row, text = batches.row(number), samples[number]
        if EOS in text[:-1]:
            assert row.tokens[: row.separator].tolist() == [*text[: row.separator - 1], WORDS.gap]
            assert WORDS.eop not in row.targets and row.tokens[row.separator] == WORDS.sop


def test_rows_by_hand() -> None:
    text = np.array([WORDS.enc, 20, 21, 22, 23, 24, EOS])
    row = blanked(text, [(2, 4), (5, 6)], WORDS.mask, WORDS, generator(1), "words", shuffle=False)
    m, s, e = WORDS.mask, WORDS.sop, WORDS.eop
    assert row.tokens.tolist() == [WORDS.enc, 20, m, 23, m, EOS, s, 21, 22, s, 24]
    assert row.targets.tolist() == [WORDS.enc, 20, m, 23, m, EOS, 21, 22, e, 24, e]
    assert row.positions.tolist() == [[0, 1, 2, 3, 4, 5, 2, 2, 2, 4, 4], [0, 0, 0, 0, 0, 0, 1, 2, 3, 1, 2]]
    assert (row.separator, row.loss_mask.tolist()) == (6, [0.0] * 6 + [1.0] * 5)
    rest = continued(text, 3, WORDS)
    assert rest.tokens.tolist() == [WORDS.enc, 20, 21, WORDS.gap, s, 22, 23, 24]
    assert rest.targets.tolist() == [WORDS.enc, 20, 21, WORDS.gap, 22, 23, 24, EOS]
    assert rest.positions.tolist() == [[0, 1, 2, 3, 3, 3, 3, 3], [0, 0, 0, 0, 1, 2, 3, 4]]
    assert (rest.separator, rest.loss_mask.tolist()) == (4, [0.0] * 4 + [1.0] * 4)


def test_a_span_that_fits_nowhere_is_left_out() -> None:
    text = np.array([WORDS.enc, 20, 21, EOS])
    assert place_spans(text, [5], WORDS, 0.15, generator(1)) == []
    assert place_spans(text, [1, 5], WORDS, 0.15, generator(1)) in ([(1, 2)], [(2, 3)])


def test_the_lengths_of_short_spans_have_the_mean_of_their_distribution() -> None:
    chances = span_chances(3.0)
    assert len(chances) == 39 and chances.sum() == pytest.approx(1.0)
    assert (chances * np.arange(1, 40)).sum() == pytest.approx(3.0 / (1 - np.exp(-3.0)))


@pytest.mark.parametrize("lengths", [[1], [1, 1], [2], [1, 0, 2], [3]])
def test_the_smallest_corpora_give_rows_too(tmp_path: Path, lengths: list[int]) -> None:
    for across in (True, False):
        samples = samples_of(corpus_of(tmp_path, lengths), across_documents=across)
        batches = GlmBatches(samples, Infilling())
        for number in range(60):
            row = batches.row(number)
            assert row.loss_mask.any() and len(row.tokens) == len(row.targets) == row.positions.shape[1]


def test_a_window_of_a_long_document_does_not_read_the_whole_of_it(tmp_path: Path) -> None:
    from trainer.samples.glm_windows import Document

    class Watched(np.ndarray):  # type: ignore[type-arg]
        most = 0

        def astype(self, *given: object, **more: object) -> np.ndarray:  # type: ignore[type-arg,override]
            Watched.most = max(Watched.most, len(self))
            return super().astype(*given, **more)  # type: ignore[call-overload,no-any-return]

    samples = samples_of(corpus_of(tmp_path, [20_000]))
    samples._document = lambda random: Document(samples.corpus.tokens.view(Watched), EOS)  # type: ignore[method-assign]
    assert all(len(samples[number]) <= 64 for number in range(50))
    assert 0 < Watched.most <= 65


def test_a_tokens_text_says_whether_it_ends_a_sentence(tmp_path: Path) -> None:
    from trainer.corpus.tokenizer import Tokenizer, train_tokenizer

    train_tokenizer(iter(["Well. Yes? No!\nSo; then: it"] * 50), 270, tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    ends = sentence_ends(tokenizer)
    said = {
        text: bool(ends[tokenizer.encode(text)[-1]])
        for text in (".", "?", "!", ";", ":", "\n", "a", " ", ",")
    }
    assert said == {**dict.fromkeys(".?!;:\n", True), **dict.fromkeys("a ,", False)}
