"""A stop ends every thread at once, wherever it waits, and names the one that does not end."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

import feeder
from small import WAIT_S, Aside, Held, Pure, chunk, make

FAST_S = 4.0
"""More than any stop takes on a busy machine, less than any time-out in the library."""


def stop_fast(coordinator: feeder.Coordinator) -> None:
    started = time.monotonic()
    assert coordinator.stop() is True
    assert time.monotonic() - started < FAST_S


class Endless:
    """`fetch(worker_id, batch_size)` without end that tells when it has been called so often."""

    def __init__(self, num_calls: int, result: Any = None) -> None:
        self._left = num_calls
        self._result = result
        self.called = threading.Event()

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        self._left -= 1
        if self._left <= 0:
            self.called.set()
        return self._result


def test_a_retry_that_is_put_off_does_not_hold_up_the_stop() -> None:
    failed = threading.Event()

    def fetch(call: feeder.Call) -> Any:
        failed.set()
        raise OSError

    coordinator = make(fetch, retries=5, retry_backoff_s=1000.0)
    coordinator.start()
    assert failed.wait(WAIT_S)
    stop_fast(coordinator)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_user_who_waits_in_another_thread_is_woken(num_devices: int) -> None:
    fetch = Endless(10)
    coordinator = make(fetch, devices=num_devices)
    coordinator.start()
    feed = coordinator["train"]
    waiting = [Aside(lambda i=i: next(feed.on(i))) for i in range(num_devices)]
    assert fetch.called.wait(WAIT_S)
    stop_fast(coordinator)
    for user in waiting:
        with pytest.raises(feeder.ClosedError, match=r"^(the feed|feed '\w+') is stopped$"):
            user.result()


def test_stopping_at_any_moment_ends_all() -> None:
    for step in range(60):
        coordinator = make(Pure(40, 1 + step % 7), num_worker_threads=4, devices=1 + step % 3)
        coordinator.start()
        feed = coordinator["train"]
        user = Aside(lambda feed=feed: take_from_all(feed))
        for _ in range(step * 50):
            pass
        stop_fast(coordinator)
        with pytest.raises((feeder.ClosedError, StopIteration)):
            user.result()


def take_from_all(feed: feeder.Feed) -> None:
    while True:
        for device in feed.devices:
            next(feed.on(device))


def test_the_fetch_function_may_stop_the_coordinator() -> None:
    started = threading.Event()

    def fetch(call: feeder.Call) -> Any:
        if call.index == 3:
            assert started.wait(WAIT_S)
            stopped.append(coordinator.stop())
        return chunk(0, call.index, 4)

    stopped: list[bool] = []
    coordinator = make(fetch, num_worker_threads=1)
    with coordinator, pytest.raises(feeder.ClosedError):
        started.set()
        list(coordinator["train"])
    assert stopped == [True]


# ---- a fetch function that does not return


def test_the_with_block_tells_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feeder.feeds.coordinator.STOP_DEADLINE_S", 3.0)
    fetch = Held()
    coordinator = make(fetch, input_source_name="val", num_worker_threads=1)
    with pytest.raises(feeder.StuckWorkerError) as caught, coordinator:
        assert fetch.entered.wait(WAIT_S)
    fetch.release()
    assert caught.value.names == ("feeder val fetcher 0",)
    first, *stack = str(caught.value).splitlines()
    assert first.startswith("1 threads did not end within 3.0")
    assert first.endswith(" s: ['feeder val fetcher 0']")
    assert stack[0] == "feeder val fetcher 0:"
    assert stack[-1].strip().endswith(("waiter.acquire(True, timeout)", "^^^^"))
    assert any("self._released.wait(WAIT_S)" in line for line in stack)
    assert coordinator.stop() is True


def test_an_error_in_the_with_block_goes_before_a_stuck_fetch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("feeder.feeds.coordinator.STOP_DEADLINE_S", 3.0)
    fetch = Held()
    coordinator = make(fetch, num_worker_threads=1)
    with caplog.at_level(logging.ERROR, "feeder"), pytest.raises(ZeroDivisionError), coordinator:
        assert fetch.entered.wait(WAIT_S)
        raise ZeroDivisionError
    fetch.release()
    assert "1 threads did not end within " in caplog.text
    assert coordinator.stop() is True


def test_a_stuck_feed_does_not_keep_the_others_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("feeder.feeds.coordinator.STOP_DEADLINE_S", 3.0)
    fetch = Held()
    coordinator = make(fetch, num_worker_threads=1)
    make(Held(1_000_000), input_source_name="val", coordinator=coordinator)
    make(fetch, input_source_name="test", num_worker_threads=1, coordinator=coordinator)
    with pytest.raises(feeder.StuckWorkerError) as caught, coordinator:
        assert fetch.entered.wait(WAIT_S)
        next(coordinator["val"])
    alive = [thread.name for thread in threading.enumerate() if " val " in thread.name]
    fetch.release()
    assert alive == []
    assert set(caught.value.names) <= {"feeder train fetcher 0", "feeder test fetcher 0"}
    assert coordinator.stop() is True
