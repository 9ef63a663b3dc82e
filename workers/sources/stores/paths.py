"""Paths as users give them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeAlias

from feeder.workers.errors import ConfigError

PathLike: TypeAlias = str | os.PathLike[str]


def list_paths(paths: PathLike | Iterable[PathLike], what: str) -> list[str]:
    """One path, or several, as a list; `what` says of what, such as "an LMDB folder".

    Raises:
        ConfigError: there is none, or it is no path.
    """
    if isinstance(paths, (str, bytes, os.PathLike)) or not isinstance(paths, Iterable):
        return [check_path(paths, what)]
    listed = [check_path(path, what) for path in paths]
    if not listed:
        raise ConfigError(f"no path is given, expected that of {what}")
    return listed


def check_path(path: Any, what: str) -> str:
    """A path as a string.

    Raises:
        ConfigError: it is no path.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text:
        raise ConfigError(f"path is {path!r}, expected that of {what} as a string or a Path")
    return text
