"""Full checksums that are made while batches are copied, and those that are made when they go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conformance.served import reading, serving
from feeder.service.memory.arena import ArenaSlots
from feeder.service.memory.memfd import ArenaSlot, Wanted
from feeder.service.protocol.batches import checksum
from feeder.service.server import delivery
from feeder.workers.stream.chunks import Column, Columns
from feeder.workers.stream.copying import copy_part, copy_rows, copy_whole
from small import Calls, make
from watching import around

ROWS, WIDTH = 64, 4101
"""Rows of 16 kB and 20 bytes: a batch has a megabyte, and does not fill its slot."""


def columns(*axes: int, dtype: str = "f4", width: int = WIDTH) -> Columns:
    return tuple(
        Column(name=f"c{i}", axis=axis, dtype=np.dtype(dtype), shape=(width,))
        for i, axis in enumerate(axes)
    )


def slot_for(of: Columns, *, wanted: bool = True) -> ArenaSlot:
    slots = ArenaSlots(2, lambda device, slot_bytes: 2)
    slots.prepare(1, Wanted(sums=wanted))
    assert slots.take_slot(0, of, ROWS).seen is None
    return slots.take_slot(1, of, ROWS)


def rows(num: int, first: int = 0) -> Any:
    return np.arange(first, first + num * WIDTH, dtype="f4").reshape(num, WIDTH)


def in_chunks(*sizes: int) -> Callable[[ArenaSlot], None]:
    def copy(slot: ArenaSlot) -> None:
        pieces = [rows(size, 1000 * i) for i, size in enumerate(sizes)]
        num_rows = sum(map(len, pieces))
        copy_rows(slot.arrays[0], slot.flats[0], 0, 0, num_rows, pieces, slot.seen)

    return copy


def in_parts(slot: ArenaSlot) -> None:
    flat = slot.flats[0]
    assert flat is not None
    for at in (0, 16, 32, 48):
        copy_part(slot.arrays[0], flat, at, rows(100), at + 7, at + 23, slot.seen)


COPIES: dict[str, Callable[[ArenaSlot], None]] = {
    "whole": lambda slot: copy_whole(slot.arrays[0], slot.flats[0], rows(ROWS), slot.seen),
    "strided": lambda slot: copy_whole(
        slot.arrays[0], slot.flats[0], rows(2 * ROWS)[::2], slot.seen
    ),
    "another byte order": lambda slot: copy_whole(
        slot.arrays[0], slot.flats[0], rows(ROWS).astype(">f4"), slot.seen
    ),
    "chunks": in_chunks(7, 50, 7),
    "parts": in_parts,
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_what_is_made_while_rows_are_copied_is_the_checksum_of_the_slot(
    copy: Callable[[ArenaSlot], None],
) -> None:
    slot = slot_for(columns(0))
    slot.memory[:] = bytes(len(slot.memory))
    copy(slot)
    slot.lease(ROWS)
    assert slot.checksum == checksum(slot.memory, "full")
    assert slot.checked_s > 0
    slot.prepare(Wanted(sums=True))
    copy(slot)
    slot.lease(ROWS)
    assert slot.checksum == checksum(slot.memory, "full")


def padded(slot: ArenaSlot) -> None:
    in_chunks(30)(slot)
    slot.arrays[0][30:] = slot.arrays[0][29]


@pytest.mark.parametrize(
    ("of", "copy"),
    [
        (columns(0), in_chunks(*[1] * ROWS)),
        (columns(0), padded),
        (columns(0), lambda slot: slot.arrays[0].fill(1)),
        (columns(0, 0), lambda slot: None),
        (columns(1), lambda slot: None),
        (columns(0, width=100), lambda slot: None),
    ],
    ids=["small chunks", "padded", "adopted", "two columns", "another axis", "small"],
)
def test_else_none_is_made(of: Columns, copy: Callable[[ArenaSlot], None]) -> None:
    slot = slot_for(of)
    copy(slot)
    slot.lease(ROWS)
    assert slot.checksum is None


@pytest.mark.served
@pytest.mark.usefixtures("large_frames")
@pytest.mark.parametrize(("plane", "mode"), [("shared", "full"), ("frames", "sampled")])
def test_the_server_reads_no_batch_again(
    plane: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the consumer finds that what came is what was fetched."""
    again: list[str] = []
    around(monkeypatch, delivery, "checksum", before=lambda memory, how: again.append(how))
    fetch = Calls(40, lambda call: [rows(32, call.index)])
    with (
        serving(lambda: make(fetch, ["x"], ROWS)) as server,
        reading(server, plane=plane, checksum=mode) as consumer,
    ):
        got = np.concatenate([batch["x"] for batch in consumer])
    assert (got == np.concatenate([rows(32, i) for i in range(40)])).all()
    assert again == ([] if mode == "full" else ["sampled"] * 20)
