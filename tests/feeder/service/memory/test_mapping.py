"""Mappings: batches are read where the server wrote them, and a slot is free when nobody looks."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeder.devices.layout import layout
from feeder.errors import ProtocolError, TransportError
from feeder.service.memory.arena import SLOTS_PER_ARENA, Arena, ArenaSlots
from feeder.service.memory.mapping import FrameSlots, MappedArena, view
from feeder.workers.stream.chunks import Column
from feeder.workers.stream.loans import Loan

COLUMNS = (
    Column(name="id", axis=0, dtype=np.dtype(np.int64), shape=()),
    Column(name="image", axis=1, dtype=np.dtype(np.uint8), shape=(3, 2)),
)
ROWS = 4


class Pair:
    """A queue's slots at the server, and its first arena as the consumer maps it."""

    def __init__(self, *, is_private: bool = False) -> None:
        self.slots = ArenaSlots(1, lambda device, slot_bytes: 3)
        self.released: deque[Loan] = deque()
        self.num_wakes = 0
        slot = self.slots.take_slot(0, COLUMNS, ROWS)
        self.slots.free(0, slot)
        self.arena: Arena = slot.arena
        self.mapped = MappedArena(
            os.dup(self.arena.descriptor), self.arena.number, self.arena.slot_bytes, 3,
            self.released, self.wake, is_private=is_private,
        )  # fmt: skip

    def wake(self) -> None:
        self.num_wakes += 1

    def take_released(self) -> list[int]:
        """The numbers of the slots that have been released since last asked."""
        slots = [self.released.popleft().what for _ in range(len(self.released))]
        if slots:
            self.mapped.take_back(slots)
        return slots

    def send(self, first: int, length: int = ROWS) -> tuple[int, Any]:
        """Write a batch; the number of its slot and the batch as the consumer sees it."""
        slot = self.slots.take_slot(0, COLUMNS, ROWS)
        slot.arrays[0][:] = np.arange(first, first + ROWS)
        slot.arrays[1][:] = np.arange(first, first + ROWS, dtype=np.uint8)[:, None]
        slot.sent = True
        return slot.number, self.view(slot.number, length)

    def view(self, number: int, length: int = ROWS) -> Any:
        return self.look(number % SLOTS_PER_ARENA, ROWS, length)

    def look(self, index: int, rows: int, length: int) -> Any:
        places, num_bytes = layout(COLUMNS, rows)
        root = self.mapped.root(index, num_bytes)
        return self.mapped.lend(index, root, places, rows, length)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda array: array,
    "a slice": lambda array: array[1:],
    "one of another dtype": lambda array: array.view(np.int8),
    "a memoryview": memoryview,
    "one of a memoryview": lambda array: np.asarray(memoryview(array)),
    "one from DLPack": np.from_dlpack,
}


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("look", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_of_any_kind_keeps_its_slot(look: Callable[[Any], Any], column: int) -> None:
    pair = Pair()
    number, arrays = pair.send(1)
    view = look(arrays[column])
    del arrays
    gc.collect()
    assert (pair.mapped.num_leased, list(pair.released), pair.num_wakes) == (1, [], 0)
    del view
    assert (pair.mapped.num_leased, pair.num_wakes) == (0, 1)
    released = pair.take_released()
    assert released == [number]
    pair.slots.release(0, released)


def test_who_is_woken_finds_the_slot_released() -> None:
    pair, found = Pair(), []
    pair.mapped._wake = lambda: found.append(len(pair.released))
    _, arrays = pair.send(1)
    del arrays
    assert found == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_in_the_finaliser_loses_no_slot() -> None:
    """As it begins: Python looks for signals where a function does."""
    pair = Pair()
    number, arrays = pair.send(1)

    def interrupt(frame: FrameType, event: str, argument: Any) -> None:
        raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        del arrays
    finally:
        sys.settrace(before)
    assert pair.num_wakes == 0
    assert pair.take_released() == [number]


def test_a_slot_comes_again_once_it_was_taken_back_and_not_before() -> None:
    pair = Pair()
    number, *kept = pair.send(1)
    for num_leased in (1, 0):
        with pytest.raises(ProtocolError, match="expected one that was released"):
            pair.view(number)
        assert pair.mapped.num_leased == num_leased
        kept.clear()
    pair.take_released()
    assert pair.view(number)[0][0] == 1


def test_batches_outlive_the_mapping_and_the_server() -> None:
    pair = Pair()
    _, arrays = pair.send(5)
    del pair
    gc.collect()
    assert arrays[0].tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("pagemap", ["whole", "cut off", "refused"])
def test_what_is_written_into_a_slot_is_gone_once_the_slot_was_taken_back(
    monkeypatch: pytest.MonkeyPatch, pagemap: str
) -> None:
    """Some slots are written into, some are kept, and any of them are given back together."""
    if pagemap == "cut off":
        monkeypatch.setattr(os, "pread", lambda *given: b"")
    elif pagemap == "refused":
        monkeypatch.setattr(os, "pread", Mock(side_effect=PermissionError))
    pair, random = Pair(is_private=True), np.random.default_rng(7)
    held: list[tuple[Any, list[int]]] = []
    for first in range(200):
        if len(held) == 3:
            for _ in range(random.integers(1, 4)):
                held.pop(random.integers(len(held)))
            pair.slots.release(0, pair.take_released())
        _, arrays = pair.send(first)
        assert arrays[0].tolist() == [*range(first, first + ROWS)]
        if write := random.integers(2):
            # By the address: NumPy itself refuses it.
            ctypes.memset(arrays[0].ctypes.data, 0xFF, arrays[0].nbytes)
        held.append((arrays[0], [-1] * ROWS if write else [*range(first, first + ROWS)]))
        del arrays
        assert [array.tolist() for array, _ in held] == [rows for _, rows in held]


def test_slots_that_do_not_begin_at_pages_are_mapped_to_be_read() -> None:
    """As a server of an earlier version has them: a page of one's own would hide a neighbour."""
    arena = Arena(4160, 2)
    mapped = MappedArena(
        os.dup(arena.descriptor), 0, 4160, 2, deque(), lambda: None, is_private=True
    )
    places = Path("/proc/self/maps").read_text().splitlines()
    first = f"{mapped.root(0, 4160).ctypes.data:x}-"
    assert [line.split()[1] for line in places if line.startswith(first)] == ["r--s"]


@pytest.mark.parametrize(
    ("index", "rows", "length"),
    [(3, 4, 4), (-1, 4, 4), (0, 400, 400), (0, 4, 5), (0, 4, -1)],
    ids=["no such slot", "negative", "beyond the slot", "too many rows", "fewer than none"],
)
def test_a_batch_that_is_not_in_its_slot_is_refused(index: int, rows: int, length: int) -> None:
    pair = Pair()
    with pytest.raises(ProtocolError, match="the server gave"):
        pair.look(index, rows, length)
    assert pair.mapped.num_leased == len(pair.released) == 0


def test_what_cannot_be_mapped_is_an_error_and_its_descriptor_is_closed() -> None:
    arena = Arena(4096, 1)
    with pytest.raises(TransportError, match="8192 bytes of shared memory cannot be mapped"):
        MappedArena(os.dup(arena.descriptor), 0, 4096, 2, deque(), lambda: None)


LAID_OUT = (
    Column(name="id", axis=0, dtype=np.dtype(np.int64), shape=()),
    Column(name="nothing", axis=0, dtype=np.dtype("f4"), shape=(0,)),
    Column(name="image", axis=1, dtype=np.dtype(np.uint8), shape=(3, 50)),
    Column(name="wide", axis=0, dtype=np.dtype("g"), shape=(2,)),
    Column(name="none", axis=0, dtype=np.dtype("S0"), shape=()),
)
WHOLE = layout(LAID_OUT, ROWS)


@given(
    st.lists(st.integers(0, WHOLE.num_bytes), max_size=4), st.integers(0, 15),
    st.integers(0, ROWS), st.randoms(),
)  # fmt: skip
def test_columns_are_looked_at_where_they_lie_unless_one_is_cut(
    cuts: list[int], shift: int, length: int, rng: Any
) -> None:
    memory = rng.randbytes(WHOLE.num_bytes)
    ends = [0, *sorted(cuts), len(memory)]
    parts = [
        memoryview(bytearray(bytes(shift) + memory[start:stop]))[shift:]
        for start, stop in pairwise(ends)
    ]
    arrays = view(parts, WHOLE, ROWS, length)
    if any(p.offset < cut < p.offset + p.num_bytes for cut in cuts for p in WHOLE.places):
        assert arrays is None
        return
    assert arrays is not None
    for array, (shape, dtype, axis, offset, _) in zip(arrays, WHOLE.places, strict=True):
        wanted = np.ndarray(shape, dtype, memory, offset)
        assert array.tobytes() == wanted[(slice(None),) * axis + (slice(length),)].tobytes()
        assert array.dtype == dtype and array.flags.aligned
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        is_there = [np.may_share_memory(array, np.frombuffer(part, np.uint8)) for part in parts]
        if array.nbytes and dtype.alignment == 1:
            assert any(is_there), "it was copied"


def test_frames_are_written_into_memory_that_is_used_again() -> None:
    slots = FrameSlots(keep=2)
    for first in range(1, 9):
        slot = slots.take_slot(0, COLUMNS, ROWS)
        slot.memory[:32] = np.arange(first, first + ROWS).tobytes()
        kept, arrays = slots.take_slot(0, COLUMNS, ROWS).lease(ROWS), slot.lease(3)
        assert arrays[0].tolist() == [first, first + 1, first + 2]
        assert slots.num_leased == 2
        del slot, kept, arrays
    assert slots.num_leased == 0 and slots._slots.num_made == 2
