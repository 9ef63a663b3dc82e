"""Slots: a batch's memory comes back when the last array over it is gone, and never before."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.devices.slots import HostSlots
from small import Aside, Calls, make

ROWS = 3
"""Rows of a chunk: no divisor of the batch size, so that every batch is written into a slot."""
WIDTH = 5


def blocks(num_calls: int = 400, **settings: Any) -> feeder.Coordinator:
    """A feed of rows of `WIDTH` equal values, and a number beside each."""

    def fetch(call: feeder.Call) -> Any:
        numbers = np.arange(ROWS) + ROWS * call.index + 1
        return np.repeat(numbers, WIDTH).reshape(ROWS, WIDTH), numbers

    settings = {"max_buffered_batches": 4, **settings}
    return make(Calls(num_calls, fetch), ["block", "number"], **settings)


def slots_of(coordinator: feeder.Coordinator) -> Any:
    (stream,) = coordinator["train"].streams
    return stream.slots


def wanted(step: int) -> list[int]:
    return list(range(4 * step + 1, 4 * step + 5))


def assert_is(batch: feeder.Batch, step: int) -> None:
    """See that a batch holds what it held when it was handed out."""
    assert batch.step == step
    assert batch["number"].tolist() == wanted(step)
    assert batch["block"].tolist() == [[number] * WIDTH for number in wanted(step)]


def wide(row_bytes: int) -> feeder.Coordinator:
    """A feed of chunks of three rows of so many bytes."""
    fetch = Calls(800, lambda call: (np.full((3, row_bytes), call.index % 251 + 1, np.uint8),))
    return make(fetch, max_buffered_batches=4)


@pytest.mark.parametrize(
    ("row_bytes", "most"), [(16, 4 + 2 + 2 * 2 + 3), (20_000, 4 + 3)], ids=["tiny", "large"]
)
def test_few_slots_are_made_when_batches_are_dropped(row_bytes: int, most: int) -> None:
    with wide(row_bytes) as coordinator:
        slots = slots_of(coordinator)
        assert sum(len(batch["id"]) for batch in coordinator["train"]) == 2400
    assert slots.num_leased == 0
    assert slots.num_made <= most


def test_slots_grow_in_number_while_batches_are_kept_and_are_let_go_again() -> None:
    with wide(100_000) as coordinator:
        slots = slots_of(coordinator)
        kept = [next(coordinator["train"]) for _ in range(100)]
        assert 100 <= slots.num_leased <= slots.num_made <= 100 + 4 + 3
        kept.clear()
        assert slots.num_leased + len(slots._free) < 60
        assert sum(len(batch["id"]) for batch in coordinator["train"]) == 2000


def as_dlpack(array: np.ndarray) -> Any:
    return np.from_dlpack(array)


def as_ctypes(array: np.ndarray) -> Any:
    pointer = array.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
    length = array.size
    return type("Pointed", (), {"tolist": lambda self: [pointer[i] for i in range(length)]})()


VIEWS: dict[str, Callable[[np.ndarray], Any]] = {
    "the array": lambda array: array,
    "a slice": lambda array: array[1:3],
    "a row": lambda array: array[2],
    "reshape": lambda array: array.reshape(-1),
    "transpose": lambda array: array.T,
    "view of bytes": lambda array: array.view(np.uint8),
    "asarray": np.asarray,
    "strides": lambda array: np.lib.stride_tricks.as_strided(array, (2,), (8,)),
    "memoryview": memoryview,
    "array of a memoryview": lambda array: np.asarray(memoryview(array)[1:]),
    "frombuffer": lambda array: np.frombuffer(array, np.int64)[3:],
    "dlpack": as_dlpack,
    "ctypes": as_ctypes,
    "flat": lambda array: type("Flat", (), {"tolist": lambda self, f=array.flat: f[:].tolist()})(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_of_any_kind_keeps_its_slot(view: Callable[[np.ndarray], Any]) -> None:
    with blocks() as coordinator:
        slots, feed = slots_of(coordinator), coordinator["train"]
        views = [view(next(feed)["block"]) for _ in range(3)]
        values = [one.tolist() for one in views]
        for _ in range(200):
            next(feed)
        assert [one.tolist() for one in views] == values
        for _ in range(50):
            next(feed)
        assert [one.tolist() for one in views] == values
        assert slots.num_leased >= 3
        views.clear()
        gc.collect()
        list(feed)
    gc.collect()
    assert slots.num_leased == 0


def test_batches_may_be_dropped_by_other_threads_and_by_the_garbage_collector() -> None:
    class Cycle:
        def __init__(self, batch: feeder.Batch) -> None:
            self.me, self.number = self, batch["number"]

    with blocks(1200) as coordinator:
        slots = slots_of(coordinator)
        parts: list[list[Any]] = [[], [], []]
        for step, batch in enumerate(coordinator["train"]):
            parts[step % 3].append(Cycle(batch) if step % 2 else batch["block"])
            if len(parts[2]) == 30:
                droppers = [Aside(part.clear) for part in parts]
                for dropper in droppers:
                    dropper.result()
                gc.collect()
    parts.clear()
    del batch
    gc.collect()
    assert slots.num_leased == 0


def test_arrays_are_aligned_and_read_only() -> None:
    with blocks() as coordinator:
        for _, batch in zip(range(20), coordinator["train"], strict=False):
            for array in batch.values():
                assert array.ctypes.data % 64 == 0
                assert array.flags.c_contiguous
                assert not array.flags.writeable
                with pytest.raises(ValueError, match="read-only"):
                    array[0] = 0


def test_a_batch_may_be_dropped_after_its_feed_and_frees_all() -> None:
    with blocks() as coordinator:
        batch = next(coordinator["train"])
        pool = weakref.ref(slots_of(coordinator))
    del coordinator
    gc.collect()
    assert_is(batch, 0)
    del batch
    gc.collect()
    assert pool() is None


def test_a_returned_slot_is_the_first_to_be_taken_again() -> None:
    columns = columns_of_blocks()
    slots = HostSlots()
    first, second = slots.take_slot(0, columns, 4), slots.take_slot(0, columns, 4)
    leases = [first.lease(4), second.lease(4)]
    assert (slots.num_made, slots.num_leased) == (2, 2)
    leases.pop(0)
    assert slots.take_slot(0, columns, 4) is first
    leases.clear()
    assert slots.take_slot(0, columns, 4) is second
    assert slots.num_made == 2


def columns_of_blocks() -> Any:
    with blocks(2) as coordinator:
        next(coordinator["train"])
        (stream,) = coordinator["train"].streams
        return stream.pipeline.schema.columns


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("batch_size", [10**15, 10**19])
def test_a_batch_for_which_there_is_no_memory_is_an_error_that_names_it(
    batch_size: int, writable: bool
) -> None:
    with (
        blocks(batch_size=batch_size, writable=writable, max_buffered_batches=1) as coordinator,
        pytest.raises(feeder.ConfigError, match=rf"a batch of {batch_size} rows takes \d+ bytes"),
    ):
        next(coordinator["train"])
