"""An index is built once, kept whole, and never taken for another's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.config.data import DataConfig
from trainer.corpus.indexed import Writer
from trainer.samples.cache import (
    Arrays,
    IndexCache,
    locked,
    prune,
)
from trainer.samples.dataset import Data

ROOT = Path(__file__).resolve().parents[3]
ABOUT = {"index": "test", "bounds": (1, 2), "seed": 7, "share": 0.1}


def some() -> Arrays:
    return {
        "a": np.arange(5, dtype=np.int16),
        "b": np.arange(6).reshape(3, 2),
        "none": np.zeros(0, np.uint32),
    }


def never() -> Arrays:
    raise AssertionError("built again")


def same(found: Arrays) -> bool:
    pairs = [(found[name], array) for name, array in some().items()]
    return all(one.dtype == two.dtype and np.array_equal(one, two) for one, two in pairs)


def files(folder: Path) -> list[Path]:
    return list(folder.glob("*.index"))


def test_what_was_built_is_there_for_the_next_process(tmp_path: Path) -> None:
    assert same(IndexCache(tmp_path / "deep" / "er").arrays(ABOUT, some))
    cache = IndexCache(tmp_path / "deep" / "er")
    assert same(cache.arrays(ABOUT, never)) and not cache.built and not cache.notes
    with pytest.raises(AssertionError, match="built again"):
        cache.arrays({**ABOUT, "seed": 8}, never)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: content[:40],
        lambda content: b"",
        lambda content: b"\xff" * len(content),
        lambda content: b"[" * 5000 + b"\n",
        lambda content: content.replace(b'"seed": 7', b'"seed": 6'),
        lambda content: content.replace(b"<i2", b"|O8"),
        lambda content: content.replace(b'"shape": [5]', b'"shape": [9000]'),
    ],
)
def test_an_index_that_is_not_whole_is_built_anew(tmp_path: Path, damage: Any) -> None:
    IndexCache(tmp_path).arrays(ABOUT, some)
    (file,) = files(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    cache = IndexCache(tmp_path)
    assert same(cache.arrays(ABOUT, some)) and cache.built == 1
    assert same(IndexCache(tmp_path).arrays(ABOUT, never))


def test_without_a_place_to_write_the_index_is_kept_in_memory_and_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = IndexCache(tmp_path / "file" / "below")
    assert same(cache.arrays(ABOUT, some))
    assert cache.notes == [
        f"note: {tmp_path}/file/below: Not a directory; each rank has its own index in memory"
    ]
    assert same(IndexCache(None).arrays(ABOUT, some))


BUILDER = """
import sys, time
from pathlib import Path
import numpy as np
from trainer.samples.cache import IndexCache
folder = Path(sys.argv[1])

def build():
    (folder / f"built-{sys.argv[2]}").touch()
    while not (folder / "go on").exists():
        time.sleep(0.01)
    return {"a": np.arange(1000)}

print(int(IndexCache(folder).arrays({"index": "race"}, build)["a"].sum()))
"""


def builder(folder: Path, name: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", BUILDER, str(folder), name]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def wait_for(*paths: Path) -> None:
    while not any(path.exists() for path in paths):
        time.sleep(0.01)


def test_of_several_processes_one_builds_and_the_others_wait(tmp_path: Path) -> None:
    all_of_them = [builder(tmp_path, str(i)) for i in range(3)]
    wait_for(*(tmp_path / f"built-{i}" for i in range(3)))
    (tmp_path / "go on").touch()
    assert [one.communicate()[0] for one in all_of_them] == ["499500\n"] * 3
    assert len(list(tmp_path.glob("built-*"))) == 1


def test_a_builder_that_is_killed_leaves_the_work_to_the_next(tmp_path: Path) -> None:
    first = builder(tmp_path, "first")
    wait_for(tmp_path / "built-first")
    second = builder(tmp_path, "second")
    first.kill()
    first.communicate()
    (tmp_path / "go on").touch()
    assert second.communicate()[0] == "499500\n"
    assert (tmp_path / "built-second").exists()


def test_what_nothing_uses_makes_room(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    cache.arrays(ABOUT, some)
    cache.arrays({**ABOUT, "seed": 1}, some)
    old, young = sorted(files(tmp_path), key=lambda file: b'"seed": 1' in file.read_bytes())
    (tmp_path / ".x.index.7.tmp").touch()
    for path in (old, tmp_path / ".x.index.7.tmp", old.with_suffix(".lock")):
        os.utime(path, (1e9, 1e9))
    prune(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([young, young.with_suffix(".lock")])


def test_use_keeps_an_index_young(tmp_path: Path) -> None:
    IndexCache(tmp_path).arrays(ABOUT, some)
    (file,) = files(tmp_path)
    os.utime(file, (1e9, 1e9))
    IndexCache(tmp_path).arrays(ABOUT, never)
    prune(tmp_path)
    assert file.exists()


def test_a_lock_is_free_again_after_its_use(tmp_path: Path) -> None:
    for _ in range(2):
        with locked(tmp_path / "one.lock"):
            pass


def test_data_replaced_in_place_gets_an_index_of_its_own(tmp_path: Path) -> None:
    """Megatron's caches know a corpus by its path alone, and serve a new one with the old one's order."""

    def written(lengths: list[int]) -> DataConfig:
        with Writer(tmp_path / "corpus", np.uint16) as writer:
            for length in lengths:
                writer.add_document([[1] * length])
        return DataConfig(str(tmp_path / "corpus"), split="1")

    caches = [IndexCache(tmp_path / "cache") for _ in range(3)]
    first = Data(written([20] * 10), 8, caches[0]).samples("train", 30)
    Data(written([20] * 10), 8, caches[1]).samples("train", 30)
    other = Data(written([30] * 10), 8, caches[2]).samples("train", 30)
    assert [cache.built for cache in caches] == [1, 0, 1]
    # 2 epochs of 200 tokens, one of 300.
    assert (len(first), len(other)) == (49, 37)


def test_the_same_order_serves_any_number_of_samples_that_it_has(tmp_path: Path) -> None:
    with Writer(tmp_path / "corpus", np.uint16) as writer:
        for _ in range(10):
            writer.add_document([[1] * 100])
    config, cache = DataConfig(str(tmp_path / "corpus"), split="1"), IndexCache(tmp_path / "cache")
    for count in (10, 11, 124):
        Data(config, 8, cache).samples("train", count)
    assert cache.built == 1
