"""Settings in their order: environment over the project's file over the user's own over the default."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import InputFaults, UsageError
from clusterctl.settings import duration, inherited, load_settings


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CLUSTER", "RUNS", "FANOUT", "CONNECT_TIMEOUT", "PERSIST"):
        monkeypatch.delenv(f"CLUSTERCTL_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


def test_the_nearest_word_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    user = tmp_path / "xdg" / "clusterctl" / "config.yaml"
    user.parent.mkdir(parents=True)
    user.write_text("fanout: 4\nconnect_timeout: 3\n")
    assert load_settings(tmp_path).fanout == 4
    (tmp_path / "clusterctl.yaml").write_text("fanout: 8\ncluster: lab.yaml\n")
    settings = load_settings(tmp_path)
    assert (settings.fanout, settings.connect_timeout, settings.cluster) == (
        8,
        3.0,
        str(tmp_path / "lab.yaml"),
    )
    monkeypatch.setenv("CLUSTERCTL_FANOUT", "16")
    assert load_settings(tmp_path).fanout == 16


def test_an_unknown_key_and_a_word_for_a_number_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "clusterctl.yaml").write_text("fannout: 8\nconnect_timeout: soon\n")
    with pytest.raises(InputFaults) as caught:
        load_settings(tmp_path)
    assert "did you mean 'fanout'?" in str(caught.value) and "not 'soon'" in str(caught.value)
    (tmp_path / "clusterctl.yaml").unlink()
    monkeypatch.setenv("CLUSTERCTL_FANOUT", "many")
    with pytest.raises((UsageError, InputFaults), match="CLUSTERCTL_FANOUT"):
        load_settings(tmp_path)


def test_only_named_variables_are_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_A", "1")
    assert inherited(("MY_A", "NOT_THERE_AT_ALL")) == {"MY_A": "1"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("10m", 600),
        ("1.5h", 5400),
        ("1d", 86400),
        ("off", 0),
        ("0", 0),
        (" 10M ", 600),
    ],
)
def test_a_time_to_keep_connections_is_said_as_people_say_it(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1", "10 weeks", "1e9", "inf", "9999d", "m"])
def test_what_is_no_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        duration(text)
    assert "10m" in caught.value.hint


def test_the_time_to_keep_connections_comes_from_file_or_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert load_settings(tmp_path).persist == "off"
    (tmp_path / "clusterctl.yaml").write_text("persist: 600\n")
    assert load_settings(tmp_path).persist == "600"
    monkeypatch.setenv("CLUSTERCTL_PERSIST", "10m")
    assert load_settings(tmp_path).persist == "10m"
    (tmp_path / "clusterctl.yaml").write_text("persist: forever\n")
    with pytest.raises(InputFaults, match=r"clusterctl\.yaml:1 persist: 'forever' is not a duration"):
        load_settings(tmp_path)
