"""Jobs written from other trainers' commands, scripts and configurations: every option is mapped or has a reason."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from clusterctl.document import parse_document
from clusterctl.errors import ClusterctlError, InputFaults, UsageError
from clusterctl.migrate import commands, facts, families, manifest, model, read
from clusterctl.migrate.commands import command_text
from clusterctl.migrate.found import Option, options_by_name, plain, read_table
from clusterctl.migrate.tables import deepspeed, mindformers, torchtitan
from clusterctl.migrate.translate import translate
from clusterctl.migrate.translation import Translation
from clusterctl.migrate.write import job_text
from tests.clusterctl.conftest import Run
from trainer.plan.resolve import plan_config

ROOT = Path(__file__).resolve().parents[3]
CASES = ROOT / "tests" / "cases" / "sources"
PRETRAIN = (
    "pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024"
    " --max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 64 --lr 0.00015 --train-iters 500000"
    " --data-path 0.7 wiki/a_text_document 0.3 wiki/b_text_document --fp16 --loss-scale 4096"
)


def translated(text: str) -> Translation:
    return translate(read.read(text))


def job(result: Translation) -> Any:
    """The job as its file is read again."""
    return parse_document(job_text(result), "job.yaml").value


def accepted(result: Translation, ranks: int) -> Any:
    """The job, whose training the trainer must accept."""
    value = job(result)
    train = {key: part for key, part in value["train"].items() if key != "length"}
    # Epochs are counted in files that are not here.
    if "length" in value["train"] or "tune" in train:
        train["steps"] = 100_000
    assert not plan_config(train, ranks).faults, job_text(result)
    return value


def test_a_command_becomes_a_job_that_the_trainer_accepts() -> None:
    result = translated(f"torchrun --nnodes 2 --nproc_per_node=8 {PRETRAIN} --use-flash-attn --bogus 3")
    value = accepted(result, 16)
    train = value["train"]
    assert train["model"] == {
        **{"layers": 24, "hidden": 1024, "heads": 16, "sequence": 1024, "positions": 2048, "vocab": 50257},
        # Megatron's defaults differ from the job's.
        **{"dropout": 0.1, "attention_dropout": 0.1},
    }
    assert train["data"]["blend"] == [
        {"prefix": "{data}/a_text_document", "weight": 0.7},
        {"prefix": "{data}/b_text_document", "weight": 0.3},
    ]
    assert (value["devices"], value["data"]) == ("[0,8)", "./wiki")
    assert train["loss_scale"] == {"initial": 4096.0, "dynamic": False}
    assert train["optimizer"]["betas"] == [0.9, 0.999] and train["optimizer"]["schedule"] == "linear"
    assert dict(result.unmapped) == {
        "--use-flash-attn": "always: the fused attention of the device",
        "--bogus": "unknown to this table",
    }
    assert "it ran on 2 nodes" in job_text(result)


def test_a_script_is_read_with_its_variables_and_never_run(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    mark = tmp_path / "ran"
    script.write_text(
        f"""touch {mark}
GPUS=$(touch {mark}; echo 8)
LAYERS=${{LAYERS:-12}}   # a comment with 'a quote
MODEL_ARGS=(
    --num-layers $LAYERS
    --hidden-size $((64 * 12))
)
MORE="--lr 1e-4"
MORE+=" --train-iters 10"
export CUDA_DEVICE_MAX_CONNECTIONS=1
if true; then torchrun --nproc_per_node $GPUS pretrain_gpt.py "${{MODEL_ARGS[@]}}" $MORE \\
    --num-attention-heads 12 --micro-batch-size 2 --seq-length 1024 --split '90,10,0' --seed `date`; fi
