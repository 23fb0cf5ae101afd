"""Versions that go together: the tables agree with each other, with pyproject.toml and with what reads them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clusterctl.wire import versions

ROOT = Path(__file__).resolve().parents[3]
RELEASES = [(cann, release) for cann, releases in versions.TORCH_NPU.items() for release in releases]


def test_each_table_has_a_source() -> None:
    tables = {
        name for name, value in vars(versions).items() if name.isupper() and isinstance(value, (dict, tuple))
    }
    assert tables - {"SOURCES", "TRAINER_PYTHON", "TRAINER_TORCH"} == versions.SOURCES.keys()


def test_the_trainers_oldest_versions_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    oldest = [".".join(map(str, version)) for version in (versions.TRAINER_PYTHON, versions.TRAINER_TORCH)]
    assert re.findall(r'requires-python = ">=([0-9.]+)"', text) == [oldest[0]]
    assert re.findall(r'"torch>=([0-9.]+),', text) == [oldest[1]] * text.count('"torch>=')


@pytest.mark.parametrize(("cann", "release"), RELEASES)
def test_a_release_goes_with_its_cann_and_with_no_other_of_the_table(cann: str, release: str) -> None:
    assert versions.wrong_torch_npu(f"{cann}.0", release) is None
    assert versions.builds_for(release, "3.10") and not versions.builds_for(release, "3.7")
    others = [other for other, releases in versions.TORCH_NPU.items() if release not in releases]
    for other in others:
        mixed = {cann, other} <= set(versions.MIXED)
        assert (versions.wrong_torch_npu(other, release) is None) == mixed, (cann, release, other)


@pytest.mark.parametrize(
    ("cann", "python", "expected"),
    [
        ("8.2.RC1", "", "2.6.0"), ("8.1", "", "2.5.1"), ("8.1", "3.8", "2.4.0.post4"), ("8.2", "3.12", ""),
        ("9.1.0", "3.14", "2.12.0"), ("9.1.0", "3.9", "2.7.1.post8"), ("5.1", "", ""), ("", "", ""),
    ],
)  # fmt: skip
def test_the_newest_torch_npu_for_a_cann_and_a_python(cann: str, python: str, expected: str) -> None:
    assert versions.newest_for(cann, python) == expected


@pytest.mark.parametrize(("begin", "firmware"), versions.FIRMWARE.items())
def test_a_firmware_goes_with_its_driver_only(begin: str, firmware: str) -> None:
    assert versions.wrong_firmware(f"{begin}.1", f"{firmware}.0.1") is None
    assert (
        versions.wrong_firmware(f"{begin}.1", "") is None and versions.wrong_firmware("22.0", "6.4") is None
    )
    text, remedy = versions.wrong_firmware(f"{begin}.1", "1.84.15") or ("", "")
    assert text.endswith(f"goes with {firmware}") and firmware in remedy


@pytest.mark.parametrize("torch", versions.CUDA)
def test_an_old_driver_gets_the_newest_build_that_it_runs(torch: str) -> None:
    for cuda in versions.CUDA[torch]:
        least = versions.DRIVERS[cuda.partition(".")[0]]
        name = f"torch {torch}.0 for CUDA {cuda}"
        assert versions.needed_driver(name, f"{least}.1") == ""
        assert versions.needed_driver(name, f"{least - 1}.1").startswith(
            f"CUDA {cuda[:2]} needs driver {least}"
        )
    assert "built for CUDA 12" in versions.torch_for(f"torch {torch}.0", "535.104.05")


def test_the_facts_are_counted() -> None:
    """A row that is removed without a word makes this fail."""
    tables = (versions.TORCH_NPU, versions.NPU_PYTHON, versions.FIRMWARE, versions.CUDA, versions.DRIVERS)
    assert [len(RELEASES), *map(len, tables[1:])] == [27, 12, 6, 8, 3]
    assert sum(map(len, versions.CUDA.values())) == 24
