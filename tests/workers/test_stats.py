"""What is counted of a feed: clocks, and each row once at each hand-over."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.observe.figures import FeedFigures
from feeder.workers.fetch.threads import Wakes
from feeder.workers.stats import Stopwatch
from small import WAIT_S, Aside, Counted, Held, Pure, Seekable, ids, make
from watching import CallsOf, Clock


def only(coordinator: feeder.Coordinator) -> FeedFigures:
    (feed,) = coordinator.figures().feeds
    return feed


# ---- clocks


def test_what_a_stopwatch_shows_never_falls_beside_its_writer() -> None:
    watch, over = Stopwatch(), threading.Event()

    def write() -> None:
        while not over.is_set():
            watch.start(time.monotonic())
            watch.stop(time.monotonic())

    writer = Aside(write)
    last = 0.0
    for _ in range(20_000):
        # Read first: a watch that is started in between counts from later on.
        now = time.monotonic()
        seen = watch.seconds(now)
        assert seen >= last
        last = max(last, seen)
    over.set()
    writer.result()


# ---- each hand-over


@pytest.mark.parametrize("fetch", [Pure, Counted, Seekable])
@pytest.mark.parametrize("threads", [None, 1])
def test_every_row_is_counted_once_at_each_hand_over(fetch: Any, threads: int | None) -> None:
    workers = 1 if fetch is Pure else 2
    coordinator = make(fetch(7, 3), num_threads=threads)
    with coordinator:
        rows = len(ids(coordinator["train"]))
        stats = coordinator["train"].stats()
    assert rows == 21 * workers
    assert stats["rows"] == stats["handed_rows"] == stats["queue/0/rows"] == rows
    assert stats["bytes"] == stats["handed_bytes"] == stats["queue/0/bytes"] == 8 * rows
    assert stats["batches"] == stats["handed_batches"] == -(-rows // 4)
    # A pure function may be called beyond its end; a ring has called what it needs.
    assert stats["fetch_rows"] >= rows
    assert stats["queue/0/waiting"] == stats["queued_batches"] == 0
    stats = coordinator["train"].stats()  # nobody counts any more
    assert sum(stats[k] for k in stats if k.endswith("/calls")) == stats["fetch_calls"]


def test_each_batch_that_is_handed_out_counts_at_once() -> None:
    with make(Pure(8, 4)) as coordinator:
        feed = coordinator["train"]
        for taken in range(1, 6):
            next(feed)
            assert feed.stats()["handed_batches"] == taken
            assert feed.stats()["queue/0/rows"] == 4 * taken


def test_shorter_and_padded_batches_count_their_real_rows() -> None:
    for last_batch in ("keep", "pad"):
        with make(Pure(3, 3), last_batch=last_batch) as coordinator:
            list(coordinator["train"])
            assert coordinator["train"].stats()["handed_rows"] == 9, last_batch


def test_streams_of_one_name_are_added_up() -> None:
    coordinator = make(Pure(2, 4), devices="cpu:0")
    make(Pure(3, 4), devices="cpu:1", coordinator=coordinator)
    with coordinator:
        feed = coordinator["train"]
        list(feed.on(0)), list(feed.on(1))
        stats, figures = feed.stats(), coordinator.figures().feeds
    assert stats["handed_batches"] == 5
    assert (stats["queue/0/batches"], stats["queue/1/batches"]) == (2, 3)
    assert [feed.title for feed in figures] == ["train", "train#1"]
    assert [feed.queues[0].queue for feed in figures] == [0, 1]
    assert stats["age_s"] <= figures[0].age_s, "ages are not added up"


def test_loading_a_state_does_not_lose_the_counts() -> None:
    coordinator = make(Pure(6, 4))
    with make(Pure(6, 4)) as first:
        next(first["train"])
        state = first.state_dict()
    coordinator.load_state_dict(state)
    with coordinator:
        assert len(list(coordinator["train"])) == 5
        assert coordinator["train"].stats()["handed_batches"] == 5


# ---- errors, retries, nothing


def test_errors_retries_and_nothings_are_counted_by_worker() -> None:
    calls: dict[int, int] = {0: 0, 1: 0}

    class Fetch:
        def __call__(self, worker_id: int, batch_size: int) -> Any:
            calls[worker_id] += 1
            if worker_id == 1 and calls[1] == 2:
                raise OSError("away")
            if worker_id == 0 and calls[0] == 2:
                return None
            if calls[worker_id] > 4:
                raise StopIteration
            return [np.ones(4)]

        def cursor(self, worker_id: int) -> int:
            return 0

        def seek(self, worker_id: int, cursor: int) -> None:
            pass

    with make(Fetch(), retries=2, retry_backoff_s=0.0) as coordinator:
        list(coordinator["train"])
        stats, figures = coordinator["train"].stats(), only(coordinator)
    assert (stats["fetch_errors"], stats["fetch_retries"], stats["fetch_nothings"]) == (1, 1, 1)
    assert (stats["worker/1/errors"], stats["worker/0/errors"]) == (1, 0)
    assert [worker.nothings for worker in figures.workers] == [1, 0]
    assert figures.last_error == "OSError: away"
    assert figures.state == "ended"


def test_an_error_that_ends_the_feed_is_told() -> None:
    def fetch(call: feeder.Call) -> Any:
        raise OSError("no disk\nanywhere")

    with make(fetch) as coordinator:
        with pytest.raises(feeder.FetchError):
            next(coordinator["train"])
        figures = only(coordinator)
    assert figures.state == "failed"
    assert figures.failure == (
        "FetchError: worker 0, call 0: fetch function raised OSError: no disk anywhere"
    )
    assert only(coordinator).state == "failed", "also when it has been stopped"


# ---- waits


def test_a_wait_under_way_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(monkeypatch), CallsOf(monkeypatch, (Stopwatch, "start"))
    fetch = Held()
    with make(fetch, num_worker_threads=1) as coordinator:
        taking = Aside(lambda: list(coordinator["train"]))
        assert fetch.entered.wait(WAIT_S)
        stream = coordinator["train"].streams[0]
        stats = stream.pipeline.stats
        watches = [stream.queues[0].starved, stats.chunks, stats.partitions[0]]
        calls.wait_until(lambda: all(watch.since is not None for watch in watches))
        before = only(coordinator)
        clock.set_ahead(5.0)
        after = only(coordinator)
        fetch.release()
        taking.result()
    # Of the trainer, the enqueuer, a worker and its call.
    for wait_s in (
        lambda feed: feed.queues[0].wait_s,
        lambda feed: feed.chunks_wait_s,
        lambda feed: feed.workers[0].wait_s,
        lambda feed: feed.workers[0].fetch_s,
    ):
        assert wait_s(after) >= wait_s(before) + 5.0
    assert after.workers[0].running_s >= 5.0
    assert after.room_wait_s == 0.0


def test_a_feed_that_waits_for_its_trainer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(monkeypatch), CallsOf(monkeypatch, (Wakes, "wait"), (Stopwatch, "start"))

    def fetch(call: feeder.Call) -> Any:
        return (np.zeros((4, 2**17), np.uint8),)

    with make(fetch, ["x"], max_buffered_batches=2, epochs=None) as coordinator:
        next(coordinator["train"])
        stream = coordinator["train"].streams[0]
        queue, room = stream.pipeline.queue, stream.pipeline.stats.room
        calls.wait_until(lambda: room.since is not None and not (queue._calling or queue._has_room))
        before = only(coordinator)
        clock.set_ahead(5.0)
        after = only(coordinator)
    assert after.room_wait_s >= before.room_wait_s + 5.0
    assert after.idle_s >= before.idle_s + 5.0, "fetchers wait too"
    assert after.queues[0].wait_s == before.queues[0].wait_s
    assert after.workers[0].fetch_s == before.workers[0].fetch_s, "no back-pressure in it"
    assert after.buffered_rows >= after.limit_rows == 8


@pytest.mark.parametrize("settings", [{}, {"dont_rebatch": True}, {"num_threads": 3}], ids=str)
@pytest.mark.parametrize("form", ["call", "worker"])
def test_rows_count_from_when_they_came_though_the_call_after_them_lasts(
    form: str, settings: dict[str, Any]
) -> None:
    """Their user may have had them before it returns."""
    held, numbers = threading.Event(), itertools.count()

    def rows_of(index: int) -> Any:
        if index >= 4:
            held.wait(WAIT_S)
        if index >= 12:
            raise StopIteration
        return [np.zeros((4 if index < 2 else 2, 3))]

    def of_call(call: feeder.Call) -> Any:
        return rows_of(call.index)

    def of_worker(worker_id: int, batch_size: int) -> Any:
        return rows_of(next(numbers))

    fetch = of_call if form == "call" else of_worker
    with make(fetch, ["x"], num_worker_threads=1, **settings) as coordinator:
        feed, taken = coordinator["train"], 0
        while taken < 12:
            taken += next(feed).rows
        counts = feed.stats()
        assert (counts["buffered_rows"], counts["buffered_bytes"], counts["kept_rows"]) == (0, 0, 0)
        assert only(coordinator).buffered_rows == 0
        held.set()
        assert sum(batch.rows for batch in feed) == 16
        counts = feed.stats()
        assert (counts["buffered_rows"], counts["buffered_bytes"], counts["kept_rows"]) == (0, 0, 0)


@pytest.mark.parametrize("dont_rebatch", [False, True])
@pytest.mark.parametrize("num_calls", [1, 4])
def test_what_lies_beyond_the_end_of_an_epoch_is_counted_out(
    num_calls: int, dont_rebatch: bool
) -> None:
    """With three threads, in an epoch of one call nobody comes to what the third has got."""
    beyond = [threading.Event() for _ in range(20)]

    def fetch(call: feeder.Call) -> Any:
        if call.index == num_calls + 1:
            beyond[call.epoch].set()
        elif call.index >= num_calls:
            assert call.index > num_calls or beyond[call.epoch].wait(WAIT_S)
            raise StopIteration
        return [np.zeros((4, 100))]

    with make(fetch, ["x"], num_threads=3, epochs=20, dont_rebatch=dont_rebatch) as coordinator:
        feed = coordinator["train"]
        assert sum(1 for _ in feed) == num_calls * 20
        # What came beyond the last epoch stays.
        assert feed.stats()["buffered_rows"] in (0, 4)
        assert feed.stats()["buffered_bytes"] in (0, 4 * 800)


# ---- the position


def test_the_age_of_the_position_is_that_of_the_last_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    with make(Pure()) as coordinator:
        feed = coordinator["train"]
        for ask in (feed.state_dict, coordinator.snapshot, coordinator.state_dict):
            old = asked_at(coordinator)
            clock.set_ahead(5.0)
            assert asked_at(coordinator) == pytest.approx(old)
            ask()
            assert asked_at(coordinator) >= old + 4.9


def asked_at(coordinator: feeder.Coordinator) -> float:
    figures = coordinator.figures()
    return figures.at_s - figures.feeds[0].position_age_s
