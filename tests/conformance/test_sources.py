"""Every source through a whole feed: its rows in its order, and the same again from any cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calls import call
from feeder import ChunkError
from feeder.workers import sources
from feeder.workers.stream.placement import Place, writing_to
from freeze import sources as frozen
from freeze.sources import (
    BATCH_SIZE,
    NUM_RECORDS,
    of_arrays,
    of_caffe,
    of_caffe2,
    of_images,
    of_records,
    of_samples,
    of_tokens,
)
from needs import needs
from protos import Datum
from small import make as make_feed
from stores import encoded, picture, write_lmdb

pytestmark = pytest.mark.process

EPOCHS = 3
ORDERS = {
    name: order for name, order in frozen.ORDERS.items() if name not in ("one shard", "shuffled")
}
SOURCES = frozen.ORDERED

Make = Callable[..., Any]
Batches = list[tuple[int, int, tuple[bytes, ...]]]


def feed(
    make: Make, names: list[str], resume: bytes | None = None, **settings: Any
) -> tuple[Batches, list[bytes]]:
    """The batches of a fresh feed, and after each of them a snapshot."""
    settings = {"epochs": EPOCHS, "resume": resume, "seed": 7, **settings}
    coordinator = make_feed(make(), names, BATCH_SIZE, **settings)
    batches: Batches = []
    snapshots = []
    with coordinator:
        for batch in coordinator["train"]:
            columns = tuple(batch[name].tobytes() for name in names)
            batches.append((batch.epoch, batch.index, columns))
            snapshots.append(bytes(coordinator.snapshot()))
    return batches, snapshots


def check_every_cut(make: Make, names: list[str], **settings: Any) -> None:
    whole, snapshots = feed(make, names, **settings)
    assert whole
    for i, snapshot in enumerate(snapshots):
        rest, _ = feed(make, names, resume=snapshot, num_threads=1 + i % 3, **settings)
        assert rest == whole[i + 1 :], i


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize(("make", "names"), SOURCES.values(), ids=SOURCES.keys())
def test_a_feed_goes_on_at_every_cut(
    tmp_path: Path, make: Make, names: list[str], order: dict[str, Any]
) -> None:
    """Whether its calls write their rows to the batch, or these are copied."""
    places = {"rows_per_call": BATCH_SIZE, "num_threads": 3}
    copied, _ = feed(lambda: make(tmp_path, **order), names)
    written, snapshots = feed(lambda: make(tmp_path, **order), names, **places)
    assert written == copied
    for i, snapshot in enumerate(snapshots):
        settings = places if i % 2 else {"num_threads": 1 + i % 3}
        rest, _ = feed(lambda: make(tmp_path, **order), names, resume=snapshot, **settings)
        assert rest == copied[i + 1 :], i


def of_typed_tokens(path: Path, **order: Any) -> Any:
    np.arange(NUM_RECORDS * 5, dtype=np.uint16).tofile(path / "tokens.bin")
    return sources.tokens(path / "tokens.bin", 5, np.uint16, as_type=np.int64, **order)


def of_jpegs(path: Path, **order: Any) -> Any:
    needs("PIL")
    values = [
        Datum(data=encoded(picture(9, 9, i)), label=i, encoded=True).SerializeToString()
        for i in range(NUM_RECORDS)
    ]
    return sources.caffe_lmdb(write_lmdb(path / "jpegs", values), **order)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(
    ("make", "num"),
    [
        (of_arrays, 2), (of_tokens, 1), (of_typed_tokens, 1), (of_samples, 2), (of_records, 2),
        (of_caffe, 1), (of_jpegs, 1), (of_caffe2, 2), (of_images, 1),
    ],
)  # fmt: skip
def test_a_source_writes_its_rows_to_their_place(
    tmp_path: Path, make: Make, num: int, shuffled: bool
) -> None:
    """All columns, but for labels that were read from their records anyway."""
    source = make(tmp_path, random_shuffle=shuffled)
    plain = source(call(1, BATCH_SIZE))
    for rows in (BATCH_SIZE, BATCH_SIZE + 1):
        arrays = tuple(np.zeros((rows, *column.shape[1:]), column.dtype) for column in plain)
        one = call(1, BATCH_SIZE)
        with writing_to(Place(["x", "y"][: len(plain)], (0, 0), arrays), one):
            written = source(one)
        for i, (column, expected, place) in enumerate(zip(written, plain, arrays, strict=True)):
            assert column.tobytes() == expected.tobytes()
            assert np.shares_memory(column, place) or i >= num


@pytest.mark.parametrize("last_batch", ["carry", "drop", "pad"])
def test_last_batches(tmp_path: Path, last_batch: str) -> None:
    order = ORDERS["dali window"]
    check_every_cut(lambda: of_arrays(tmp_path, **order), ["x", "y"], last_batch=last_batch)


def test_iterators_go_on_at_every_cut(tmp_path: Path) -> None:
    check_every_cut(lambda: frozen.of_iterators(tmp_path), ["x", "epoch"])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_feed_that_leaves_records_out_goes_on_at_every_cut(num_threads: int) -> None:
    def fragile(info: sources.SampleInfo) -> tuple[int, int]:
        # All of the first call, some of the second, and all of the last.
        if info.idx_in_epoch in (0, 1, 2, 3, 5, 20, 21, 22):
            raise ValueError("unreadable")
        return info.idx_in_epoch, info.epoch_idx

    def make() -> sources.Source:
        return sources.samples(fragile, NUM_RECORDS, on_error="skip")

    whole, _ = feed(make, ["x", "y"], num_threads=num_threads)
    numbers = [n for _, _, (x, _) in whole for n in np.frombuffer(x, np.int64).tolist()]
    assert numbers == 3 * [4, *range(6, 20)]
    check_every_cut(make, ["x", "y"])


@pytest.mark.parametrize("batch_size", [1, 4])
def test_rows_of_another_shape_are_named_by_their_record(tmp_path: Path, batch_size: int) -> None:
    values = [
        Datum(
            channels=1, height=1 + i // 8, width=2, data=bytes(2 + i // 8 * 2), label=i,
            encoded=False,
        ).SerializeToString()
        for i in range(16)
    ]  # fmt: skip
    path = write_lmdb(tmp_path / "db", values)
    coordinator = make_feed(sources.caffe_lmdb(path), ["image", "label"], batch_size)
    message = (
        rf"^worker 0, call {8 // batch_size}: column 'image': row shape is \(2, 2, 1\), expected "
        rf"\(1, 2, 1\); where .* dont_rebatch=True makes .*; the call's first "
        rf"record is {str(path)!r} at key b'00000008'$"
    )
    with coordinator:
        assert sum(next(coordinator["train"]).rows for _ in range(8 // batch_size)) == 8
        with pytest.raises(ChunkError, match=message):
            next(coordinator["train"])
