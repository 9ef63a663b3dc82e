"""Paths that are none, alike for every source that takes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feeder.workers.errors import ConfigError
from feeder.workers.sources import caffe2_lmdb, caffe_lmdb, image_folder, tokens
from feeder.workers.sources.arguments import list_paths

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
