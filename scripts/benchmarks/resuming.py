"""How soon the first batch comes after a resume far into the stream, and after a fresh start."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from contenders import COLUMN, FEED, copyto, make_coordinator, timed
from fetches import Array, Load, SeekableFetch, pure
from harness import Measures, Settings, Spread, interleave, time_of
from report import Goal, Report, spread

ROWS = 1_000_000
ASKED_MS = 5
LOAD = Load(
    name="256×16 int64", batch_size=256, row_shape=(16,), dtype="int64", chunk_rows=100, bound=100
)
COPYTO = "copyto of 33 KB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a feed starts, and the batch that must come first there."""

    name: str
    resume: bytes | None
    first: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of fetch function; a new one is made for every start."""

    name: str
    make_fetch: Callable[[], Callable[..., Any]]

    def places(self) -> list[Place]:
        """The start of the stream, and the place after `ROWS` rows as a snapshot and a token."""
        with make_coordinator(LOAD, self.make_fetch()) as coordinator:
            feed = coordinator[FEED]
            batch = next(feed)
            start = batch[COLUMN].copy()
            while (batch.step + 1) * LOAD.batch_size < ROWS:
                batch = next(feed)
            snapshot, token = bytes(coordinator.snapshot()), batch.cut.token()
            then = next(feed)[COLUMN].copy()
        return [
            Place(name=f"{self.name}: fresh", resume=None, first=start),
            Place(name=f"{self.name}: snapshot", resume=snapshot, first=then),
            Place(name=f"{self.name}: token", resume=token, first=then),
        ]


FORMS = (
    Form(name="seek", make_fetch=lambda: SeekableFetch(LOAD)),
    Form(name="pure", make_fetch=lambda: pure(LOAD)),
)


def resuming(settings: Settings) -> Report:
    """Both forms: from making the feed to its first batch, which is compared."""
    starts = [_timed_start(form, place) for form in FORMS for place in form.places()]
    times = interleave(starts, settings.repetitions * settings.tries)
    copied = interleave([timed(COPYTO, copyto(LOAD), settings)], settings.repetitions)[COPYTO]
    differences = {
        f"{form.name}, from a {how}": times[f"{form.name}: {how}"].minus(
            times[f"{form.name}: fresh"]
        )
        for form in FORMS
        for how in ("snapshot", "token")
    }
    return Report(
        case="resume",
        title=f"from the call of init to the first batch, after {ROWS:,} rows, in ms",
        head=("start", "ms"),
        rows=tuple((name, spread(time)) for name, time in times.items()),
        measures=times,
        goals=tuple(_goal(name, difference) for name, difference in differences.items()),
        notes=(
            "every first batch was the right one",
            f"{COPYTO}: {spread(copied.times(LOAD.batch_bytes / 1e9), 'GB/s')}",
        ),
    )


def resumes_per_second(times: int) -> float:
    """How many resumes of a pure function from a token fit into a second, by the median."""
    form = FORMS[-1]
    (place,) = [place for place in form.places() if place.name.endswith(": token")]
    start = _timed_start(form, place)
    return 1e3 / statistics.median(start()[place.name] for _ in range(times))


def _timed_start(form: Form, place: Place) -> Callable[[], Measures]:
    def measure() -> Measures:
        fetch = form.make_fetch()
        found: list[Array] = []
        coordinators = []

        def start() -> None:
            coordinator = make_coordinator(LOAD, fetch, resume=place.resume)
            coordinators.append(coordinator)
            coordinator.start()
            found.append(next(coordinator[FEED])[COLUMN])

        elapsed = time_of(start)
        coordinators[0].stop()
        if not np.array_equal(found[0], place.first):
            raise RuntimeError(f"{place.name}: the first batch is not the one that was to come")
        return {place.name: elapsed * 1e3}

    return measure


def _goal(name: str, difference: Spread) -> Goal:
    return Goal(
        what=f"resume: {name}, beyond a fresh start",
        asked=ASKED_MS,
        measured=difference,
        unit="ms",
        at_most=True,
    )
