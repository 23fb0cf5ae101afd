from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from clusterctl.wire.data_requests import BuildRequest, Recipe
from tests.support.building import SAYINGS, built, pair_bytes, small_tokenizer, texts_in, verb, write_lines
from trainer.corpus.documents import sentences
from trainer.corpus.indexed import Writer, manifest_path, open_corpus
from trainer.corpus.store import work_folder
from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import DataError, DataFailed

SMALL_PARTS = """
import sys
from trainer.corpus import inputs
inputs.Reader.__init__.__defaults__ = ("file", 3000, 1 << 20)
from trainer.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.corpus.inputs.Reader.__init__.__defaults__", ("file", 3000, 1 << 20))


def many_texts(count: int, seed: int = 5) -> list[str]:
    some = random.Random(seed)
    vocabulary = [
        "the",
        "cat",
        "sat",
        "on",
        "mat",
        "naïve",
        "中文",
        "end.",
        "Then,",
        "what?",
        "\U0001f600",
        "\t\n",
    ]
    return [" ".join(some.choices(vocabulary, k=some.randrange(0, 60))) for _ in range(count)]


def by_hand(
    output: Path, tokenizer: Path, texts: list[str], append_eod: bool, by_sentence: bool = False
) -> Path:
    """As the common preprocessor makes it: empty sequences go, empty documents stay, the end counts."""
    tool = Tokenizer.load(tokenizer)
    with Writer(output, np.uint16) as writer:
        for text in texts:
            rows = [tool.encode(one) for one in (sentences(text) if by_sentence else [text])]
            rows = [row for row in rows if row]
            if rows and append_eod:
                rows[-1].append(tool.eod)
            writer.add_document(rows)
    return output


@pytest.mark.parametrize("unit", ["document", "sentence"])
@pytest.mark.parametrize("append_eod", [False, True])
def test_a_build_is_what_document_after_document_gives(
    words: Path, tmp_path: Path, small_parts: None, append_eod: bool, unit: str
) -> None:
    texts = [*many_texts(300), "", *SAYINGS]
    write_lines(tmp_path / "in.jsonl", texts)
    manifest = built(tmp_path / "out", words, tmp_path / "in.jsonl", append_eod=append_eod, unit=unit)
    expected = by_hand(tmp_path / "hand", words, texts, append_eod, unit == "sentence")
    assert pair_bytes(tmp_path / "out") == pair_bytes(expected)
    corpus = open_corpus(tmp_path / "out")
    assert manifest["documents"] == corpus.documents == len(texts)
    assert manifest["empty_documents"] == (np.diff(corpus.marks) == 0).sum() > 0
    assert manifest["tokens"] == len(corpus.tokens) and manifest["sequences"] == len(corpus.lengths)


def test_the_number_of_workers_changes_no_byte(words: Path, tmp_path: Path, small_parts: None) -> None:
    write_lines(tmp_path / "in.jsonl", many_texts(400))
    manifests = set()
    for workers in (1, 3):
        name = tmp_path / f"out{workers}"
        built(name, words, tmp_path / "in.jsonl", workers=workers, append_eod=True, dedup=True, min_chars=3)
        manifests.add((manifest_path(name).read_bytes(), *pair_bytes(name)))
    assert len(manifests) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_the_manifest_says_of_what_it_was_made(words: Path, tmp_path: Path) -> None:
    import hashlib

    source = write_lines(tmp_path / "in.jsonl", SAYINGS)
    manifest = built(tmp_path / "out", words, source, append_eod=True)
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    assert manifest == json.loads(manifest_path(tmp_path / "out").read_text())
    assert manifest["inputs"] == [
        {"path": str(source), "bytes": source.stat().st_size, "sha256": hashes["in.jsonl"]}
    ]
    assert [manifest["outputs"][one]["sha256"] for one in ("bin", "idx")] == [
        hashes["out.bin"],
        hashes["out.idx"],
    ]
    assert manifest["tokenizer"]["sha256"] == hashlib.sha256(words.read_bytes()).hexdigest()
    assert (manifest["eod"], manifest["eod_token"], manifest["vocab"]) == (0, "<|endoftext|>", 300)
    corpus = open_corpus(tmp_path / "out")
    share = np.bincount(corpus.tokens) / len(corpus.tokens)
    entropy = -sum(p * np.log(p) for p in share if p)
    assert manifest["unigram_entropy_nats"] == pytest.approx(entropy)


# -- filters


def test_short_documents_and_later_copies_go(words: Path, tmp_path: Path, small_parts: None) -> None:
    texts = many_texts(300)
    texts = [*texts, *texts[::3], *many_texts(50, seed=6), texts[0]]
    write_lines(tmp_path / "in.jsonl", texts)
    manifest = built(
        tmp_path / "out", words, tmp_path / "in.jsonl", dedup=True, min_chars=20, append_eod=True
    )
    kept = list(dict.fromkeys(text for text in texts if len(text) >= 20))
    assert texts_in(tmp_path / "out", words) == kept
    short = sum(len(text) < 20 for text in texts)
    assert manifest["dropped"] == {
        "bad": 0,
        "short": short,
        "language": 0,
        "duplicate": len(texts) - short - len(kept),
    }
    assert pair_bytes(tmp_path / "out") == pair_bytes(by_hand(tmp_path / "hand", words, kept, True))
    counts = np.bincount(open_corpus(tmp_path / "out").tokens)
    share = counts[counts > 0] / counts.sum()
    assert manifest["unigram_entropy_nats"] == pytest.approx(-(share * np.log(share)).sum())


def test_duplicates_are_found_alike_in_few_or_many_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.corpus import dedup

    hashes = np.random.RandomState(1).randint(0, 500, 2000).astype("<u8")
    (tmp_path / "hashes").write_bytes(np.stack([hashes * np.uint64(0x9E3779B97F4A7C15), hashes], 1).tobytes())
    first = np.zeros(2000, bool)
    first[np.unique(hashes, return_index=True)[1]] = True
    for at_once in (1 << 21, 300, 17):
        monkeypatch.setattr(dedup, "AT_ONCE", at_once)
        assert np.array_equal(dedup.first_ones(tmp_path / "hashes"), first)


def language_model(path: Path) -> Path:
    """A model in fastText's own format: `the` is English, `le` French, by two numbers a word."""
    pytest.importorskip("fasttext")
    entries = [("the", 0), ("le", 0), ("__label__en", 1), ("__label__fr", 1)]
    out = struct.pack("<ii", 793712314, 12)
    # Dim 2, softmax, supervised, no n-grams.
    out += struct.pack("<12id", 2, 5, 5, 1, 5, 1, 3, 3, 0, 0, 0, 100, 1e-4)
    out += struct.pack("<iiiqq", 4, 2, 2, 4, -1)
    out += b"".join(word.encode() + b"\0" + struct.pack("<qb", 1, kind) for word, kind in entries)
    for matrix in ([[1, 0], [0, 1]], [[9, 0], [0, 9]]):
        out += struct.pack("<?qq", False, 2, 2) + np.array(matrix, "<f4").tobytes()
    path.write_bytes(out)
    return path


