"""Arguments of sources as users give them, checked: numbers, flags, names and paths."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeAlias

from feeder.workers.errors import ConfigError

PathLike: TypeAlias = str | os.PathLike[str]


def list_paths(paths: PathLike | Iterable[PathLike], what: str) -> list[str]:
    """One path, or several, as a list; `what` says of what, such as "an LMDB folder".

    Raises:
        ConfigError: there is none, or it is no path.
    """
    # A string is iterable too: it is one path, not one per letter.
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


def check_names(options: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise a ConfigError where an option has none of the names, with the one it is like."""
    for name in options:
        if name not in names:
            # A misspelt option is the usual mistake, so the error says which one was meant.
            near = get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}" if near else f"expected {', '.join(names)}"
            raise ConfigError(f"unknown option {name!r}: {hint}")


def whole(name: str, value: Any, least: int = 0) -> int:
    """A whole number of at least `least`, else a ConfigError that names the option."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    # True is 1 to Python, and nearly always a mistake here.
    if number is None or isinstance(value, bool) or number < least:
        raise ConfigError(f"{name} is {value!r}, expected a whole number of at least {least}")
    return number


def flag(name: str, value: Any) -> bool:
    """True or False, else a ConfigError that names the option."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, expected True or False")
    return value
