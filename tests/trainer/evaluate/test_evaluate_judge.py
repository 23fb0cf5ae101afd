"""lm-eval as a judge: its `hf` model on our export gives the same counts and perplexities."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.building import SAYINGS, built, small_tokenizer, verb, with_prefix, write_lines

TEXTS = [
    "the cat sat on the mat",
    "One. Two! Three?",
    "naïve café, 中文 and tabs",
    "the mat " * 30 + "the cat",
]
PAGES = [" = Title = \n the cat sat @-@ on the mat , one . " * 4, "One ( Two ) Three ; the cat"]
QUESTIONS = [
    {
        "premise": f"The cat sat on the mat {i}.",
        "choice1": "It was One.",
        "choice2": "Two! Three?",
        "question": ("cause", "effect")[i % 2],
        "label": i % 3 % 2,
        "idx": i,
    }
    for i in range(12)
]
TASKS = {
    "lambada_local": """
task: lambada_local
dataset_path: json
dataset_kwargs: {data_files: {test: LAMBADA}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' '+text.split(' ')[-1]}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "wikitext_local": """
task: wikitext_local
dataset_path: json
dataset_kwargs: {data_files: {test: WIKITEXT}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: !function prepared.detokenize
process_results: !function prepared.process_results
metric_list:
  - {metric: word_perplexity}
  - {metric: byte_perplexity}
  - {metric: bits_per_byte}
""",
    "copa_local": """
task: copa_local
dataset_path: json
dataset_kwargs: {data_files: {test: COPA}}
output_type: multiple_choice
test_split: test
doc_to_text: !function prepared.doc_to_text
doc_to_target: !function prepared.doc_to_target
doc_to_choice: !function prepared.doc_to_choice
metric_list:
  - {metric: acc}
""",
}
PREPARED = """
from lm_eval.tasks.wikitext.preprocess_wikitext import process_results, wikitext_detokenizer as detokenize
from lm_eval.tasks.super_glue.copa.utils import doc_to_choice, doc_to_target, doc_to_text
"""
# Ours to theirs.
SAME = {
    ("lambada", "accuracy"): ("lambada_local", "acc,none"),
    ("lambada", "perplexity"): ("lambada_local", "perplexity,none"),
    ("wikitext", "word_perplexity"): ("wikitext_local", "word_perplexity,none"),
    ("wikitext", "byte_perplexity"): ("wikitext_local", "byte_perplexity,none"),
    ("wikitext", "bits_per_byte"): ("wikitext_local", "bits_per_byte,none"),
    ("copa", "accuracy"): ("copa_local", "acc,none"),
}


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("lm_eval"), reason="lm-eval is not installed (pip install -e '.[judges]')")
@pytest.mark.parametrize("bos", ["", "<s> $A"])
def test_figures_equal_those_of_lm_eval(tmp_path: Path, train_here: Callable[..., Any], bos: str) -> None:
    tokenizer = small_tokenizer(tmp_path)
    tokenizer = with_prefix(tokenizer, bos, "<s>") if bos else tokenizer
    built(tmp_path / "corpus", tokenizer, write_lines(tmp_path / "in.jsonl", SAYINGS * 4), append_eod=True)
    train_here(
        tmp_path / "run",
        steps=20,
        model={"layers": 2, "hidden": 32, "heads": 2, "sequence": 32, "vocab": 301},
        data={"prefix": str(tmp_path / "corpus"), "split": "80,20,0", "tokenizer": str(tokenizer)},
        optimizer={"lr": 1e-2},
        global_batch=4,
        eval={"batches": 0},
    )
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000020"
    data = {
        "LAMBADA": write_lines(tmp_path / "lambada.jsonl", TEXTS),
        "WIKITEXT": write_lines(tmp_path / "wikitext.jsonl", PAGES, key="page"),
        "COPA": tmp_path / "copa.jsonl",
    }
    data["COPA"].write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    arguments = [f"--task={name.lower()}={file}" for name, file in data.items()]
    ours = verb(
        "evaluate", "--checkpoint", str(checkpoint), *arguments, "--json", "--output", str(tmp_path / "out")
    )
    assert ours.returncode == 0, ours.stderr.decode()
    figures = {result["task"]: result["metrics"] for result in json.loads(ours.stdout)}
    theirs = judged(tmp_path, checkpoint, data)
    for (task, name), (their_task, their_name) in SAME.items():
        assert figures[task][name]["value"] == pytest.approx(theirs[their_task][their_name], rel=1e-4), (
            task,
            name,
        )


def judged(folder: Path, checkpoint: Path, data: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Export a checkpoint, evaluate the export with lm-eval's own program, and return its figures by task."""
    done = verb("checkpoint-export", str(checkpoint), "--to", "hf", "--output", str(folder / "hf"))
    assert done.returncode == 0, done.stderr.decode()
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "prepared.py").write_text(PREPARED)
    for name, text in TASKS.items():
        for key, file in data.items():
            text = text.replace(key, str(file))
        (tasks / f"{name}.yaml").write_text(text)
    words = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--tasks", ",".join(TASKS)]
    words += ["--model_args", f"pretrained={folder / 'hf'},dtype=float32", "--include_path", str(tasks)]
    words += ["--device", "cpu", "--batch_size", "1", "--output_path", str(folder / "lm_eval")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(words, env={**os.environ, **offline}, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    (result,) = (folder / "lm_eval").rglob("results_*.json")
    found: dict[str, dict[str, float]] = json.loads(result.read_text())["results"]
    return found
