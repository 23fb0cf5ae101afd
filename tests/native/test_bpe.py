"""Words as the regular expression of `tokenizers` finds them; merges as a plain loop makes them; places checked."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import psutil
import pytest

from native.compiled import library
from native.text import bpe, unicode_classes
from tests.support.hostile_texts import hostile

pytestmark = pytest.mark.usefixtures("compiled")
Merges = list[tuple[int, int, int]]


def model(merges: Merges | None = None, dtype: type = np.int32, **other: object) -> bpe.Bpe:
    """Bytes are their own ids."""
    rows = np.array(merges or [], np.uint32).reshape(-1, 3)
    tables = bpe.Tables(np.arange(256, dtype=np.uint32), rows, (), False)
    return bpe.Bpe(tables, dtype, **other)  # type: ignore[arg-type]


def encode(inner: bpe.Bpe, texts: list[bytes], eod: int | None = None) -> list[list[int]]:
    ends = np.cumsum([len(text) for text in texts])
    ids, lengths = inner.encode(b"".join(texts), ends - [len(text) for text in texts], ends, eod)
    assert ids.dtype == inner.dtype and lengths.sum() == len(ids)
    return [one.tolist() for one in np.split(ids, np.cumsum(lengths)[:-1])]


def some_merges(random: Random, letters: bytes, count: int) -> Merges:
    """Merges of what was made before; some make one token in two ways, a few pairs come twice."""
    spelled = {bytes([one]): one for one in range(256)}
    known = [bytes([one]) for one in letters]
    rows: Merges = []
    while len(rows) < count:
        left, right = random.choice(known[:5000]), random.choice(known[:100])
        if len(left + right) > 12:
            continue
        made = spelled.setdefault(left + right, len(spelled))
        known.append(left + right)
        rows.append((spelled[left], spelled[right], made))
    return rows


def by_pair(merges: Merges) -> dict[tuple[int, int], tuple[int, int]]:
    return {(left, right): (rank, made) for rank, (left, right, made) in enumerate(merges)}


def merged(word: bytes, ranks: dict[tuple[int, int], tuple[int, int]]) -> list[int]:
    """The meaning: the pair of the least rank, the leftmost of equals, until there is none."""
    ids = list(word)
    while True:
        best = min(
            ((*ranks[pair], i) for i, pair in enumerate(itertools.pairwise(ids)) if pair in ranks),
            default=None,
        )
        if best is None:
            return ids
        _, made, at = best
        ids[at : at + 2] = [made]


# Around 256 bytes another way of merging takes over; around 15 and 60 another cache.
@pytest.mark.parametrize("size", [1, 2, 3, 14, 15, 16, 17, 59, 60, 61, 255, 256, 257, 700])
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_words_are_merged_by_rank_and_place(size: int, dtype: type) -> None:
    random = Random(size)
    for _ in range(6):
        merges = some_merges(random, b"abc", 60)
        words = [bytes(random.choices(b"abc", k=size)) for _ in range(4)]
        wanted = [merged(word, by_pair(merges)) for word in words]
        inner = model(merges, dtype)
        assert encode(inner, words) == wanted
        # Out of the cache.
        assert encode(inner, words) == wanted


def test_more_words_than_the_cache_has_room_for() -> None:
    random = Random(5)
    merges = some_merges(random, b"abcdefgh", 300)
    words = [bytes(random.choices(b"abcdefgh", k=random.choice((3, 5, 9, 30)))) for _ in range(60_000)]
    inner = model(merges, np.uint16)
    meaning = by_pair(merges)
    once = encode(inner, words)
    assert encode(inner, words[::-1]) == once[::-1]
    for i in range(0, len(words), 997):
        assert once[i] == merged(words[i], meaning)


def test_a_word_of_a_megabyte_takes_no_quadratic_time() -> None:
    merges = [(97, 97, 256), (256, 256, 257), (257, 257, 258)]
    (ids,) = encode(model(merges), [b"a" * 1_000_003])
    assert ids == [258] * 125_000 + [256, 97]


def test_the_room_of_a_long_word_is_given_back() -> None:
    """Also where the text is a copy with a space before it, which the word lies in."""
    tables = bpe.Tables(np.arange(256, dtype=np.uint32), np.array([(97, 97, 256)]), (), True)
    inner = bpe.Bpe(tables, np.uint16)
    encode(inner, [b"a" * 1000])
    before = psutil.Process().memory_info().rss
    assert encode(inner, [b"a" * 10_000_001]) == [[32] + [256] * 5_000_000 + [97]]
    # A byte took 28.
    assert psutil.Process().memory_info().rss - before < 100 << 20


def test_many_pairs_in_a_half_full_table_are_all_found() -> None:
    """One in twenty of its buckets is then full and continues in the next one."""
    random = Random(6)
    merges = some_merges(random, b"abcdefghijkl", 32_768)
    inner = model(merges)
    meaning = by_pair(merges)
    words = [bytes(random.choices(b"abcdefghijkl", k=random.choice((2, 3, 4, 8, 12)))) for _ in range(3000)]
    assert encode(inner, words) == [merged(word, meaning) for word in words]


def test_threads_change_nothing() -> None:
    random = Random(9)
    merges = some_merges(random, b"abcdefgh", 200)
    texts = [bytes(random.choices(b"abcdefgh   ", k=random.choice((0, 1, 10, 3000)))) for _ in range(50)]
    alone = encode(model(merges), texts, eod=7)
    assert [row[-1:] for row in alone] == [[7] if text else [] for text in texts]
    for threads in (2, 3, 64, 1000):
        assert encode(model(merges, threads=threads), texts, eod=7) == alone
    assert encode(model(merges, threads=2), []) == [[]]


def test_the_words_are_those_of_the_regular_expression() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner = model()
    for number in range(3000):
        text = hostile(number)
        ends = np.cumsum([len(word) for word, _ in theirs.pre_tokenize_str(text)])
        assert np.array_equal(inner.words(text.encode()), ends), repr(text)


def test_the_table_is_what_tokenizers_says_of_every_character() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner = model()
    # The two planes of most scripts whole, the ends of ranges beyond them, and every 50th of the rest.
    ends = [int(one) + step for row in bpe.unicode_ranges() for one in row[:2] for step in (-1, 0)]
    codes = [*range(0x2_0000), *(one for one in ends if one >= 0x2_0000), *range(0x2_0000, 0x11_0000, 50)]
    real = (code for code in codes if not 0xD800 <= code < 0xE000)
    while some := list(itertools.islice(real, unicode_classes.AT_ONCE)):
        text = "".join(map(unicode_classes.FRAME.format, map(chr, some)))
        ends = np.cumsum([len(word) for word, _ in theirs.pre_tokenize_str(text)])
        assert np.array_equal(inner.words(text.encode()), ends), f"{some[0]:x} to {some[-1]:x}"


def test_the_table_is_as_it_was_written() -> None:
    written = (library.FOLDER / "text" / "unicode_classes.h").read_text()
    version = written.split("are to tokenizers ")[1].split(";")[0]
    ranges = [(int(a), int(b), int(c)) for a, b, c in bpe.unicode_ranges()]
    assert unicode_classes.header(ranges, version) == written


def test_ranges_are_gathered_from_single_characters() -> None:
    pytest.importorskip("tokenizers")
    assert unicode_classes.ranges(range(0x80)) == [
        (0x09, 0x0E, unicode_classes.SPACE),
        (0x20, 0x21, unicode_classes.SPACE),
        (0x30, 0x3A, unicode_classes.NUMBER),
        (0x41, 0x5B, unicode_classes.LETTER),
        (0x61, 0x7B, unicode_classes.LETTER),
    ]


BAD = [
    b"\x80", b"a\xff", b"\xc3", b"\xc0\xaf", b"\xc1\xbf", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xed\xbf\xbf",
    b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xe4\xb8", b"\xf0\x9f\x98", b"\xc3(", b"\xe4\xb8(",
    b"12345678\xff", b"1234567\xc3",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD)
@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_not_utf8_is_named(text: bytes, threads: int) -> None:
    with pytest.raises(UnicodeDecodeError, match="utf-8"):
        text.decode()
    with pytest.raises(bpe.NotUtf8, match="document 2 is not UTF-8") as caught:
        encode(model(threads=threads), [b"good", "gut: ä中\U0001f600".encode(), text, b"\x80"])
    assert caught.value.document == 2


def test_every_character_is_utf8() -> None:
    codes = [code for code in range(0, 0x110000, 7) if not 0xD800 <= code < 0xE000]
    text = "".join(map(chr, codes)).encode()
    (ids,) = encode(model(), [text])
    assert bytes(ids) == text


@pytest.mark.parametrize(
    ("starts", "ends"),
    [([-1], [2]), ([0], [11]), ([3], [2]), ([0, 2], [3, 4]), ([4, 0], [5, 1]), ([0, 1], [2]), ([[0]], [[1]])],
)
def test_places_outside_the_text_or_each_other_are_refused(starts: list[int], ends: list[int]) -> None:
    with pytest.raises(ValueError, match=r"documents must ascend|starts and ends are"):
        model().encode(b"0123456789", np.array(starts), np.array(ends))


def test_documents_may_have_gaps_and_lie_in_any_buffer() -> None:
    inner = model()
    for buffer in (
        b"0123456789",
        bytearray(b"0123456789"),
        memoryview(b"0123456789"),
        np.arange(48, 58, dtype=np.uint8),
    ):
        ids, lengths = inner.encode(buffer, np.array([1, 4, 9]), np.array([3, 4, 10]))
        assert bytes(ids.tolist()) == b"129" and lengths.tolist() == [2, 0, 1]


def test_a_document_beyond_31_bits_is_refused_before_anything_is_read() -> None:
    with pytest.raises(ValueError, match="document 1 has 2147483648 bytes; at most 2147483646"):
        bpe.check_places(np.array([0, 5]), np.array([5, 5 + (1 << 31)]), 1 << 32)


def test_tables_that_do_not_fit_are_refused() -> None:
    rows = np.lib.stride_tricks.as_strided(np.zeros(3, np.uint32), (bpe.MOST_MERGES + 1, 3), (0, 4))
    with pytest.raises(ValueError, match="8388608 merges; at most 8388607"):
        bpe.Bpe(bpe.Tables(np.arange(256, dtype=np.uint32), rows, (), False), np.int32)
    with pytest.raises(ValueError, match="id 1048575; at most 1048574"):
        model([(97, 97, bpe.LARGEST_ID + 1)])
    assert encode(model([(97, 97, bpe.LARGEST_ID)]), [b"aaa"]) == [[bpe.LARGEST_ID, 97]]


def test_added_tokens_are_found_longest_first_and_late_ones_in_what_is_left() -> None:
    added = (
        bpe.Added(b"<|", 300, False),
        bpe.Added(b"<|end|>", 301, False),
        bpe.Added(b"x<|", 302, True),
        bpe.Added(b"end", 303, True),
    )
    tables = bpe.Tables(np.arange(256, dtype=np.uint32), np.zeros((0, 3), np.uint32), added, False)
    inner = bpe.Bpe(tables, np.uint16)
    assert encode(inner, [b"x<|end|>", b"<<|end", b"<|en", b"x<", b"end<|end|>end"]) == [
        [120, 301], [60, 300, 303], [300, 101, 110], [120, 60], [303, 301, 303],
    ]  # fmt: skip


def test_a_space_before_each_piece() -> None:
    tables = bpe.Tables(
        np.arange(256, dtype=np.uint32), np.array([(32, 97, 256)]), (bpe.Added(b"|", 300, False),), True
    )
    inner = bpe.Bpe(tables, np.uint16)
    assert encode(inner, [b"a", b" a", b"", b"|a|", b"\na", b"||"]) == [
        [256], [256], [], [300, 256, 300], [32, 10, 97], [300, 300],
    ]  # fmt: skip
