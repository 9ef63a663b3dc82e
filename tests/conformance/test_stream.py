"""The stream is that of the naive feeder, bit for bit, whatever it is run with."""

from __future__ import annotations

from itertools import product
from threading import Event
from typing import Any

import numpy as np
import pytest

from feeder import Call
from feeds import assert_same, deal, drain, expected, note, running
from fetches import FORMS, NEED_TWO_WORKERS, PATTERNS, make_fetch, make_rows
from parts import some

THREADS = (1, 2, 8)
LAST_BATCH = ("keep", "drop", "pad", "carry")
LAST_ROUND = ("uneven", "drop", "pad")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("workers", (1, 3))
def test_stream_is_the_naive_one(form: str, pattern: str, workers: int) -> None:
    if workers == 1 and form != "pure" and pattern in NEED_TWO_WORKERS:
        workers = 4
    ways = ((1, 2), *((3, threads) for threads in THREADS))
    for last_batch, (epochs, threads) in some((form, pattern, workers), LAST_BATCH, ways):
        settings: dict[str, Any] = {"epochs": epochs, "last_batch": last_batch}
        stream = expected(
            make_fetch(form, pattern), pure=form == "pure", num_workers=workers, **settings
        )
        got = drain(
            make_fetch(form, pattern), num_worker_threads=workers, num_threads=threads, **settings
        )
        assert_same(got, stream, epochs, last_batch, threads)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("last_round", LAST_ROUND)
def test_stream_is_dealt_out_to_devices_in_rounds(form: str, pattern: str, last_round: str) -> None:
    ways = ((2, 8), (3, 1))
    for (devices, threads), last_batch in some((form, pattern, last_round), ways, LAST_BATCH):
        settings: dict[str, Any] = {
            "epochs": 2, "last_batch": last_batch, "last_round": last_round
        }  # fmt: skip
        stream = expected(
            make_fetch(form, pattern), pure=form == "pure", num_devices=devices, **settings
        )
        got = drain(make_fetch(form, pattern), devices=devices, num_threads=threads, **settings)
        assert_same(got, stream, devices, last_batch, threads)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("devices", (1, 2))
def test_each_device_gets_its_share_in_order_however_far_apart_they_are(
    form: str, devices: int
) -> None:
    stream = expected(make_fetch(form, "ragged"), pure=form == "pure", epochs=2)
    with running(make_fetch(form, "ragged"), epochs=2, devices=devices) as (_, feed):
        for i, name in enumerate(feed.devices):
            assert [note(batch) for batch in feed.on(name)] == stream[i::devices]


@pytest.mark.parametrize(
    ("order", "beyond"), (("ticket", "rows"), ("ticket", "error"), ("arrival", "error"))
)
@pytest.mark.parametrize("threads", (2, 3, 8))
def test_what_lies_beyond_the_first_end_of_a_pure_function_is_discarded(
    order: str, beyond: str, threads: int
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

    with running(fetch, epochs=2, order=order, num_threads=threads) as (_, feed):
        ids = [int(row_id) for batch in feed for row_id in batch["id"]]
    chunks = [make_rows(0, epoch, index, 3) for epoch, index in product(range(2), range(5))]
    assert sorted(ids) == [row_id for chunk in chunks for row_id in chunk["id"].tolist()]


@pytest.mark.parametrize("form", FORMS)
def test_stream_without_end_goes_on_through_the_epochs(form: str) -> None:
    stream = expected(make_fetch(form, "ragged"), pure=form == "pure", epochs=5)[:-1]
    assert len(stream) > 20
    assert drain(make_fetch(form, "ragged"), epochs=None, most=len(stream)) == stream


@pytest.mark.parametrize("pattern", PATTERNS)
def test_seed_alone_changes_what_a_pure_function_draws(pattern: str) -> None:
    streams = [drain(make_fetch("pure", pattern), seed=seed) for seed in (0, 7, 2**64 - 1)]
    for seed, stream in zip((0, 7, 2**64 - 1), streams, strict=True):
        assert stream == expected(make_fetch("pure", pattern), pure=True, epochs=1, seed=seed)
    assert streams[0] != streams[1] != streams[2] != streams[0]


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_without_rebatching_each_chunk_with_rows_is_a_batch(form: str, pattern: str) -> None:
    singles = expected(make_fetch(form, pattern), pure=form == "pure", epochs=2, batch_size=1)
    for threads, devices in some((form, pattern), THREADS, (1, 2)):
        with running(
            make_fetch(form, pattern),
            epochs=2, dont_rebatch=True, num_threads=threads, devices=devices,
        ) as (_, feed):  # fmt: skip
            batches = list(deal(feed))
        assert all(batch.rows == len(batch["id"]) > 0 for batch in batches)
        assert sorted({batch.rows for batch in batches}) == chunk_sizes(pattern, form)
        rows = [
            (batch.epoch, *row) for batch in batches for row in zip(*batch.arrays(), strict=True)
        ]
        assert [(epoch, *map(as_bytes, row)) for epoch, *row in rows] == [
            (epoch, *(column[2] for column in columns)) for epoch, _, _, _, columns in singles
        ]


def chunk_sizes(pattern: str, form: str) -> list[int]:
    """Return the sizes of the chunks of two epochs, those without rows left out."""
    script = PATTERNS[pattern]
    calls = (rows for epoch in range(2) for worker in range(3) for rows in script(worker, epoch))
    return sorted({rows for rows in calls if rows})


def as_bytes(value: Any) -> bytes:
    return np.asarray(value).tobytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_rows_may_lie_along_any_axis(form: str, pattern: str) -> None:
    stream = expected(make_fetch(form, pattern), pure=form == "pure", epochs=2)
    fetch = make_fetch(form, pattern)
    upright = fetch.make

    def make_sideways(*args: Any) -> list[np.ndarray]:
        chunk = upright(*args)
        ids, vectors, labels = (
            (chunk[name] for name in ("id", "vector", "label"))
            if isinstance(chunk, dict)
            else chunk
        )
        return [ids, vectors.T, labels]

    fetch.make = make_sideways
    with running(fetch, epochs=2, batch_columns=[0, 1, 0]) as (_, feed):
        batches = list(feed)
    for batch in batches:
        assert batch["vector"].shape == (3, len(batch["id"]))
    sideways = [
        (*note(batch)[:4], tuple(as_bytes(column.T) for column in batch.arrays()))
        for batch in batches
    ]
    assert sideways == [(*head, tuple(c[2] for c in columns)) for *head, columns in stream]
