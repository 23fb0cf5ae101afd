"""Evaluation: scores equal a direct computation for any batches, ranks and interruptions."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import native
from clusterctl.wire.requests import Scoring
from tests.support import weights
from tests.support.building import SAYINGS, built, small_tokenizer, with_prefix, write_lines
from trainer.__main__ import main
from trainer.checkpoint.store import open_checkpoint
from trainer.corpus.tokenizer import Tokenizer, add_glm_tokens, train_tokenizer
from trainer.device import Device, open_device
from trainer.errors import DataError, InputError
from trainer.evaluate import packed_scorer
from trainer.evaluate.evaluate import Order, Subject, evaluate
from trainer.evaluate.request import Request, Score
from trainer.evaluate.results import Progress
from trainer.evaluate.scorer import Scorer
from trainer.evaluate.statistics import mean, ratio_perplexity
from trainer.evaluate.text import Reader
from trainer.evaluate.wikitext import detokenized
from trainer.generate.loading import open_decoder
from trainer.model.glm import GLM
from trainer.parallel.group import Group

MODEL = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 24}
CHOICES: list[dict[str, Any]] = [
    {"context": "the cat sat", "choices": ["on the mat", "under a tree over there", "One."], "label": 0},
    {"context": "", "choices": ["Two!", "Three?"], "label": 1},
]
COPA = {
    "premise": "The cat sat on the mat.",
    "choice1": "It was One.",
    "choice2": "Two!",
    "question": "cause",
    "label": 1,
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("material")
    small_tokenizer(folder)
    built(
        folder / "corpus",
        folder / "tokenizer.json",
        write_lines(folder / "in.jsonl", SAYINGS * 4),
        append_eod=True,
    )
    return folder


@pytest.fixture
def gpt(tmp_path: Path, material: Path, train_here: Callable[..., Any]) -> Path:
    return trained(tmp_path, material / "tokenizer.json", material, train_here, {**MODEL, "vocab": 300})


@pytest.fixture
def glm(tmp_path: Path, material: Path, train_here: Callable[..., Any]) -> Path:
    add_glm_tokens(material / "tokenizer.json", tmp_path / "glm.json")
    vocab = Tokenizer.load(tmp_path / "glm.json").vocab
    model = {**MODEL, "kind": "glm", "sequence": 64, "vocab": vocab}
    return trained(tmp_path, tmp_path / "glm.json", material, train_here, model)


def trained(
    folder: Path, tokenizer: Path, material: Path, train_here: Callable[..., Any], model: dict[str, Any]
) -> Path:
    """Return a checkpoint after three steps: its weights are no longer those of the initialization."""
    data = {"prefix": str(material / "corpus"), "split": "60,20,20", "tokenizer": str(tokenizer)}
    train_here(
        folder / f"run-{model.get('kind')}",
        steps=3,
        model=model,
        data=data,
        optimizer={"lr": 1e-2},
        global_batch=4,
        eval={"batches": 0},
    )
    return folder / f"run-{model.get('kind')}" / "checkpoints" / "step-00000003"


def subject_of(checkpoint: Path) -> Subject:
    return Subject.load(checkpoint, None, open_device("cpu", 0, 1, None, deterministic=False))


def run(checkpoint: Path, task: str, data: Path | None, output: Path, **options: Any) -> dict[str, Any]:
    """Evaluate on this process alone and return the result as JSON."""
    batch = options.pop("batch_tokens", 256)
    subject = subject_of(checkpoint)
    order = Order(task, data, output, Scoring(**options), batch)
    alone = Group(0, 1, open_device("cpu", 0, 1, None, deterministic=False))
    return evaluate(subject, order, alone, lambda *_: None).as_json()  # type: ignore[return-value]


def value(result: dict[str, Any], name: str) -> float:
    return float(result["metrics"][name]["value"])


@torch.no_grad()
def directly(subject: Subject, context: Sequence[int], target: Sequence[int]) -> tuple[float, bool]:
    """Return the log likelihood and whether it is greedy, from logits of the whole row, alone."""
    context = list(context)[-(subject.reader.window + 1 - len(target)) :]
    logits = subject.model(torch.tensor([[*context, *target[:-1]]]))[0, -len(target) :].double()
    wanted = torch.tensor(list(target))
    chosen = logits.log_softmax(-1).gather(1, wanted[:, None])
    return float(chosen.sum()), bool((logits.argmax(-1) == wanted).all())


def test_lambada_equals_a_direct_computation(gpt: Path, tmp_path: Path) -> None:
    texts = [
        "the cat sat on the mat",
        "One. Two! Three?",
        "café 中文 and tabs " + "the mat " * 20 + "the cat",
    ]
    data = write_lines(tmp_path / "lambada.jsonl", texts)
    result, subject = run(gpt, "lambada", data, tmp_path / "out"), subject_of(gpt)
    encode, wanted = subject.reader.tokenizer.encode, []
    for text in texts:
        whole = encode(text)
        before = encode(text.rpartition(" ")[0])
        # A window of 24 inputs: 25 tokens with the last target.
        wanted.append(
            directly(subject, whole[: len(before)][-(25 - len(whole) + len(before)) :], whole[len(before) :])
        )
    assert value(result, "accuracy") == pytest.approx(sum(greedy for _, greedy in wanted) / 3)
    assert value(result, "perplexity") == pytest.approx(math.exp(-sum(ll for ll, _ in wanted) / 3), rel=1e-5)
    assert result["truncated"] == 1 and result["documents"] == 3 and result["convention"] == "lm-eval"


@pytest.mark.parametrize("convention", ["megatron", "megatron-strict"])
def test_lambada_of_megatron(gpt: Path, tmp_path: Path, convention: str) -> None:
    text = "One. Two! the mat"
    data = write_lines(tmp_path / "lambada.jsonl", [text])
    result = run(gpt, "lambada", data, tmp_path / "out", convention=convention)
    subject = subject_of(gpt)
    encode = subject.reader.tokenizer.encode
    pair = (
        (encode("One. Two! the"), encode(" mat"))
        if "strict" in convention
        else (encode(text)[:-1], encode(text)[-1:])
    )
    likelihood, greedy = directly(subject, *pair)
    assert value(result, "perplexity") == pytest.approx(math.exp(-likelihood), rel=1e-5)
    assert value(result, "accuracy") == float(greedy)


def test_batches_do_not_change_scores(gpt: Path) -> None:
    subject, random = subject_of(gpt), torch.Generator().manual_seed(1)
    requests = []
    for length in (1, 2, 7, 12, 20, 24):
        ids = torch.randint(0, 300, (length + 1,), generator=random).tolist()
        start = max(1, length - 3)
        requests.append(Request(tuple(ids[:start]), tuple(ids[start:])))
    scorer = Scorer(subject.model, batch_tokens=60)
    batches = list(scorer.batches(requests))
    assert sorted(index for batch in batches for index in batch) == list(range(6)) and len(batches) > 1
    assert all(max(requests[i].length for i in batch) * len(batch) <= 60 for batch in batches)
    for batch in batches:
        for index, score in zip(batch, scorer.score([requests[index] for index in batch]), strict=True):
            likelihood, greedy = directly(subject, requests[index].context, requests[index].target)
            assert score.log_likelihood == pytest.approx(likelihood, abs=1e-4) and score.greedy == greedy


def test_packed_scores_share_contexts_and_steps(gpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, random = subject_of(gpt), torch.Generator().manual_seed(2)
    if reason := packed_scorer.why_not(subject.model):
        pytest.skip(reason)
    ids = [torch.randint(0, 300, (24,), generator=random).tolist() for _ in range(3)]
    contexts = [
        tuple(ids[0][:20]),
        tuple(ids[0][:20]),
        tuple(ids[1][:1]),
        tuple(ids[2][:17]),
        tuple(ids[0][:20]),
    ]
    targets = [(5, 6), (7,), tuple(ids[1]), (9, 10, 11, 12), (5, 6)]
    requests = [Request(*pair) for pair in zip(contexts, targets, strict=True)]
    # The same request twice.
    requests.append(requests[0])
    # Steps end in the middle of a request, and hold parts of several.
    monkeypatch.setattr(packed_scorer, "STEP_TOKENS", 13)
    scorer, found = packed_scorer.PackedScorer(subject.model), dict[int, Score]()
    batches = list(scorer.batches(requests))
    for batch in batches:
        found |= zip(batch, scorer.score([requests[index] for index in batch]), strict=True)
    assert sorted(found) == list(range(6)) and found[0] == found[4] == found[5]
    for index, request in enumerate(requests):
        likelihood, greedy = directly(subject, request.context, request.target)
        assert found[index].log_likelihood == pytest.approx(likelihood, abs=1e-4)
        assert found[index].greedy == greedy
        # Alone, a request has the same score to the last bit.
        assert scorer.score([request]) == [found[index]]


def test_on_another_device_no_op_of_the_cpu_is_chosen(gpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's device without memory stands in for CUDA and NPUs."""
    asked = list[str]()
    choose = native.choose

    def recorded(kind: str, *rest: Any) -> Any:
        asked.append(kind)
        return choose(kind, *rest)

    monkeypatch.setattr(native, "choose", recorded)
    subject = Subject.load(gpt, None, Device("meta"))
    logits = subject.model(torch.zeros(1, 4, dtype=torch.long, device="meta"))
    assert asked[-1] == "meta" and logits.device.type == "meta" and logits.shape[:2] == (1, 4)
    assert packed_scorer.why_not(subject.model) == "it is not on the CPU"


