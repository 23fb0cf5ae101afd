"""The strict reader: the yaml traps that were seen to bite, and where each message points."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.document import MAX_BYTES, Section, load_document, parse_document, secrets_in
from clusterctl.errors import InputFaults, UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.5", 1.5),
        (".5", 0.5),
        ("100", 100),
        ("-3", -3),
        ("no", "no"),
        ("22:22", "22:22"),
        ("0010", "0010"),
        ("1_0", "1_0"),
        ("true", True),
        ("null", None),
        ("'12'", "12"),
        ("2026-01-01", "2026-01-01"),
        (".inf", ".inf"),
        ("0x10", "0x10"),
        # No key takes such a number, and an account keeps its digits.
        ("12345678901234567890", "12345678901234567890"),
    ],
)
def test_a_scalar_is_read_as_a_person_means_it(text: str, value: object) -> None:
    assert parse_document(f"key: {text}", "f.yaml").value == {"key": value}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\na: 2\n", "f.yaml:2: the key 'a' is given twice"),
        ("a: !!python/object:os.system x\n", "not allowed"),
        ("a: !mine [1]\n", "not allowed"),
        ("a: {b: [1, 2}\n", "f.yaml:1:"),
        ("\tkey: 1\n", "f.yaml:1:"),
        ("[" * 20000, "deep"),
        (
            "a: &a [x,x]\nb: &b [" + ",".join(["*a"] * 900) + "]\nc: [" + ",".join(["*b"] * 900) + "]\n",
            "too large",
        ),
        ("? [1, 2]\n: 3\n", "a key must be a word"),
    ],
)
def test_a_hostile_or_broken_file_is_a_fault_with_its_place(text: str, says: str) -> None:
    with pytest.raises(InputFaults) as caught:
        parse_document(text, "f.yaml")
    assert says in str(caught.value)


def test_a_missing_a_huge_and_a_binary_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_document(tmp_path / "none.yaml")
    (tmp_path / "huge.yaml").write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(UsageError, match="larger than"):
        load_document(tmp_path / "huge.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_document(tmp_path / "binary.yaml")
    with pytest.raises(UsageError, match=str(tmp_path)):
        load_document(tmp_path)


def test_all_faults_of_a_section_are_told_at_once_with_near_misses() -> None:
    section = Section(parse_document("stpes: 3\nlr: fast\nname: [1]\n", "job.yaml"))
    section.take("steps", int)
    section.take("lr", float)
    section.take_text("name")
    section.done()
    text = "\n".join(map(str, section.faults))
    assert "job.yaml:1 stpes: unknown key 'stpes' (did you mean 'steps'?)" in text
    assert "job.yaml:2 lr: must be a number, not 'fast' (as in 0.5 or 1e-4)" in text
    assert "job.yaml:3 name: must be text, not [1]" in text


def test_true_is_no_number_and_an_int_serves_for_a_float() -> None:
    section = Section(parse_document("a: true\nb: 3\n", "f"))
    assert section.take("a", int, 7) == 7
    assert section.take("b", float) == 3.0
    assert len(section.faults) == 1


def test_what_no_text_and_no_json_can_hold_is_refused_at_its_line() -> None:
    with pytest.raises(InputFaults) as caught:
        parse_document('a: 1e999\nb: "\\ud800"\n"c\\udfff": 1\n', "job.yaml")
    assert [fault.where for fault in caught.value.faults] == ["job.yaml:1", "job.yaml:2", "job.yaml:3"]


def test_secrets_are_known_by_their_names_or_a_password_in_an_address() -> None:
    secret = {
        "HF_TOKEN": "abc",
        "GITHUBTOKEN": "abc",
        "aws_secret_access_key": "abc",
        "WANDB_API_KEY": "abc",
        "DB_PASSWORD": "abc",
        "http_proxy": "http://me:abc@proxy:3128",
    }
    harmless = {
        "TOKENIZERS_PARALLELISM": "false",
        "TOKENIZER": "gpt2",
        "MAX_TOKENS": "4096",
        "HF_TOKEN_PATH": "/run/token",
        "PAD_TOKEN": "[PAD]",
        "KEYBOARD": "us",
        "USE_TOKEN": "1",
        "https_proxy": "http://proxy:3128",
        "ENDPOINT": "tcp://10.0.0.1:2379/a@b",
        # Nearly an address, a million times: the search takes no longer for it.
        "LONG": "a" * 1_000_000 + "://" + ":" * 1_000_000,
    }
    assert secrets_in({**harmless, **secret}) == list(secret)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("nodes: {node[1-4]: {host: a}}\n", 'put a name with brackets in quotes: {"node[1-4]": ...}'),
        ("nodes:\n\tnode1: {}\n", "indent with spaces, not tabs"),
        ("nodes: 'node1\n", "check quotes, colons and the indentation"),
    ],
)
def test_a_text_that_is_not_yaml_names_what_to_change(text: str, remedy: str) -> None:
    with pytest.raises(InputFaults) as caught:
        parse_document(text, "cluster.yaml")
    assert [fault.remedy for fault in caught.value.faults] == [remedy]
