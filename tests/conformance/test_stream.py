"""Moments that no drawn program has for certain: calls that are held until something has come, a
stream without end, and what random numbers follow from. The rest is drawn (`tests/property`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product
from threading import Event
from typing import Any, NoReturn

import numpy as np
import pytest

from feeder import Batch, Call, Cut
from feeds import CARRIERS, assert_same, drain, expected, note, running
from fetches import FORMS, make_fetch, make_rows


@pytest.mark.parametrize(
    ("order", "beyond"), (("ticket", "rows"), ("ticket", "error"), ("arrival", "error"))
)
def test_what_lies_beyond_the_first_end_of_a_pure_function_is_discarded(
    order: str, beyond: str
) -> None:
    beyond_called = [Event(), Event()]

    def fetch(call: Call) -> Any:
        if call.index < 5:
            return make_rows(0, call.epoch, call.index, 3)
        if call.index == 5:
            # Calls beyond the end are made first, where there are threads for them.
            assert beyond_called[call.epoch].wait(10)
            raise StopIteration
        beyond_called[call.epoch].set()
        if beyond == "error":
            raise IndexError(call.index)
        return make_rows(1, call.epoch, call.index, 3)

    with running(fetch, epochs=2, order=order, num_threads=3) as (_, feed):
        ids = [int(row_id) for batch in feed for row_id in batch["id"]]
    chunks = [make_rows(0, epoch, index, 3) for epoch, index in product(range(2), range(5))]
    assert sorted(ids) == [row_id for chunk in chunks for row_id in chunk["id"].tolist()]


def test_random_numbers_are_keyed_by_seed_epoch_and_index_alone() -> None:
    draws: dict[tuple[int, int, int], int] = {}

    def fetch(call: Call) -> Any:
        if call.index >= 9:
            raise StopIteration
        draw = int(call.rng.integers(1, 2**62))
        assert draws.setdefault((call.seed, call.epoch, call.index), draw) == draw
        return [np.full(3, draw)]

    for seed, workers, batch_size in product((1, 2), (1, 3), (2, 5)):
        with running(
            fetch, input_blob_names=["x"], epochs=2, seed=seed,
            num_worker_threads=workers, batch_size=batch_size,
        ) as (_, feed):  # fmt: skip
            assert len(list(feed)) == 2 * -(-27 // batch_size)
    assert len(set(draws.values())) == len(draws) == 2 * 2 * 9


class Gate:
    """Holds the calls that would end an epoch until it is opened."""

    def __init__(self, fetch: Any) -> None:
        self.opened = Event()
        self.fetch = fetch
        self.fetch.end = self.end

    def end(self) -> NoReturn:
        assert self.opened.wait(10)
        raise StopIteration


def place(cut: Cut) -> tuple[int, int, int, bool]:
    return cut.epoch, cut.index, cut.step, cut.finished


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("last_batch", "epochs"), [("keep", 2), ("drop", 1), ("carry", 2)])
def test_end_of_an_epoch_is_in_the_cut_once_it_is_known(
    form: str, last_batch: str, epochs: int
) -> None:
    gate = Gate(make_fetch(form, "whole"))
    settings: dict[str, Any] = {"epochs": epochs, "last_batch": last_batch, "num_worker_threads": 1}
    stream = expected(
        make_fetch(form, "whole"), pure=form == "pure", epochs=epochs, last_batch=last_batch,
        num_workers=1,
    )  # fmt: skip
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


# ---- order="arrival": the order is open, but no row is lost or doubled, over any number of resumes


def ids_of(batches: Iterable[Batch]) -> list[int]:
    """Return the ids of the real rows."""
    return [int(row_id) for batch in batches for row_id in batch["id"][: batch.rows]]


@pytest.mark.parametrize(("carrier", "threads"), (("snapshot", 2), ("token", 8)))
def test_an_index_that_dawdles_holds_nobody_up(carrier: str, threads: int) -> None:
    let_go = Event()
    called: list[int] = []

    def fetch(call: Call) -> Any:
        called.append(call.index)
        assert call.index or let_go.wait(10)
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


@pytest.mark.parametrize(("carrier", "threads"), (("bytes", 1), ("token", 2)))
def test_an_open_index_below_the_rows_left_over_is_not_forgotten(
    carrier: str, threads: int
) -> None:
    let_go = Event()

    def fetch(call: Call) -> Any:
        assert call.index or let_go.wait(10)
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