def test_wikitext_by_articles_counts_words_of_the_original(gpt: Path, tmp_path: Path) -> None:
    pages = [" = Title = \n the cat sat @-@ on the mat , one . " * 3, "One ( Two ) Three"]
    data = write_lines(tmp_path / "wiki.jsonl", pages, key="page")
    result, subject = run(gpt, "wikitext", data, tmp_path / "out"), subject_of(gpt)
    total = 0.0
    for page in pages:
        ids = subject.reader.tokenizer.encode(detokenized(page))
        known = [subject.reader.tokenizer.eod, *ids]
        for start in range(0, len(ids), 24):
            end = min(start + 24, len(ids))
            total += directly(subject, known[max(0, end - 24) : start + 1], ids[start:end])[0]
    words = sum(len(re.split(r"\s+", page)) for page in pages)
    assert value(result, "word_perplexity") == pytest.approx(math.exp(-total / words), rel=1e-4)
    size = sum(len(page.encode()) for page in pages)
    assert value(result, "bits_per_byte") == pytest.approx(-total / size / math.log(2), rel=1e-4)


def test_wikitext_of_megatron_scores_every_token_once_in_overlapping_windows(
    gpt: Path, tmp_path: Path
) -> None:
    data = tmp_path / "wiki.test.tokens"
    data.write_text("the cat sat on the mat , one . " * 12)
    result, subject = run(gpt, "wikitext", data, tmp_path / "out", stride=5), subject_of(gpt)
    ids = subject.reader.tokenizer.encode(detokenized(data.read_text()))
    # As Megatron's dataset does: windows of 25 tokens every 5, the first counted whole, the others at their end.
    total, counted = 0.0, 0
    for start in range(0, len(ids) - 1, 5):
        window = ids[start : start + 25]
        own = len(window) - 1 if start == 0 else max(0, len(window) - 1 - 19)
        if own:
            total += directly(subject, window[:-own], window[-own:])[0]
            counted += own
    assert counted == len(ids) - 1
    assert value(result, "loss") == pytest.approx(-total / counted, rel=1e-5)
    words = len(data.read_text().strip().split(" "))
    adjusted = math.exp(-total / counted * (len(ids) - 1) / (words - 1))
    assert value(result, "adjusted_perplexity") == pytest.approx(min(adjusted, math.exp(20)), rel=1e-4)


