"""A feed without threads (`num_threads=0`): the thread that asks for a batch makes it, and gets the
batches that threads would give (random programs compare them: `tests/property`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import served
from feeder import ConfigError, FeedError, FetchError, FetchTimeout
from small import Pure, ids, make


class Noted:
    """`fetch(call)`, that notes the thread of each call; `at` gives what happens in some."""

    def __init__(self, at: dict[int, Callable[[], Any]] | None = None, rows: int = 3) -> None:
        self.at, self.fetch, self.threads = at or {}, Pure(num_calls=12, rows=rows), list[int]()

    def __call__(self, call: feeder.Call) -> Any:
        self.threads.append(threading.get_ident())
        if call.index in self.at and (given := self.at.pop(call.index)()) is not None:
            return given
        return self.fetch(call)


def raising(error: BaseException) -> Callable[[], None]:
    def raises() -> None:
        raise error

    return raises


def test_calls_are_made_in_the_thread_that_asks_and_no_earlier_than_a_batch_needs_them() -> None:
    fetch, before = Noted(), threading.active_count()
    with make(fetch, batch_size=4, num_threads=0) as coordinator:
        feed = coordinator["train"]
        assert not fetch.threads, "nothing is read before a batch is asked for"
        needed = []
        for _ in range(9):
            next(feed)
            needed.append(len(fetch.threads))
            assert threading.active_count() == before
    # The first call is made again once, to see whether it gives the same rows.
    assert needed == [-(-4 * num // 3) + 1 for num in range(1, 10)]
    assert set(fetch.threads) == {threading.get_ident()}


@pytest.mark.parametrize("rows", [1, 2, 30])
def test_of_chunks_of_any_size_no_more_than_the_bound_and_one_chunk_is_buffered(rows: int) -> None:
    with make(Noted(rows=rows), batch_size=4, num_threads=0, max_buffered_batches=1) as coordinator:
        feed = coordinator["train"]
        assert len(ids(feed)) == 12 * rows
        assert feed.stats()["peak_buffered_rows"] <= 4 + rows


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("at", [0, 5])
def test_an_interrupt_of_a_call_reaches_the_user_and_the_position_is_that_of_the_last_batch(
    interrupt: type[BaseException], at: int
) -> None:
    whole = ids(make_and_read(Noted()))
    with make(Noted({at: raising(interrupt())}), num_threads=0) as coordinator:
        feed, head = coordinator["train"], list[feeder.Batch]()
        with pytest.raises(interrupt):
            head.extend(feed)
        for _ in range(2):
            with pytest.raises(FeedError, match="was interrupted while it made a batch"):
                next(feed)
        position = coordinator.snapshot()
    assert len(head) == 3 * at // 4
    assert ids(head) + ids(make_and_read(Noted(), resume=position)) == whole


def make_and_read(fetch: Any, **settings: Any) -> list[feeder.Batch]:
    with make(fetch, num_threads=0, **settings) as coordinator:
        return list(coordinator["train"])


def test_an_interrupt_of_the_first_call_as_it_is_repeated_reaches_the_user() -> None:
    fetch = Noted()
    with make(fetch, num_threads=0) as coordinator:
        fetch.at[0] = lambda: fetch.at.update({0: raising(KeyboardInterrupt())})
        with pytest.raises(KeyboardInterrupt):
            next(coordinator["train"])


def test_an_error_comes_in_its_place_and_a_call_that_fails_once_is_made_again() -> None:
    with make(Noted({5: raising(OSError("gone"))}), num_threads=0) as coordinator:
        feed, got = coordinator["train"], list[feeder.Batch]()
        with pytest.raises(FetchError, match=r"call 5: .*gone"):
            got.extend(feed)
        assert len(ids(got)) == 12
    fetch = Noted({5: raising(OSError("gone"))})
    whole = make_and_read(fetch, retries=1, retry_backoff_s=0.001)
    assert ids(whole) == ids(make_and_read(Noted()))


def test_a_call_that_gives_nothing_is_made_again_until_the_timeout() -> None:
    def fetch(call: feeder.Call) -> Any:
        return None

    with (
        make(fetch, num_threads=0, timeout=0.05) as coordinator,
        pytest.raises(FetchTimeout, match="no chunk for"),
    ):
        next(coordinator["train"])


def test_a_stop_by_another_thread_ends_a_wait_for_a_call_that_is_put_off() -> None:
    calls, errors = threading.Semaphore(0), list[BaseException]()

    def fetch(call: feeder.Call) -> Any:
        calls.release()

    def read() -> None:
        try:
            next(coordinator["train"])
        except BaseException as error:
            errors.append(error)

    with make(fetch, num_threads=0) as coordinator:
        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(3):
            assert calls.acquire(timeout=10)
        coordinator.stop()
        thread.join(10)
    (error,) = errors
    assert isinstance(error, feeder.ClosedError)


def test_calls_write_to_the_batch_in_place() -> None:
    placed = []

    def fetch(call: feeder.Call) -> Any:
        if call.index == 10:
            raise StopIteration
        placed.append(call.out is not None)
        array = np.full(2, call.index) if call.out is None else call.out["id"]
        array[:] = call.index
        return (array,)

    with make(fetch, num_threads=0, rows_per_call=2, batch_size=4) as coordinator:
        assert ids(coordinator["train"]) == [index for index in range(10) for _ in range(2)]
    assert placed.count(True) >= 6


@pytest.mark.served
def test_a_server_makes_the_batches_in_a_thread_of_its_own() -> None:
    fetch = Noted()
    with served("ipc", lambda: make(fetch, num_threads=0)) as seen:
        assert ids(seen.on(0)) == ids(make_and_read(Noted()))
    assert threading.get_ident() not in fetch.threads


def test_several_devices_and_gpus_are_refused() -> None:
    for devices in (2, "cuda:0", ["cpu", "cpu:1"]):
        with pytest.raises(ConfigError, match="num_threads"):
            make(Pure(), num_threads=0, devices=devices)
    with pytest.raises(ConfigError, match="one of the two"):
        make(Pure(), num_threads=0, executor=feeder.Threads(2))
