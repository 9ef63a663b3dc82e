"""`std::shuffle` of one list, many times over: DALI's compound order after many epochs.

What a shuffle does is found without going through its swaps one after the other, so that NumPy
does those of many shuffles at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feeder.workers.sources.orders.libstdcxx import (
    STATE_WORDS,
    draw_from_each,
    draw_mt19937_64,
    draw_targets,
)

_FEW_SWAPS = 1 << 16
"""So few swaps of a shuffle are made one by one, since NumPy lets go of the interpreter."""
# Beside a busy Python thread that costs more than the loop (2026-11-22).

_SWAPS_DRAWN = 1 << 20
_SWAPS_FOLLOWED = 1 << 18
"""So many swaps of a shuffle are drawn at once, and so many followed at once."""
# What is followed lies in a core's caches (2026-11-22).

# A block of each engine at least.
_MOST_DRAWN, _MOST_FOLLOWED = _SWAPS_DRAWN, _SWAPS_FOLLOWED


def shuffle_again(order: NDArray[np.int64], seeds: Sequence[int]) -> NDArray[np.int64]:
    """A list after `std::shuffle` with `std::mt19937_64(seed)`, for one seed after the other.

    It takes about 0.01 µs per element and seed, or 0.1 where the swaps are few in all, or the
    list does not fit into the caches.
    """
    num = len(order)
    if num < 2:
        return order.copy()
    is_few = num * len(seeds) < _FEW_SWAPS
    at_once = max(1, _MOST_DRAWN // max(2 * STATE_WORDS, num))
    for first in range(0, len(seeds), at_once):
        for targets in _draw_all_targets(num, seeds[first : first + at_once], is_few):
            if is_few:
                order = _swap(order, targets)
                continue
            for origins in _origins(targets):
                order = order.take(origins, mode="wrap")  # The quickest mode; all are places.
    return order


def _draw_all_targets(num: int, seeds: Sequence[int], is_few: bool) -> Iterator[NDArray[Any]]:
    """For each seed, with which element `std::shuffle` swaps elements 0, 1, ... of `num` > 1;
    in rows, some at a time."""
    words = np.empty((len(seeds), num // 2), dtype=np.uint64)
    at = 0
    for block in draw_from_each(seeds):
        words[:, at : at + STATE_WORDS] = block[: num // 2 - at].T
        at += STATE_WORDS
        if at >= num // 2:
            break
    rows_at_once = max(1, _MOST_FOLLOWED // num)
    # Those of a single engine are so few at once that NumPy keeps the GIL.
    pairs_at_once = STATE_WORDS if is_few else num // 2
    for top in range(0, len(seeds), rows_at_once):
        some = words[top : top + rows_at_once]
        targets = np.zeros((len(some), num), dtype=np.int32 if num < 1 << 15 else np.int64)
        rejected: set[int] = set()
        for left in range(0, num // 2, pairs_at_once):
            rejected |= _fill_pairs(targets, some[:, left : left + pairs_at_once], left)
        for k in rejected:
            targets[k, 1:] = list(draw_targets(num, draw_mt19937_64(seeds[top + k]), 64))
        yield targets


def _fill_pairs(targets: NDArray[Any], words: NDArray[np.uint64], left: int) -> set[int]:
    """Write the targets of pairs `left`, `left` + 1, ... of elements, of which each draw tells
    one; in which rows a draw may have been rejected.

    A draw is a fraction of 2**64: the integer part of its product with how many targets the first
    of a pair has, then that of what is left with those of the second. (Of an odd number of
    elements the first is alone, and is not swapped.)
    """
    num = targets.shape[1]
    # An integer part is made without the product's lowest bits, which have no room in 64. They
    # change it only where what is left is below `least`.
    bits = num.bit_length()
    low, high, least = np.array([bits, 64 - bits, 1 << 2 * bits], dtype=np.uint64)
    at = num % 2 + 2 * left
    stop = at + 2 * words.shape[1]
    first = np.arange(at + 1, stop, 2, dtype=np.uint64)
    rest, is_sure = words, True
    for place, num_targets in ((at, first), (at + 1, first + np.uint64(1))):
        target = rest >> low
        target *= num_targets
        target >>= high
        targets[:, place:stop:2] = target
        rest = rest * num_targets
        is_sure = is_sure and bool(rest.min() >= least)
    rejected = set[int]()
    if is_sure:
        return rejected
    for row, pair in np.argwhere((words * first < least) | (rest < least)).tolist():
        i = at + 2 * pair
        product = int(words[row, pair]) * (i + 1) * (i + 2)
        targets[row, i : i + 2] = divmod(product >> 64, i + 2)
        if product & 2**64 - 1 < (i + 1) * (i + 2):
            rejected.add(row)
    return rejected


def _swap(order: NDArray[np.int64], targets: NDArray[Any]) -> NDArray[np.int64]:
    """A list after swaps: for each row of targets, of elements 0, 1, ... with their targets."""
    items = order.tolist()
    for row in targets:
        for i, target in enumerate(row.tolist()):
            items[i], items[target] = items[target], items[i]
    return np.array(items, dtype=np.int64)


def _origins(targets: NDArray[Any]) -> NDArray[Any]:
    """For each row of targets, where the elements were that the same swaps bring to each place.

    Swap i finds element i at its own place, since targets are not above i, and brings it to its
    target; what it finds there goes to place i. So the swaps of one target hand on: each brings to
    its own place the element of the one before, the first what came to the target's own place,
    and the element of the last stays. (Sorting tells who is before; what the first ones find is
    followed from place to place, half of them one place, a quarter two, and so on.)
    """
    num, dtype = targets.shape[1], targets.dtype
    bits = num.bit_length()
    swap = np.arange(num, dtype=dtype)
    rows = np.arange(0, targets.size, num)[:, np.newaxis]
    # Places are numbered through all rows.
    target = (targets + rows).ravel()
    swaps = targets << bits
    swaps |= swap
    swaps.sort(axis=1)
    # What comes to the swap's own place: an element, or less than 0 where it is what came to the
    # target's, since the swap before has a lower target there. (Of an element that is swapped with
    # itself nobody asks: it is the first of its target.)
    found = np.empty_like(swaps)
    found[:, 0] = -1
    np.bitwise_and(swaps[:, 1:], -1 << bits, out=found[:, 1:])
    np.subtract(swaps[:, :-1], found[:, 1:], out=found[:, 1:])
    swaps &= (1 << bits) - 1
    came = np.empty(targets.size, dtype=dtype)
    came[(swaps + rows).ravel()] = found.ravel()
    origins = came.copy()
    origins[target] = np.broadcast_to(swap, targets.shape).ravel()  # In order: the last one stays.
    places = at = np.flatnonzero(origins < 0)
    while len(places):
        at = target.take(at, mode="wrap")
        found = came.take(at, mode="wrap")
        origins[places] = found
        left = np.flatnonzero(found < 0)
        places, at = places.take(left), at.take(left)
    return origins.reshape(targets.shape)