def test_choices_and_copa_take_the_larger_likelihood(gpt: Path, tmp_path: Path) -> None:
    data = tmp_path / "choices.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in CHOICES))
    result, subject = run(gpt, "choice", data, tmp_path / "out"), subject_of(gpt)
    right = 0
    for row in CHOICES:
        values = [
            directly(subject, *pair_of(subject.reader, str(row["context"]), f" {text}"))[0]
            for text in row["choices"]
        ]  # type: ignore[attr-defined]
        right += values.index(max(values)) == row["label"]
    assert value(result, "accuracy") == right / 2
    (tmp_path / "copa.jsonl").write_text(json.dumps(COPA) + "\n")
    copa = run(gpt, "copa", tmp_path / "copa.jsonl", tmp_path / "out")
    context = "The cat sat on the mat because"
    pairs = [pair_of(subject.reader, context, text) for text in (" it was One.", " two!")]
    first, second = (directly(subject, *pair)[0] for pair in pairs)
    assert value(copa, "accuracy") == float(second > first)


def pair_of(reader: Reader, context: str, target: str) -> tuple[list[int], list[int]]:
    whole, before = reader.tokenizer.encode(context + target), reader.tokenizer.encode(context)
    return (before or [reader.tokenizer.eod]), whole[len(before) :]


