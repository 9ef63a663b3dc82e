"""Fetch functions for processes, in a module that these import, and the datasets beside them."""

from __future__ import annotations

from typing import Any

import numpy as np

from fetches import IMAGES, SMALL, Array

WORDS = [f"word{number}" for number in range(5000)]
NUMBERS = {word: number for number, word in enumerate(WORDS)}
TEXT_ROWS, TEXT_WORDS = 64, 128
_IMAGE = IMAGES.rows(IMAGES.batch_size)
_SMALL = SMALL.rows(SMALL.batch_size)


def row_of_text(number: int) -> Array:
    """A line of words as numbers, made by Python alone."""
    line = " ".join(WORDS[(number * 13 + i * 31) % len(WORDS)] for i in range(TEXT_WORDS))
    return np.array([NUMBERS.get(word, 0) for word in line.lower().split()], np.int64)


def text(call: Any) -> list[Array]:
    """A batch of such lines."""
    first = call.index * TEXT_ROWS
    return [np.stack([row_of_text(first + row) for row in range(TEXT_ROWS)])]


class Text:
    """The same lines as a dataset."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, number: int) -> Array:
        return row_of_text(number)


def images(call: Any) -> list[Array]:
    """20 MB, written to where they are sent from."""
    made = call.empty(_IMAGE.shape, _IMAGE.dtype)
    np.copyto(made, _IMAGE)
    return [made]


MEGABYTE_ROWS = 64
_MEGABYTE = np.ones((MEGABYTE_ROWS, 4096), np.float32)


def megabyte(call: Any) -> list[Array]:
    """1 MB, written to where it is sent from."""
    made = call.empty(_MEGABYTE.shape, _MEGABYTE.dtype)
    np.copyto(made, _MEGABYTE)
    return [made]


def small(call: Any) -> list[Array]:
    """8 KB in a chunk of a batch."""
    return [_SMALL + call.index]
