"""How soon the first batch comes after a resume far into every order, and after a fresh start.

A feed cannot be run through 10**12 samples, so its position is written: the token that it would
have there. The records are numbers that nothing holds, any number of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

import feeder
from contenders import COLUMN, FEED
from feeder.workers.sources.orders.libstdcxx import seed_minstd
from feeder.workers.sources.orders.sharding import Sharding
from feeder.workers.sources.orders.windowed import Window, encode_step
from fetches import Array
from harness import Measures, Settings, Spread, interleave, time_of
from report import Goal, Report, spread

ASKED_MS = 10
ASKED_CURSOR_BYTES = 64
ASKED_SLOT_BYTES = 4
BATCH_SIZE = 256
HUGE = 2 * 10**12
SMALL = 10_000
STEPS_PER_CHECKPOINT = 4096
MOST_WRITTEN_SLOTS = 20_000
FILLS_BEHIND = 28
"""How many times its slots a window that is not written down is walked to, at least."""
WALKED = 10**6
"""What a window is walked through; further on one is made up."""


class Numbers:
    """Records that are their own numbers."""

    kind = "numbers"
    skipped = 0

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def name(self, index: int) -> str:
        """The number."""
        return f"number {index}"

    def describe(self) -> dict[str, Any]:
        """Nothing beside their number."""
        return {}

    def read(self, indices: Array, call: feeder.Call) -> tuple[Array, ...]:
        """The numbers."""
        return (indices,)


@dataclass(frozen=True, slots=True, kw_only=True)
class FarOrder:
    """An order, and how far it is followed."""

    name: str
    options: dict[str, Any]
    size: int = HUGE
    samples: tuple[int, ...] = (10**3, 10**6, 10**12)
    fill: int = 0
    """Slots of its window, 0 where it has none."""
    is_asked: bool = True
    """Whether it has to resume within `ASKED_MS`."""

    def source(self) -> feeder.sources.Source:
        """A new source in this order."""
        return feeder.sources.Source(Numbers(self.size), **self.options)


DALI = {"order": "dali"}
ORDERS = (
    FarOrder(name="sequential", options={}),
    FarOrder(name="shard 3 of 8", options={"num_shards": 8, "shard_id": 3}, size=8 * HUGE),
    FarOrder(name="padded shard", options={"num_shards": 7, "pad_last_batch": True}),
    FarOrder(name="shuffled", options={"random_shuffle": True}),
    FarOrder(name="many epochs, shuffled", options={"random_shuffle": True}, size=SMALL),
    FarOrder(name="DALI's after epoch", options={**DALI, "shuffle_after_epoch": True}, size=SMALL),
    FarOrder(
        name="DALI's after epoch, compound",
        options={**DALI, "shuffle_after_epoch": "compound"}, size=SMALL, samples=(10**3, 10**6),
    ),
    *(
        FarOrder(
            name=f"the same of {size:,} records",
            options={**DALI, "shuffle_after_epoch": "compound"}, size=size, samples=(10**6,),
            is_asked=False,
        )
        for size in (1_000, 100_000)
    ),
    *(
        FarOrder(
            name=f"DALI's window of {fill:,}",
            options={**DALI, "random_shuffle": True, "initial_fill": fill}, fill=fill,
        )
        for fill in (1024, 16384)
    ),
    FarOrder(
        name="DALI's window of 65,536",
        options={**DALI, "random_shuffle": True, "initial_fill": 65536}, fill=65536,
        is_asked=False,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a feed starts, and the batch that must come first there."""

    order: FarOrder
    samples: int
    token: bytes | None
    cursor_bytes: int
    first: Array

    @property
    def name(self) -> str:
        """The order and how far."""
        return f"{self.order.name}: {'fresh' if self.token is None else f'{self.samples:.0e}'}"


def make_coordinator(source: feeder.sources.Source, token: bytes | None) -> feeder.Coordinator:
    """A coordinator with one endless feed."""
    return feeder.init_data_input_workers(
        [COLUMN], source, BATCH_SIZE, 2, FEED, epochs=None, resume=token,
        coordinator=feeder.Coordinator(),
    )  # fmt: skip