@pytest.mark.parametrize("pattern", [0, 1])
def test_copa_of_a_glm_is_a_cloze_question(glm: Path, tmp_path: Path, pattern: int) -> None:
    (tmp_path / "copa.jsonl").write_text(json.dumps(COPA) + "\n")
    result = run(glm, "copa", tmp_path / "copa.jsonl", tmp_path / "out", pattern=pattern)
    subject = subject_of(glm)
    encode, tokens = subject.reader.tokenizer.encode, subject.reader.glm
    assert tokens is not None and isinstance(subject.model, GLM)
    listed = '"it was One" or "two"?' if pattern == 0 else "it was One or two?"
    head = [tokens.enc, *encode(f"{listed} The cat sat on the mat because")]
    source = [*head, tokens.mask, *encode("."), tokens.eos]
    totals = []
    for text in (" it was One", " two"):
        target = encode(text)
        ids = torch.tensor([[*source, tokens.sop, *target[:-1]]])
        first = [*range(len(source)), *[len(head)] * len(target)]
        second = [0] * len(source) + list(range(1, len(target) + 1))
        with torch.no_grad():
            logits = subject.model(ids, torch.tensor([[first, second]]), torch.tensor([len(source)]))
        chosen = logits[0, len(source) :].double().log_softmax(-1)
        totals.append(float(chosen.gather(1, torch.tensor(target)[:, None]).sum()))
    assert result["convention"] == "glm-cloze"
    assert value(result, "accuracy") == float(totals[1] > totals[0])
    scored = Scorer(subject.model, tokens).score(
        [Request(tuple(source), tuple(encode(text)), len(head)) for text in (" it was One", " two")]
    )
    assert [score.log_likelihood for score in scored] == pytest.approx(totals, abs=1e-4)


def test_perplexity_of_the_test_split_is_the_loss_of_its_tokens(
    gpt: Path, material: Path, tmp_path: Path
) -> None:
    result, subject = run(gpt, "ppl", None, tmp_path / "out", split="test"), subject_of(gpt)
    encode = subject.reader.tokenizer.encode
    # 12 documents, the last 20 % of them.
    ids = [token for text in (SAYINGS * 4)[10:] for token in [*encode(text), subject.reader.tokenizer.eod]]
    total, scored = 0.0, 1
    while scored < len(ids):
        end = min(len(ids), scored + 24)
        total += directly(subject, ids[scored - 1 : scored], ids[scored:end])[0]
        scored = end
    assert value(result, "loss") == pytest.approx(-total / (len(ids) - 1), rel=1e-5)
    assert value(result, "perplexity") == pytest.approx(math.exp(-total / (len(ids) - 1)), rel=1e-4)


