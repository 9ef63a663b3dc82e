"""Arguments of sources as users give them, checked: numbers, flags, names and paths."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from glob import glob, has_magic
from itertools import pairwise
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


def list_files(
    paths: PathLike | Iterable[PathLike], what: str, suffixes: Sequence[str] = ()
) -> list[str]:
    """Files by a path or several. Of a folder those at any depth whose names have one of the
    suffixes, in the order of their paths; braces as "{000..099}" and "{train,test}" stand for all
    that they name, in their order; a pattern such as "shards/*.tar" for the files that fit, sorted.
    Without suffixes a folder stands for itself.

    Raises:
        ConfigError: there is none.
    """
    return [file for path in list_paths(paths, what) for file in _files_of(path, what, suffixes)]


def _files_of(path: str, what: str, suffixes: Sequence[str]) -> list[str]:
    # A file that is called like a pattern is that file.
    if os.path.exists(path):
        return _files_in(path, what, suffixes) if suffixes and os.path.isdir(path) else [path]
    if (braced := unbraced(path)) != [path]:
        return [file for one in braced for file in _files_of(one, what, suffixes)]
    if not has_magic(path):
        return [path]
    found = [
        file
        for one in sorted(glob(path, recursive="**" in path))
        for file in _files_of(one, what, suffixes)
    ]
    if not found:
        raise ConfigError(f"{path!r} fits no file, expected {what}")
    return found


def _files_in(folder: str, what: str, suffixes: Sequence[str]) -> list[str]:
    """The files of a folder whose names have a suffix, hidden ones and hidden folders left out."""

    def fail(error: OSError) -> None:
        raise ConfigError(f"{error.filename!r} cannot be read: {error.strerror}") from error

    found = []
    for within, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        # Spark and others mark what is no data with "_".
        folders[:] = [name for name in folders if name[0] not in "._"]
        found += [
            os.path.join(within, name)
            for name in names
            if name[0] not in "._" and has_suffix(name, suffixes)
        ]
    if not found:
        told = ", ".join(f".{suffix}" for suffix in suffixes)
        raise ConfigError(f"{folder!r} is a folder without {what}: no name has {told}")
    return sorted(found)


def has_suffix(name: str, suffixes: Iterable[str]) -> bool:
    """Whether a file's name has one of these suffixes, perhaps before others: "x.tar" and
    "x.tar.gz" have "tar", and "x.tfrecord-00001-of-00010" has "tfrecord"."""
    parts = [part.partition("-")[0] for part in name.lower().split(".")[1:]]
    return not set(suffixes).isdisjoint(parts)


_RANGE = re.compile(r"(?:(-?\d+)\.\.(-?\d+)|([a-z])\.\.([a-z])|([A-Z])\.\.([A-Z]))(?:\.\.(-?\d+))?")


def unbraced(path: str) -> list[str]:
    """What a path with braces names, as shells and WebDataset expand it."""
    start, depth, cuts = path.find("{"), 0, []
    for at in range(start, len(path)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(path[at], 0)
        if path[at] == "," and depth == 1:
            cuts.append(at)
        if not depth:
            break
    else:
        # Without braces, or with one that nothing closes.
        head, rest = path[: start + 1], path[start + 1 :]
        return [head + one for one in unbraced(rest)] if head else [rest]
    parts = [path[a + 1 : b] for a, b in pairwise([start, *cuts, at])]
    named = _range(parts[0]) or unbraced(parts[0])
    if cuts:
        named = [one for part in parts for one in unbraced(part)]
    elif not _RANGE.fullmatch(parts[0]):
        # Braces that name nothing stay what they are.
        named = [f"{{{one}}}" for one in named]
    rests = unbraced(path[at + 1 :])
    return [path[:start] + one + rest for one in named for rest in rests]


def _range(text: str) -> list[str]:
    """The numbers or letters of a range; none of any other text."""
    if not (found := _RANGE.fullmatch(text)):
        return []
    first, last, *step = (one for one in found.groups() if one is not None)
    is_number = found[1] is not None
    start, stop = (int(one) if is_number else ord(one) for one in (first, last))
    by = abs(int(step[0])) or 1 if step else 1
    numbers = range(start, stop + 1, by) if stop >= start else range(start, stop - 1, -by)
    if not is_number:
        return [*map(chr, numbers)]
    # As many digits as the longer one has, if one begins with a zero.
    padded = any(re.match(r"-?0\d", one) for one in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{number:0{width}d}" for number in numbers]


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
