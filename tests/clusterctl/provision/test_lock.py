"""Lock files: what is accepted, and every error with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import InputFaults, UsageError
from clusterctl.provision.lock import parse_lock, read_lock

A, B = "a" * 64, "b" * 64


def test_a_lock_of_pip_tools_and_one_of_ours_are_the_same() -> None:
    long = f"""
# made by a tool
--index-url https://mirror.example/simple
Some_Package[extra]==1.2.3 ; python_version >= "3.8" \\
    --hash=sha256:{B} \\
    --hash=sha256:{A}
    # via other
other==2.0 --hash=sha256:{A}  # a comment
"""
    short = f"""other==2.0 --hash=sha256:{A}
some-package==1.2.3 ; python_version >= "3.8" --hash=sha256:{A} --hash=sha256:{B}
"""
    lock = parse_lock(long, "long.txt")
    assert lock.text == short
    assert lock.fingerprint("python3") == parse_lock(short, "short.txt").fingerprint("python3")
    assert lock.fingerprint("python3") != lock.fingerprint("python3.11")
    assert [pin.line for pin in lock.pins] == [4, 8]


def test_all_errors_of_a_lock_are_reported_with_their_lines() -> None:
    text = f"""one>=1.0
two==2.0
three==3.0 --hash=md5:abc
-e ./four
five @ https://example.org/five.whl
six==6.0,!=6.1 --hash=sha256:{A}
seven==7.0 --hash=sha256:{A}
seven==7.1 --hash=sha256:{B}
--trusted-host example.org
"""
    with pytest.raises(InputFaults) as raised:
        parse_lock(text, "bad.lock")
    assert [fault.where for fault in raised.value.faults] == [f"bad.lock:{n}" for n in (1, 2, 3, 4, 5, 8, 9)]
    assert "'one>=1.0' pins no version" in str(raised.value)
    assert "two has no SHA-256" in str(raised.value)
    assert "seven is also in line 7" in str(raised.value)


@pytest.mark.parametrize(("content", "text"), [(b"", "contains no package"), (b"\xff\xfe", "is not UTF-8")])
def test_a_file_that_is_no_lock_is_refused(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "lock").write_bytes(content)
    with pytest.raises(UsageError, match=text):
        read_lock(tmp_path / "lock")
    with pytest.raises(UsageError, match="No such file"):
        read_lock(tmp_path / "nothing")
