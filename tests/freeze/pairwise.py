"""A few cases in which every two values of every two settings meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def pairwise(
    settings: Mapping[str, Sequence[Any]], may_be: Callable[[Case], bool] = lambda case: True
) -> list[Case]:
    """Choose from all cases that may be, always the first of those that hold the most new pairs."""
    cases = [dict(zip(settings, values, strict=True)) for values in product(*settings.values())]
    pairs = [(case, set(combinations(case.items(), 2))) for case in cases if may_be(case)]
    missing = set().union(*(held for _, held in pairs))
    chosen = []
    while missing:
        case, held = max(pairs, key=lambda pair: len(pair[1] & missing))
        chosen.append(case)
        missing -= held
    return chosen


def name_of(case: Case) -> str:
    """A case by its settings."""
    return ", ".join(f"{name} {value}" for name, value in case.items())
