"""A tokenizer and files of conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tuning import write_files


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("chat"))
