"""The product over the original algorithm: batches per second, rows lost, rows out of order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from audit import Audit, audit_original, audit_product
from contenders import copyto, original, product, timed
from fetches import IMAGES, SMALL, VECTORS, Load, fresh
from harness import Settings, Spread, interleave
from report import Goal, Report, rate_cells, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """A load on which both are measured, and the ratio that is asked for."""

    case: str
    load: Load
    asked: float | None = None
    ambitious: float | None = None


RACES = (
    Race(case="images-32", load=IMAGES.in_chunks_of(32), asked=2.5, ambitious=4),
    Race(case="images-7", load=IMAGES.in_chunks_of(7), asked=3.5, ambitious=4),
    Race(case="images-100", load=IMAGES.in_chunks_of(100)),
    Race(case="vectors-1", load=VECTORS.in_chunks_of(1), asked=25, ambitious=35),
    Race(case="vectors-17", load=VECTORS.in_chunks_of(17), asked=8, ambitious=10),
    Race(case="vectors-256", load=VECTORS.in_chunks_of(256), asked=2.5, ambitious=4),
    Race(case="small-64", load=SMALL.in_chunks_of(64), asked=2.5, ambitious=4),
)


def run_race(race: Race, settings: Settings) -> Report:
    """The product, the original and a plain copy on one load, and what became of its rows."""
    load = race.load
    rates = interleave(
        [
            timed("product", product(load, lambda: fresh(load)), settings),
            timed("original", original(load, lambda: fresh(load)), settings),
            timed("copyto", copyto(load), settings),
        ],
        settings.repetitions,
    )
    audits = {
        "product": audit_product(load, settings.checked_batches),
        "original": audit_original(load, settings.checked_batches),
    }
    ratio = rates["product"].per(rates["original"])
    return Report(
        case=race.case,
        title=f"batches of {load.name}, allocated afresh by each call",
        head=("contender", "batches/s", "GB/s", "of copyto", "rows lost", "rows late"),
        rows=_rows(load, rates, audits),
        measures=rates,
        goals=_goals(race, ratio, audits["product"]),
        notes=(f"product / original: {spread(ratio, '×')}", _audit_note(audits)),
    )


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


def _goals(race: Race, ratio: Spread, audit: Audit) -> tuple[Goal, ...]:
    faults = Goal(
        what=f"{race.case}: rows lost, doubled or out of order",
        asked=0,
        measured=Spread(samples=(audit.faults,)),
        at_most=True,
    )
    if race.asked is None:
        return (faults,)
    over = Goal(
        what=f"{race.case}: over the original",
        asked=race.asked,
        measured=ratio,
        unit="×",
        ambitious=race.ambitious,
    )
    return over, faults


def _audit_note(audits: Mapping[str, Audit]) -> str:
    return "; ".join(
        f"{name}: {audit.fetched:,} numbered rows, {audit.doubled:,} doubled, "
        f"{'in' if audit.in_rota else 'not in'} the order of the rota"
        for name, audit in audits.items()
    )
