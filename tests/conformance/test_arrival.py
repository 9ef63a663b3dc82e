"""order="arrival": the order is open, but no row is lost or doubled, over any number of resumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice, product
from threading import Event
from typing import Any

import pytest

from feeder import Batch, Call
from feeds import CARRIERS, deal, expected, running
from fetches import BATCH_SIZE, FORMS, PATTERNS, make_fetch, make_rows, shaky

WAIT_S = 10.0
EPOCHS = 2


def ids_of(batches: Iterable[Batch]) -> list[int]:
    """Return the ids of the real rows."""
    return [int(row_id) for batch in batches for row_id in batch["id"][: batch.rows]]


def all_ids(form: str, pattern: str) -> list[int]:
    """Return the ids of all rows of the stream, sorted."""
    stream = expected(make_fetch(form, pattern), pure=form == "pure", epochs=EPOCHS, batch_size=1)
    return sorted(int.from_bytes(columns[0][2], "little") for *_, columns in stream)


def take_in_parts(form: str, pattern: str, carrier: str, seed: int, **settings: Any) -> list[Batch]:
    """Take the stream a few batches at a time, resuming in between, with calls that dawdle."""
    position, batches = None, []
    for part in range(100):
        fetch = make_fetch(form, pattern, shaky(seed + part))
        with running(
            fetch, resume=position, order="arrival", epochs=EPOCHS, **settings
        ) as (coordinator, feed):  # fmt: skip
            taken = []
            for batch in islice(deal(feed), 1 + (seed + part) % 4):
                taken.append(batch)
                position = CARRIERS[carrier](coordinator, batch)
        batches += taken
        if not taken:
            return batches
    raise AssertionError("the stream did not end")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("threads", (1, 2, 8))
def test_no_row_is_lost_or_doubled_over_resumes(form: str, carrier: str, threads: int) -> None:
    for seed, (pattern, last_batch) in enumerate(zip(PATTERNS, ("keep", "pad") * 4, strict=True)):
        batches = take_in_parts(
            form, pattern, carrier, seed, num_threads=threads, last_batch=last_batch
        )
        assert sorted(ids_of(batches)) == all_ids(form, pattern), pattern
        assert [batch.step for batch in batches] == list(range(len(batches)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("carrier", ("bytes", "token"))
def test_rows_carried_into_the_next_epoch_are_kept(form: str, carrier: str) -> None:
    for seed, pattern in enumerate(PATTERNS):
        batches = take_in_parts(form, pattern, carrier, seed, last_batch="carry")
        assert sorted(ids_of(batches)) == all_ids(form, pattern), pattern
        assert all(batch.rows == BATCH_SIZE for batch in batches[:-1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("carrier", ("bytes", "token"))
def test_only_the_rest_of_each_epoch_is_dropped(form: str, carrier: str) -> None:
    for seed, pattern in enumerate(PATTERNS):
        batches = take_in_parts(form, pattern, carrier, seed, last_batch="drop")
        wanted = all_ids(form, pattern)
        got = ids_of(batches)
        assert not Counter(got) - Counter(wanted)
        for epoch in range(EPOCHS):
            rows = sum(epoch_of(row_id) == epoch for row_id in wanted)
            of_epoch = [batch for batch in batches if batch.epoch == epoch]
            assert {epoch_of(row_id) for row_id in ids_of(of_epoch)} <= {epoch}
            assert len(ids_of(of_epoch)) == rows - rows % BATCH_SIZE, pattern


def epoch_of(row_id: int) -> int:
    return (row_id - 1) // 100_000 % 10


@pytest.mark.parametrize("form", FORMS)
def test_no_epoch_begins_before_the_one_before_it_has_ended(form: str) -> None:
    for seed, pattern in enumerate(PATTERNS):
        batches = take_in_parts(form, pattern, "bytes", seed)
        epochs = [epoch_of(row_id) for row_id in ids_of(batches)]
        assert epochs == sorted(epochs), pattern


@pytest.mark.parametrize("form", ("replay", "seek"))
@pytest.mark.parametrize("carrier", CARRIERS)
def test_rows_of_one_worker_keep_their_order(form: str, carrier: str) -> None:
    for seed, pattern in enumerate(PATTERNS):
        ids = ids_of(take_in_parts(form, pattern, carrier, seed))
        for worker in range(3):
            own = [row_id for row_id in ids if row_id // 1_000_000 == worker]
            assert own == sorted(own), (pattern, worker)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("carrier", ("snapshot", "state dict"))
def test_no_row_is_lost_or_doubled_with_several_devices(form: str, carrier: str) -> None:
    for pattern, devices in product(("ragged", "large", "idle"), (2, 3)):
        position, rows, rounds = None, [], 1
        while rounds:
            with running(
                make_fetch(form, pattern, shaky(devices)),
                resume=position, order="arrival", epochs=EPOCHS, devices=devices,
            ) as (coordinator, feed):  # fmt: skip
                # One round and one batch more, which is of a round that not every device has.
                taken = list(islice(deal(feed), devices + 1))
                rounds = len(taken) // devices
                rows += ids_of(taken if len(taken) <= devices else taken[:devices])
                position = CARRIERS[carrier](coordinator, taken[-1]) if taken else None
        assert sorted(rows) == all_ids(form, pattern), (pattern, devices)


@pytest.mark.parametrize("form", ("replay", "seek"))
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_worker_that_dawdles_holds_nobody_up(form: str, carrier: str) -> None:
    let_go = Event()
    fetch = make_fetch(form, "single")
    plain = fetch.make

    def make_late(worker: int, *args: int) -> Any:
        assert worker or let_go.wait(WAIT_S)
        return plain(worker, *args)

    fetch.make = make_late
    settings: dict[str, Any] = {"order": "arrival", "epochs": EPOCHS}
    with running(fetch, **settings) as (coordinator, feed):
        batches = [next(feed), next(feed)]
        position = CARRIERS[carrier](coordinator, batches[-1])
        let_go.set()
    assert min(ids_of(batches)) > 1_000_000, "rows of worker 0 came while its first call waited"
    with running(make_fetch(form, "single"), resume=position, **settings) as (_, feed):
        rest = list(feed)
    assert sorted(ids_of(batches + rest)) == all_ids(form, "single")


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("threads", (2, 8))
def test_an_index_that_dawdles_holds_nobody_up(carrier: str, threads: int) -> None:
    let_go = Event()
    called: list[int] = []

    def fetch(call: Call) -> Any:
        called.append(call.index)
        assert call.index or let_go.wait(WAIT_S)
        if call.index >= 40:
            raise StopIteration
        return make_rows(0, 0, call.index, 3)

    settings: dict[str, Any] = {"order": "arrival", "num_threads": threads}
    with running(fetch, **settings) as (coordinator, feed):
        batches = [next(feed) for _ in range(3)]
        position = CARRIERS[carrier](coordinator, batches[-1])
        let_go.set()
    done = {(row_id - 1) // 1000 for row_id in ids_of(batches)}
    assert 0 not in done
    (straddled,) = {(int(batches[-1]["id"][-1]) - 1) // 1000}
    called.clear()
    with running(fetch, resume=position, **settings) as (_, feed):
        rest = list(feed)
    assert Counter(ids_of(batches + rest)) == Counter(
        1 + row + 1000 * index for index in range(40) for row in range(3)
    )
    assert not (done - {straddled}) & set(called), "what was done is not fetched again"


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("threads", (1, 2, 8))
def test_an_open_index_below_the_rows_left_over_is_not_forgotten(
    carrier: str, threads: int
) -> None:
    let_go = Event()

    def fetch(call: Call) -> Any:
        assert call.index or let_go.wait(WAIT_S)
        if call.index >= 3:
            raise StopIteration
        return make_rows(0, 0, call.index, 2)

    stream: dict[str, Any] = {"order": "arrival", "batch_size": 1, "num_worker_threads": 1}
    ids: list[int] = []
    position, at_first = None, {"num_threads": 2}
    while True:
        run = at_first if position is None else {"num_threads": threads}
        with running(fetch, resume=position, **stream, **run) as (coordinator, feed):
            batch = next(feed, None)
            let_go.set()
            if batch is None:
                break
            ids += ids_of([batch])
            position = CARRIERS[carrier](coordinator, batch)
    assert sorted(ids) == [1, 2, 1001, 1002, 2001, 2002]