def test_only_the_language_asked_for_stays(words: Path, tmp_path: Path) -> None:
    model = str(language_model(tmp_path / "lid.bin"))
    texts = ["the the le\nthe", "le le", "the", "the le"]
    write_lines(tmp_path / "in.jsonl", texts)
    english = built(tmp_path / "en", words, tmp_path / "in.jsonl", language="en", language_model=model)
    assert texts_in(tmp_path / "en", words)[:2] == [texts[0], texts[2]] and english["dropped"][
        "language"
    ] in (1, 2)
    assert english["filters"]["language"] == "en" and len(english["filters"]["language_model_sha256"]) == 64
    built(
        tmp_path / "sure",
        words,
        tmp_path / "in.jsonl",
        language="fr",
        language_model=model,
        min_confidence=0.9,
    )
    assert texts_in(tmp_path / "sure", words) == [texts[1]]
    (tmp_path / "lid.bin").write_bytes(b"no model")
    with pytest.raises(DataError, match="not a model of fastText"):
        built(tmp_path / "bad", words, tmp_path / "in.jsonl", language="fr", language_model=model)


# -- refused


def test_all_that_is_wrong_with_an_order_is_told_at_once(words: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        built(
            tmp_path / "out.bin",
            words,
            "x",
            unit="word",
            each="page",
            workers=-1,
            max_bad=-1,
            min_chars=-1,
            language="en",
            language_model=str(tmp_path / "none"),
            min_confidence=2,
        )
    for part in ("is a prefix", "--unit: unknown 'word' (one of ", "--each: unknown 'page' (", "--workers: -1 is",
                 "--max-bad: -1 is", "--min-chars: -1 is", "none: no such file", "--min-confidence: 2 is"):  # fmt: skip
        assert part in caught.value.message
    assert not list(tmp_path.iterdir())


def test_bad_lines_are_told_up_to_a_number_and_counted_beyond_it(words: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "good"}\n' + "bad\n" * 33)
    with pytest.raises(DataError) as caught:
        built(tmp_path / "out", words, tmp_path / "in.jsonl", max_bad=32)
    assert (
        "in.jsonl:2: " in caught.value.message
        and "33 bad lines so far, and --max-bad is 32" in caught.value.message
    )
    assert "--max-bad" in caught.value.hint
    manifest = built(tmp_path / "out", words, tmp_path / "in.jsonl", max_bad=33)
    assert (manifest["documents"], manifest["dropped"]["bad"]) == (1, 33)


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_an_input_without_text_is_refused(words: Path, tmp_path: Path, texts: list[str]) -> None:
    write_lines(tmp_path / "in.jsonl", texts)
    with pytest.raises(DataError, match="no document with text"):
        built(tmp_path / "out", words, tmp_path / "in.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_what_is_there_is_replaced_only_when_asked(words: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", SAYINGS)
    built(tmp_path / "out", words, tmp_path / "in.jsonl")
    before = pair_bytes(tmp_path / "out")
    with pytest.raises(DataError, match="exists already"):
        built(tmp_path / "out", words, tmp_path / "in.jsonl", append_eod=True)
    assert pair_bytes(tmp_path / "out") == before
    built(tmp_path / "out", words, tmp_path / "in.jsonl", append_eod=True, replace=True)
    assert pair_bytes(tmp_path / "out") != before
    assert not work_folder(tmp_path / "out").exists()


# -- ended half-way


def stop_half_way(words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build that ends after some parts; the folder of what it made."""
    from trainer.corpus.store import Store

    write_lines(tmp_path / "in.jsonl", many_texts(300))
    append, made = Store.append, []

    def some(self: Store, one: Any) -> None:
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(one)
        append(self, one)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "append", some)
        with pytest.raises(KeyboardInterrupt):
            built(tmp_path / "out", words, tmp_path / "in.jsonl", append_eod=True, workers=1)
    assert (work_folder(tmp_path / "out") / "journal").read_bytes().count(b"\n") == 4
    return work_folder(tmp_path / "out")


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda folder: None,
    "half a line": lambda folder: (folder / "journal").write_bytes((folder / "journal").read_bytes()[:-7]),
    "tokens beyond the journal": lambda folder: (folder / "bin").open("ab").write(b"xyz"),
    "tokens cut": lambda folder: (folder / "bin").write_bytes((folder / "bin").read_bytes()[:-3]),
    "a bit of the first part": lambda folder: flip(folder / "bin", 3),
    "a bit of the lengths": lambda folder: flip(folder / "lengths", -1),
    "journal gone": lambda folder: (folder / "journal").unlink(),
    "tokens gone": lambda folder: (folder / "bin").unlink(),
    "plan damaged": lambda folder: (folder / "plan.json").write_bytes(b"{"),
    "journal of garbage": lambda folder: (folder / "journal").write_bytes(os.urandom(999)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_build_goes_on_from_what_is_whole_and_ends_with_the_same_bytes(
    words: Path, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    folder = stop_half_way(words, tmp_path, monkeypatch)
    DAMAGE[damage](folder)
    told: list[str] = []
    from trainer.corpus.build import build

    source, recipe = str(tmp_path / "in.jsonl"), Recipe(append_eod=True)
    order = BuildRequest(input=(source,), tokenizer=words, output=tmp_path / "out", recipe=recipe)
    build(order, told.append)
    assert ("resuming after 4 parts" in "".join(told)) == (damage in ("nothing", "tokens beyond the journal"))
    assert pair_bytes(tmp_path / "out") == pair_bytes(
        by_hand(tmp_path / "hand", words, many_texts(300), True)
    )
    assert not folder.exists()


def test_another_input_or_option_begins_anew_and_says_why(
    words: Path, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.corpus.build import build

    stop_half_way(words, tmp_path, monkeypatch)
    told: list[str] = []
    write_lines(tmp_path / "in.jsonl", many_texts(20))
    source = str(tmp_path / "in.jsonl")
    build(BuildRequest(input=(source,), tokenizer=words, output=tmp_path / "out"), told.append)
    assert told and "started again: inputs, options changed" in told[0]
    assert texts_in(tmp_path / "out", words) == many_texts(20)


def test_a_kill_while_the_files_are_put_in_place_is_mended_by_the_next_build(
    words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "in.jsonl", SAYINGS)
    built(tmp_path / "whole", words, tmp_path / "in.jsonl")
    real = os.replace
    for number in range(8):
        calls = []

        def replaced(source: Any, target: Any, stop: int = number, calls: list[Any] = calls) -> None:
            if str(source).endswith(("/bin", "/idx", "/manifest.json")):
                calls.append(source)
                if len(calls) > stop:
                    raise KeyboardInterrupt
            real(source, target)

        with monkeypatch.context() as patched:
            patched.setattr("os.replace", replaced)
            try:
                built(tmp_path / "out", words, tmp_path / "in.jsonl", replace=True)
            except KeyboardInterrupt:
                with pytest.raises(DataError, match=r"none\.idx: no such file"):
                    open_corpus(tmp_path / "none")
        built(tmp_path / "out", words, tmp_path / "in.jsonl", replace=True)
        assert pair_bytes(tmp_path / "out") == pair_bytes(tmp_path / "whole")
        assert manifest_path(tmp_path / "out").exists() and not work_folder(tmp_path / "out").exists()


def building(words: Path, tmp_path: Path, *more: str) -> list[str]:
    return ["data-build", "--input", str(tmp_path / "in.jsonl"), "--tokenizer", str(words), "--output",
            str(tmp_path / "out"), "--append-eod", "--workers", "2", *more]  # fmt: skip


def wait_for(seen: Callable[[], Any], process: subprocess.Popen[bytes]) -> bool:
    """Until it is seen; False where the process ended before."""
    while not seen():
        if process.poll() is not None:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kill_9_at_any_moment_changes_no_byte_and_leaves_no_worker(words: Path, tmp_path: Path) -> None:
    texts = many_texts(900)
    write_lines(tmp_path / "in.jsonl", texts)
    journal = work_folder(tmp_path / "out") / "journal"
    for parts in (0, 1, 9, 18):
        process = subprocess.Popen([sys.executable, "-c", SMALL_PARTS, *building(words, tmp_path)])
        enough = wait_for(
            lambda n=parts: journal.exists() and journal.read_bytes().count(b"\n") >= n, process
        )  # type: ignore[misc]
        workers = psutil.Process(process.pid).children() if enough else []
        process.kill()
        process.wait()
        _, left = psutil.wait_procs(workers, timeout=30)
        assert not left, left
    done = subprocess.run(
        [sys.executable, "-c", SMALL_PARTS, *building(words, tmp_path)], capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert pair_bytes(tmp_path / "out") == pair_bytes(by_hand(tmp_path / "hand", words, texts, True))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_second_builder_of_one_output_is_refused_while_the_first_lives(words: Path, tmp_path: Path) -> None:
    from trainer.corpus.store import Lock

    write_lines(tmp_path / "in.jsonl", SAYINGS)
    lock = Lock(work_folder(tmp_path / "out"))
    done = verb(*building(words, tmp_path))
    assert done.returncode == 2 and b"another build of the same output is running" in done.stderr
    assert f"process {os.getpid()}".encode() in done.stderr
    lock.release()
    assert verb(*building(words, tmp_path)).returncode == 0


def test_a_full_disk_is_told_in_words_and_the_build_goes_on_when_there_is_room(
    words: Path, tmp_path: Path
) -> None:
    texts = many_texts(900)
    write_lines(tmp_path / "in.jsonl", texts)

    def little() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))

    argv = [sys.executable, "-c", SMALL_PARTS, *building(words, tmp_path)]
    done = subprocess.run(argv, capture_output=True, preexec_fn=little)
    assert done.returncode == 1, done.stderr
    assert (
        b"is full" in done.stderr
        and b"run the same command again" in done.stderr
        and b"Traceback" not in done.stderr
    )
    done = subprocess.run(argv, capture_output=True)
    assert done.returncode == 0 and b"resuming after" in done.stderr, done.stderr
    assert pair_bytes(tmp_path / "out") == pair_bytes(by_hand(tmp_path / "hand", words, texts, True))


def test_a_worker_that_is_killed_is_told_in_words(words: Path, tmp_path: Path, small_parts: None) -> None:
    from trainer.corpus import pool

    write_lines(tmp_path / "in.jsonl", many_texts(300))
    begin = pool.Pool._begin

    def begin_and_kill(self: pool.Pool) -> Any:
        link = begin(self)
        self._workers[link].kill()
        return link

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pool.Pool, "_begin", begin_and_kill)
        with pytest.raises(DataFailed, match="ended by SIGKILL") as caught:
            built(tmp_path / "out", words, tmp_path / "in.jsonl", workers=2)
    assert "--workers" in caught.value.hint
    built(tmp_path / "out", words, tmp_path / "in.jsonl", workers=2)
    assert texts_in(tmp_path / "out", words) == many_texts(300)


def test_an_error_in_a_worker_is_the_same_as_in_one_process(
    words: Path, tmp_path: Path, small_parts: None
) -> None:
    write_lines(tmp_path / "in.jsonl", [*many_texts(300), 7])
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"in\.jsonl:301: no text under 'text' .it is a int"):
            built(tmp_path / "out", words, tmp_path / "in.jsonl", workers=workers)


# -- the verb


def test_the_verb_tells_people_and_programs(words: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [*SAYINGS, ""])
    done = verb(*building(words, tmp_path))
    text = done.stdout.decode()
    assert (
        "4 documents" in text
        and "empty: 1 document;" in text
        and "each ends with <|endoftext|> (id 0)" in text
    )
    again = verb(*building(words, tmp_path, "--replace", "--json"))
    assert json.loads(again.stdout)["documents"] == 4 and again.stderr == b""
    wrong = verb(*building(words, tmp_path, "--replace", "--unit", "word"))
    assert wrong.returncode == 2 and wrong.stdout == b"" and b"--unit: unknown 'word'" in wrong.stderr


def test_no_data_verb_loads_torch(words: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from trainer.__main__ import main\n"
        "main(sys.argv[1:])\n"
        "import trainer.corpus.info, trainer.corpus.shards, trainer.corpus.verify, trainer.corpus.documents\n"
        "sys.exit(9 if 'torch' in sys.modules else 0)"
    )
    write_lines(tmp_path / "in.jsonl", SAYINGS)
    assert (
        subprocess.run(
            [sys.executable, "-c", code, *building(words, tmp_path)], capture_output=True
        ).returncode
        == 0
    )
