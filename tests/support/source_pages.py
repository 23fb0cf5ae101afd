"""The pages about published procedures, and a project in which their command lines run at a tiny size."""

from __future__ import annotations

import bz2
import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli import main
from clusterctl.downloads.names import NAMES
from clusterctl.jobs import job as jobs
from clusterctl.jobs.phase import Phase
from clusterctl.jobs.run_folder import RunDir, new_run
from clusterctl.sandbox import demo
from tests.support.records import record_of
from tests.support.run_folders import end_run
from trainer import __main__ as trainer
from trainer.corpus.tokenizer import train_tokenizer
from trainer.env import Env
from trainer.plan.resolve import read_config
from trainer.train.assemble import run_training

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "guide" / "sources"
CASES = ROOT / "tests" / "cases" / "sources"
VOCABULARY = 512
# GLM's tokens follow those of its tokenizer.
GLM_VOCABULARY = VOCABULARY + 9
MODEL = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 64}
# Commands that need nodes; the tests over SSH run them.
NEED_NODES = ("doctor", "ranktable build", "checkpoint list", "serve")
CLOZE = {
    "premise": "the dog ran",
    "choice1": "the cat came",
    "choice2": "it rained",
    "question": "cause",
    "label": 0,
}


def command_lines(page: str) -> list[str]:
    """Return the lines of a page's bash blocks."""
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [line for block in found for line in block.splitlines()]


