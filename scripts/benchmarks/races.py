"""The product over the original algorithm: batches per second, rows lost, rows out of order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from audit import Audit, audit_original, audit_product
from contenders import copyto, original, product, timed
from fetches import IMAGES, SMALL, VECTORS, Fetch, Load, constant, fresh
from harness import Settings, Spread, interleave
from report import Goal, Report, rate_cells, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """A load on which both are measured, and the ratio that is asked for."""

    case: str
    load: Load
    make_fetch: Callable[[Load], Fetch] = constant
    asked: float | None = None
    ambitious: float | None = None
    audited: bool = True

    @property
    def title(self) -> str:
        how = "the same array by" if self.make_fetch is constant else "allocated afresh by"
        return f"batches of {self.load.name}, {how} each call"


RACES = (
    Race(case="images-32", load=IMAGES.in_chunks_of(32), make_fetch=fresh, asked=2.5, ambitious=4),
    Race(case="images-7", load=IMAGES.in_chunks_of(7), asked=3.5, ambitious=4),
    Race(case="images-7-fresh", load=IMAGES.in_chunks_of(7), make_fetch=fresh, audited=False),
    Race(case="images-100", load=IMAGES.in_chunks_of(100)),
    Race(case="vectors-1", load=VECTORS.in_chunks_of(1), asked=25, ambitious=35),
    Race(case="vectors-1-fresh", load=VECTORS.in_chunks_of(1), make_fetch=fresh, audited=False),
    Race(case="vectors-17", load=VECTORS.in_chunks_of(17), asked=8, ambitious=10),
    Race(case="vectors-17-fresh", load=VECTORS.in_chunks_of(17), make_fetch=fresh, audited=False),
    Race(
        case="vectors-256", load=VECTORS.in_chunks_of(256), make_fetch=fresh, asked=2.5, ambitious=4
    ),
    Race(case="small-64", load=SMALL.in_chunks_of(64), make_fetch=fresh, asked=2.5, ambitious=4),
)
"""Small chunks are judged with a constant array, which leaves the cost of the machinery alone; what
the two do with fresh ones, where both wait for the same allocations, stands beside it."""


def run_race(race: Race, settings: Settings) -> Report:
    """The product, the original and a plain copy on one load, and what became of its rows."""
    load = race.load
    rates = interleave(
        [
            timed("product", product(load, lambda: race.make_fetch(load)), settings),
            timed("original", original(load, lambda: race.make_fetch(load)), settings),
            timed("copyto", copyto(load), settings),
        ],
        settings.repetitions,
    )
    audits = _audits(load, settings) if race.audited else {}
    ratio = rates["product"].per(rates["original"])
    return Report(
        case=race.case,
        title=race.title,
        head=("contender", "batches/s", "GB/s", "of copyto", "rows lost", "rows late"),
        rows=_rows(load, rates, audits),
        measures=rates,
        goals=_goals(race, ratio, audits),
        notes=(f"product / original: {spread(ratio, '×')}", *_audit_notes(audits)),
    )


def _audits(load: Load, settings: Settings) -> dict[str, Audit]:
    return {
        "product": audit_product(load, settings.checked_batches),
        "original": audit_original(load, settings.checked_batches),
    }


def _rows(
    load: Load, rates: Mapping[str, Spread], audits: Mapping[str, Audit]
) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            name,
            *rate_cells(rate, rates["copyto"], load.batch_bytes),
            *(audits[name].cells if name in audits else ("", "")),
        )
        for name, rate in rates.items()
    )


def _goals(race: Race, ratio: Spread, audits: Mapping[str, Audit]) -> tuple[Goal, ...]:
    goals = []
    if race.asked is not None:
        goals.append(
            Goal(
                what=f"{race.case}: over the original",
                asked=race.asked,
                measured=ratio,
                unit="×",
                ambitious=race.ambitious,
            )
        )
    if audits:
        goals.append(
            Goal(
                what=f"{race.case}: rows lost, doubled or out of order",
                asked=0,
                measured=Spread(samples=(audits["product"].faults,)),
                at_most=True,
            )
        )
    return tuple(goals)


def _audit_notes(audits: Mapping[str, Audit]) -> Iterator[str]:
    for name, audit in audits.items():
        order = "in" if audit.in_turn else "not in"
        yield (
            f"{name}: {audit.fetched:,} numbered rows, {audit.doubled:,} doubled, "
            f"{order} the order of turns"
        )
