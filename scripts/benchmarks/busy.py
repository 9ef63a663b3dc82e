"""Small copies beside a thread that is busy with pure Python: is there a convoy?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from contenders import BusyThread, Contender, copyto, product, timed, timed_beside_busy
from fetches import SMALL, VECTORS, Fetch, Load, constant, fresh
from harness import Measures, Settings, Spread, interleave
from report import Goal, Report, figure, spread

FAIR_SHARE = 0.5
"""What two threads that both need the interpreter all the time would each get of it."""
ASKED = 0.25
SOLO = "busy thread alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """One load that is run beside the busy thread."""

    name: str
    load: Load
    make_fetch: Callable[[Load], Fetch]

    @property
    def contender(self) -> Contender:
        return product(self.load, lambda: self.make_fetch(self.load))


NEIGHBOURS = (
    Neighbour(name="256×1024, chunks of 1", load=VECTORS.in_chunks_of(1), make_fetch=fresh),
    Neighbour(name="256×1024, chunks of 17", load=VECTORS.in_chunks_of(17), make_fetch=fresh),
    Neighbour(name="8 KB, passed", load=SMALL, make_fetch=fresh),
    Neighbour(name="8 KB, copied", load=SMALL, make_fetch=constant),
)


def beside_busy(settings: Settings) -> Report:
    """Each load alone and beside the busy thread, whose own progress is measured too."""
    contenders: list[Callable[[], Measures]] = [
        lambda: _solo(settings),
        timed("copyto of 1 MB", copyto(VECTORS), settings),
    ]
    for neighbour in NEIGHBOURS:
        quiet, beside, progress = _keys(neighbour)
        contenders.append(timed(quiet, neighbour.contender, settings))
        contenders.append(timed_beside_busy(beside, progress, neighbour.contender, settings))
    rates = interleave(contenders, settings.repetitions)
    copied = rates["copyto of 1 MB"].times(VECTORS.batch_bytes / 1e9)
    return Report(
        case="busy",
        title="beside a thread that is busy with pure Python, in batches/s",
        head=("load", "alone", "beside it", "of the fair half", "busy thread keeps"),
        rows=tuple(_row(neighbour, rates) for neighbour in NEIGHBOURS),
        measures=rates,
        goals=tuple(
            Goal(
                what=f"busy: {neighbour.name}, of its fair half",
                asked=ASKED,
                measured=_of_fair_half(neighbour, rates),
                unit="×",
            )
            for neighbour in NEIGHBOURS
        ),
        notes=(f"copyto of 1 MB, quiet: {spread(copied, 'GB/s')}",),
    )


def _solo(settings: Settings) -> Measures:
    with BusyThread() as busy:
        busy.wait(settings.timed_s)
        return {SOLO: busy.rounds_per_second()}


def _keys(neighbour: Neighbour) -> tuple[str, str, str]:
    name = neighbour.name
    return f"{name}: alone", f"{name}: beside busy", f"{name}: busy thread"


def _of_fair_half(neighbour: Neighbour, rates: dict[str, Spread]) -> Spread:
    quiet, beside, _ = _keys(neighbour)
    return rates[beside].per(rates[quiet].times(FAIR_SHARE))


def _row(neighbour: Neighbour, rates: dict[str, Spread]) -> tuple[str, ...]:
    quiet, beside, progress = _keys(neighbour)
    return (
        neighbour.name,
        spread(rates[quiet]),
        spread(rates[beside]),
        figure(_of_fair_half(neighbour, rates).median),
        f"{rates[progress].per(rates[SOLO]).median:.0%}",
    )
