"""Columns that are sent from where they were fetched to, and looked at where they came."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from zmq.utils import garbage

import feeder
from conformance.served import reading, serving
from feeder.service.memory.arena import ArenaSlots
from feeder.service.memory.memfd import NOTHING, ArenaSlot, Arrays, Wanted, wanted_by_all
from feeder.service.protocol.batches import checksum
from feeder.workers.stream import copying
from feeder.workers.stream.chunks import Column
from feeder.workers.stream.copying import keep_or_copy
from small import Calls, make
from watching import around

pytestmark = pytest.mark.served

ROWS = 16
IMAGE, LABEL, SERIES = (4099, 5), (3,), (1025, 16)
COLUMNS = (
    Column(name="label", axis=0, dtype=np.dtype("i2"), shape=LABEL),
    Column(name="image", axis=0, dtype=np.dtype("f4"), shape=IMAGE),
    Column(name="series", axis=1, dtype=np.dtype("i8"), shape=SERIES),
    Column(name="last", axis=0, dtype=np.dtype("u1"), shape=()),
)
"""The second and the third have a megabyte and more; between the columns is memory of no column."""


def chunk(first: int) -> list[NDArray[Any]]:
    shapes = [
        (*column.shape[: column.axis], ROWS, *column.shape[column.axis :]) for column in COLUMNS
    ]
    return [
        (np.arange(np.prod(shape)) + first).astype(column.dtype).reshape(shape)
        for column, shape in zip(COLUMNS, shapes, strict=True)
    ]


def put(wanted: Wanted, arrays: list[NDArray[Any]]) -> tuple[ArenaSlot, Arrays]:
    """A slot with a batch in it, and the arrays of the batch."""
    slots = ArenaSlots(1, lambda device, slot_bytes: 1)
    slots.prepare(0, wanted)
    slot = slots.take_slot(0, COLUMNS, ROWS)
    slot.memory[:] = bytes(len(slot.memory))
    for number, array in enumerate(arrays):
        keep_or_copy(slot, number, array)
    return slot, slot.lease(ROWS)


LAYOUTS: dict[str, tuple[Callable[[NDArray[Any]], NDArray[Any]], bool]] = {
    "as it is": (lambda array: array, True),
    "read-only": (lambda array: np.frombuffer(array.tobytes(), "f4").reshape(array.shape), True),
    "a part of a larger one": (lambda array: np.concatenate([array, array])[ROWS:], True),
    "a small part of a larger one": (lambda array: np.concatenate([array] * 3)[ROWS:-ROWS], False),
    "a subclass": (lambda array: array.view(np.recarray), True),
    "strided": (lambda array: np.repeat(array, 2, axis=0)[::2], False),
    "columns first": (np.asfortranarray, False),
    "another byte order": (lambda array: array.astype(">f4"), False),
}


@pytest.mark.parametrize(("lay", "is_kept"), LAYOUTS.values(), ids=LAYOUTS)
def test_what_is_kept_has_the_bytes_of_a_copy(
    lay: Callable[[NDArray[Any]], NDArray[Any]], is_kept: bool
) -> None:
    arrays = chunk(7)
    arrays[1] = lay(arrays[1])
    copy, copied = put(Wanted(), arrays)
    slot, kept = put(Wanted(sums=True, keeps=True), arrays)
    assert b"".join(slot.memories(kept)) == b"".join(copy.memories(copied))
    assert len(copy.memories(copied)) == 1 and len(slot.memories(kept)) == (4 if is_kept else 3)
    assert slot.checksum == checksum(copy.memory, "full") and slot.checked_s > 0
    for got, wanted in zip(kept, copied, strict=True):
        assert type(got) is np.ndarray and not got.flags.writeable
        assert np.array_equal(got, wanted) and got.dtype == wanted.dtype
    assert [np.may_share_memory(got, array) for got, array in zip(kept, arrays, strict=True)] == [
        False, is_kept, True, False,
    ]  # fmt: skip
    assert arrays[2].flags.writeable, "the user's own array was made read-only"


class Fetch(Calls):
    """Chunks of a whole batch, of which it is known whether they are still somewhere."""

    def __init__(self, num_calls: int) -> None:
        super().__init__(num_calls, self.give)
        self.alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def give(self, call: feeder.Call) -> Any:
        label, image, _, _ = chunk(call.index)
        self.alive[call.index] = image
        return [label, image]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of what is copied whole; ends the thread that ZeroMQ lets go of messages in."""
    shapes: list[tuple[int, ...]] = []
    around(
        monkeypatch, copying, "copy_whole", before=lambda target, *_: shapes.append(target.shape)
    )
    yield shapes
    garbage.gc.stop()


@pytest.mark.parametrize(("scheme", "how"), [("ipc", "off"), ("tcp", "sampled"), ("ipc", "full")])
def test_in_frames_large_columns_are_copied_nowhere(
    scheme: str, how: str, copied: list[tuple[int, ...]]
) -> None:
    """But for a sample, which is taken of a batch that lies in one place."""
    with (
        serving(lambda: make(Fetch(12), ["label", "image"], ROWS), scheme) as server,
        reading(server, plane="frames", checksum=how) as consumer,
    ):
        batches = list(consumer)
        plane: Any = consumer._lease
        assert plane._frames.num_leased == 0, "the consumer has copied it"
        assert consumer.stats()["checksum_failures"] == 0
    assert len(batches) == 12
    for index, batch in enumerate(batches):
        label, image, _, _ = chunk(index)
        assert np.array_equal(batch["label"], label) and np.array_equal(batch["image"], image)
        assert not batch["image"].flags.writeable and batch["image"].flags.aligned
    assert ((ROWS, *IMAGE) in copied) is (how == "sampled")
    assert (ROWS, *LABEL) in copied


@pytest.mark.parametrize(
    ("wishes", "both"),
    [
        ([Wanted(sums=True, keeps=True), NOTHING], Wanted(sums=True)),
        ([Wanted(keeps=True), Wanted(sums=True, keeps=True)], Wanted(sums=True, keeps=True)),
        ([Wanted(keeps=True), NOTHING, Wanted(keeps=True)], NOTHING),
    ],
)
def test_what_serves_all_replicas(wishes: list[Wanted], both: Wanted) -> None:
    """Sums where one wants them, and columns in the slot where one reads it."""
    assert wanted_by_all(wishes) == both
    assert (wanted_by_all(wishes) is NOTHING) == (both == NOTHING)


@pytest.mark.usefixtures("copied")
def test_a_chunk_goes_when_its_batch_has_been_used() -> None:
    fetch, num_calls = Fetch(40), 40
    with (
        serving(lambda: make(fetch, ["label", "image"], ROWS, max_buffered_batches=4)) as server,
        reading(server, plane="frames", credit=2) as consumer,
    ):
        most = 0
        for _ in consumer:
            gc.collect()
            most = max(most, len(fetch.alive))
        # Buffered; being fetched; in the slots of a queue: its credit, what is spare, and held. And
        # as many again, of which ZeroMQ says later that it has let go of them.
        assert most <= 2 * (4 + 2 + (2 + 2 + 1)) < num_calls
        assert consumer.stats()["batches"] == num_calls
    garbage.gc.stop()  # It waits until those are gone.
    gc.collect()
    assert not fetch.alive
