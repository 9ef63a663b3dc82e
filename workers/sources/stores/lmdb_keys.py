"""Which key the i-th record of an LMDB has.

LMDB keeps keys in byte order and cannot tell the i-th without counting. Writers mostly number
them, zero-padded, `00000017` or Caffe's `00000017_name`: then the key is known from the index.
Other keys are read once, when the store is opened (about 0.3 µs each).

Numbered keys need no proof at the start: if N records are numbered from the first key to the last
and one of them has another key, then a number is missing, and reading it says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

_NUM_SAMPLES = 16
"""So many keys of an LMDB are looked up before all of it is taken to be numbered."""
# One key takes microseconds, and reading all of them 0.3 us each. A gap between the samples is
# found when its record is read, so this changes no batch; not measured (2026-11-24).


_NUMBER = re.compile(rb"([0-9]{1,18})(_.*)?", re.DOTALL)


class NumberedKeys:
    """Keys that begin with decimal numbers of one width, each one more than the one before.
    Read-only: any thread asks."""

    def __init__(self, first: int, width: int, suffix: bool) -> None:
        self._first = first
        self._form = b"%%0%dd" % width + (b"_" if suffix else b"")
        self.exact = not suffix
        """Whether `key` gives whole keys, and not what they begin with."""

    def key(self, index: int) -> bytes:
        """The key of a record, or its beginning, which no other record's key has."""
        return self._form % (self._first + index)

    def keys(self, indices: list[int]) -> list[bytes]:
        """The same of several."""
        form, first = self._form, self._first
        return [form % (first + index) for index in indices]


class ListedKeys:
    """Keys as they were read; 8 bytes each and their own length. Read-only: any thread asks."""

    exact = True

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._text = b"".join(keys)
        self._ends = np.fromiter(accumulate(map(len, keys), initial=0), np.int64, len(keys) + 1)

    def key(self, index: int) -> bytes:
        return self._text[self._ends[index] : self._ends[index + 1]]

    def keys(self, indices: list[int]) -> list[bytes]:
        text, ends = self._text, self._ends
        starts, stops = ends[indices].tolist(), ends[np.add(indices, 1)].tolist()
        return [text[start:stop] for start, stop in zip(starts, stops, strict=True)]


Keys = NumberedKeys | ListedKeys
"""The keys of a store, by index."""


def find_keys(cursor: Any, num_records: int) -> Keys | None:
    """The keys of the store that an LMDB cursor of bytes runs over; None where they are found to
    be more or fewer than the records."""
    # Found out in a few reads; to list the keys takes one read each.
    numbered = _numbered(cursor, num_records)
    if numbered is not None:
        return numbered
    cursor.first()
    keys = list(cursor.iternext(values=False))
    # LMDB counts records in its head; a damaged tree has another number of them.
    return ListedKeys(keys) if len(keys) == num_records else None


def _numbered(cursor: Any, num_records: int) -> NumberedKeys | None:
    cursor.last()
    last = _NUMBER.fullmatch(cursor.key())
    cursor.first()
    first = _NUMBER.fullmatch(cursor.key())
    if first is None or last is None:
        return None
    width, begin = len(first[1]), int(first[1])
    # One width: with another the byte order of keys is not that of numbers.
    is_run = int(last[1]) - begin + 1 == num_records and len(last[1]) == width
    if not is_run or (first[2] is None) != (last[2] is None):
        return None
    keys = NumberedKeys(begin, width, suffix=first[2] is not None)
    step = max(1, num_records // _NUM_SAMPLES)
    # A few samples: a gap anywhere else is an error of the record that is missing.
    return keys if all(move_to(cursor, keys, i) for i in range(0, num_records, step)) else None


def move_to(cursor: Any, keys: Keys, index: int) -> bool:
    """Put a cursor at a record; whether there is one with its key."""
    key = keys.key(index)
    if keys.exact:
        return bool(cursor.set_key(key))
    return bool(cursor.set_range(key)) and is_at(cursor, keys, index)


def is_at(cursor: Any, keys: Keys, index: int) -> bool:
    """Whether a cursor stands at a record."""
    key = keys.key(index)
    return bytes(cursor.key()[: len(key)]) == key and (not keys.exact or cursor.key() == key)
