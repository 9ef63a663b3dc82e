"""`std::shuffle` of one list, many times over: DALI's compound order after many epochs.

What a shuffle does is found without going through its swaps one after the other, so that NumPy
does those of many shuffles at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.sources.libstdcxx import (
    STATE_WORDS,
    draw_from_each,
    draw_mt19937_64,
    draw_targets,
)

# So few are done one by one: NumPy gives the GIL up, and waits for it beside a busy Python thread.
_FEW_SWAPS = 1 << 16
# Swaps that are drawn at once, a block of each engine at least, and those that are followed at
# once, in a core's cache.
_MOST_DRAWN, _MOST_FOLLOWED = 1 << 20, 1 << 17

_HALF, _LOWER = np.uint64(32), np.uint64(0xFFFFFFFF)


def shuffle_again(order: NDArray[np.int64], seeds: Sequence[int]) -> NDArray[np.int64]:
    """A list after `std::shuffle` with `std::mt19937_64(seed)`, for one seed after the other.

    It takes about 0.015 µs per element and seed, or 0.1 where the swaps are few in all, or the
    list does not fit into the caches.
    """
    num = len(order)
    if num < 2:
        return order.copy()
    at_once = max(1, _MOST_DRAWN // max(2 * STATE_WORDS, num))
    for first in range(0, len(seeds), at_once):
        targets = _draw_all_targets(num, seeds[first : first + at_once])
        if num * len(seeds) < _FEW_SWAPS:
            order = _swap(order, targets)
        else:
            for origins in _follow(targets):
                order = order.take(origins, mode="wrap")  # The quickest mode; all are places.
    return order


def _draw_all_targets(num: int, seeds: Sequence[int]) -> NDArray[Any]:
    """For each seed, with which element `std::shuffle` swaps elements 0, 1, ... of `num` > 1."""
    targets = np.zeros((len(seeds), num), dtype=np.int32 if num < 1 << 15 else np.int64)
    sound = np.ones(len(seeds), dtype=np.bool_)
    at = num % 2  # Elements go in pairs; of an odd number the first is alone, and is not swapped.
    for words in draw_from_each(seeds):
        # One draw, as a fraction of 2**64, tells of one pair: the integer part of the product with
        # how many targets the first has, then that of what is left with those of the second.
        first = np.arange(at + 1, min(num, at + 2 * len(words)), 2, dtype=np.uint64)[:, np.newaxis]
        second = first + np.uint64(1)
        some = targets[:, at : at + 2 * len(first)]
        target, rest = _multiply(words[: len(first)], first)
        some[:, 0::2] = target.T
        target, rest = _multiply(rest, second)
        some[:, 1::2] = target.T
        # Below that a draw may have been rejected, as one in 2**64 / num**2 is.
        sound &= (rest >= first * second).all(axis=0)
        at += 2 * len(first)
        if at >= num:
            break
    for k in np.flatnonzero(~sound).tolist():
        targets[k, 1:] = list(draw_targets(num, draw_mt19937_64(seeds[k]), 64))
    return targets


def _multiply(
    a: NDArray[np.uint64], b: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The upper and the lower 64 bits of products; `b` is below 2**32."""
    upper = a & _LOWER
    upper *= b
    upper >>= _HALF
    middle = a >> _HALF
    middle *= b
    upper += middle
    upper >>= _HALF
    return upper, a * b


def _swap(order: NDArray[np.int64], targets: NDArray[Any]) -> NDArray[np.int64]:
    """A list after swaps: for each row of targets, of elements 0, 1, ... with their targets."""
    items = order.tolist()
    for row in targets:
        for i, target in enumerate(row.tolist()):
            items[i], items[target] = items[target], items[i]
    return np.array(items, dtype=np.int64)


def _follow(targets: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """For each row of targets, where the elements were that the same swaps bring to each place."""
    num = targets.shape[1]
    at_once = max(1, _MOST_FOLLOWED // num)
    for first in range(0, len(targets), at_once):
        yield from _origins(targets[first : first + at_once])


def _origins(targets: NDArray[Any]) -> NDArray[Any]:
    """The same for a few rows, all at once; the targets are used up.

    Swap i finds element i at its own place, since targets are not above i, and brings it to its
    target; what it finds there goes to place i. So the swaps of one target hand on: each brings to
    its own place the element of the one before, the first what came to the target's own place,
    and the element of the last stays. (Sorting tells who is before; what the first ones find is
    followed from place to place, half of them one place, a quarter two, and so on.)
    """
    num, dtype = targets.shape[1], targets.dtype
    bits = num.bit_length()
    rows = np.arange(len(targets), dtype=dtype)[:, np.newaxis] * num
    swaps = targets
    swaps <<= bits
    swaps |= np.arange(num, dtype=dtype)
    swaps.sort(axis=1)
    # Places are numbered through all rows.
    target = ((swaps >> bits) + rows).ravel()
    swap = ((swaps & (1 << bits) - 1) + rows).ravel()
    # What comes to the swap's own place: an element, or ~place where it is what came there. Without
    # np.where, which branches for each element and takes ten times as long.
    is_first = np.ones_like(target)
    np.not_equal(target[1:], target[:-1], out=is_first[1:], casting="unsafe")
    found = target ^ -(target != swap).astype(dtype)
    found[1:] -= swap[:-1]
    found *= is_first
    found[1:] += swap[:-1]
    came = np.empty_like(found)
    came[swap.astype(np.intp)] = found
    origins = came.copy()
    origins[target.astype(np.intp)] = swap  # In order: the element of the last one stays.
    places = np.flatnonzero(origins < 0)
    found = origins.take(places)
    while len(places):
        found = came.take(~found, mode="wrap")
        origins[places] = found
        left = np.flatnonzero(found < 0)
        places, found = places.take(left), found.take(left)
    places_in_row: NDArray[Any] = origins.reshape(targets.shape) - rows
    return places_in_row
