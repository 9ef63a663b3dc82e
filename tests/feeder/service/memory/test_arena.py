"""Arenas: memory that the server alone writes, and slots that come back when they are released."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from feeder.errors import ClosedError, ProtocolError, TransportError
from feeder.service.memory import memfd
from feeder.service.memory.arena import SLOTS_PER_ARENA, Arena, ArenaSlot, ArenaSlots
from feeder.service.memory.memfd import Pages
from feeder.workers.stats import Stopwatch
from feeder.workers.stream.chunks import Column, Columns
from small import WAIT_S, Aside

COLUMNS = (
    Column(name="id", axis=0, dtype=np.dtype(np.int64), shape=()),
    Column(name="image", axis=1, dtype=np.dtype(np.uint8), shape=(3, 2)),
)


def make(num_slots: int = 2, **settings: Any) -> ArenaSlots:
    return ArenaSlots(2, lambda device, slot_bytes: num_slots, **settings)


def take(slots: ArenaSlots, device: int = 0, columns: Columns = COLUMNS, rows: int = 4) -> Any:
    """A slot, where one has to be free."""
    slot = slots.take_slot(device, columns, rows)
    assert slot is not None
    return slot


def lend(slots: ArenaSlots, device: int = 0, rows: int = 4) -> Any:
    """The slot of a batch that has been sent."""
    slot = take(slots, device, rows=rows)
    slot.lease(rows)
    slot.sent = True
    return slot


class Waits(Stopwatch):
    """Tells when a wait has begun: then the lock of the slots is held until they wait."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def start(self, now: float) -> None:
        super().start(now)
        self.begun.set()


def wait_aside(slots: ArenaSlots) -> Aside:
    """Take a slot of queue 0, of which none is free, in a thread; returns when that waits."""
    assert slots.take_slot(0, COLUMNS, 4) is None
    slots.waited = waits = Waits()

    def deed() -> Any:
        slots.wait_for_slot(0)
        return slots.take_slot(0, COLUMNS, 4)

    waiting = Aside(deed)
    assert waits.begun.wait(WAIT_S)
    return waiting


@pytest.mark.parametrize("num_reserved", [None, 4096, 2**16])
def test_who_has_the_descriptor_can_read_and_nothing_else(num_reserved: int | None) -> None:
    arena = Arena(4096, 2, 0, None if num_reserved is None else Pages(num_reserved))
    memory, descriptor, size = arena.memory, arena.descriptor, arena.num_bytes
    assert os.fstat(descriptor).st_nlink == 0, "it has a name, and outlives a server that is killed"
    memory[:5] = b"fed 1"

    def open_anew() -> None:
        with open(f"/proc/self/fd/{descriptor}", "r+b", buffering=0) as other:
            mmap.mmap(other.fileno(), size)

    forbidden: list[Callable[[], Any]] = [
        lambda: mmap.mmap(descriptor, size), open_anew,
        lambda: os.pwrite(descriptor, b"x", 0),
        lambda: os.ftruncate(descriptor, 0), lambda: os.ftruncate(descriptor, 2 * size),
        lambda: fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ]  # fmt: skip
    for deed in forbidden:
        with pytest.raises(OSError):
            deed()
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as reader:
        assert reader[:5] == b"fed 1"
    memory[:5] = b"fed 2"
    del arena
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert bytes(memory[:5]) == b"fed 2"


def test_who_is_told_meanwhile_that_it_is_over_asks_for_no_more_memory() -> None:
    size, told = 8 * 2**20, [False, False, True]
    arena = Arena(size, 3)
    assert not arena.back(1, lambda: told.pop(0))
    assert not told
    backed = os.fstat(arena.descriptor).st_blocks * 512
    assert size < backed < 2 * size
    assert arena.back(1, lambda: False)
    assert os.fstat(arena.descriptor).st_blocks * 512 == 2 * size
    assert arena.back(1, lambda: True), "what is there needs not be asked for"


def test_memory_that_is_not_to_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    wanted = r"no shared memory of 2097152 bytes .*No space left"
    arena = Arena(2**20, 2)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransportError, match=wanted):
        arena.back(1)
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(TransportError, match=wanted):
        Arena(2**20, 2)


