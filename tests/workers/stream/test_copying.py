"""Large arrays are copied in pieces, and then told: whatever their size, layout and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from feeder.workers.stream import copying
from feeder.workers.stream.copying import copy_part, copy_rows, copy_whole

LARGE = copying._LARGE_BYTES
PIECE = copying._PIECE_BYTES

SIZES = [LARGE - 1, LARGE, LARGE + 1, LARGE + PIECE, LARGE + 2 * PIECE - 1, LARGE + 2 * PIECE + 7]


def bytes_of(num: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(1, 256, num, np.uint8)


def slot(num_bytes: int, dtype: Any = np.uint8) -> tuple[NDArray[Any], memoryview]:
    memory = bytearray(num_bytes)
    return np.frombuffer(memory, dtype), memoryview(memory)


@pytest.mark.parametrize("num_bytes", SIZES)
def test_every_byte_of_a_large_array_is_copied(num_bytes: int) -> None:
    rows, (target, flat) = bytes_of(num_bytes), slot(num_bytes)
    copy_whole(target, flat, rows)
    assert np.array_equal(target, rows)


@pytest.mark.parametrize("num_bytes", SIZES)
def test_a_part_is_copied_to_its_place_and_no_further(num_bytes: int) -> None:
    rows, (target, flat) = bytes_of(num_bytes + 30), slot(num_bytes + 50)
    copy_part(target, flat, 20, rows, 10, 10 + num_bytes)
    assert np.array_equal(target[20 : 20 + num_bytes], rows[10 : 10 + num_bytes])
    assert not target[:20].any() and not target[20 + num_bytes :].any()


@pytest.mark.parametrize(
    "layout",
    [
        lambda rows: rows[::2],
        lambda rows: rows[::-1],
        lambda rows: rows.astype(">i8"),
        lambda rows: np.asfortranarray(rows),
    ],
    ids=["strided", "backwards", "another byte order", "columns first"],
)
@pytest.mark.parametrize("is_told", [False, True])
def test_so_is_one_that_does_not_lie_there_as_it_will(
    layout: Callable[[NDArray[Any]], NDArray[Any]], is_told: bool
) -> None:
    rows = layout(bytes_of(2 * LARGE + 32).view("i8").reshape(-1, 2))
    memory, told = bytearray(rows.nbytes), bytearray()
    target = np.frombuffer(memory, "i8").reshape(rows.shape)
    copy_whole(target, memoryview(memory), rows, told.extend if is_told else None)
    assert np.array_equal(target, rows)
    assert told == (memory if is_told else b"")


@pytest.mark.parametrize("order", ["C", "F"])
def test_rows_on_another_axis_are_copied(order: Literal["C", "F"]) -> None:
    rows = bytes_of(LARGE + 1024).reshape(1024, -1).copy(order)
    target = np.zeros((1024, rows.shape[1] + 3), np.uint8)
    copy_rows(target, None, 1, 3, target.shape[1], [rows])
    assert np.array_equal(target[:, 3:], rows) and not target[:, :3].any()


def test_told_rows_of_several_bytes_come_to_lie_behind_others() -> None:
    rows = [bytes_of(PIECE, i).view("i8").reshape(-1, 4) for i in range(2)]
    memory, told = bytearray(3 * PIECE), bytearray()
    target, first = np.frombuffer(memory, "i8").reshape(-1, 4), len(rows[0])
    copy_rows(target, memoryview(memory), 0, first, 3 * first, rows, told.extend)
    assert np.array_equal(target[first:], np.concatenate(rows)) and not target[:first].any()
    assert told == memory[PIECE:]


def note_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many pieces how far apart each call of NumPy copies from now on."""
    copyto, calls = np.copyto, list[tuple[int, int]]()

    def noted(to: NDArray[Any], of: NDArray[Any]) -> None:
        assert (to.shape, to.strides) == (of.shape, of.strides)
        calls.append((len(to), to.strides[0]))
        copyto(to, of)

    monkeypatch.setattr(np, "copyto", noted)
    return calls


@pytest.mark.parametrize("copies", [copy_whole, copy_part, copy_rows])
def test_a_large_array_is_copied_in_pieces_by_one_call(
    monkeypatch: pytest.MonkeyPatch, copies: Any
) -> None:
    rows, (target, flat), calls = bytes_of(LARGE), slot(LARGE), note_calls(monkeypatch)
    if copies is copy_whole:
        copy_whole(target, flat, rows)
    elif copies is copy_part:
        copy_part(target, flat, 0, rows, 0, LARGE)
    else:
        copy_rows(target, flat, 0, 0, LARGE, [rows])
    assert calls == [(LARGE // PIECE - 1, PIECE)]
    assert np.array_equal(target, rows)
