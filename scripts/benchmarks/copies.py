"""19.8 MB batches from chunks of 7 rows, against what one thread can copy."""

from __future__ import annotations

from contenders import copy_loop, copyto, product, timed
from fetches import IMAGES, Fetch, Load, constant, fresh
from harness import Settings, Spread, interleave
from report import Goal, Report, rate_cells, spread

LOAD = IMAGES.in_chunks_of(7)
LOOP = "loop of one thread"
ASKED = 0.85


def copy_constant(settings: Settings) -> Report:
    """The same array each call: the product against one-thread copyto."""
    rates = _race(constant(LOAD), settings)
    ratio = rates["product"].per(rates["copyto"])
    goal = Goal(what="copy-constant: against copyto", asked=ASKED, measured=ratio, unit="×")
    return _report("copy-constant", "the same array by each call", LOAD, rates, goal)


def copy_fresh(settings: Settings) -> Report:
    """A freshly filled array each call: the product against one thread that copies it once."""
    rates = _race(fresh(LOAD), settings)
    ratio = rates["product"].per(rates[LOOP])
    goal = Goal(what=f"copy-fresh: against a {LOOP}", asked=ASKED, measured=ratio, unit="×")
    return _report("copy-fresh", "freshly filled by each call", LOAD, rates, goal)


def _race(fetch: Fetch, settings: Settings) -> dict[str, Spread]:
    return interleave(
        [
            timed("product", product(LOAD, lambda: fetch), settings),
            timed(LOOP, copy_loop(LOAD, fetch), settings),
            timed("copyto", copyto(LOAD), settings),
        ],
        settings.repetitions,
    )


def _report(case: str, how: str, load: Load, rates: dict[str, Spread], goal: Goal) -> Report:
    ratios = [
        f"product / {other}: {spread(rates['product'].per(rates[other]), '×')}"
        for other in (LOOP, "copyto")
    ]
    return Report(
        case=case,
        title=f"batches of {load.name}, {how}",
        head=("contender", "batches/s", "GB/s", "of copyto"),
        rows=tuple(
            (name, *rate_cells(rate, rates["copyto"], load.batch_bytes))
            for name, rate in rates.items()
        ),
        measures=rates,
        goals=(goal,),
        notes=tuple(ratios),
    )
