"""Copying chunks into a slot: the one copy that each row makes, or none where that is safe.

NumPy drops the GIL for copies of 500 elements and more, and beside a thread that is busy with
Python it waits milliseconds to get it back. So small arrays are copied in ways that keep it: many
at a time through `bytes.join`, or one by one through a memoryview. Only where the copy takes
longer than the switch is worth does NumPy do it, and other threads run meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import getweakrefcount

import numpy as np
from numpy.typing import NDArray

from feeder.workers.stream.buffers import Seen, Slot
from feeder.workers.stream.chunks import part_of
from feeder.workers.stream.memory import Memory

DROP_GIL_BYTES = 256 * 1024
"""Arrays of this size and larger are copied by NumPy, which lets go of the interpreter."""
# To get the interpreter back takes milliseconds beside a busy thread, which is worth it only
# where the copy takes as long as a switch of threads (2026-11-21).

_KEPT_BYTES = 256 * 1024
"""Smaller arrays are copied into a message, larger ones are sent from where they are."""
# A part of a message of its own costs more than the copy of a smaller array (2026-11-23).

_JOIN_BYTES = 8 * 1024
"""Arrays of at most this size, on average, are copied by `bytes.join`."""
# Above it the second copy costs more than the calls that it saves (2026-11-21).

_PIECE_BYTES = 512 * 1024
"""Large arrays are copied in pieces of this size."""
# Of a larger piece a core's second cache keeps nothing; smaller ones are copied slower
# (2026-11-23).

_LARGE_BYTES = 8 * 1024 * 1024
"""Arrays of this size and larger are copied in pieces."""
# Copied at once they pass by the caches, and the next reader of the batch fetches it from
# memory: 7 to 22 % of a served 20 MB batch. Smaller ones in pieces push others out of the
# caches (2026-11-23).

_KEPT_VIEW_TIMES = 2
"""A view of an array that is more than so many times larger is copied, and not sent."""
# Sent, it would keep the whole array until its batch is used, and the bound counts the view
# alone: memory is bounded by so many times the bound (by reckoning, 2026-11-23).


def copy_rows(
    target: NDArray[Any], flat: memoryview | None, axis: int, at: int, stop: int,
    arrays: Sequence[Any], seen: Seen = None,
) -> None:  # fmt: skip
    """Copy arrays one after another into the rows of `target` from row `at` up to `stop`.

    `target` has its rows on `axis`; `flat` is its memory as bytes where that axis is the first
    and `target` is contiguous, else None, and then there is no `seen`.
    """
    # A checksum is wanted: it is made while the bytes are in a cache.
    if flat is not None and seen is not None and _are_large(arrays):
        _copy_seen(flat, at * (len(flat) // len(target)), arrays, target.dtype, seen)
        return
    if flat is None or not arrays:
        _copy_each(target, axis, at, arrays)
        return
    row_bytes = len(flat) // len(target)
    # By the mean: chunks of one list are alike, and to look at each would cost what the choice
    # saves.
    mean_bytes = (stop - at) * row_bytes // len(arrays)
    if mean_bytes >= DROP_GIL_BYTES:
        _copy_each(target, axis, at, arrays)
        return
    try:
        # Joined at most 256 KiB at once: a join lets nobody else run, and the second copy should
        # find the first one in a cache.
        if mean_bytes <= _JOIN_BYTES and len(arrays) > 1:
            _join(flat, at * row_bytes, arrays, max(1, DROP_GIL_BYTES // max(1, mean_bytes)))
        else:
            start = at * row_bytes
            for array in arrays:
                end = start + array.nbytes
                flat[start:end] = array.data.cast("B")
                start = end
    except (BufferError, ValueError, TypeError):
        # Not contiguous, or of a dtype that the buffer protocol does not know.
        _copy_each(target, axis, at, arrays)


def keep_or_copy(slot: Slot, number: int, array: NDArray[Any]) -> None:
    """Store `array` as column `number` of a slot, all of it. Without a copy where the slot allows
    that and the array is large, contiguous, of the target's dtype and shape, and no small part of
    a larger one, which would be kept alive too; else by a copy."""
    target, is_large = slot.arrays[number], array.nbytes >= _KEPT_BYTES
    # The conditions together mean: sending this array in place of the column gives the same bytes,
    # and keeps nothing large alive that nobody needs.
    if slot.kept is not None and is_large and _is_like(array, target) and not _is_part(array):
        slot.kept[number] = array
    else:
        copy_whole(target, slot.flats[number], array, slot.seen)


def _is_like(array: NDArray[Any], target: NDArray[Any]) -> bool:
    is_alike = array.dtype == target.dtype and array.shape == target.shape
    return is_alike and array.flags.c_contiguous


def _is_part(array: NDArray[Any]) -> bool:
    """Whether what it is a view of is much larger."""
    # The array at the bottom holds the memory; a view of a view refers to it.
    base: Any = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    return bool(base.nbytes > _KEPT_VIEW_TIMES * array.nbytes)


def copy_whole(
    target: NDArray[Any], flat: memoryview | None, array: NDArray[Any], seen: Seen = None
) -> None:
    """Copy an array into all of `target`; `flat` and `seen` as for `copy_rows`."""
    if flat is not None and seen is not None and _are_large([array]):
        _copy_seen(flat, 0, [array], target.dtype, seen)
        return
    if flat is not None and array.nbytes < DROP_GIL_BYTES:
        try:
            flat[:] = array.data.cast("B")
            return
        except (BufferError, ValueError, TypeError):
            pass  # Not contiguous, or of a dtype that the buffer protocol does not know.
    _copy(target, array)


def copy_part(
    target: NDArray[Any], flat: memoryview, at: int, array: NDArray[Any], first: int, last: int,
    seen: Seen = None,
) -> None:  # fmt: skip
    """Copy rows `first` to `last` of one array into `target` from row `at` on; `flat` and `seen` as
    for `copy_rows`."""
    part = array[first:last]
    if seen is not None and _are_large([part]):
        _copy_seen(flat, at * (len(flat) // len(target)), [part], target.dtype, seen)
        return
    num_bytes = part.nbytes
    if num_bytes < DROP_GIL_BYTES:
        try:
            start = at * (len(flat) // len(target))
            flat[start : start + num_bytes] = part.data.cast("B")
            return
        except (BufferError, ValueError, TypeError):
            pass  # Not contiguous, or of a dtype that the buffer protocol does not know.
    _copy(target[at : at + last - first], part)


def _are_large(arrays: Sequence[Any]) -> bool:
    """Whether the arrays are so large that their bytes are summed up as they are copied. For many
    small ones a call for each would take longer than reading the batch again."""
    return bool(sum([array.nbytes for array in arrays]) >= DROP_GIL_BYTES * len(arrays))


def _copy_seen(
    flat: memoryview, at: int, arrays: Sequence[Any], dtype: np.dtype[Any],
    seen: Callable[[memoryview], None],
) -> None:  # fmt: skip
    """Copy arrays to byte `at` of `flat` and on, and call `seen` with the bytes of each as soon as
    it was copied, while a cache may hold them. The copy drops the GIL, and beside a busy Python
    thread each drop costs a wait, so it is one call per array. The sum keeps the GIL."""
    target = np.frombuffer(flat, np.uint8)
    for array in arrays:
        # The bytes as they are in the slot: the checksum is of these.
        source = np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8)
        _copy(target[at : at + len(source)], source)
        seen(source.data)
        at += len(source)


def _copy(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Copy an array, a large one in pieces. Copied at once it would pass by the caches, and the
    batch's next reader would fetch it from memory. One call copies all pieces, since each call
    drops the GIL. Each piece includes the first byte of the next one, else NumPy would join them
    into one copy."""
    is_plain = target.flags.c_contiguous and source.flags.c_contiguous
    # Overlapping pieces are right only where both sides are plain bytes in one piece.
    if source.nbytes < _LARGE_BYTES or not is_plain or target.dtype != source.dtype:
        np.copyto(target, source)
        return
    to, of = target.reshape(-1).view(np.uint8), source.reshape(-1).view(np.uint8)
    num = (len(of) - 1) // _PIECE_BYTES
    shape, strides, end = (num, _PIECE_BYTES + 1), (_PIECE_BYTES, 1), num * _PIECE_BYTES
    np.copyto(
        np.ndarray(shape, np.uint8, to, 0, strides), np.ndarray(shape, np.uint8, of, 0, strides)
    )
    # The last piece, which has no next one. A memoryview keeps the interpreter.
    to.data[end:] = of.data[end:]


