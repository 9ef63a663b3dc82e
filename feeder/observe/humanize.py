"""Figures and lists as people read them: three digits in the unit that fits, the first names."""

from __future__ import annotations

from collections.abc import Iterable


def duration(seconds: float) -> str:
    """Seconds in the unit that fits."""
    if seconds >= 1.0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def size(num_bytes: float) -> str:
    """Bytes in the unit that fits."""
    for unit in ("B", "kB", "MB"):
        # 999.5 would be shown as 1e+03.
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000.0
    return f"{num_bytes:.3g} GB" if num_bytes < 999.5 else f"{num_bytes:.0f} GB"


def some(names: Iterable[str], separator: str) -> str:
    """The first ten names, and how many more there are: a line of a log or a page that tells all of
    4,096 queues hides what it says."""
    first, others = (names := list(names))[:10], len(names) - 10
    return separator.join(first + [f"and {others} more"] * (others > 0))
