"""Where columns lie in a slot, checksums of its memory, and the pieces that frames carry."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeder.devices.layout import layout
from feeder.service.protocol.batches import checksum, full_checksum, pieces
from feeder.workers.stream.chunks import Column

KIB = 1024


def column(name: str, dtype: str, shape: tuple[int, ...], axis: int = 0) -> Column:
    return Column(name=name, axis=axis, dtype=np.dtype(dtype), shape=shape)


COLUMNS = (
    column("image", "<f4", (3, 5)),
    column("label", "|i1", ()),
    column("nothing", "<f8", (0,)),
    column("series", "<i8", (2, 7), axis=1),
)


def test_columns_follow_each_other_at_multiples_of_64_bytes() -> None:
    places, num_bytes = layout(COLUMNS, 10)
    assert [place.shape for place in places] == [(10, 3, 5), (10,), (10, 0), (2, 10, 7)]
    assert [place.num_bytes for place in places] == [600, 10, 0, 1120]
    assert [place.offset for place in places] == [0, 640, 704, 704]
    assert [place.axis for place in places] == [0, 0, 0, 1]
    assert num_bytes == 704 + 1152


@pytest.mark.parametrize("rows", [0, 1])
def test_a_slot_has_at_least_64_bytes(rows: int) -> None:
    assert layout((column("x", "|u1", ()),), rows).num_bytes == 64
    assert layout((), rows).num_bytes == 64


SIZES = [0, 1, 64, 4 * KIB, 8 * KIB, 32 * KIB, 32 * KIB + 1, 64 * KIB, 65 * KIB, 65 * KIB + 1,
         1024 * KIB, 1025 * KIB + 17]  # fmt: skip


class Flipped:
    """Memory of which a region can be changed, and is as it was afterwards."""

    def __init__(self, size: int, mode: Any) -> None:
        self.data, self.mode = bytearray(random.Random(size).randbytes(size)), mode
        self.good = self.look()

    def look(self) -> int:
        return checksum(memoryview(self.data), self.mode)

    def is_noticed(self, start: int, stop: int) -> bool:
        """Whether it is that every byte from `start` to `stop` has changed."""
        was = self.data[start:stop]
        self.data[start:stop] = bytes(byte ^ 0xFF for byte in was)
        found = self.look()
        self.data[start:stop] = was
        return found != self.good


@pytest.mark.parametrize("mode", ["sampled", "full"])
@pytest.mark.parametrize("size", [size for size in SIZES if size])
def test_a_changed_region_of_64_kib_is_noticed_wherever_it_is(size: int, mode: Any) -> None:
    """And a byte at the head or the tail."""
    memory, width = Flipped(size, mode), min(size, 64 * KIB)
    assert memory.is_noticed(0, 1) and memory.is_noticed(size - 1, size)
    last, rng = size - width, random.Random(1)
    starts = {0, last, *(rng.randint(0, last) for _ in range(12))}
    starts |= {start for start in (1, 1023, 1024, 1025, 65535, 65536) if start <= last}
    for start in starts:
        assert memory.is_noticed(start, start + width), start


def test_of_large_memory_a_sixty_fourth_is_looked_at() -> None:
    memory = Flipped(1024 * KIB, "sampled")
    seen = [memory.is_noticed(at, at + 1) for at in range(0, 1024 * KIB, 256)]
    assert 1 / 70 <= sum(seen) / len(seen) <= 1 / 55


@given(st.lists(st.binary(max_size=80), max_size=5))
def test_the_full_checksum_of_parts_is_that_of_all_of_them(parts: list[bytes]) -> None:
    found = full_checksum(map(memoryview, parts))
    assert found == checksum(memoryview(b"".join(parts)), "full")


@given(st.lists(st.integers(1, 200), min_size=1, max_size=4), st.integers(1, 400))
def test_pieces_are_all_of_the_memory_in_order(sizes: list[int], max_bytes: int) -> None:
    memories = [bytearray(os.urandom(size)) for size in sizes]
    parts = pieces([memoryview(memory) for memory in memories], max_bytes)
    assert b"".join(parts) == b"".join(memories)
    assert all(0 < len(part) <= max_bytes for part in parts)
    if sum(sizes) <= max_bytes:
        assert len(parts) == len(sizes), "what could go as it lies was cut"
    memories[-1][-1] ^= 0xFF
    assert parts[-1][-1] == memories[-1][-1], "a piece is a copy"


def test_a_batch_goes_whole_or_in_pieces_of_a_mebibyte() -> None:
    whole = np.arange(31 * 2**17, dtype=np.int64).reshape(31, -1)
    assert [part.nbytes for part in pieces([memoryview(whole)])] == [31 * 2**20]
    parts = pieces([memoryview(whole), memoryview(b"!")])
    assert [part.nbytes for part in parts] == [2**20] * 31 + [1]
    assert b"".join(parts) == whole.tobytes() + b"!"
