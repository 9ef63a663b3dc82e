"""Many shuffles of one list, against one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeder.workers.sources.orders import libstdcxx, shuffles
from feeder.workers.sources.orders.libstdcxx import draw_mt19937_64, shuffle
from feeder.workers.sources.orders.shuffles import shuffle_again
from parts import examples


def slowly_again(num: int, seeds: Sequence[int]) -> list[int]:
    order = np.arange(num)
    for seed in seeds:
        order = order[shuffle(num, draw_mt19937_64(seed), 64)]
    return order.tolist()


@given(
    num=st.integers(1, 60) | st.integers(620, 630) | st.integers(1240, 1252),
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4),
    seeded_at_once=st.booleans(),
    swapped=st.booleans(),
    most=st.sampled_from([1, 100, 3000]),
)
def test_shuffles_one_after_the_other(
    num: int, seeds: list[int], seeded_at_once: bool, swapped: bool, most: int
) -> None:
    few = 2**60 if swapped else 0
    with (
        patch.object(libstdcxx, "_FEW_ENGINES", 0 if seeded_at_once else 20),
        patch.multiple(shuffles, _FEW_SWAPS=few, _MOST_DRAWN=2 * most, _MOST_FOLLOWED=most),
    ):
        order = shuffle_again(np.arange(num), seeds)
    assert order.dtype == np.int64
    assert order.tolist() == slowly_again(num, seeds)


@pytest.mark.parametrize("num", [32767, 32768])
def test_lists_on_both_sides_of_a_wider_type(num: int) -> None:
    assert shuffle_again(np.arange(num), [3, 4, 5]).tolist() == slowly_again(num, [3, 4, 5])


def test_the_list_that_is_given_stays() -> None:
    for num_seeds in (1, 300):
        order = np.arange(300)
        assert shuffle_again(order, range(num_seeds)).tolist() != order.tolist() == [*range(300)]


@pytest.mark.parametrize("rejected", [0, 1], ids=["the first draw", "a later draw"])
def test_a_shuffle_with_a_rejected_draw_is_made_one_draw_at_a_time(
    rejected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draws(seeds: Sequence[int]) -> Iterator[np.ndarray]:
        # The product of 0 and a bound lies below the bound: such draws are rejected, if the bound
        # is no power of two.
        words = [[2**63] * rejected + [0] + [2**63 + 12345] * 311, [2**62 + 54321] * 312]
        while True:
            yield np.array([column[:312] for column in words[: len(seeds)]], np.uint64).T

    monkeypatch.setattr(libstdcxx, "draw_from_each", draws)
    monkeypatch.setattr(shuffles, "draw_from_each", draws)
    order = shuffle_again(np.arange(11), [1, 2])
    first = shuffle(11, iter([2**63] * rejected + [0] + [2**63 + 12345] * 20), 64)
    assert order.tolist() == first[shuffle(11, iter([2**62 + 54321] * 20), 64)].tolist()


@settings(max_examples=examples(1000))
@given(
    num=st.integers(2, 1000) | st.integers(2, 2**17),
    pair=st.integers(0, 2**16),
    of_both=st.booleans(),
    share=st.integers(0, 2**64 - 1),
    off=st.integers(-9, 99) | st.integers(-(2**40), 2**40),
)
def test_the_targets_of_draws_next_to_where_they_change(
    num: int, pair: int, of_both: bool, share: int, off: int
) -> None:
    pair %= num // 2
    i = num % 2 + 2 * pair
    bound = (i + 1) * (i + 2)
    # The first draw of those with the same targets, or with the same first target, and off it.
    parts = bound if of_both else i + 1
    draw = -(-(share % parts << 64) // parts) + off & 2**64 - 1
    # Another draw beside it, whose targets are plain.
    words = np.array([[draw], [2**63 // 3]], dtype=np.uint64)
    targets = np.full((2, num), -1)
    rejected = shuffles._fill_pairs(targets, words, pair)
    expected = np.full((2, num), -1)
    for row, word in enumerate(words[:, 0].tolist()):
        expected[row, i : i + 2] = divmod(word * bound >> 64, i + 2)
    assert targets.tolist() == expected.tolist()
    assert rejected == ({0} if draw * bound & 2**64 - 1 < bound else set())