"""
    )
    result = translated(str(script))
    model = accepted(result, 8)["train"]["model"]
    assert (model["layers"], model["hidden"], model["heads"]) == (12, 768, 12)
    assert result.values["train.optimizer.lr"].value == 1e-4 and result.values["train.steps"].value == 10
    reasons = dict(result.unmapped)
    assert "known only when the script runs" in reasons["--nproc_per_node"]
    assert "set train.seed" in reasons["--seed"]
    assert not mark.exists() and result.found.name == "train"


def test_of_several_trainings_the_taken_and_the_skipped_lines_are_named(
    command_line: Run, tmp_path: Path
) -> None:
    options = "--num-layers 2 --hidden-size 8 --num-attention-heads"
    first = f"echo pretrain_gpt.py\npython pretrain_gpt.py \\\n {options} 1\n"
    script = f"{first}\ntorchrun a/pretrain_gpt.py {options} 2\n"
    (tmp_path / "s.sh").write_text(script)
    code, out, err = command_line("init", "--from", "s.sh", "--dry-run")
    assert code == 0 and "heads: 2" in out
    assert "warning: took s.sh:5 (a/pretrain_gpt.py); skipped s.sh:2 (pretrain_gpt.py); for" in err
    code, _, err = command_line("init", "--from", f"one {options} 1; two {options} 2", "--dry-run")
    assert code == 0 and "took the command:1 (two); skipped the command:1 (one)" in err
    (tmp_path / "s.sh").write_text(first)
    code, out, err = command_line("init", "--from", "s.sh", "--dry-run")
    assert code == 0 and "heads: 1" in out and not err


def test_a_manifest_a_configuration_a_container_and_glm() -> None:
    t9k = accepted(translated(str(CASES / "gpt-13b.yaml")), 16)
    assert (t9k["name"], t9k["train"]["length"], t9k["train"]["zero"]) == ("gpt-13b", "260B tokens", 1)
    assert t9k["train"]["parallel"] == {"tensor": 1, "pipeline": 4}
    mind = accepted(translated(str(CASES / "run_gpt2_13b.yaml")), 32)["train"]
    assert (mind["global_batch"], mind["length"], mind["zero"]) == (192, "2 epochs", 1)
    assert mind["optimizer"]["schedule"] == "polynomial" and mind["recompute"] == {
        "split": True,
        "mode": "full",
    }
    oneflow = accepted(translated(str(CASES / "oneflow.sh")), 8)
    assert oneflow["network"] == {"rdma": "on"} and oneflow["train"]["global_batch"] == 64
    glm = accepted(translated(str(CASES / "glm.sh")), 16)["train"]
    assert glm["model"]["kind"] == "glm" and glm["model"]["label_smoothing"] == 0.1
    assert glm["optimizer"]["min_lr"] == 1e-5 and glm["data"]["infilling"]["words"] == 0.5


@pytest.mark.parametrize("size", ["345M", "345M_without_mp", "1.3B", "2.7B", "3.7B"])
def test_every_model_size_of_the_modelzoo_script_is_a_training(size: str) -> None:
    result = translated(f"bash ./test/train_full_8p.sh --data_path=/d/gpt_text_document --model_size={size}")
    recipe = parse_document((ROOT / "examples" / f"ascend-{NAMES[size]}.yaml").read_text(), "x").value[
        "train"
    ]
    train = accepted(result, 8)["train"]
    for key in ("model", "micro_batch", "global_batch", "precision", "loss_scale"):
        assert train[key] == recipe[key] or key == "loss_scale", key
    config, theirs = (plan_config({**each, "steps": 500_000}, 8).config for each in (train, recipe))
    assert (config.parallel, config.recompute, config.loss_scale) == (
        theirs.parallel,
        theirs.recompute,
        theirs.loss_scale,
    )


NAMES = {"345M": "345m", "345M_without_mp": "345m-plain", "1.3B": "1.3b", "2.7B": "2.7b", "3.7B": "3.7b"}


def test_the_scripts_of_glm_and_mindformers(tmp_path: Path) -> None:
    tune = accepted(translated("bash ./tests/train_finetune_full_8p.sh --data_path=/data/sets"), 8)
    assert tune["data_there"] == "/data/sets" and tune["train"]["tune"]["task"] == "copa"
    (tmp_path / "run.yaml").write_bytes((CASES / "run_gpt2_13b.yaml").read_bytes())
    config = os.path.relpath(tmp_path / "run.yaml")
    mind = translated(f"bash run_distribute.sh /hccl.json {config} [8,16] train 32")
    assert job(mind)["devices"] == "[0,8)" and "it ran on 4 nodes" in job_text(mind)
    assert job(mind)["train"]["model"]["layers"] == 40


def test_a_script_of_glm_describes_a_training_without_any_option(command_line: Run, tmp_path: Path) -> None:
    code, _, err = command_line("init", "--from", "bash ./tests/train_pretrain_full_16p.sh")
    assert code == 0, err
    written = parse_document((tmp_path / "train_pretrain_full_16p.yaml").read_text(), "job.yaml").value
    assert written["train"]["model"]["name"] == "glm-10B"
    assert command_line("init", "--from", "bash ./mine.sh")[0] == 2


def test_a_preparation_of_data_becomes_our_command() -> None:
    text = command_text(
        read.read("python tools/preprocess_data.py --input 'a b.json' --output-prefix out/x --append-eod")
    )
    assert text == "clusterctl data build --input 'a b.json' --append-eod --output out/x_text_document\n"


WRONG = [
    ("pretrain_gpt.py --num-layers twelve --lr", "the command:1 --lr: has no value"),
    ("pretrain_gpt.py --num-layers twelve --seed 1.5", "--num-layers: is 'twelve'; a number"),
    ("pretrain_gpt.py --num-layers 2 --seed 1.5", "--seed: is '1.5'; a whole number"),
    ("pretrain_gpt.py --lr nan", "finite"),
    ("python train.py --lr 3", "no training of a known program"),
    ("pretrain_gpt.py --data-path 'open", "never closed"),
    ("train_full_8p.sh --model_size=9B", "there is no size '9B'"),
    ("nowhere.sh", "no such file"),
    ("run_distribute.sh t.json nowhere.yaml [0,8] train 8", "no file nowhere.yaml"),
]


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_wrong_input_names_its_place(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        translated(text)
    assert says in str(caught.value)


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    for name, text, complaint in (
        ("list.yaml", "[1]", "not a mapping"),
        ("other.yaml", "a: 1", "neither a job of Kubernetes nor"),
        ("pod.yaml", "kind: Job\nspec: {replicas: 2}", "no container starts a known program"),
        ("ds.json", "[1]", "not a mapping"),
        ("bytes.sh", "\udcff", "not UTF-8 text"),
    ):
        path = tmp_path / name
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ClusterctlError, match=f"{name}: {complaint}"):
            translated(str(path))


def test_hostile_text_ends_soon_and_stays_in_comments() -> None:
    variables = "".join(f"A{i}=$A{i + 1}$A{i + 1}\n" for i in range(40))
    result = translated(
        f"{variables}pretrain_gpt.py --num-layers 2 --save '\x1b[31m\nname: x' --data-path $A0 $(rm -rf /)"
    )
    assert "\x1b" not in job_text(result) and job(result)["name"] == "pretrain_gpt"


# ---- the five documents


def option_of(document: str, name: str, table: str) -> Option | None:
    if table == "keys":
        keys = {"mindformers": mindformers.KEYS, "megatron": manifest.KEYS}[document]
        return options_by_name(keys).get(plain(name))
    known = {family.name: family for family in families.FAMILIES}
    wanted = {"oneflow": ["oneflow", "preprocess"], "glm": ["ascend-glm", "glm"]}.get(document, [document])
    found = (option for each in wanted if (option := known[each].option(name)) is not None)
    return next(found, families.LAUNCHER.option(name))


def counts() -> dict[str, tuple[int, int]]:
    """Return for each document how many of its options are mapped, and how many are explained instead."""
    documents = json.loads((CASES / "options.json").read_text())
    result = {}
    for document, tables in documents.items():
        mapped = explained = 0
        for table, names in tables.items():
            for name in names:
                option = option_of(document, name, table)
                assert option is not None, f"{document}: {name} is in no table"
                assert option.target or option.note
                mapped += bool(option.target)
                explained += not option.target
        result[document] = (mapped, explained)
    return result


def test_every_option_of_the_five_documents_is_mapped_or_explained() -> None:
    page = (ROOT / "docs" / "guide" / "sources" / "index.md").read_text()
    for document, (mapped, explained) in counts().items():
        assert f"| {document} | {mapped + explained} | {mapped} | {explained} |" in page, (
            document,
            mapped,
            explained,
        )


SEEDS = os.environ.get("CLUSTERCTL_TEST_SOURCES", "")


@pytest.mark.skipif(not SEEDS, reason="CLUSTERCTL_TEST_SOURCES names no folder with the five documents")
def test_no_option_of_the_documents_themselves_is_missing() -> None:
    listed = json.loads((CASES / "options.json").read_text())
    known = {name for tables in listed.values() for names in tables.values() for name in names}
    for path in Path(SEEDS).glob("*.txt"):
        for name in set(re.findall(r"(?<![A-Za-z0-9_-])--[A-Za-z][A-Za-z0-9_-]*", path.read_text())):
            assert name in known, f"{path.name}: {name}"


LENGTHS = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 64,
    "max_difficulty": 1024,
    "schedule_type": "fixed_root",
    "schedule_config": {"total_curriculum_step": 15000, "difficulty_step": 8, "root_degree": 3},
}


@pytest.mark.parametrize("nested", [False, True])
def test_a_curriculum_of_sequence_length_becomes_that_of_the_job(tmp_path: Path, nested: bool) -> None:
    own: Any = {"curriculum_learning": LENGTHS}
    if nested:
        metrics = {"seqlen_truncate": {key: value for key, value in LENGTHS.items() if key != "enabled"}}
        own = {"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": metrics}}
        own = {"data_efficiency": {"enabled": True, "data_sampling": own}}
    (tmp_path / "ds.json").write_text(json.dumps(own))
    (tmp_path / "run.sh").write_text(
        f"python {PRETRAIN} --deepspeed --deepspeed_config ds.json --curriculum-learning\n"
    )
    result = translated(str(tmp_path / "run.sh"))
    train = {key: value for key, value in job(result)["train"].items() if key != "engine"}
    expected = {"start": 64, "steps": 15000, "schedule": "root", "root": 3, "multiple": 8}
    assert train["curriculum"] == expected and train["model"]["sequence"] == 1024
    assert not plan_config(train, 1).faults
    assert any("the keys of ds.json are read" in note for note in result.notes)
    alone = job(translated(str(tmp_path / "ds.json")))
    assert alone["train"]["curriculum"] == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"enabled": False}, "the curriculum is off"),
        ({"curriculum_type": "vocabularyrarity"}, "only the length of samples can grow"),
        ({"schedule_type": "fixed_discrete"}, "the schedule fixed_discrete is not supported"),
    ],
)
def test_another_curriculum_is_not_mapped(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"curriculum_learning": {**LENGTHS, **change}}))
    result = translated(str(tmp_path / "ds.json"))
    assert "curriculum" not in job(result).get("train", {})
    assert any(reason in why for name, why in result.unmapped if name.endswith("min_difficulty"))


def test_every_fact_of_a_table_is_used() -> None:
    tables = {table for family in families.FAMILIES for table in family.tables}
    tables |= {mindformers.KEYS, deepspeed.KEYS, manifest.KEYS, torchtitan.KEYS, *families.LAUNCHER.tables}
    source = "".join(Path(module.__file__).read_text() for module in (facts, manifest, model, read, commands))
    aside = {"tokenizer_type", "load", "config", "command", "output"}
    for table in tables:
        for option in read_table(table):
            if option.target.startswith("@") and option.target[1:] not in aside:
                name = option.target[1:]
                assert f'"{name}"' in source or name.partition("_")[0] in ("decay", "warmup"), name


def test_no_keys_of_the_tables_are_unknown_to_the_job() -> None:
    from clusterctl.jobs.job_check import job_schema

    schema: Any = job_schema()["properties"]
    for family in (*families.FAMILIES, families.LAUNCHER):
        for table in (*family.tables, mindformers.KEYS, deepspeed.KEYS, torchtitan.KEYS):
            for option in read_table(table):
                key = option.target.partition("=")[0]
                if not key or key.startswith(("@", "--", "!")):
                    continue
                place = schema
                for part in key.split("."):
                    place = place.get(part) or next(
                        each["properties"][part]
                        for each in place["anyOf"]
                        if part in each.get("properties", {})
                    )
                    place = {**place.get("properties", {}), "anyOf": place.get("anyOf", [])}


def test_open_quotes_in_a_file_name_its_line(tmp_path: Path) -> None:
    path = tmp_path / "x.sh"
    path.write_text("a\nb 'c\n")
    with pytest.raises(InputFaults, match=r"x\.sh:2"):
        translated(str(path))
