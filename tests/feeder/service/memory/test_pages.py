"""Memory that a server has ready before anybody comes, and what becomes of it."""

from __future__ import annotations

import os
import resource
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feeder.errors import TransportError
from feeder.service.memory import arena as arena_module
from feeder.service.memory.arena import Arena, ArenaSlots
from feeder.service.memory.memfd import Pages
from feeder.workers.stream.chunks import Column

PAGE = os.sysconf("SC_PAGE_SIZE")
NUM_SLOTS = 3


def columns(num_bytes: int) -> tuple[Column, ...]:
    return (Column(name="x", axis=0, dtype=np.dtype(np.uint8), shape=(num_bytes,)),)


def held(pages: Pages | Arena) -> int:
    """The bytes that have memory."""
    return os.fstat(pages.descriptor).st_blocks * 512


def make() -> ArenaSlots:
    """The slots of two queues, with memory in reserve."""
    slots = ArenaSlots(2, lambda device, slot_bytes: NUM_SLOTS)
    slots.reserve()
    return slots


def reserved(slots: ArenaSlots) -> list[Pages]:
    return [slots._reserve[device] for device in range(2)]


def test_all_queues_together_have_the_reserve() -> None:
    slots = make()
    sizes = [held(pages) for pages in reserved(slots)]
    assert sizes == [arena_module._RESERVE_BYTES // 2] * 2
    assert arena_module._RESERVE_BYTES == 24 * 2**20
    assert slots.num_bytes == 0


# Larger than what is in reserve: by little, or each slot by itself.
@pytest.mark.parametrize("slot_bytes", [5 * 2**20 + PAGE, 13 * 2**20 + PAGE])
def test_the_first_arena_of_each_queue_is_made_of_it(slot_bytes: int) -> None:
    slots = make()
    files = [os.fstat(pages.descriptor).st_ino for pages in reserved(slots)]
    for device, file in enumerate(files):
        slot = slots.take_slot(device, columns(slot_bytes), 1)
        state, size = os.fstat(slot.arena.descriptor), NUM_SLOTS * slot_bytes
        assert (state.st_ino, state.st_size) == (file, size)
        assert held(slot.arena) == -(-max(slot_bytes, 12 * 2**20) // PAGE) * PAGE
        rows, before = b"x" * slot_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        slot.memory[:] = rows
        num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert num_faults < 64 + slot_bytes // PAGE // 8
        # The other slots are slots as any, those at the end of what was in reserve too.
        for _ in range(NUM_SLOTS - 1):
            other = slots.take_slot(device, columns(slot_bytes), 1)
            other.memory[:] = b"y" * slot_bytes
            assert other.arena is slot.arena
        assert slot.memory == rows
        slots.retire(device)
        other = slots.take_slot(device, columns(slot_bytes), 1)
        assert os.fstat(other.arena.descriptor).st_ino != file


def test_what_is_more_than_a_queue_needs_is_given_back_once_it_is_fed() -> None:
    slots, told = make(), []
    slots.on_spare = lambda: told.append(True)
    spare = weakref.ref(reserved(slots)[0])
    slot = slots.take_slot(0, columns(4096), 1)
    assert slot.arena.num_bytes == NUM_SLOTS * 4096
    assert spare() is not None and not told, "its consumer waits"
    slot.sent = True
    slots.release(0, [slot.number])
    assert spare() is not None and told
    slots.let_go()
    assert spare() is None
    slots.take_slot(0, columns(4096), 1).sent = True
    slots.release(0, [0])
    assert len(told) == 1
    assert list(slots._reserve) == [1], "the other queue waits on"


def test_what_is_cut_off_has_no_memory_any_more() -> None:
    pages = Pages(4 * PAGE)
    pages.write(3 * PAGE)
    pages.resize(2 * PAGE)
    assert pages.num_backed == held(pages) == 2 * PAGE
    pages.resize(4 * PAGE)
    memory = pages.seal()
    assert (len(memory), pages.num_backed, held(pages)) == (4 * PAGE, 2 * PAGE, 2 * PAGE)
    assert pages.back(4 * PAGE)
    assert pages.num_backed == held(pages) == 4 * PAGE


def test_what_nobody_came_for_is_given_back() -> None:
    slots = make()
    pages = [weakref.ref(pages) for pages in reserved(slots)]
    descriptors = [pages.descriptor for pages in reserved(slots)]
    slots.take_slot(0, columns(64), 1)  # The first one's was too much, the second's waits.
    slots.drop()
    assert [each() for each in pages] == [None, None]
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate", "pwritev"])
def test_who_is_short_of_memory_is_told_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    files = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        slots = make()
        wanted = rf"no shared memory of {NUM_SLOTS * PAGE} bytes .*No space left"
        with pytest.raises(TransportError, match=wanted) as caught:
            slots.take_slot(0, columns(64), 1)
    assert caught.tb is not None, "it holds frames"
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    assert slots.take_slot(0, columns(64), 1).arena.num_bytes == NUM_SLOTS * PAGE
