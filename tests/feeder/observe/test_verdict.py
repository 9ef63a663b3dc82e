"""The rule of the verdict: figures made by hand, and which words they come to."""

from __future__ import annotations

from typing import Any

import pytest

from feeder.observe.figures import ExecutorFigures
from feeder.observe.humanize import duration
from feeder.observe.interval import Interval
from feeder.observe.verdict import KINDS, STARVING, judge
from figures import consumer, feed, queue, service, store, worker

MB = 1_000_000


def taking(batches: int, wait_s: float, number: int = 0, **fields: Any) -> Any:
    return queue(number, batches=batches, bytes=batches * MB, wait_s=wait_s, **fields)


def running(*queues: Any, **fields: Any) -> Any:
    """Ten seconds of a feed that makes 1 MB batches; judged since the start."""
    batches = sum(each.batches for each in queues)
    defaults = {"age_s": 10.0, "batches": batches, "bytes": batches * MB, "queues": queues}
    return feed(**(defaults | fields))


CASES: dict[str, tuple[Any, str, str]] = {
    "no batch in the first second": (feed(age_s=0.5), "starting", "no batch"),
    "not started": (feed(state="waiting", age_s=0.0), "waiting", "it is not started"),
    "a queue without a consumer": (
        feed(state="waiting", missing=(1, 3), service=service(),
             queues=tuple(map(queue, range(4)))),
        "waiting", "on queue 1, 3",
    ),
    "most queues without a consumer": (
        feed(state="waiting", missing=tuple(range(1, 13)), service=service(),
             queues=tuple(map(queue, range(13)))),
        "waiting", "on queue 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, and 2 more",
    ),
    "a replica without a consumer": (
        feed(state="waiting", missing=(1, 2), service=service(),
             queues=tuple(queue(i // 2, replica=i % 2) for i in range(4))),
        "waiting", "on queue 0.1, 1.0",
    ),
    "its consumer is gone, and batches lie there for it": (
        running(taking(50, 0.0, waiting=9), missing=(0,), service=service(), room_wait_s=9.0),
        "waiting", "for a consumer on queue 0",
    ),
    "a consumer is gone, and nothing lies there for it yet": (
        running(taking(50, 9.0), taking(50, 9.0, 1), missing=(1,), service=service(),
                chunks_wait_s=9.0),
        "fetch-bound", "worker 0",
    ),
    "failed": (
        running(taking(9, 9.0), state="failed", failure="FetchError: gone"), "failed", "gone",
    ),
    "ended": (running(taking(9, 9.0), state="ended"), "ended", "all 9 batches"),
    "stopped": (running(taking(9, 9.0), state="stopped"), "stopped", "after 9 batches"),
    "the trainer hardly waits": (running(taking(100, 0.4)), "trainer-bound", "4%"),
    "the trainer takes nothing": (
        running(taking(0, 0.0, waiting=5)), "trainer-bound", "no batch in 10 s",
    ),
    "one takes nothing, one waits behind it": (
        running(taking(50, 8.0), taking(0, 0.0, 1, waiting=5), room_wait_s=9.0),
        "stalled-queue", "queue 1 has batches",
    ),
    "one is slower, and another waits behind it": (
        running(taking(50, 3.0), taking(50, 0.0, 1, waiting=9), room_wait_s=9.0),
        "slow-queue", "queue 1 is full, and queue 0 waits behind it 30%",
    ),
    "one has taken nothing since there is nothing": (
        running(taking(50, 8.0), taking(0, 9.9, 1), chunks_wait_s=9.0),
        "fetch-bound", "worker 0",
    ),
    "two calls at a time, with one processor together": (
        running(taking(50, 5.0), chunks_wait_s=9.0, threads=2,
                workers=(worker(0, fetch_s=9.5, computed_s=4.9),
                         worker(1, fetch_s=9.5, computed_s=4.9))),
        "fetch-bound", "a call): the fetch function holds the interpreter: run it in processes, "
        "executor=feeder.Processes(2)",
    ),
    "processes that are all busy": (
        running(taking(50, 5.0), chunks_wait_s=9.0, threads=2,
                workers=(worker(0, fetch_s=9.5), worker(1, fetch_s=9.5)),
                executor=ExecutorFigures(processes=2, busy=2, restarts=0, bytes=0)),
        "fetch-bound", "raise the 2 processes",
    ),
    "actors that are all busy": (
        running(taking(50, 5.0), chunks_wait_s=9.0, threads=2,
                workers=(worker(0, fetch_s=9.5), worker(1, fetch_s=9.5)),
                executor=ExecutorFigures(processes=8, busy=8, restarts=0, bytes=0, kind="actors")),
        "fetch-bound", "raise the 8 actors",
    ),
    "8 KB batches by the thousand": (
        running(queue(batches=100_000, bytes=100_000 * 8192, wait_s=4.0), bytes=100_000 * 8192,
                batches=100_000, chunks_wait_s=5.0),
        "tiny-batches", "8.19 kB each, 10000 /s",
    ),
    "8 KB batches from a slow fetch function": (
        running(queue(batches=25_000, bytes=25_000 * 8192, wait_s=4.0), bytes=25_000 * 8192,
                batches=25_000, chunks_wait_s=6.0, workers=(worker(fetch_s=9.9, calls=25_000),)),
        "fetch-bound", "a call",
    ),
    "two workers, much alike": (
        running(taking(100, 5.0), chunks_wait_s=6.0, workers=(
            worker(0, calls=100, fetch_s=4.0), worker(1, calls=100, fetch_s=4.1, wait_s=4.0))),
        "fetch-bound", "worker 1 slowest, 41 ms a call",
    ),
    "a call has not returned": (
        running(taking(0, 9.0), chunks_wait_s=9.9, workers=(worker(fetch_s=9.9, running_s=9.9),)),
        "fetch-bound", "worker 0 slowest, 9.9 s a call",
    ),
    "one worker of three is slow": (
        running(taking(100, 5.0), chunks_wait_s=6.0, workers=(
            worker(0, calls=100, fetch_s=0.2), worker(1, calls=100, fetch_s=0.3),
            worker(2, calls=100, fetch_s=4.1, wait_s=5.0))),
        "slow-worker", "worker 2, 41 ms a call, the others 2.5 ms",
    ),
    "one worker is slow, but another is waited for": (
        running(taking(100, 5.0), chunks_wait_s=6.0, workers=(
            worker(0, calls=100, fetch_s=0.2, wait_s=5.0), worker(1, calls=1, fetch_s=1.0))),
        "fetch-bound", "worker 1 slowest",
    ),
    "calls wait for a store, by the link": (
        running(taking(100, 8.0), chunks_wait_s=9.0, workers=(worker(calls=100, fetch_s=9.5),),
                store=store(wait_s=9.0, requests=20, bytes=110 * MB)),
        "storage-bound", "blocks 95% of their time, 11 MB/s come in 2 requests/s): the link",
    ),
    "calls wait for a store that sends much for little": (
        running(taking(100, 8.0), chunks_wait_s=9.0, workers=(worker(calls=100, fetch_s=9.5),),
                store=store(wait_s=9.0, requests=900, bytes=900 * MB)),
        "storage-bound", "90 requests/s, 9.0 times what batches hold): use shuffle(window=)",
    ),
    "calls wait for a store that fails": (
        running(taking(100, 8.0), chunks_wait_s=9.0, workers=(worker(calls=100, fetch_s=9.5),),
                store=store(wait_s=9.0, requests=50, retries=20, bytes=900 * MB)),
        "storage-bound", "20 of 50 were made again): look at the store",
    ),
    "calls wait for a store, and compute for longer": (
        running(taking(100, 8.0), chunks_wait_s=9.0, workers=(worker(calls=100, fetch_s=9.5),),
                store=store(wait_s=4.0, requests=20, bytes=110 * MB)),
        "fetch-bound", "worker 0 slowest",
    ),
    "calls raise": (
        running(taking(20, 8.0), chunks_wait_s=9.0, last_error="OSError: away",
                workers=(worker(calls=20, errors=10, retries=10),)),
        "failing-fetch", "10 of 30 calls raised, the last OSError: away",
    ),
    "few calls raise": (
        running(taking(100, 8.0), chunks_wait_s=9.0, last_error="OSError: away",
                workers=(worker(calls=200, errors=1, retries=1, fetch_s=9.0),)),
        "fetch-bound", "worker 0 slowest, 45 ms a call",
    ),
    "the source has nothing": (
        running(taking(10, 9.0), chunks_wait_s=9.0, workers=(worker(calls=10, nothings=90),)),
        "source-bound", "90 times",
    ),
    "the source has nothing now and then, and is slow": (
        running(taking(10, 9.0), chunks_wait_s=9.0,
                workers=(worker(calls=10, nothings=90, fetch_s=9.0),)),
        "fetch-bound", "a call",
    ),
    "neither is waited for": (
        running(taking(100, 3.0), chunks_wait_s=1.0, room_wait_s=1.0), "copy-bound", "80%",
    ),
    "room and trainer are waited for": (
        running(taking(100, 3.0), room_wait_s=7.0), "small-buffer", "30%",
    ),
    "batches in frames are on their way": (
        running(taking(10, 8.0, starved_s=0.5, consumer=consumer(plane="frames")),
                room_wait_s=9.0, service=service()),
        "network-bound", "queue 0 gets 1 MB/s",
    ),
    "batches in shared memory are on their way": (
        running(taking(10, 8.0, starved_s=0.5, consumer=consumer()), room_wait_s=9.0,
                service=service()),
        "small-buffer", "credit",
    ),
    "frames are waited for because there are none": (
        running(taking(10, 8.0, starved_s=7.5, consumer=consumer(plane="frames")),
                chunks_wait_s=9.0, service=service()),
        "fetch-bound", "a call",
    ),
    "checksums take their time": (
        running(taking(10, 8.0, starved_s=0.5, checked_s=3.0, consumer=consumer()),
                room_wait_s=9.0, service=service()),
        "checksum-bound", "30% of the time on queue 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("figures", "kind", "words"), CASES.values(), ids=CASES)
def test_verdict(figures: Any, kind: str, words: str) -> None:
    verdict = judge(None, figures, 0.0)
    assert verdict.kind == kind, str(verdict)
    assert words in str(verdict)
    assert str(verdict).startswith(f"{kind} ({verdict.why})")


def test_every_kind_is_among_the_cases() -> None:
    assert {kind for _, kind, _ in CASES.values()} == set(KINDS)


@pytest.mark.parametrize(("wait_s", "kind"), [
    (10 * STARVING - 0.01, "trainer-bound"), (10 * STARVING + 0.01, "copy-bound"),
])  # fmt: skip
def test_where_waiting_begins(wait_s: float, kind: str) -> None:
    assert judge(None, running(taking(100, wait_s)), 0.0).kind == kind


def test_only_what_happened_in_between_counts() -> None:
    """A feed that was slow for an hour and is quick now."""
    before = running(taking(100, 3000.0), age_s=3600.0, chunks_wait_s=3500.0)
    after = running(taking(200, 3000.1), age_s=3610.0, chunks_wait_s=3500.1)
    assert judge(before, after, 10.0).kind == "trainer-bound"
    assert judge(None, after, 10.0).kind == "fetch-bound"


def test_a_server_that_was_restarted_is_judged_from_its_start() -> None:
    before = running(taking(10_000, 3.0), age_s=3600.0)
    after = running(taking(100, 9.0), age_s=10.0, chunks_wait_s=9.0)
    interval = Interval(before, after, 1.0)
    assert (interval.seconds, interval.taken_per_s, interval.starving) == (10.0, 10.0, 0.9)


def test_shares_are_shares_whatever_is_told() -> None:
    """Waits are told late, and in lumps."""
    before = running(taking(100, 0.0))
    after = running(taking(90, 500.0), age_s=20.0, chunks_wait_s=300.0, room_wait_s=-5.0)
    interval = Interval(before, after, 1.0)
    shares = (interval.starving, interval.chunks, interval.room, interval.busy)
    assert shares == (1.0, 1.0, 0.0, 0.0)
    assert Interval(before, before, 0.0).seconds > 0


def test_workers_and_queues_that_are_new_count_from_their_start() -> None:
    before = running(taking(100, 0.0), workers=(worker(0, calls=5),))
    after = running(taking(100, 0.0), taking(7, 0.5, 1), age_s=20.0,
                    workers=(worker(0, calls=9), worker(1, calls=3)))  # fmt: skip
    interval = Interval(before, after, 10.0)
    assert [part.calls for part in interval.workers] == [4, 3]
    assert [part.batches for part in interval.queues] == [0, 7]


@pytest.mark.parametrize(("seconds", "words"), [
    (0.0, "0 µs"), (41e-6, "41 µs"), (0.0412, "41.2 ms"), (1.5, "1.5 s"), (600, "600 s"),
])  # fmt: skip
def test_times_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
