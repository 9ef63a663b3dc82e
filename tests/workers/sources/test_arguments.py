"""What sources are given and cannot be: paths, alike for every source that takes one, and options
of orders."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feeder.workers.errors import ConfigError
from feeder.workers.sources import Source, arrays, caffe2_lmdb, caffe_lmdb, image_folder, tokens
from feeder.workers.sources.arguments import list_files, list_paths
from feeder.workers.sources.array_rows import ArrayRecords

TAKERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "caffe_lmdb": (caffe_lmdb, "an LMDB folder"),
    "caffe2_lmdb": (caffe2_lmdb, "an LMDB folder"),
    "image_folder": (image_folder, "a folder of class folders"),
    "tokens": (lambda path: tokens(path, 4, np.uint16), "a file of tokens"),
}


@pytest.mark.parametrize("path", [None, 5, b"/tmp", ""])
@pytest.mark.parametrize(("take", "what"), TAKERS.values(), ids=TAKERS.keys())
def test_what_is_no_path(take: Callable[[Any], Any], what: str, path: Any) -> None:
    message = f"^path is {path!r}, expected that of {what} as a string or a Path$"
    with pytest.raises(ConfigError, match=message):
        take(path)


@pytest.mark.parametrize("name", ["caffe_lmdb", "caffe2_lmdb", "tokens"])
def test_several_paths_of_which_one_is_none(name: str) -> None:
    take, what = TAKERS[name]
    with pytest.raises(ConfigError, match=f"^path is None, expected that of {what}"):
        take([None])
    with pytest.raises(ConfigError, match=f"^no path is given, expected that of {what}$"):
        take([])


def test_paths_of_all_kinds() -> None:
    assert list_paths("a", "a file") == list_paths(Path("a"), "a file") == ["a"]
    assert list_paths(("a", Path("b")), "a file") == ["a", "b"]
    assert list_paths((name for name in "ab"), "a file") == ["a", "b"]


# ---- orders


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_shards": 11}, r"num_shards is 11, more than the 10 records of the source"),
        ({"num_shards": 0}, r"num_shards is 0, expected a whole number of at least 1"),
        ({"num_shards": 2.0}, r"num_shards is 2\.0, expected a whole number"),
        ({"shard_id": 1}, r"shard_id is 1, expected 0 to 0 \(num_shards is 1\)"),
        ({"shard_id": -1}, r"shard_id is -1, expected a whole number of at least 0"),
        ({"shard_id": True}, r"shard_id is True, expected a whole number"),
        ({"order": "alphabetic"}, r"order is 'alphabetic', expected one of \('feeder', 'dali'\)"),
        ({"random_shuffle": 1}, r"random_shuffle is 1, expected True or False"),
        ({"stick_to_shard": None}, r"stick_to_shard is None, expected True or False"),
        ({"pad_last_batch": "no"}, r"pad_last_batch is 'no', expected True or False"),
        ({"initial_fill": 0}, r"initial_fill is 0, expected a whole number of at least 1"),
        (
            {"initial_fill": 5, "random_shuffle": True},
            r"initial_fill is the window of order='dali'",
        ),
        ({"seed": -1}, r"seed is -1, expected a whole number of at least 0"),
        ({"seed": -1, "order": "dali"}, r"seed is -1, expected a whole number of at least 0$"),
        (
            {"seed": -5, "order": "dali"},
            r"^seed is -5, expected 0 to 2\*\*64 - 1: -5 % 2\*\*64 gives DALI's sequence$",
        ),
        (
            {"order": "dali", "shuffle_after_epoch": True, "shuffle_after_epoch_seed": -1},
            r"^shuffle_after_epoch_seed is -1, .*: -1 % 2\*\*64 gives DALI's sequence$",
        ),
        ({"seed": 2**64}, r"seed is 18446744073709551616, expected 0 to 2\*\*64 - 1"),
        ({"shuffle_after_epoch": True}, r"shuffle_after_epoch belongs to order='dali'"),
        (
            {"order": "dali", "shuffle_after_epoch": True, "random_shuffle": True},
            r"random_shuffle and shuffle_after_epoch exclude each other: choose one",
        ),
        (
            {"order": "dali", "shuffle_after_epoch": True, "stick_to_shard": True},
            r"stick_to_shard and shuffle_after_epoch exclude each other",
        ),
        ({"order": "dali", "shuffle_after_epoch": "yes"}, r"shuffle_after_epoch is 'yes'"),
        ({"shuffle_after_epoch_seed": 3}, r"is given without shuffle_after_epoch"),
        ({"num_shard": 2}, r"unknown option 'num_shard': did you mean 'num_shards'"),
        ({"xyz": 2}, r"unknown option 'xyz': expected order, shard_id"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arrays(np.arange(10), **options)


def test_a_shuffled_list_is_another_order() -> None:
    options: dict[str, Any] = {"order": "dali", "random_shuffle": True}
    labels = ArrayRecords({0: np.arange(10)})
    told = [Source(labels, list_shuffle=flag, **options).describe() for flag in (False, True)]
    assert [fields["shuffle"] for fields in told] == ["dali", "dali, of a list"]


FILES = [
    "a/00.x", "a/01.x.gz", "a/02.x-1", "a/b/03.x", "a/b/04.y", "a/.h/05.x", "a/_t/06.x", "7{1,2}.x",
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "found"),
    {
        "a": [0, 1, 2, 3],
        "a/*": [0, 1, 2, 6, 3],
        "a/0*.x": [0],
        "a/**/0[34].x": [3],
        "{a/b/03,a/00}.x": [3, 0],
        "a/{00..02}.{x,x.gz,x-1}": [0, 1, 2],
        "{a/b,a/0{0,2}.x*}": [3, 0, 2],
        "7{1,2}.x": [7],
        "7*.x": [7],
    }.items(),
)
def test_folders_braces_and_patterns_name_files(
    given: str, found: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("")
    listed = list_files(given, "a file", ("x",))
    assert [one for one in listed if os.path.exists(one)] == [FILES[i] for i in found]
    # A name that braces stand for need not be there: who opens it says so.
    assert len(listed) == (9 if "x-1" in given else len(found))


def test_a_folder_or_a_pattern_without_a_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder without a file: no name has \.x, \.y"):
        list_files(tmp_path, "a file", ("x", "y"))
    with pytest.raises(ConfigError, match=r"fits no file, expected a file"):
        list_files(tmp_path / "*{1,2}", "a file", ("x",))
    assert list_files(tmp_path, "a folder") == [str(tmp_path)]
