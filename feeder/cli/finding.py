"""One finding about the machine: how bad it is, what it is, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one look at the machine found."""

    level: Literal["ok", "warning", "problem"]
    """How bad it is; a problem keeps feeder from working."""
    text: str
    """What was found."""
    cure: str = ""
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.text}" + (f": {self.cure}" if self.cure else "")


def ok(text: str) -> Finding:
    """Nothing stands in the way."""
    return Finding(level="ok", text=text)


def warning(text: str, cure: str) -> Finding:
    """It works, but worse than it could."""
    return Finding(level="warning", text=text, cure=cure)


def problem(text: str, cure: str) -> Finding:
    """It does not work."""
    return Finding(level="problem", text=text, cure=cure)