@pytest.mark.parametrize("packed", [True, False])
def test_an_interrupted_evaluation_continues_and_leaves_one_result(
    gpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    if packed and (reason := packed_scorer.why_not(subject_of(gpt).model)):
        pytest.skip(reason)
    if not packed:
        monkeypatch.setattr(packed_scorer, "why_not", lambda _: "not wanted")
    kind: Any = packed_scorer.PackedScorer if packed else Scorer
    data = write_lines(tmp_path / "lambada.jsonl", SAYINGS * 3)
    batches, stop = list[int](), [0]
    score = kind.score

    def broken(self: object, requests: Sequence[Request]) -> Any:
        batches.append(len(requests))
        if len(batches) == stop[0]:
            raise KeyboardInterrupt
        return score(self, requests)

    monkeypatch.setattr(kind, "score", broken)
    whole = run(gpt, "lambada", data, tmp_path / "whole", batch_tokens=24)
    wanted = len(batches)
    stop[0] = wanted + 4
    with pytest.raises(KeyboardInterrupt):
        run(gpt, "lambada", data, tmp_path / "out", batch_tokens=24)
    (unfinished,) = (tmp_path / "out").glob(".unfinished-*")
    # The last line was cut off by the kill.
    unfinished.write_text(unfinished.read_text() + "[3, -1.")
    before = len(batches)
    again = run(gpt, "lambada", data, tmp_path / "out", batch_tokens=24)
    assert len(batches) - before == wanted - 3 > 3
    assert again["metrics"] == whole["metrics"]
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(files) == 1 and files[0].startswith("lambada-step-00000003-")


def test_several_ranks_give_the_same_figures(gpt: Path, tmp_path: Path) -> None:
    data = write_lines(tmp_path / "lambada.jsonl", SAYINGS * 3)
    alone = run(gpt, "lambada", data, tmp_path / "alone", batch_tokens=24)
    (tmp_path / "out").mkdir()
    # torchrun starts the two ranks; no launcher is needed.
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "trainer",
    ]
    words += [
        "evaluate",
        "--checkpoint",
        str(gpt),
        "--task",
        f"lambada={data}",
        "--output",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        [*words, "--batch-tokens", "24", "--json"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    for name, metric in alone["metrics"].items():
        assert value(result, name) == pytest.approx(metric["value"], rel=1e-6)
    assert len(list((tmp_path / "out").iterdir())) == 1


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        (
            "lambada",
            '{"txt": "a b"}\n{"text": 3}\nno\n',
            r"(?s)x\.jsonl:1: has no field 'text'.*:2: .*int.*:3: not JSON",
        ),
        (
            "lambada",
            '{"text": "single"}\n{"txt": "a b"}\n{"text": "a b"}\n{"text": ""}\n',
            r"(?s)x\.jsonl:1: the text has fewer.*:2: has no field 'text'.*:4: the text has fewer",
        ),
        (
            "copa",
            json.dumps({**COPA, "question": "why", "premise": " "}) + '\n{"premise": 3}\n',
            r"(?s)x\.jsonl:1: .*cause or effect; field 'premise' is empty.*:2: .*'premise' has the wrong type: int; "
            r"has no field 'choice1'",
        ),
        ("lambada", '{"text": "single"}\n', r"x\.jsonl:1: the text has fewer than two words"),
        ("lambada", "\n", "contains no records"),
        ("lambada", '{"text": "one \\ud800"}\n', r"x\.jsonl:1: half of a surrogate pair, \\ud800"),
        (
            "choice",
            '{"context": "a", "choices": ["b", "\\udc00"], "label": 0}\n',
            "x.jsonl:1: half of a surrogate",
        ),
        (
            "choice",
            '{"context": "a", "choices": ["b", "c"], "label": 2}\n',
            r"x\.jsonl:1: field 'label' is 2",
        ),
        ("choice", '{"context": "a", "choices": ["b"], "label": 0}\n', "at least two texts"),
        ("copa", json.dumps({**COPA, "question": "why"}) + "\n", "use cause or effect"),
        ("copa", json.dumps({**COPA, "label": True}) + "\n", "wrong type: bool"),
        ("wikitext", '{"text": "x"}\n', "has no field 'page'"),
    ],
)
def test_wrong_data_is_refused_with_file_and_line(
    gpt: Path, tmp_path: Path, task: str, content: str, message: str
) -> None:
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        run(gpt, task, tmp_path / "x.jsonl", tmp_path / "out")
    assert caught.value.hint