def _join(flat: memoryview, start: int, arrays: Sequence[Any], at_once: int) -> None:
    for i in range(0, len(arrays), at_once):
        joined = b"".join(arrays[i : i + at_once])
        stop = start + len(joined)
        flat[start:stop] = joined
        start = stop


def _copy_each(target: NDArray[Any], axis: int, at: int, arrays: Sequence[Any]) -> None:
    # As a view; NumPy then copies in whatever order of memory the two sides have.
    rows = np.moveaxis(target, axis, 0) if axis else target
    for array in arrays:
        source = np.moveaxis(array, axis, 0) if axis else array
        stop = at + len(source)
        _copy(rows[at:stop], source)
        at = stop


def pieces_of(
    arrays: list[Any], rows: list[int], axis: int, i: int, taken: int, j: int, last: int
) -> list[Any]:
    """The arrays from row `taken` of the i-th up to row `last` of the j-th."""
    if i == j:
        return [part_of(arrays[i], axis, taken, last)]
    pieces = arrays[i:j]
    if taken:
        pieces[0] = part_of(pieces[0], axis, taken, rows[i])
    if last:
        pieces.append(part_of(arrays[j], axis, 0, last))
    return pieces


def lies_at(array: NDArray[Any], target: NDArray[Any]) -> bool:
    """Whether an array is just this memory, seen in the same way."""
    # First what tells most arrays apart: one that is no view owns its memory.
    if array.base is None or array.shape != target.shape or array.strides != target.strides:
        return False
    is_there = array.__array_interface__["data"][0] == target.__array_interface__["data"][0]
    return is_there and array.dtype == target.dtype


