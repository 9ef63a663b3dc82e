"""Processes change not one byte: not their number, nor what a feed was run on before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
import parts
import remote
from conformance.served import served
from feeder import Processes, Threads
from feeder.workers import sources
from feeds import CARRIERS, Record, assert_same, deal, drain, expected, make, note, running
from fetches import FORMS, NEED_TWO_WORKERS, PATTERNS, make_fetch, make_rows
from parts import some
from protos import Datum
from remote import Flaky, Walk, beyond, plain, sample
from stores import write_lmdb

pytestmark = pytest.mark.process

LAST_BATCH = ("keep", "drop", "pad", "carry")
KINDS = (Processes(1), Processes(2), Threads(2), Processes(3), None, Processes(5), "processes")
"""What a feed is run on, one after the other; None says nothing."""


def two(case: Sequence[Any], *axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield two combinations of a test case, and in the full part a few: processes start slowly,
    and the 2,300 of the stream alone would take nine minutes."""
    return islice(parts.few(case, *axes), None if parts.is_full else 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_stream_is_the_naive_one(form: str, pattern: str) -> None:
    ways = two((form, pattern), LAST_BATCH, (1, 2, 3, 5), (1, 2), (2, 3, 1, 5))
    for last_batch, workers, devices, num in ways:
        if workers == 1 and form != "pure" and pattern in NEED_TWO_WORKERS:
            workers = 4
        settings: dict[str, Any] = {"epochs": 3, "last_batch": last_batch}
        stream = expected(
            make_fetch(form, pattern), pure=form == "pure", num_workers=workers,
            num_devices=devices, **settings,
        )  # fmt: skip
        got = drain(
            make_fetch(form, pattern), num_worker_threads=workers, devices=devices,
            executor=Processes(num), **settings,
        )  # fmt: skip
        assert_same(got, stream, last_batch, workers, devices, num)


@pytest.mark.parametrize("form", FORMS)
def test_sixty_four_processes(form: str) -> None:
    workers = 64 if form != "pure" else 3
    settings: dict[str, Any] = {"epochs": 1}
    stream = expected(
        make_fetch(form, "single"), pure=form == "pure", num_workers=workers, **settings
    )
    executor = Processes(64)
    with running(
        make_fetch(form, "single"), num_worker_threads=workers, executor=executor, **settings
    ) as (_, feed):
        assert_same([note(batch) for batch in deal(feed)], stream)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "buffers",
    ({"max_buffered_batches": 1}, {"max_buffered_batches": 3}, {"max_buffered_bytes": 1}),
    ids=("1 batch", "3 batches", "1 byte"),
)
def test_buffers_change_nothing(form: str, buffers: dict[str, int]) -> None:
    for pattern, num in two((form, *buffers), tuple(PATTERNS), (1, 3)):
        stream = expected(make_fetch(form, pattern), pure=form == "pure", epochs=2)
        got = drain(make_fetch(form, pattern), epochs=2, executor=Processes(num), **buffers)
        assert_same(got, stream, pattern, num)


@pytest.mark.parametrize("batch_size", (1, 7, 64))
def test_batches_of_any_size(batch_size: int) -> None:
    for form, pattern in two((batch_size,), tuple(FORMS), tuple(PATTERNS)):
        settings: dict[str, Any] = {"epochs": 2, "batch_size": batch_size}
        stream = expected(make_fetch(form, pattern), pure=form == "pure", **settings)
        got = drain(make_fetch(form, pattern), executor=Processes(2), **settings)
        assert_same(got, stream, form, pattern)


@pytest.mark.parametrize("form", FORMS)
def test_without_rebatching_each_chunk_is_a_batch(form: str) -> None:
    settings: dict[str, Any] = {"epochs": 2, "dont_rebatch": True}
    stream = drain(make_fetch(form, "ragged"), **settings)
    assert_same(drain(make_fetch(form, "ragged"), executor=Processes(3), **settings), stream)


@pytest.mark.parametrize("form", FORMS)
def test_in_order_of_arrival_no_row_is_lost(form: str) -> None:
    stream = expected(make_fetch(form, "ragged"), pure=form == "pure", epochs=2)
    got = drain(make_fetch(form, "ragged"), epochs=2, order="arrival", executor=Processes(3))
    assert rows_of(got) == rows_of(stream)


def rows_of(stream: Sequence[Record]) -> list[tuple[int, int]]:
    """Return the epoch and the id of each row, sorted."""
    return sorted(
        (epoch, row_id)
        for epoch, _, _, _, ((dtype, _, first), *_) in stream
        for row_id in np.frombuffer(first, dtype).tolist()
    )


