"""Settings written as TOML, each with who gave it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from feeder.config_file.settings import DEFAULT, Settings, Table


def show(settings: Settings) -> Iterator[str]:
    """The lines of a TOML file that says the same, with a comment on each."""
    tables = {"server": settings.server, "checkpoint": settings.checkpoint}
    tables |= {f"feeds.{_key(name)}": table for name, table in settings.feeds.items()}
    written = [(name, table) for name, table in tables.items() if table]
    for number, (name, table) in enumerate(written):
        yield from [""] * (number > 0)
        yield f"[{name}]"
        yield from _show(table)


def _show(table: Table) -> Iterator[str]:
    lines = {
        # A dot is of a source's options: it is TOML's own for a table in the table.
        ".".join(map(_key, key.split(".", 1))): setting
        for key, setting in table.items()
    }
    for key, (value, origin) in lines.items():
        is_unset = value is None and origin == DEFAULT
        text = f"# {key} is not set" if is_unset else f"{key} = {_value(value)}"
        yield f"{text:<44}  # {origin}"


def _key(name: str) -> str:
    is_bare = name.replace("-", "_").isascii() and name.replace("-", "_").isidentifier()
    return name if is_bare else json.dumps(name)


def _value(value: Any) -> str:
    """A value as TOML."""
    if value is None:
        return "inf"
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