def copy_elsewhere(slot: Slot, pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> None:
    """Copy arrays, each the second of a pair, into parts of a slot. They may lie in other parts."""
    apart = [(target, array.copy() if lies_in(array, slot) else array) for target, array in pairs]
    for target, array in apart:
        _copy(target, array)


def lies_in(array: NDArray[Any], slot: Slot) -> bool:
    """Whether an array may have memory of a slot."""
    is_view = array.base is not None
    return is_view and any(np.may_share_memory(array, column) for column in slot.arrays)


def _count_references(arrays: Sequence[Any], i: int) -> int:
    return sys.getrefcount(arrays[i])


def _count_base_references(arrays: Sequence[Any], i: int) -> tuple[int, ...]:
    base = arrays[i].base
    if type(base) is bytearray:
        return (sys.getrefcount(base),)
    return sys.getrefcount(base), sys.getrefcount(base.base)


# What the counts are where the list alone holds the array differs between versions of Python.
# Measured here, at import, by the same calls that compare later.
_SOLE_REFERENCES = _count_references([np.empty(0)], 0)
_SOLE_BASE_REFERENCES = (
    _count_base_references([np.ndarray(1, np.uint8, np.asarray(Memory(np.empty(1, np.uint8))))], 0),
    _count_base_references([np.ndarray(1, np.uint8, bytearray(1))], 0),
)
# Without the interpreter lock another thread may take a reference between the count and the use, so
# nothing is passed on then.
_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()


def is_sole_owner(arrays: Sequence[Any], i: int) -> bool:
    """Whether nobody but this list can reach the memory of its i-th array. A weak reference counts
    as a way to reach it: a fetch function may find in a cache what it returned before."""
    flags, base = arrays[i].flags, arrays[i].base
    # Memory of the pool (`stream/memory.py`) is lent: the chain is array, root, `Memory`, and all
    # three have to be referred to by nobody else. Joined rows lie in a bytearray.
    is_lent = type(base) is bytearray or type(getattr(base, "base", None)) is Memory
    sound = flags.c_contiguous
    sound = sound and not getweakrefcount(arrays[i]) and not getweakrefcount(base)
    owns = base is None and flags.owndata
    del flags, base  # They refer to the array, and to what it is a view of.
    if not (sound and _GIL and (owns or is_lent)):
        return False
    if is_lent and _count_base_references(arrays, i) not in _SOLE_BASE_REFERENCES:
        return False
    return sys.getrefcount(arrays[i]) == _SOLE_REFERENCES