def test_what_lies_beyond_the_first_end_is_discarded() -> None:
    whole = drain(beyond, epochs=3, executor=Threads(1), num_worker_threads=1)
    assert rows_of(whole) == [
        (epoch, row_id)
        for epoch in range(3)
        for index in range(5)
        for row_id in make_rows(0, epoch, index, 3)["id"].tolist()
    ]
    for num in (1, 3, 8):
        assert_same(drain(beyond, epochs=3, executor=Processes(num)), whole, num)


@pytest.mark.parametrize("form", FORMS)
def test_resumed_again_after_every_batch_on_something_else(form: str) -> None:
    ((pattern, last_batch),) = islice(some((form,), ("ragged", "gaps", "large"), LAST_BATCH), 1)
    settings: dict[str, Any] = {"epochs": 2, "last_batch": last_batch}
    stream: list[Record] = []
    position = None
    for executor, carrier in zip(cycle(KINDS), cycle(CARRIERS.values()), strict=False):
        fetch = make_fetch(form, pattern)
        with running(fetch, resume=position, executor=executor, **settings) as (coordinator, feed):
            batch = next(feed, None)
            if batch is None:
                break
            stream.append(note(batch))
            position = carrier(coordinator, batch)
    wanted = expected(make_fetch(form, pattern), pure=form == "pure", **settings)
    assert_same(stream, wanted, pattern, last_batch)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_place_is_the_same_token_whatever_the_feed_is_run_on(form: str) -> None:
    tokens = []
    for executor in (None, Processes(1), Processes(3)):
        with running(
            make_fetch(form, "ragged"), epochs=2, last_batch="carry", executor=executor
        ) as (_, feed):
            tokens.append([batch.cut.token() for batch in list(feed)])
    assert tokens[1:] == tokens[:1] * 2


@pytest.mark.parametrize("form", ("pure", "seek"))
def test_calls_that_raise_are_made_again(form: str, tmp_path: Path) -> None:
    stream = expected(make_fetch(form, "ragged"), pure=form == "pure", epochs=2)
    fetch = make_fetch(form, "ragged")
    fetch = Flaky(fetch, tmp_path) if form == "seek" else fetch
    got = drain(fetch, epochs=2, retries=1, retry_backoff_s=0.0, executor=Processes(2))
    assert_same(got, stream)
    assert form == "pure" or len(list(tmp_path.iterdir())) > 3


def test_a_stop_in_a_call_is_no_error() -> None:
    fetch = remote.At(9, remote.hang_in_a_place_of_its_own)
    with running(fetch, executor=Processes(2), batch_size=3, retries=1) as (coordinator, feed):
        next(feed)
    (figures,) = coordinator.figures().feeds
    assert (figures.last_error, sum(worker.errors for worker in figures.workers)) == ("", 0)
    assert figures.executor is not None and figures.executor.restarts == 0


def test_a_function_is_named_by_its_place() -> None:
    stream = drain(plain, epochs=2)
    assert_same(drain("remote:plain", epochs=2, executor=Processes(2)), stream)


def test_a_pure_function_may_have_cursors(tmp_path: Path) -> None:
    whole = drain(plain, epochs=2)
    unstarted = make(remote.Cursors(tmp_path), epochs=2, executor=Processes(2))
    taken = [bytes(unstarted.snapshot())]
    with running(remote.Cursors(tmp_path), epochs=2, executor=Processes(2)) as (coordinator, feed):
        batches = [note(next(feed)) for _ in range(4)]
        taken.append(bytes(coordinator.snapshot()))
    # What it had come to went with its processes.
    taken.append(bytes(coordinator.snapshot()))
    assert_same(batches, whole[:4])
    for at, position in zip((0, 4, 4), taken, strict=True):
        sought = len(list(tmp_path.iterdir()))
        rest = drain(remote.Cursors(tmp_path), resume=position, epochs=2, executor=Processes(3))
        assert_same(rest, whole[at:], at)
        assert (len(list(tmp_path.iterdir())) > sought) == (position is taken[1])


# ---- Sources

NUM_RECORDS = 23
ORDERS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "shuffled shards": {"num_shards": 2, "shard_id": 1, "random_shuffle": True},
    "dali window": {
        "num_shards": 2, "shard_id": 1, "order": "dali", "random_shuffle": True, "initial_fill": 5,
    },
}  # fmt: skip


def of_arrays(path: Path, **order: Any) -> Any:
    return sources.arrays(np.arange(NUM_RECORDS), np.arange(NUM_RECORDS) ** 2, **order)


def of_large_arrays(path: Path, **order: Any) -> Any:
    return sources.arrays(np.arange(2000), np.arange(2_000_000).reshape(2000, 1000), **order)


