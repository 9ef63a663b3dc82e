"""What a planted bug is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A mistake that somebody could make in the library, and the tests that are there to see it."""

    name: str
    harm: str
    """What it would do to a user, in a sentence."""
    file: str
    """The file that it is planted in, from the project's folder."""
    symbol: str
    """The definition that it is planted in, by its qualified name: `Merge._round`, or the name of
    a constant. Other code of the file may move, and may look the same."""
    old: str
    """Code that is in this definition exactly once, compared token by token: indentation, line
    breaks, comments and the commas before a closing bracket do not count."""
    new: str
    """What takes its place, put at the indentation of the line that is replaced."""
    tests: tuple[str, ...]
    """Node ids of pytest. Each of them, run by itself, has to fail; of a parametrised test one
    case."""
