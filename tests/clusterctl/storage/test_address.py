"""Addresses, endpoints and keys of object stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.storage.address import StoreOptions, address_fault, endpoint_fault, is_address, parse_address
from clusterctl.storage.credentials import access_to


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "OBS_ACCESS_KEY_ID",
        "AWS_ENDPOINT_URL",
        "AWS_PROFILE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "nothing"))


@pytest.mark.parametrize("text", ["s3://bucket", "obs://my-bucket.a/deep/folder/", "s3://abc/x y"])
def test_good_addresses(text: str) -> None:
    assert is_address(text) and address_fault(text) == ("", "")
    assert str(parse_address(text) / "run") == text.rstrip("/") + "/run"


@pytest.mark.parametrize(
    "text",
    [
        "s3://",
        "s3://B",
        "s3://a_b",
        "s3://key:secret@bucket/x",
        "s3://bucket/../x",
        "s3://bucket//x",
        "s3://b\n/x",
        "S3://bucket",
    ],
)
def test_bad_addresses_are_refused_without_repeating_a_secret(text: str) -> None:
    fault, remedy = address_fault(text)
    assert fault and remedy and "secret" not in fault


@pytest.mark.parametrize(
    "url", ["ftp://a", "https://", "https://u:secret@host", "https://h/x", "https://h:99999999", "h"]
)
def test_bad_endpoints(url: str) -> None:
    fault, _ = endpoint_fault(url)
    assert fault and "secret" not in fault
    assert endpoint_fault("http://127.0.0.1:9000") == ("", "")


def test_keys_come_from_the_environment_or_a_private_file_and_are_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = parse_address("s3://bucket/x")
    assert access_to(address, StoreOptions()).keys is None
    file = tmp_path / "keys"
    file.write_text("[default]\naws_access_key_id = FILE\naws_secret_access_key = s%cret\n")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="other users can read it"):
        access_to(address, StoreOptions(credentials=str(file)))
    file.chmod(0o600)
    found = access_to(address, StoreOptions(credentials=str(file)))
    assert found.keys == ("FILE", "s%cret", "") and "s%cret" not in repr(found) + str(found)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "other")
    assert access_to(address, StoreOptions()).keys == ("ENV", "other", "")
    file.write_text("[default]\naws_access_key_id secret line\n")
    with pytest.raises(UsageError, match="is not a file of keys") as raised:
        access_to(address, StoreOptions(credentials=str(file)))
    assert "secret line" not in str(raised.value)
    with pytest.raises(UsageError, match="no endpoint is named"):
        access_to(parse_address("obs://bucket"), StoreOptions())