def test_a_kernel_without_the_seal_against_writers_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memfd, "_F_SEAL_FUTURE_WRITE", 0x4000)
    monkeypatch.setattr(memfd._Once, "said", False)
    for arena in (Arena(64, 2), Arena(64, 2)):
        seals = fcntl.fcntl(arena.descriptor, fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert len([line for line in caplog.messages if "does not seal" in line]) == 1


def test_a_batch_is_where_its_slot_says() -> None:
    slots = make()
    slot = slots.take_slot(0, COLUMNS, 4)
    slot.arrays[0][:] = 1, 2, 3, 4
    slot.arrays[1][:] = 7
    whole, part = slot.lease(4), slot.lease(3)
    assert whole[0].tolist() == [1, 2, 3, 4]
    assert part[0].tolist() == [1, 2, 3] and part[1].shape == (3, 3, 2)
    assert not whole[0].flags.writeable and not part[1].flags.writeable
    arena, start = slot.arena, slot.number % SLOTS_PER_ARENA * slot.arena.slot_bytes
    with mmap.mmap(arena.descriptor, arena.num_bytes, prot=mmap.PROT_READ) as reader:
        assert reader[start : start + len(slot.memory)] == bytes(slot.memory)
    assert bytes(slot.memory[:32]) == np.arange(1, 5).tobytes()
    assert slot.flats[1] is None and bytes(slot.flats[0] or b"") == whole[0].tobytes()


@pytest.mark.parametrize("wrong", ["unknown", "free", "twice", "foreign", "not sent", "negative"])
def test_a_release_of_what_the_consumer_has_not_changes_nothing(wrong: str) -> None:
    slots = make(3)
    good, freed, unsent = lend(slots), lend(slots), slots.take_slot(0, COLUMNS, 4)
    foreign = lend(slots, device=1)
    slots.release(0, [freed.number])
    number = good.number
    numbers = {
        "unknown": [number, 99 * SLOTS_PER_ARENA], "free": [number, freed.number],
        "twice": [number, number], "foreign": [number, foreign.number],
        "not sent": [number, unsent.number], "negative": [number, -1],
    }  # fmt: skip
    with pytest.raises(ProtocolError, match=r"slots \[.* of queue 0"):
        slots.release(0, numbers[wrong])
    assert slots.num_leased == 3
    slots.release(0, [number])
    assert slots.num_leased == 2


def send(slot: ArenaSlot, *replicas: int) -> ArenaSlot:
    for replica in replicas:
        slot.sent |= 1 << replica
    return slot


def test_a_shared_slot_is_free_when_all_replicas_have_let_go_of_it() -> None:
    slots = make(1, replicas=3)
    slot = send(take(slots), 0, 2)
    slots.release(0, [slot.number], 2)
    send(slot, 1)
    slots.release(0, [slot.number], 0)
    assert slots.take_slot(0, COLUMNS, 4) is None
    slots.release(0, [slot.number], 1)
    assert take(slots) is slot and not slot.sent
    # The next batch is wanted by all again, and one of them is not sent it.
    slots.free(0, slot)
    slots.release(0, [send(slot, 1).number], 1)
    assert slots.take_slot(0, COLUMNS, 4) is None
    slots.release(0, [send(slot, 2).number], 2)
    assert take(slots) is slot


@pytest.mark.parametrize("replica", [0, 2])
def test_a_replica_releases_only_what_it_has(replica: int) -> None:
    """One has given it back, and the other has not been sent it."""
    slots = make(1, replicas=3)
    slot = send(take(slots), 0, 1)
    slots.release(0, [slot.number], 0)
    with pytest.raises(ProtocolError, match="not all of them are with its consumer"):
        slots.release(0, [slot.number], replica)
    slots.release(0, [slot.number], 1)
    slots.release(0, [send(slot, 2).number], 2)
    assert take(slots) is slot


def test_of_a_run_that_has_ended_only_those_are_waited_for_who_were_sent_the_slot() -> None:
    slots = make(3, replicas=2)
    both, one, nobody = send(take(slots), 0, 1), send(take(slots), 1), take(slots)
    slots.release(0, [both.number], 0)
    slots.close()
    slots.reopen()
    assert take(slots) is nobody and slots.take_slot(0, COLUMNS, 4) is None
    slots.release(0, [one.number], 1)
    assert take(slots) is one
    slots.release(0, [both.number], 1)
    assert take(slots) is both


def test_who_finds_no_free_slot_is_told_so_and_may_wait() -> None:
    slots = make(1)
    batch = lend(slots)
    waiting = wait_aside(slots)
    slots.release(0, [batch.number])
    slots.wake(hungry=True)
    assert waiting.result() is batch


def test_close_ends_a_wait_and_reopen_frees_what_was_not_sent() -> None:
    slots = make(2)
    sent, unsent = lend(slots), take(slots)
    waiting = wait_aside(slots)
    slots.close()
    with pytest.raises(ClosedError):
        waiting.result()
    with pytest.raises(ClosedError):
        slots.take_slot(1, COLUMNS, 4)
    slots.reopen()
    assert slots.take_slot(0, COLUMNS, 4) is unsent
    slots.release(0, [sent.number])


def test_a_retired_arena_is_never_written_again() -> None:
    slots = make(1)
    old = lend(slots)
    take(slots, 1)
    with mmap.mmap(old.arena.descriptor, 0, prot=mmap.PROT_READ) as reader:
        before = reader[:]
        waiting = wait_aside(slots)
        slots.retire(0)
        new = waiting.result()
        assert new.arena is not old.arena
        new.memory[:] = b"\xff" * len(new.memory)
        slots.release(0, [old.number, old.number])
        slots.free(0, old)
        assert reader[:] == before
    assert slots.num_leased == 2


@pytest.mark.parametrize(
    ("gives_back", "is_wanted", "stays"),
    [(True, True, True), (False, True, False), (True, False, False)],
    ids=["given back", "still looked at", "not wanted"],
)
def test_an_arena_stays_where_its_consumer_has_given_everything_back(
    gives_back: bool, is_wanted: bool, stays: bool
) -> None:
    slots = make()
    old = lend(slots)
    if gives_back:
        slots.release(0, [old.number])
    slots.retire(0, lambda arena: is_wanted)
    assert (take(slots).arena is old.arena) == stays
    assert slots.num_made == (2 if stays else 4)


def test_the_memory_of_a_retired_arena_goes_with_its_last_array() -> None:
    slots = make()
    old = lend(slots)
    descriptor, mapping = old.arena.descriptor, weakref.ref(old.arena.memory.obj)
    slots.retire(0)
    os.fstat(descriptor)
    assert mapping() is not None
    del old
    assert mapping() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_larger_batch_opens_an_arena_twice_as_large() -> None:
    slots = make(2)
    made = {lend(slots, rows=rows).arena: rows for rows in (4, 4, 300, 3000)}
    assert slots.num_made == 2 * len(made) == 6
    first, second, third = (arena.slot_bytes for arena in made)
    assert (first, second) == (4096, 8192) and third >= 3000 * 14
    assert len({arena.number for arena in made}) == 3


def test_a_batch_beyond_the_cap_is_an_error_that_names_it() -> None:
    slots = make(2, max_arena_bytes=12_288)
    lend(slots, rows=4)
    assert take(slots, 0, COLUMNS, 8).arena.slot_bytes == 4096
    with pytest.raises(TransportError, match=r"expected at most 12288"):
        slots.take_slot(0, COLUMNS, 3000)


def test_after_a_run_that_has_not_used_all_slots_those_are_taken_first_that_it_has() -> None:
    slots, size = make(4), 8 * 2**20
    large = (Column(name="id", axis=0, dtype=np.dtype(np.uint8), shape=(size,)),)
    first, second = (slots.take_slot(0, large, 1) for _ in range(2))
    arena = first.arena
    slots.close()
    slots.reopen()
    backed = os.fstat(arena.descriptor).st_blocks
    assert [slots.take_slot(0, large, 1) for _ in range(2)] == [first, second]
    assert os.fstat(arena.descriptor).st_blocks == backed
