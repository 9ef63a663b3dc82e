"""Seconds and bytes as people read them: three digits, in the unit that fits."""

from __future__ import annotations


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
