"""The names of a writer's own sequence of checkpoints: its name, a dot, and a number that grows."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"[0-9]+")


def name(writer: str, number: int) -> str:
    """The name of one of a writer's sequence."""
    return f"{writer}.{number:08d}"


def number_of(writer: str, name: str) -> int:
    """Which of a writer's sequence has a name; -1 where none has."""
    number = name.removeprefix(f"{writer}.")
    return int(number) if number != name and _NUMBER.fullmatch(number) else -1


def sort(writer: str, names: Iterable[str]) -> list[str]:
    """Those of the names that belong to a writer's sequence, from old to new."""
    numbers = {name: number_of(writer, name) for name in names}
    return sorted((name for name in numbers if numbers[name] >= 0), key=numbers.__getitem__)