def test_wrong_orders_are_refused(
    gpt: Path, glm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        assert (
            main(["evaluate", "--checkpoint", str(gpt), "--output", str(tmp_path / "out"), *arguments]) == 2
        )
        return capsys.readouterr().err

    data = write_lines(tmp_path / "x.jsonl", ["a b c"])
    for arguments, message in (
        (["--task", "lambda", "--data", str(data)], "there is no task 'lambda'"),
        (["--task", "lambada"], "task lambada needs data"),
        (["--task", "lambada=nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--task", "lambada="], "the file name of a task is empty"),
        (["--task", f"lambada={data}", "--convention", "mine"], "has no convention 'mine'"),
        (["--task", f"lambada={data}", "--stride", "0", "--limit", "-1"], "--stride: 0 is too small"),
    ):
        assert message in refused(*arguments)
    tasks = ["--task", "lambda", "--task", f"lambada={data}", "--task", "copa=gone", "--stride", "0"]
    wrong = ("there is no task 'lambda'", "gone does not exist", "--stride: 0 is too small (1 or more)")
    assert refused(*tasks).splitlines()[:3] == [f"error: {text}" for text in wrong]
    with pytest.raises(InputError, match="this model is a GLM"):
        run(glm, "lambada", data, tmp_path / "out")


def test_the_tokenizer_may_lie_beside_a_checkpoint_that_does_not_contain_it(
    material: Path, tmp_path: Path
) -> None:
    model = replace(weights.GPT, sequence=24, vocab=300)
    folder = weights.checkpoint(tmp_path / "imported", model, weights.random_state(model))
    with pytest.raises(InputError, match="contains no tokenizer"):
        subject_of(folder)
    (folder / "tokenizer.json").write_bytes((material / "tokenizer.json").read_bytes())
    data = write_lines(tmp_path / "x.jsonl", ["the cat sat"])
    assert run(folder, "lambada", data, tmp_path / "out")["documents"] == 1


def test_the_detokenizer_joins_what_wikitext_separates() -> None:
    assert detokenized("a @-@ b , c ; d") == "a-b, c; d"
    assert detokenized("( x )[ y ]{ z }") == "(x)[y]{z}"
    assert detokenized("the dogs ' bone , 20 ° C") == "the dogs' bone, 20°C"


def test_standard_errors() -> None:
    metric = mean([1.0, 0.0, 0.0, 1.0])
    assert metric.value == 0.5 and metric.standard_error == pytest.approx(math.sqrt(1 / 3 / 4))
    assert mean([1.0]).standard_error is None
    # Equal losses per weight leave no uncertainty.
    even = ratio_perplexity([-2.0, -4.0], [1.0, 2.0])
    assert even.value == pytest.approx(math.exp(2)) and even.standard_error == pytest.approx(0, abs=1e-9)


def test_scores_of_other_evaluations_are_not_read(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-other-0.jsonl").write_text("[0, -1.0, true]\n")
    (tmp_path / ".unfinished-mine-1.jsonl").write_text('[7, -1.0, true]\n[0, -2.0, false]\n{"no": 1}\nnull\n')
    with Progress(tmp_path, "mine", 0) as progress:
        scores = progress.read(3)
    assert {index: score.log_likelihood for index, score in scores.items()} == {0: -2.0}


def test_the_checkpoint_is_named_by_the_hash_of_its_manifest(gpt: Path, tmp_path: Path) -> None:
    import hashlib

    data = write_lines(tmp_path / "x.jsonl", ["a b c"])
    result = run(gpt, "lambada", data, tmp_path / "out")
    assert result["checkpoint_sha256"] == hashlib.sha256((gpt / "manifest.json").read_bytes()).hexdigest()
    assert result["step"] == open_checkpoint(gpt).step == 3
    assert result["data_sha256"] == hashlib.sha256(data.read_bytes()).hexdigest()


def test_texts_begin_as_lm_evals_with_the_tokenizers_own_tokens(tmp_path: Path) -> None:
    file = with_prefix(small_tokenizer(tmp_path), "<s> $A", "<s>")
    tokenizer = Tokenizer.load(file)
    bos, reader = tokenizer.bos, Reader(tokenizer, 24, prefix=tokenizer.prefix())
    assert bos is not None and reader.start == bos
    request, _ = reader.continuation("the cat", " sat")
    assert request.context == (bos, *tokenizer.encode("the cat"))
    # lm-eval takes the one token without a context, and adds none to a text that begins with it.
    assert reader.continuation("", "the")[0].context == (bos,)
    assert reader.continuation(" ", "the")[0].context == (bos,)
    assert reader.encode("<s>the") == [bos, *tokenizer.encode("the")]
    (first,) = reader.rolling(reader.encode("the cat"), reader.start).requests
    assert first.context[0] == bos and first.target[0] == bos
    plain = replace(reader, prefix=tokenizer.prefix(False))
    assert plain.continuation("the cat", " sat")[0].context == tuple(tokenizer.encode("the cat"))


def test_another_tokenizer_than_the_models_or_the_datas_is_refused(material: Path, tmp_path: Path) -> None:
    model = replace(weights.GPT, sequence=24)
    folder = weights.checkpoint(tmp_path / "model", model, weights.random_state(model))
    train_tokenizer(iter(["the mat; café"] * 9), 280, tmp_path / "other.json")
    cpu = open_device("cpu", 0, 1, 1, deterministic=False)
    # Without a tokenizer of its own, a model takes any; the data know theirs.
    subject = Subject.load(folder, tmp_path / "other.json", cpu)
    with pytest.raises(DataError, match="is not the tokenizer that encoded"):
        evaluate(
            subject, Order("ppl", material / "corpus", tmp_path / "out"), Group(0, 1, cpu), lambda *_: None
        )
    (folder / "tokenizer.json").write_bytes((material / "tokenizer.json").read_bytes())
    with pytest.raises(InputError, match="is not the tokenizer of"):
        Subject.load(folder, tmp_path / "other.json", cpu)
    with pytest.raises(InputError, match="is not the tokenizer of"):
        open_decoder(folder, tmp_path / "other.json")
    assert Subject.load(folder, material / "tokenizer.json", cpu).reader.tokenizer.vocab <= 300
