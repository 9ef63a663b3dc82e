"""One queue that four trainers share: what each of them gets, and how much memory it takes."""

from __future__ import annotations

from collections.abc import Callable

from children import bounded
from contenders import timed
from factories import LOADS
from harness import Measures, Settings, interleave
from report import Goal, Report, rate_cells
from served import served

REPLICAS = 4
ASKED = 0.8
_NAMES = ("images", "vectors", "small")


def shared_queue(settings: Settings) -> Report:
    """Batches of three sizes through shared memory, for one trainer and for each of four: these are
    processes of their own, so with fewer processors than five they take each other's time."""
    measures: list[Callable[[], Measures]] = []
    taken: dict[str, dict[int, int]] = {name: {} for name in _NAMES}
    for name in _NAMES:
        for replicas in (1, REPLICAS):
            contender = served(name, plane="shared", replicas=replicas, arena_bytes=taken[name])
            measures.append(bounded()(timed(_title(name, replicas), contender, settings)))
    rates = interleave(measures, settings.repetitions)
    rows, goals, notes = [], [], []
    for name in _NAMES:
        alone, each = (rates[_title(name, replicas)] for replicas in (1, REPLICAS))
        for replicas, rate in ((1, alone), (REPLICAS, each)):
            rows.append((_title(name, replicas), *rate_cells(rate, alone, LOADS[name].batch_bytes)))
        goals.append(Goal(
            what=f"replicas: {LOADS[name].name}, each of {REPLICAS} against one alone", asked=ASKED,
            measured=each.per(alone), unit="×",
        ))  # fmt: skip
        one, four = (taken[name][replicas] / 1e6 for replicas in (1, REPLICAS))
        notes.append(
            f"{LOADS[name].name}: {one:.1f} MB of shared memory for one, {four:.1f} MB for "
            f"{REPLICAS}"
        )
    return Report(
        case="replicas",
        title=f"batches of a queue that {REPLICAS} trainers share",
        head=("contender", "batches/s", "GB/s", "of one alone"),
        rows=tuple(rows),
        measures=rates,
        goals=tuple(goals),
        notes=tuple(notes),
    )


def _title(name: str, replicas: int) -> str:
    return f"{LOADS[name].name}, " + ("one alone" if replicas == 1 else f"each of {replicas}")
