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
    old: str
    """Text that is in this file exactly once."""
    new: str
    """What takes its place."""
    tests: tuple[str, ...]
    """Node ids of pytest. Each of them, run by itself, has to fail; of a parametrised test one
    case."""
