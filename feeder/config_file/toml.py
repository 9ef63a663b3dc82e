"""A TOML file, and at which line each of its keys stands."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from typing import Any

from feeder.errors import ConfigError

Path = tuple[str, ...]
"""Where a key is: the tables' names and its own."""

_AT = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TomlFile:
    """A TOML file that has been read."""

    name: str
    """The file's path, as it was given."""
    data: dict[str, Any]
    """Its tables."""
    lines: dict[Path, int]
    """The line, from 1 on, of every key and table that it writes down."""

    def where(self, *path: str) -> str:
        """File and line of a key, or of the nearest table around it that is written down."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.name}:{self.lines[path]}" if path else self.name


def read_toml(name: str | os.PathLike[str]) -> TomlFile:
    """Read a file. Raises `ConfigError` where there is none, or it is no TOML."""
    try:
        with open(name, "rb") as file:
            text = file.read().decode()
    except OSError as error:
        raise ConfigError(
            f"configuration {os.fspath(name)!r} cannot be read: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{os.fspath(name)}: not UTF-8 at byte {error.start}") from error
    return parse_toml(os.fspath(name), text)


def parse_toml(name: str, text: str) -> TomlFile:
    """The tables of a text, and their lines. Raises `ConfigError`, naming the line."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = _AT.search(str(error))
        line = at[1] if at and at[1] else len(text.splitlines())
        # tomllib tells the line at the end of its text; ours stands in front, as in a compiler's.
        said = _AT.sub("", str(error))
        raise ConfigError(f"{name}:{line}: {said[:1].lower()}{said[1:]}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: it is nested too deeply") from error
    return TomlFile(name=name, data=data, lines=_lines(text))


def _lines(text: str) -> dict[Path, int]:
    """The line of every key of a text that is TOML.

    Each statement is TOML by itself, and no beginning of one is: so lines are gathered until they
    can be read.
    """
    found: dict[Path, int] = {}
    table: Path = ()
    gathered, first = "", 1
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        # A multi-line string or array is one statement: its key stands in its first line.
        first = first if gathered else number
        gathered += line
        try:
            statement = tomllib.loads(gathered)
        except tomllib.TOMLDecodeError:
            continue
        if gathered.lstrip().startswith("["):
            table = _header(statement)
            found.setdefault(table, first)
        else:
            for path in _paths(statement):
                found.setdefault(table + path, first)
        gathered = ""
    return found


def _header(statement: dict[str, Any]) -> Path:
    """The path of the table that a header begins."""
    path: Path = ()
    inner: Any = statement
    while isinstance(inner, dict) and inner:
        ((name, inner),) = inner.items()
        path = (*path, name)
    return path


def _paths(value: Any) -> list[Path]:
    """The paths of all keys in nested dicts."""
    if not isinstance(value, dict):
        return []
    return [
        path
        for key, inner in value.items()
        for path in [(key,), *((key, *rest) for rest in _paths(inner))]
    ]
