"""A resume makes the call of the last chunk again and compares, where that chunk was taken whole.

A fetch function that is not pure is then found out also where every chunk ends with its batch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

import feeder
from small import WAIT_S, Calls

NUM_ROWS = 8
ROWS_PER_CALL = [8, 16, 2]
"""Chunks that are a batch, two batches and a quarter of one."""


class Pure(Calls):
    """Rows that follow from the index alone."""

    def __init__(self, rows: int) -> None:
        super().__init__(100, lambda call: [np.arange(rows) + call.index * rows])


class Counting(Calls):
    """A fetch function that goes on where its last call ended, whatever the index."""

    def __init__(self, rows: int) -> None:
        numbers = count()
        super().__init__(100, lambda call: [np.arange(rows) + next(numbers) * rows])


def make(fetch: Callable[..., Any], **options: Any) -> feeder.Coordinator:
    options = {"coordinator": feeder.Coordinator(), "num_worker_threads": 1, **options}
    return feeder.init_data_input_workers(["x"], fetch, NUM_ROWS, **options)


def token_after(coordinator: feeder.Coordinator, num: int) -> bytes:
    with coordinator:
        feed = coordinator["train"]
        batch = [next(feed) for _ in range(num)][-1]
        return batch.cut.token()


@pytest.mark.parametrize("rows", ROWS_PER_CALL)
@pytest.mark.parametrize("order", ["ticket", "arrival"])
def test_a_function_that_counts_its_calls_is_found_out(rows: int, order: str) -> None:
    token = token_after(make(Counting(rows), order=order), 6)
    with (
        make(Counting(rows), resume=token, order=order) as coordinator,
        pytest.raises(feeder.ResumeError, match=r"not deterministic.*other rows"),
    ):
        next(coordinator["train"])


@pytest.mark.served
@pytest.mark.parametrize("plane", ["shared", "frames"])
def test_so_it_is_by_a_consumer(plane: Any) -> None:
    with (
        feeder.serve(lambda: make(Counting(8)), "tcp://127.0.0.1:0") as server,
        feeder.connect(server.addresses[0], plane=plane) as consumer,
    ):
        batches = [next(consumer) for _ in range(5)]  # So many kept are copied.
        state = consumer.state_dict()
        assert all(batch.cut.checked is not None for batch in batches)
    with (
        make(Counting(8), resume=state) as coordinator,
        pytest.raises(feeder.ResumeError, match="worker 0, call 4: other rows"),
    ):
        next(coordinator["train"])


def test_nothing_is_compared_where_the_rows_may_have_changed_or_are_gone() -> None:
    with make(Pure(8), writable=True) as coordinator:
        batch = next(coordinator["train"])
        batch["x"][:] += 1
        assert batch.cut.checked is None
    with make(Pure(8)) as coordinator:
        batch = next(coordinator["train"])
        place, is_gone = batch.place, threading.Event()
        weakref.finalize(batch.place.batch(), is_gone.set)
        # The feed keeps the newest batch, which a position compares.
        del batch
        next(coordinator["train"])
        # The thread that made it may be about to let go of it.
        assert is_gone.wait(WAIT_S)
        assert place.cut().checked is None
    with make(Pure(8), repeatable=False) as coordinator:
        batch = next(coordinator["train"])
        assert batch.cut.checked is None


def test_a_token_of_eight_workers_is_small() -> None:
    token = token_after(make(Pure(8), num_worker_threads=8), 5)
    assert len(token) <= 300


class InOrder(Pure):
    """Pure, and quick where its calls come in order: a cursor names the call that comes next."""

    def __init__(self) -> None:
        super().__init__(8)
        self.threads: set[int] = set()
        self.indices: list[int] = []
        self.sought: list[int] = []

    def __call__(self, call: feeder.Call) -> list[Any]:
        self.threads.add(threading.get_ident())
        self.indices.append(call.index)
        return super().__call__(call)

    def cursor(self, call: feeder.Call) -> bytes:
        return str(call.index + 1).encode()

    def seek(self, call: feeder.Call, cursor: bytes) -> None:
        self.sought.append(int(cursor))


def test_the_call_is_one_of_the_stream_s_calls_and_comes_first() -> None:
    """One thread makes all calls where num_threads says so, as for a connection to a database that
    only its own thread may use; and a cursor is of the call that comes first."""
    token = token_after(make(InOrder()), 3)
    fetch = InOrder()
    with make(fetch, resume=token, num_threads=1) as coordinator:
        assert next(coordinator["train"]).step == 3
    assert fetch.sought == [2]
    assert fetch.indices[0] == 2
    assert len(fetch.threads) == 1


@pytest.mark.parametrize("dont_rebatch", [False, True])
def test_what_is_compared_counts_in_the_bound_until_it_is(dont_rebatch: bool) -> None:
    token = token_after(make(Pure(8), dont_rebatch=dont_rebatch), 3)
    with make(Pure(8), dont_rebatch=dont_rebatch, resume=token) as coordinator:
        feed = coordinator["train"]
        assert [batch["x"][0] for batch in feed] == list(range(24, 800, 8))
        stats = feed.stats()
        assert (stats["buffered_rows"], stats["buffered_bytes"]) == (0, 0)


class ThreeCalls:
    """Epochs of three chunks, the last of which is short."""

    def __call__(self, call: feeder.Call) -> list[Any]:
        if call.index == 3:
            raise StopIteration
        (rows,) = super().__call__(call)  # type: ignore[misc]
        return [rows[: 5 if call.index == 2 else 8] + 1000 * call.epoch]


class InEpochs(ThreeCalls, Pure): ...


class CountingInEpochs(ThreeCalls, Counting): ...


ENDS = [("keep", False), ("pad", False), ("drop", False), ("keep", True)]
"""What becomes of the short batch, and whether each chunk is a batch."""


@pytest.mark.parametrize("order", ["ticket", "arrival"])
@pytest.mark.parametrize(("last_batch", "dont_rebatch"), ENDS)
def test_so_it_is_where_an_epoch_has_ended(order: str, last_batch: str, dont_rebatch: bool) -> None:
    settings = {
        "order": order, "last_batch": last_batch, "dont_rebatch": dont_rebatch, "epochs": 3,
    }  # fmt: skip
    num = 2 if last_batch == "drop" else 3

    def at_the_end(fetch: Callable[..., Any]) -> bytes:
        with make(fetch, **settings) as coordinator:
            batches = [next(coordinator["train"]) for _ in range(num + 1)]
            assert (batches[-2].epoch, batches[-1].epoch) == (0, 1)
            assert (batches[-2].cut.epoch, batches[-2].cut.index) == (1, 0)
            assert batches[-2].cut.checked is not None
            return batches[-2].cut.token()

    token = at_the_end(InEpochs(8))
    assert len(token) <= 300
    with make(InEpochs(8), resume=token, num_threads=1, **settings) as coordinator:
        batches = list(coordinator["train"])
        assert [batch.epoch for batch in batches] == [1] * num + [2] * num
        assert batches[0].step == num
        assert batches[0]["x"].tolist() == list(range(1000, 1008))
    with (
        make(CountingInEpochs(8), resume=at_the_end(CountingInEpochs(8)), **settings) as again,
        pytest.raises(feeder.ResumeError, match=r"not deterministic.*other rows"),
    ):
        next(again["train"])