def of_tokens(path: Path, **order: Any) -> Any:
    np.arange(NUM_RECORDS * 5, dtype=np.uint16).tofile(path / "tokens.bin")
    return sources.tokens(path / "tokens.bin", 5, np.uint16, **order)


def of_samples(path: Path, **order: Any) -> Any:
    return sources.samples(sample, NUM_RECORDS, **order)


def of_records(path: Path, **order: Any) -> Any:
    return sources.records([(i, i / 2) for i in range(NUM_RECORDS)], **order)


def of_caffe(path: Path, **order: Any) -> Any:
    if not (path / "caffe").exists():
        write_lmdb(
            path / "caffe",
            [
                Datum(
                    channels=1, height=2, width=2, data=bytes([i] * 4), label=i, encoded=False
                ).SerializeToString()
                for i in range(NUM_RECORDS)
            ],
        )
    return sources.caffe_lmdb(path / "caffe", **order)


SOURCES: dict[str, Callable[..., Any]] = {
    "arrays": of_arrays,
    "tokens": of_tokens,
    "samples": of_samples,
    "records": of_records,
    "caffe": of_caffe,
}


def source_feed(
    source: Any, resume: bytes | None = None, most: int | None = None, **settings: Any
) -> tuple[list[Record], list[bytes]]:
    """Return the batches of a feed, and after each of them a snapshot."""
    names = ["tokens"] if "tokens" in repr(source) else ["x", "y"]
    batches, snapshots = [], []
    with make(
        source, input_blob_names=names, batch_size=4, num_worker_threads=2, seed=7, epochs=3,
        resume=resume, timeout=60.0, **settings,
    ) as coordinator:  # fmt: skip
        (name,) = coordinator
        for batch in islice(coordinator[name], most):
            batches.append(note(batch))
            snapshots.append(bytes(coordinator.snapshot()))
    return batches, snapshots


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("kind", SOURCES)
def test_sources_go_on_at_a_cut(tmp_path: Path, kind: str, order: dict[str, Any]) -> None:
    def source() -> Any:
        return SOURCES[kind](tmp_path, **order)

    whole, _ = source_feed(source())
    again, snapshots = source_feed(source(), executor=Processes(2))
    assert_same(again, whole)
    i = len(whole) // 2
    rest, _ = source_feed(source(), resume=snapshots[i - 1], executor=Processes(3))
    assert_same(rest, whole[i:])
    rest, _ = source_feed(source(), resume=snapshots[i - 1])
    assert_same(rest, whole[i:])


@pytest.mark.parametrize("last_batch", ("carry", "drop", "pad"))
def test_last_batches_of_a_source(tmp_path: Path, last_batch: str) -> None:
    order = ORDERS["dali window"]
    whole, _ = source_feed(of_arrays(tmp_path, **order), last_batch=last_batch)
    again, _ = source_feed(
        of_arrays(tmp_path, **order), last_batch=last_batch, executor=Processes(2)
    )
    assert_same(again, whole)


def test_iterators_go_on_at_a_cut() -> None:
    whole, _ = source_feed(sources.iterable(Walk))
    again, snapshots = source_feed(sources.iterable(Walk), executor=Processes(2))
    assert_same(again, whole)
    for i in (1, len(whole) // 2):
        for executor in (Processes(1), None):
            rest, _ = source_feed(
                sources.iterable(Walk), resume=snapshots[i - 1], executor=executor
            )
            assert_same(rest, whole[i:], i, executor)


def test_large_arrays_of_a_source_are_shared(tmp_path: Path) -> None:
    order = {"random_shuffle": True}
    whole, _ = source_feed(of_large_arrays(tmp_path, **order), most=50)
    again, _ = source_feed(of_large_arrays(tmp_path, **order), most=50, executor=Processes(3))
    assert_same(again, whole)


# ---- Served


@pytest.mark.parametrize("transport", ("shared", "tcp"))
@pytest.mark.parametrize("form", FORMS)
def test_a_served_feed_runs_on_processes(transport: str, form: str) -> None:
    stream = expected(make_fetch(form, "ragged"), pure=form == "pure", epochs=2)
    coordinator = make(make_fetch(form, "ragged"), epochs=2, executor=Processes(2))
    with served(transport, coordinator) as seen:
        assert_same(list(map(note, seen)), stream)


def test_a_server_runs_what_it_serves_on_processes(tmp_path: Path) -> None:
    stream = expected(make_fetch("pure", "ragged"), pure=True, epochs=2)
    coordinator = make(make_fetch("pure", "ragged"), epochs=2)
    address = f"ipc://{tmp_path}/feed.sock"
    with (
        feeder.serve(coordinator, address, executor=Processes(2)) as server,
        feeder.connect(server.addresses[0]) as consumer,
    ):
        assert_same([note(batch) for batch in consumer], stream)
