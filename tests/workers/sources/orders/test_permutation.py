"""The permutation that can be indexed: is one, and looks random."""

from __future__ import annotations

from math import isqrt

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from feeder.workers.sources.orders.permutation import MAX_SIZE, Permutation

pytestmark = pytest.mark.served


@given(size=st.integers(1, MAX_SIZE), data=st.data())
def test_images_do_not_depend_on_what_is_asked_with_them(size: int, data: st.DataObject) -> None:
    permutation = Permutation(size, "k")
    start = data.draw(st.integers(0, size - 1))
    stop = min(size, start + data.draw(st.integers(1, 1200)))
    images = permutation(start, stop)
    assert len(np.unique(images)) == stop - start
    assert images.min() >= 0 and images.max() < size
    at = data.draw(st.integers(start, stop - 1))
    assert permutation(at, at + 1)[0] == images[at - start]


def slowly(size: int, key: str, position: int) -> int:
    """The same image, by the book and one number at a time."""
    num_rounds = 24 if size < 256 else 8
    keys = [xxhash.xxh3_64_intdigest(f"{key}/{i}".encode()) for i in range(num_rounds)]
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)

    def mixed(value: int, key: int, side: int) -> int:
        word = (value ^ key) * 0x9E3779B97F4A7C15 % 2**64
        word = (word ^ word >> 32) * 0xBF58476D1CE4E5B9 % 2**64
        return (word >> 32) * side >> 32

    while True:
        row, column = divmod(position, columns)
        for i in range(0, num_rounds, 2):
            row = (row + mixed(column, keys[i], rows)) % rows
            column = (column + mixed(row, keys[i + 1], columns)) % columns
        position = row * columns + column
        if position < size:
            return position


@given(size=st.integers(1, MAX_SIZE) | st.integers(1, 300), data=st.data())
def test_images_are_those_of_the_book(size: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, size - 1))
    assert Permutation(size, "k")(at, at + 1)[0] == slowly(size, "k", at)


def test_images_are_the_same_in_every_version() -> None:
    # Feeds are resumed by later versions.
    assert Permutation(10, "0/0")(0, 10).tolist() == [0, 9, 7, 4, 1, 3, 2, 5, 8, 6]
    assert Permutation(10**12, "1/2")(5, 8).tolist() == [155202174790, 874735578462, 916938832317]