def find_place(order: FarOrder, samples: int) -> Place:
    """The place after so many samples, or the next one between two calls."""
    source = order.source()
    epoch, rest = divmod(samples, source.rows(0, BATCH_SIZE))
    call = feeder.Call(rest // BATCH_SIZE, epoch, 0, BATCH_SIZE, 0)
    if samples == 0:
        return Place(order=order, samples=0, token=None, cursor_bytes=0, first=source.indices(call))
    before = call._replace(index=call.index - 1)
    cursor = source.cursor(before) if samples <= WALKED else _made_up(order, samples)
    source.seek(call, cursor)
    return Place(
        order=order, samples=samples, token=_token(order, call, cursor),
        cursor_bytes=len(cursor), first=source.indices(call),
    )  # fmt: skip


def _made_up(order: FarOrder, samples: int) -> bytes:
    """A cursor of a window in which each record lies where it was put, as at the stream's start."""
    if not order.fill:
        return b""
    # A window of 16,384 slots is written down once in 16,384 steps.
    stride = max(STEPS_PER_CHECKPOINT, order.fill)
    step = samples // stride * stride
    if order.fill > MOST_WRITTEN_SLOTS:
        return encode_step(step - FILLS_BEHIND * order.fill, seed_minstd(1))
    slots = [step + (slot - step) % order.fill for slot in range(order.fill)]
    return bytes(Window(Sharding(num_records=order.size), step, seed_minstd(1), slots))


def _token(order: FarOrder, call: feeder.Call, cursor: bytes) -> bytes:
    """The token of a feed whose next call this is."""
    coordinator = make_coordinator(order.source(), None)
    (stream,) = coordinator[FEED].streams
    cut = stream.pipeline.start_cut
    position = cut.position._replace(
        epoch=call.epoch, calls=(call.index,), marks=(cursor or None,)
    )  # fmt: skip
    at = replace(cut, epoch=call.epoch, index=call.index, step=call.index, position=position)
    return stream.positions.id.encode(at)


@cache
def _places() -> tuple[Place, ...]:
    return tuple(find_place(order, n) for order in ORDERS for n in (0, *order.samples))


def resuming(settings: Settings) -> Report:
    """From making the feed to its first batch, which is compared."""
    places = _places()
    times = interleave(
        [_timed_start(place) for place in places], settings.repetitions * settings.tries
    )
    resumed = [place for place in places if place.token is not None and place.order.is_asked]
    return Report(
        case="resume",
        title="from the call of init to the first batch, in ms; batches of 256 numbers",
        head=("start", "ms", "token", "cursor of the order"),
        rows=tuple(_row(place, times[place.name]) for place in places),
        measures=times,
        goals=(*(_goal(place, times) for place in resumed), *_size_goals(resumed)),
        notes=("every first batch was the right one", "sizes are in bytes"),
    )


def _row(place: Place, time: Spread) -> tuple[str, ...]:
    token = "" if place.token is None else str(len(place.token))
    return place.name, spread(time), token, str(place.cursor_bytes or "")


def _timed_start(place: Place) -> Callable[[], Measures]:
    def measure() -> Measures:
        source = place.order.source()
        found: list[Array] = []
        coordinators = []

        def start() -> None:
            coordinator = make_coordinator(source, place.token)
            coordinators.append(coordinator)
            coordinator.start()
            found.append(next(coordinator[FEED])[COLUMN])

        elapsed = time_of(start)
        coordinators[0].stop()
        if not np.array_equal(found[0], place.first):
            raise RuntimeError(f"{place.name}: the first batch is not the one that was to come")
        return {place.name: elapsed * 1e3}

    return measure


def _goal(place: Place, times: dict[str, Spread]) -> Goal:
    fresh = times[f"{place.order.name}: fresh"]
    return Goal(
        what=f"resume: {place.name}, beyond a fresh start",
        asked=ASKED_MS,
        measured=times[place.name].minus(fresh),
        unit="ms",
        at_most=True,
    )


def _size_goals(places: list[Place]) -> tuple[Goal, ...]:
    """Without a window the whole token counts as the cursor: it is all that there is."""
    plain = [len(place.token or b"") for place in places if not place.order.fill]
    slots = [place.cursor_bytes / place.order.fill for place in places if place.order.fill]
    return (
        Goal(
            what="cursor: the longest token of an order without a window",
            asked=ASKED_CURSOR_BYTES,
            measured=Spread(samples=(max(plain),)),
            unit="bytes",
            at_most=True,
        ),
        Goal(
            what="cursor: of a windowed shuffle, each slot",
            asked=ASKED_SLOT_BYTES,
            measured=Spread(samples=(max(slots),)),
            unit="bytes",
            at_most=True,
        ),
    )
