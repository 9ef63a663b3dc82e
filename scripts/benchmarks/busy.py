"""Beside a thread that is busy with pure Python: is there a convoy?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from contenders import (
    BusyThread,
    Contender,
    bare_calls,
    copyto,
    product,
    timed,
    timed_beside_busy,
)
from factories import LOADS
from fetches import SMALL, VECTORS, Fetch, Load, constant, fresh, fresh_holding
from harness import Measures, Settings, Spread, interleave
from report import Goal, Report, figure, spread
from served import served

FAIR_SHARE = 0.5
"""What two threads that both need the interpreter all the time would each get of it."""
ASKED = 0.25
SOLO = "busy thread alone"
COPYTO = "copyto of 1 MB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Something that is run alone and beside the busy thread."""

    name: str
    contender: Contender
    judged: bool = True


def _neighbours() -> Iterator[Neighbour]:
    one, few = VECTORS.in_chunks_of(1), VECTORS.in_chunks_of(17)
    loads = {"256×1024, chunks of 1": one, "256×1024, chunks of 17": few, "8 KB": SMALL}
    for name, load in loads.items():
        yield Neighbour(name=f"{name}, fresh", contender=_product(load, fresh_holding))
        yield Neighbour(name=f"{name}, constant", contender=_product(load, constant))
    for name, load in loads.items():
        yield Neighbour(name=f"{name}, copy()", contender=_product(load, fresh), judged=False)
        yield Neighbour(
            name=f"{name}, copy() and no feed",
            contender=bare_calls(load, fresh(load)),
            judged=False,
        )


def _product(load: Load, make_fetch: Callable[[Load], Fetch]) -> Contender:
    return product(load, lambda: make_fetch(load))


def _consumers() -> Iterator[Neighbour]:
    for plane, names in {"shared": ("images", "vectors", "small"), "frames": ("images",)}.items():
        for name in names:
            yield Neighbour(
                name=f"{LOADS[name].name}, {plane}", contender=served(name, plane=plane)
            )


def beside_busy(settings: Settings) -> Report:
    """Each load alone and beside the busy thread, whose own progress is measured too.

    The loads that are judged keep the interpreter while they fetch. Where the fetch function
    itself lets go of it, a bare loop over that function shows what there is to be had.
    """
    return _beside(_neighbours(), settings)


def consumers_beside_busy(settings: Settings) -> Report:
    """Consumers alone and beside a thread that is busy in the trainer's process."""
    return _beside(_consumers(), settings)


def _beside(found: Iterable[Neighbour], settings: Settings) -> Report:
    neighbours = tuple(found)
    contenders: list[Callable[[], Measures]] = [
        lambda: _solo(settings),
        timed(COPYTO, copyto(VECTORS), settings),
    ]
    for neighbour in neighbours:
        quiet, beside, progress = _keys(neighbour)
        contenders.append(timed(quiet, neighbour.contender, settings))
        contenders.append(timed_beside_busy(beside, progress, neighbour.contender, settings))
    rates = interleave(contenders, settings.repetitions)
    copied = rates[COPYTO].times(VECTORS.batch_bytes / 1e9)
    return Report(
        case="busy",
        title="beside a thread that is busy with pure Python, in batches/s",
        head=("load", "alone", "beside it", "of the fair half", "busy thread keeps"),
        rows=tuple(_row(neighbour, rates) for neighbour in neighbours),
        measures=rates,
        goals=tuple(
            Goal(
                what=f"busy: {neighbour.name}, of its fair half",
                asked=ASKED,
                measured=_of_fair_half(neighbour, rates),
                unit="×",
            )
            for neighbour in neighbours
            if neighbour.judged
        ),
        notes=(f"{COPYTO}, quiet: {spread(copied, 'GB/s')}",),
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
