"""A second oracle: the stream as docs/promise.md and the pages that it links tell it, and no other.

The first oracle (`feeds`, `property.programs`) was written beside the engine. What both of them
misunderstand would never show. This one shares no code with either, and was written from the pages
for users alone; where these left something open they now tell it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any, NamedTuple

Row = Any
FAILS = "fails"


class Failed(Exception):
    """An epoch fails: the batches of its round that are before the error arrive."""

    def __init__(self, epoch: int, batches: list[Batch] | None = None) -> None:
        super().__init__(epoch, batches)
        self.epoch, self.batches = epoch, batches or []


@dataclass(frozen=True)
class Feed:
    """The settings that the pages call part of the stream, and those of one run."""

    fetch: Callable[[int, int, int], Any]
    """The rows of an epoch, worker and number of its call; None ends, `FAILS` is an error. Of
    `fetch(call)`, and of a source, there is one worker."""
    workers: int = 1
    batch_size: int | None = None
    global_batch_size: int | None = None
    epochs: int | None = 1
    last_batch: str = "keep"
    dont_rebatch: bool = False
    devices: int = 1
    last_round: str = "uneven"
    rounds: str = "stream"


class Place(NamedTuple):
    """Between two batches: the next row, by its number in its epoch, and what has been counted."""

    epoch: int = 0
    row: int = 0
    step: int = 0
    of: int = 0
    """The epoch of the batch before it."""
    number: int = 0
    """How many batches that epoch had until here."""


class Batch(NamedTuple):
    """What a reader sees of one."""

    epoch: int
    number: int
    step: int
    rows: int
    values: list[Row]
    after: Place


def chunks(feed: Feed, epoch: int) -> list[Any]:
    """What the calls of an epoch return, "merged in turn"; who has ended it has no more turn."""
    made, turns = [], [(worker, 0) for worker in range(feed.workers)]
    for worker, number in turns:
        chunk = feed.fetch(epoch, worker, number)
        if chunk is not None:
            made.append(chunk)
            turns.append((worker, number + 1))
        if chunk is FAILS:
            break
    return made


def pieces(feed: Feed, place: Place) -> Iterator[tuple[int, int, list[Row], int, int]]:
    """Epoch, real rows and values of each batch from `place` on, and which row comes then."""
    size = feed.batch_size or (feed.global_batch_size or 0) // feed.devices
    held: list[Row] = []
    for epoch in count(place.epoch):
        if feed.epochs is not None and epoch >= feed.epochs:
            break
        at = place.row if epoch == place.epoch else 0
        made = chunks(feed, epoch)
        fails = FAILS in made
        rows = [row for chunk in made if chunk is not FAILS for row in chunk][at:]
        while rows:
            if feed.dont_rebatch:
                ends = accumulate(len(chunk) for chunk in made if chunk is not FAILS)
                size = next(end for end in ends if end > at) - at
            taken = rows[: size - len(held)]
            held, rows, at = held + taken, rows[len(taken) :], at + len(taken)
            if len(held) < size and (fails or feed.last_batch == "carry"):
                break
            if len(held) == size or feed.last_batch in ("keep", "pad"):
                padding = size - len(held) if feed.last_batch == "pad" else 0
                yield epoch, len(held), held + held[-1:] * padding, epoch, at
            held = []
        if fails:
            raise Failed(epoch)
    if held:  # "carry" keeps the last rows of the stream
        yield epoch - 1, len(held), held, epoch, 0


def stream(feed: Feed, place: Place) -> Iterator[Batch]:
    """The batches from a place on, one after the other."""
    step, of, number = place.step, place.of, place.number
    for epoch, real, values, next_epoch, row in pieces(feed, place):
        number = number if epoch == of else 0
        of = epoch
        step, number = step + 1, number + 1
        yield Batch(
            epoch, number - 1, step - 1, real, values, Place(next_epoch, row, step, of, number)
        )


class Round(NamedTuple):
    """One batch for each device; the last of a stream is empty."""

    batches: list[Batch]
    after: Place | None
    """None where the pages do not tell how batches are counted on if the stream is made longer:
    `skip` went beyond its end, or its last round was padded."""


def rounds(feed: Feed, place: Place, skip: int = 0) -> Iterator[Round]:
    """The rounds from a place on, of which the first ones are left out."""
    try:
        for round_ in _rounds(feed, place):
            if skip and round_.batches:
                skip -= 1
            else:
                tells = not skip or feed.last_round == "uneven" or feed.rounds == "epoch"
                yield round_ if tells else round_._replace(after=None)
    except Failed as failed:
        raise Failed(failed.epoch, [] if skip else failed.batches) from None


def _rounds(feed: Feed, place: Place) -> Iterator[Round]:
    dealt: list[Batch] = []
    try:
        for batch in stream(feed, place):
            if dealt and feed.rounds == "epoch" and batch.epoch != dealt[0].epoch:
                yield from _last(feed, dealt)
                dealt = []
            dealt = [*dealt, batch]
            place = batch.after
            if len(dealt) == feed.devices:
                yield Round(dealt, place)
                dealt = []
    except Failed as failed:
        if dealt and feed.rounds == "epoch" and failed.epoch > dealt[0].epoch:
            yield from _last(feed, dealt)
            dealt = []
        # "drop" holds a round back until it is whole.
        raise Failed(failed.epoch, [] if feed.last_round == "drop" else dealt) from None
    step = place.step
    if dealt:
        yield from _last(feed, dealt)
    if feed.rounds == "stream" and feed.last_round == "drop":
        step -= len(dealt)
    assert feed.epochs is not None, "the stream has no end"
    end = Place(max(place.epoch, feed.epochs), 0, step)
    unknown = dealt and feed.rounds == "stream" and feed.last_round == "pad"
    yield Round([], None if unknown else end)


def _last(feed: Feed, dealt: list[Batch]) -> Iterator[Round]:
    """What becomes of a round that is not whole."""
    batch, missing = dealt[-1], range(1, feed.devices - len(dealt) + 1)
    after: Place | None = batch.after
    if feed.rounds == "epoch":  # A round that ends an epoch is known to.
        after = Place(batch.epoch + 1, 0, batch.step + 1)
    elif feed.last_round == "pad":
        after = None
    if feed.last_round == "pad":
        dealt = dealt + [
            batch._replace(number=batch.number + n, step=batch.step + n, rows=0) for n in missing
        ]
    if feed.last_round != "drop":
        yield Round(dealt, after)
    elif feed.rounds == "epoch" and batch.epoch and dealt[0].number == 0:
        raise Failed(batch.epoch)  # the whole epoch would be left out