def rows_of(page: str) -> Iterator[Mapping[str, str]]:
    """Yield the rows of a page's tables by their headings."""
    heading: list[str] = []
    for line in (PAGES / f"{page}.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            heading = []
        elif not heading:
            heading = cells
        elif not line.startswith("|---"):
            yield dict(zip(heading, cells, strict=True))


def smaller(recipe: str, layout: str = "{}") -> list[str]:
    """Return the values of --set that make a recipe so small that one core trains it in a second."""
    glm, cloze = recipe.startswith("glm"), recipe == "glm-copa"
    # A GLM of 521 tokens, with the recipe's other settings of the model.
    whole = jobs.documents.load_document(ROOT / "examples" / f"{recipe}.yaml").value["train"]
    named = whole["model"] if isinstance(whole["model"], dict) else {}
    kept = {key: value for key, value in named.items() if "dropout" in key or key == "label_smoothing"}
    model = {**MODEL, **kept, "vocab": GLM_VOCABULARY if glm else VOCABULARY}
    model["layers"] = 4 if "pipeline: 4" in layout else 2
    model |= {"kind": "glm", "positions": 128} if glm else {}
    values: dict[str, Any] = {
        "model": model,
        "hardware": {},
        "steps": 6,
        "micro_batch": 2,
        "global_batch": 16,
    }
    values |= {"eval": {"every": 3, "batches": 2}, "save": {"every": 3}}
    values["optimizer"] = {
        **whole["optimizer"],
        "lr": 1e-2,
        "min_lr": 1e-3,
        "warmup": "1 steps",
        "decay": "6 steps",
    }
    values["optimizer"].pop("warmup_steps", None)
    if whole.get("precision") == "fp16":
        # A recipe that begins with 2^32 needs more than six steps to find its scale.
        values["loss_scale"] = {"initial": 1024}
    if isinstance(whole.get("recompute"), dict) and layout == "{}":
        values["recompute"] = {**whole["recompute"], "split": False}
    texts = [f"train.{key}={json.dumps(value)}" for key, value in values.items()]
    return [*texts, f"train.parallel={layout}", *(["train.offload=false"] if cloze else [])]


@dataclass(frozen=True)
class Project:
    """A folder with the inputs that the pages begin with. Commands run in this process, which has torch loaded."""

    folder: Path

    def run(self, line: str) -> None:
        """Run a line of a page; it must succeed."""
        argv = shlex.split(line)
        if argv[0] == "cp":
            for name in argv[1:-1]:
                (self.folder / argv[-1] / Path(name).name).write_bytes((ROOT / name).read_bytes())
            return
        assert argv.pop(0) == "clusterctl", line
        if argv[:2] == ["data", "fetch"]:
            return self.fetch(argv[2 : argv.index("-o")], argv[-1])
        if argv[0] == "launch" and "--" not in argv:
            return self.train(argv[1])
        if argv[0] == "launch":
            # A program of the user's own.
            argv[0] = "plan"
        if " ".join(argv[:2]) in NEED_NODES or argv[0] in NEED_NODES:
            return
        if argv[:2] == ["checkpoint", "import"]:
            # The files do not record the heads, which are known for models of a usual shape.
            argv += ["--heads", str(MODEL["heads"])]
            argv += ["--vocab", str(GLM_VOCABULARY)] if "glm" in argv[2] else []
        if argv == ["plan", "glm-copa.yaml"]:
            # It compares the model with the weights, which are tiny here.
            argv += ["--set", smaller("glm-copa")[0]]
        if argv[:3] == ["data", "tokenizer", "train"]:
            argv[argv.index("--vocab-size") + 1] = str(VOCABULARY)
        assert main.run(argv) == 0, line

    def fetch(self, names: Sequence[str], where: str) -> None:
        """Put small files in the place of those that a command would download."""
        (self.folder / where).mkdir(parents=True, exist_ok=True)
        for name in names:
            (self.folder / where / NAMES[name].file).write_bytes(
                (self.folder / "internet" / name).read_bytes()
            )

    def train(self, file: str) -> None:
        """Train a recipe on one rank with its own settings, at a tiny size; keep it as a run."""
        loaded = jobs.load(self.folder / file, smaller(Path(file).stem))
        run = new_run(loaded.name, self.folder / "runs")
        run.write_record(record_of({"node1": [0]}, job={"train": loaded.train}, run=run.run_id))
        config = read_config(json.loads(json.dumps(loaded.train).replace("{data}", str(loaded.data))))
        run_training(config, Env(device_kind="cpu", threads=1), run.root, lambda: False)
        end_run(run, Phase.FINISHED)

    @property
    def last(self) -> RunDir:
        """The newest run."""
        return RunDir(
            max((self.folder / "runs").glob("*/run.json"), key=lambda file: file.stat().st_mtime).parent
        )


def prepare(folder: Path) -> Project:
    """Write the inputs of all pages: texts, a vocabulary, questions, and the documents' own files."""
    # The test part of the recipes is a thousandth of the documents.
    texts = [
        text[at : at + 250] for text in demo.documents() for at in range(0, 1500, 250) if text[at : at + 250]
    ]
    for name in ("corpus.jsonl", "my-corpus.json", "00.jsonl"):
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    internet = folder / "internet"
    internet.mkdir()
    train_tokenizer(iter(texts), VOCABULARY, internet / "gpt2")
    (internet / "gpt2" / "vocab.json").rename(internet / "gpt2-vocab")
    (internet / "gpt2" / "merges.txt").rename(internet / "gpt2-merges")
    page = "<page><title>T{}</title><ns>0</ns><id>{}</id><revision><text>{}</text></revision></page>\n"
    plain = [re.sub(r"[^\w .,\n]", " ", text) for text in texts]
    pages = "".join(page.format(number, number, text) for number, text in enumerate(plain, 1))
    (internet / "enwiki").write_bytes(bz2.compress(f"<mediawiki>\n{pages}</mediawiki>\n".encode()))
    (folder / "lambada_test.jsonl").write_text(
        "".join(json.dumps({"text": text[:120]}) + "\n" for text in texts[:4])
    )
    (folder / "data" / "COPA").mkdir(parents=True)
    questions = [{**CLOZE, "label": number % 2} for number in range(8)]
    for name in ("train", "val"):
        (folder / "data" / "COPA" / f"{name}.jsonl").write_text(
            "".join(json.dumps(each) + "\n" for each in questions)
        )
    (folder / "gpt-125m.yaml").write_bytes((CASES / "gpt-13b.yaml").read_bytes())
    (folder / "run_mindformer.py").write_text("print('trained')\n")
    (folder / "rank_table.json").write_text(json.dumps(rank_table()))
    return Project(folder)


def rank_table() -> dict[str, Any]:
    """Return a table of four servers with eight devices each, as MindFormers' document shows one."""
    servers = [
        {
            "server_id": f"10.155.111.{140 + server}",
            "device": [
                {
                    "device_id": str(device),
                    "device_ip": f"192.{1 + device % 4}.27.{6 + 2 * server + device // 4}",
                    "rank_id": str(8 * server + device),
                }
                for device in range(8)
            ],
            "host_nic_ip": "reserve",
        }
        for server in range(4)
    ]
    return {"version": "1.0", "server_count": "4", "server_list": servers, "status": "completed"}


def trainer_in_this_process(patch: pytest.MonkeyPatch) -> None:
    """Run the trainer's commands in this process: a Python with torch takes three seconds to start."""
    real = subprocess.call

    def call(argv: Sequence[str], **options: Any) -> int:
        return trainer.main(argv[3:]) if argv[1:3] == ["-m", "trainer"] else real(argv, **options)

    patch.setattr(subprocess, "call", call)
