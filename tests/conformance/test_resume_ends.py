"""Positions at the end of an epoch and of the stream, and resuming with other epochs."""

from __future__ import annotations

from threading import Event
from typing import Any, NoReturn

import pytest

from feeder import Cut
from feeds import Record, assert_same, deal, drain, expected, note, running
from fetches import FORMS, PATTERNS, make_fetch

LAST_BATCH = ("keep", "drop", "pad", "carry")


def stream_of(form: str, pattern: str, **settings: Any) -> list[Record]:
    return expected(make_fetch(form, pattern), pure=form == "pure", **settings)


def place(cut: Cut) -> tuple[int, int, int, bool]:
    return cut.epoch, cut.index, cut.step, cut.finished


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("last_batch", ("keep", "drop", "pad"))
def test_position_after_the_last_batch_is_the_next_epoch(
    form: str, pattern: str, last_batch: str
) -> None:
    settings: dict[str, Any] = {"epochs": 3, "last_batch": last_batch}
    with running(make_fetch(form, pattern), **settings) as (_, feed):
        batches = list(feed)
    following = [(batch.epoch, batch.index, batch.step, False) for batch in batches[1:]]
    following.append((3, 0, len(batches), True))
    if batches:
        assert [place(batch.cut) for batch in batches] == following


class Gate:
    """Holds the calls that would end an epoch until it is opened."""

    def __init__(self, fetch: Any) -> None:
        self.opened = Event()
        self.fetch = fetch
        self.fetch.end = self.end

    def end(self) -> NoReturn:
        assert self.opened.wait(10)
        raise StopIteration


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("last_batch", LAST_BATCH)
@pytest.mark.parametrize("epochs", (1, 2))
def test_end_of_an_epoch_is_in_the_cut_once_it_is_known(
    form: str, last_batch: str, epochs: int
) -> None:
    gate = Gate(make_fetch(form, "whole"))
    settings: dict[str, Any] = {"epochs": epochs, "last_batch": last_batch, "num_worker_threads": 1}
    stream = stream_of(form, "whole", epochs=epochs, last_batch=last_batch, num_workers=1)
    num = sum(epoch == 0 for epoch, *_ in stream)
    with running(gate.fetch, **settings) as (coordinator, feed):
        batches = [next(feed) for _ in range(num)]
        before = batches[-1].cut
        early = [before.token(), coordinator.snapshot(), coordinator.state_dict()]
        gate.opened.set()
        rest = [note(batch) for batch in feed]
        after = batches[-1].cut
    assert_same(rest, stream[num:])
    assert place(before) == (0, num, num, False)
    assert place(after) == (1, 0, num, epochs == 1)
    for position in (*early, after.token()):
        got = drain(make_fetch(form, "whole"), resume=position, **settings)
        assert_same(got, stream[num:], type(position))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("last_batch", ("keep", "drop", "pad"))
def test_finished_feed_goes_on_with_more_epochs(form: str, pattern: str, last_batch: str) -> None:
    stream = stream_of(form, pattern, epochs=4, last_batch=last_batch)
    for devices, more in ((1, 4), (2, 4), (1, None)):
        with running(
            make_fetch(form, pattern), epochs=2, last_batch=last_batch, devices=devices
        ) as (coordinator, feed):
            num = len(list(deal(feed)))
            taken: list[Any] = [coordinator.snapshot(), coordinator.state_dict()]
        for position in taken:
            rest = drain(
                make_fetch(form, pattern), resume=position, epochs=more, last_batch=last_batch,
                most=len(stream) - num if stream else 0,
            )  # fmt: skip
            assert_same(rest, stream[num:], devices, more)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_with_carry_a_finished_feed_has_kept_its_last_rows(form: str, pattern: str) -> None:
    stream = stream_of(form, pattern, epochs=4)
    with running(make_fetch(form, pattern), epochs=2, last_batch="carry") as (coordinator, feed):
        first = [note(batch) for batch in feed]
        position = coordinator.snapshot()
    rest = drain(make_fetch(form, pattern), resume=position, epochs=4, last_batch="carry")
    assert ids(first + rest) == ids(stream)
    assert [record[2] for record in first + rest] == list(range(len(first) + len(rest)))


def ids(records: list[Record]) -> bytes:
    """Return the ids of all batches as bytes."""
    return b"".join(columns[0][2] for *_, columns in records)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("last_batch", LAST_BATCH)
def test_epochs_may_be_added_in_the_middle(form: str, last_batch: str) -> None:
    one, three = ({"epochs": epochs, "last_batch": last_batch} for epochs in (1, 3))
    stream = stream_of(form, "ragged", **three)
    num_full = len(stream_of(form, "ragged", epochs=1, last_batch="drop"))
    with running(make_fetch(form, "ragged"), **one) as (coordinator, feed):
        for i in range(1, num_full + 1):
            batch = next(feed)
            for position in (batch.cut.token(), coordinator.snapshot()):
                rest = drain(make_fetch(form, "ragged"), resume=position, **three)
                assert_same(rest, stream[i:], i)


@pytest.mark.parametrize("form", FORMS)
def test_feed_that_has_had_its_epochs_is_finished(form: str) -> None:
    with running(make_fetch(form, "ragged"), epochs=3) as (coordinator, feed):
        for batch in feed:
            if batch.epoch == 2:
                break
        positions = (batch.cut.token(), coordinator.snapshot())
    assert batch.cut.leftover is not None
    for position in positions:
        assert drain(make_fetch(form, "ragged"), resume=position, epochs=1) == []
        assert drain(make_fetch(form, "ragged"), resume=position, epochs=2) == []
