"""One finding about the machine: how bad it is, what it is, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding about the machine."""

    level: Literal["ok", "warning", "problem"]
    """How bad it is; a problem keeps feeder from working."""
    text: str
    """The finding itself."""
    cure: str = ""
    """The advice; empty where there is nothing to do."""

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
