"""The random numbers of libstdc++, against the standard's own check values, values printed by
programs compiled with GCC 12, and arithmetic by the book."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from feeder.workers.sources.orders.libstdcxx import (
    MAX_DRAWS,
    draw_minstd,
    draw_mt19937,
    draw_mt19937_64,
    shuffle,
)

MODULUS = 2**31 - 1


def test_the_check_values_of_the_standard() -> None:
    # [rand.predef]: the 10,000th draw of a default-constructed engine.
    assert next(islice(draw_mt19937(5489), 9999, None)) == 4123659995
    assert next(islice(draw_mt19937_64(5489), 9999, None)) == 9981545732273789042
    assert pow(16807, 10_000, MODULUS) == 1043618065


def slowly(state: int, bounds: list[int]) -> tuple[list[int], int]:
    numbers = []
    for bound in bounds:
        scale = (MODULUS - 2) // bound
        while True:
            state = state * 16807 % MODULUS
            if state - 1 < bound * scale:
                break
        numbers.append((state - 1) // scale)
    return numbers, state


@given(
    state=st.integers(1, MODULUS - 1),
    bounds=st.lists(st.integers(1, MODULUS - 2) | st.integers(1, 2000), min_size=1, max_size=300),
)
def test_draws_are_those_of_the_book(state: int, bounds: list[int]) -> None:
    # With bounds near 2**30 every other draw is rejected.
    numbers, after = draw_minstd(state, np.array(bounds, dtype=np.uint64))
    assert (numbers.tolist(), after) == slowly(state, bounds)


def test_as_many_draws_as_there_are_powers() -> None:
    bounds = [2**30 + 1] * MAX_DRAWS
    numbers, after = draw_minstd(7, np.array(bounds, dtype=np.uint64))
    assert (numbers.tolist(), after) == slowly(7, bounds)


SHUFFLED = [
    (1, 32, "c77b3abb6f87acd9"),
    (1, 64, "c77b3abb6f87acd9"),
    (2, 32, "26f2a1148cf52011"),
    (2, 64, "0cfbaea74a8cc0e5"),
    (10, 32, "b8d4144e8cb24acf"),
    (10, 64, "835a86545ad6cce9"),
    (46341, 32, "18d6039a9ef3ed56"),
    (46341, 64, "4994a2610027b8f8"),
    (65535, 32, "7c77276c63cccb8b"),
    (65535, 64, "626722fcfdbe0cce"),
    (65536, 32, "362bf3cfa42da077"),
    (65536, 64, "88044fa0248ede0d"),
    (70000, 32, "a3b20f6c9798e71a"),
    (70000, 64, "9010b083f61d41bc"),
]


@pytest.mark.parametrize(("num", "bits", "digest"), SHUFFLED)
def test_shuffles(num: int, bits: int, digest: str) -> None:
    order = shuffle(num, draw_mt19937(7) if bits == 32 else draw_mt19937_64(7), bits)
    assert xxhash.xxh3_64_hexdigest(order.astype("<i8").tobytes()) == digest
