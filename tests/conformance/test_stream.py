"""Moments that no drawn program has for certain: calls that are held until something has come, a
stream without end, and what random numbers follow from. The rest is drawn (`tests/property`)."""

from __future__ import annotations

from itertools import product
from threading import Event
from typing import Any, NoReturn

import numpy as np
import pytest

from feeder import Call, Cut
from feeds import assert_same, drain, expected, note, running
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


@pytest.mark.parametrize("last_batch", ("keep", "pad"))
def test_a_call_beyond_the_end_writes_into_no_batch(last_batch: str) -> None:
    """Such a call may go on for as long as it likes: the epoch's last rows come meanwhile, and
    stay."""
    beyond, out = [Event() for _ in range(3)], Event()
    written: list[np.ndarray] = []

    def fetch(call: Call) -> Any:
        if call.index < 13:
            ids = call.empty((2,), np.int64)
            ids[:] = 1 + call.index
            return [ids]
        if call.index == 13:
            assert beyond[call.epoch].wait(10)
            raise StopIteration
        written.append(call.empty((2,), np.int64))
        beyond[call.epoch].set()
        assert out.wait(10)
        for array in written:
            array[:] = 99
        raise StopIteration

    settings: dict[str, Any] = {
        "input_blob_names": ["id"], "rows_per_call": 2, "num_threads": 2,
        "last_batch": last_batch, "epochs": 1,
    }  # fmt: skip
    with running(fetch, **settings) as (_, feed):
        batches = [next(feed) for _ in range(4)]
        out.set()
        assert next(feed, None) is None
    ids = [row for batch in batches for row in batch["id"].tolist()]
    padding = [13] * (6 if last_batch == "pad" else 0)
    assert ids == [1 + i // 2 for i in range(26)] + padding


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
