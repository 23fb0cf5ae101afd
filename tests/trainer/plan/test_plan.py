from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterctl.wire.pair import FileRecord, Manifest
from trainer.corpus.indexed import Writer, manifest_path, open_corpus, write_manifest
from trainer.plan.summary import check

Make = Callable[..., dict[str, Any]]


def test_a_plan_counts_parameters_tokens_and_epochs(raw_config: Make, prefix: Path) -> None:
    answer = check({"train": raw_config(), "world_size": 2, "check_data": True})
    summary = answer["summary"]
    assert answer["ok"] and summary["layout"] == {"data": 2, "tensor": 1, "pipeline": 1, "context": 1}
    assert (summary["accumulation"], summary["tokens_per_step"], summary["tokens_total"]) == (2, 128, 1024)
    lengths = open_corpus(prefix).lengths
    # Of 40 documents, 80 %.
    tokens = int(lengths[:32].sum())
    assert summary["epochs"] == pytest.approx(1024 / tokens)
    assert [(one["tokens"], one["sequences"], one["share"]) for one in summary["corpora"]] == [
        (tokens, 40, 1.0)
    ]


def test_missing_data_is_a_fault_only_where_it_is_looked_for(raw_config: Make, tmp_path: Path) -> None:
    document = {"train": raw_config(data={"prefix": "nowhere"}), "base_dir": str(tmp_path)}
    assert check(document)["ok"]
    faults = check({**document, "check_data": True})["faults"]
    assert {fault["key"] for fault in faults} == {"train.data.prefix"}
    assert [
        str(tmp_path / f"nowhere.{end}") in fault["what"]
        for end, fault in zip(("idx", "bin"), faults, strict=True)
    ]


def test_every_fault_of_every_corpus_is_found_at_once(raw_config: Make, prefix: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    with Writer(short, np.uint16) as writer:
        writer.add_document([[1, 2, 3]])
    cut = tmp_path / "cut"
    for end in (".bin", ".idx"):
        content = prefix.with_name(prefix.name + end).read_bytes()
        cut.with_name("cut" + end).write_bytes(content[: -4 if end == ".bin" else None])
    blend = [{"prefix": str(one), "weight": 1} for one in (prefix, short, cut, "nowhere")]
    data = {"blend": blend, "split": "80,20,0", "tokenizer": "none.json"}
    faults = check({"train": raw_config(data=data), "base_dir": str(tmp_path), "check_data": True})["faults"]
    told = sorted((fault["key"], fault["what"]) for fault in faults)
    keys = [key for key, _ in told]
    assert keys == [
        # Neither part of it is as long as a sample.
        *["train.data.blend[1].prefix"] * 2,
        "train.data.blend[2].prefix",
        *["train.data.blend[3].prefix"] * 2,
        "train.data.tokenizer",
    ]
    assert "less than one sample" in told[0][1] and "has 0" not in told[2][1] and "bytes" in told[2][1]


def test_a_token_id_that_the_model_lacks_is_found_at_plan_time(
    raw_config: Make, prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ids_faults(**changes: Any) -> list[str]:
        model = {**raw_config()["model"], "vocab": 50, **changes.pop("model", {})}
        answer = check({"train": raw_config(model=model, **changes), "check_data": True})
        return [f"{fault['key']}: {fault['what']}; {fault['remedy']}" for fault in answer["faults"]]

    # Its ids are 0 to 59, and it has no manifest.
    remedy = "use vocab: 60, or the tokenizer that made the data"
    assert ids_faults() == [
        f"train.data.prefix: {prefix}.bin: has token id 59, but train.model.vocab is 50; {remedy}"
    ]
    assert ids_faults(model={"vocab": 60}) == []
    glm = {"data": {"prefix": str(prefix), "split": "80,20,0", "eod": 1}}
    (fault,) = ids_faults(model={"kind": "glm", "vocab": 60}, **glm)
    assert "GLM's special tokens begin at 51; use vocab: 69" in fault
    assert ids_faults(model={"kind": "glm", "vocab": 69}, **glm) == []
    # Of a large file only the manifest is read.
    monkeypatch.setattr("trainer.plan.check_data.SEARCHED", 0)
    assert ids_faults() == []
    copy = tmp_path / "copy"
    for end in (".bin", ".idx"):
        copy.with_name("copy" + end).write_bytes(prefix.with_name(prefix.name + end).read_bytes())
    size = copy.with_name("copy.bin").stat().st_size
    outputs = {"bin": FileRecord(size, "0" * 64)}
    write_manifest(manifest_path(copy), Manifest(vocab=1000, largest_id=999, outputs=outputs))
    assert "has token id 999" in ids_faults(data={"prefix": str(copy), "split": "80,20,0"})[0]


def test_corpora_of_their_own_for_training_and_validation_are_looked_at_whole(
    raw_config: Make, prefix: Path
) -> None:
    sources = [{"prefix": str(prefix), "weight": 3}, {"prefix": str(prefix), "weight": 1}]
    data = {"train": sources, "valid": str(prefix)}
    answer = check({"train": raw_config(data=data), "check_data": True})
    tokens = int(open_corpus(prefix).lengths.sum())
    uses = answer["summary"]["corpora"]
    assert [use["epochs"] for use in uses] == [pytest.approx(1024 * part / tokens) for part in (0.75, 0.25)]


def test_one_epoch_of_corpora_without_weights_is_counted_at_plan_time(raw_config: Make, prefix: Path) -> None:
    data = {"blend": [str(prefix), str(prefix)], "split": "80,20,0"}
    assert check({"train": raw_config(data=data), "check_data": True})["ok"]
    (fault,) = check({"train": raw_config(data=data, steps=100), "check_data": True})["faults"]
    assert fault["key"] == "train.data.blend" and "800 are needed" in fault["what"]


def test_sharding_the_optimizer_divides_its_memory(raw_config: Make) -> None:
    needs = [
        check({"train": raw_config(zero=zero), "world_size": 4})["summary"]["memory_per_device_bytes"]
        for zero in (0, 1)
    ]
    assert needs[1]["optimizer"] * 4 == needs[0]["optimizer"] and needs[1]["weights"] == needs[0]["weights"]


@pytest.mark.parametrize("document", [None, [], {"world_size": 0}, {"world_size": "2"}, {}])
def test_a_document_that_makes_no_sense_is_answered_with_faults(document: object) -> None:
    answer = check(document)
    assert not answer["ok"] and answer["faults"]


def test_planning_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, trainer.plan.summary, trainer.env; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_the_check_verb_reads_and_answers_json(raw_config: Make) -> None:
    ask = json.dumps({"train": raw_config(stepz=1), "world_size": 2})
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "check"], input=ask, capture_output=True, text=True
    )
    answer = json.loads(done.stdout)
    assert done.returncode == 1 and not done.stderr
    assert answer["faults"] == [
        {"key": "train.stepz", "what": "unknown key 'stepz'", "remedy": "did you mean 'steps'?"}
    ]
