"""The random numbers of GNU libstdc++ that DALI's orders are made of.

The engines are those of the C++ standard ([rand.predef]): `minstd_rand0`, `mt19937`,
`mt19937_64`, and `seed_seq`. How `uniform_int_distribution` and `std::shuffle` use them is left
to the library; these are libstdc++'s ways since GCC 11.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from feeder.workers.sources.orders.permutation import KEEPS_GIL_ELEMENTS

_FEW_ENGINES = 20
"""Fewer random engines than this are seeded one by one."""
# For few, NumPy's arrays cost more than the loop; not measured apart (2026-11-22).

_MINSTD_MODULUS = 2**31 - 1
_MINSTD_MULTIPLIER = 16807
# What one draw tells: values from 0 to this, because 0 is never a state.
_MINSTD_RANGE = _MINSTD_MODULUS - 2

STATE_WORDS = 312
"""Words of the state of `mt19937_64`; its draws are made so many at a time."""

_MT_MULTIPLIER = 6364136223846793005
_MASK_64 = 2**64 - 1

MAX_DRAWS = KEEPS_GIL_ELEMENTS


def _powers() -> NDArray[np.uint64]:
    powers = [_MINSTD_MULTIPLIER]
    for _ in range(MAX_DRAWS - 1):
        powers.append(powers[-1] * _MINSTD_MULTIPLIER % _MINSTD_MODULUS)
    return np.array(powers, dtype=np.uint64)


_MINSTD_POWERS = _powers()


def _seed_seq(seed: int, num: int) -> list[int]:
    """`num` words (4 to 6) of `std::seed_seq{seed}`."""
    words = [0x8B8B8B8B] * num
    p, q = (num - 1) // 2, (num - 1) // 2 + 1

    def mixed(value: int) -> int:
        return value ^ (value >> 27)

    for k in range(num):
        here, near, far = k, (k + p) % num, (k + q) % num
        r1 = 1664525 * mixed(words[here] ^ words[near] ^ words[here - 1]) & 0xFFFFFFFF
        r2 = r1 + (1 if k == 0 else k + (seed & 0xFFFFFFFF) if k == 1 else k) & 0xFFFFFFFF
        words[near] = words[near] + r1 & 0xFFFFFFFF
        words[far] = words[far] + r2 & 0xFFFFFFFF
        words[here] = r2
    for k in range(num):
        here, near, far = k, (k + p) % num, (k + q) % num
        total = words[here] + words[near] + words[here - 1] & 0xFFFFFFFF
        r3 = 1566083941 * mixed(total) & 0xFFFFFFFF
        r4 = r3 - k & 0xFFFFFFFF
        words[near] ^= r3
        words[far] ^= r4
        words[here] = r4
    return words


def seed_minstd(seed: int) -> int:
    """The state of `minstd_rand0` seeded with `std::seed_seq{seed}`; only the low 32 bits of
    the seed count."""
    return _seed_seq(seed, 4)[3] % _MINSTD_MODULUS or 1


def is_minstd_state(state: int) -> bool:
    """Whether a number can be the state of `minstd_rand0`."""
    return 0 < state < _MINSTD_MODULUS


def draw_minstd(state: int, bounds: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], int]:
    """Draw a number from 0 to bound - 1 for each of up to `MAX_DRAWS` bounds; the numbers and
    the state after them.

    The draws of a multiplicative generator are known ahead, state * 16807**i, so all are made at
    once. A rejected draw (about one in two million at a bound of 1,024) moves those after it.
    """
    numbers = np.empty(len(bounds), dtype=np.uint64)
    scales = np.uint64(_MINSTD_RANGE) // bounds
    done = 0
    # Usually once: only a rejected draw makes another round.
    while done < len(bounds):
        states = _MINSTD_POWERS[: len(bounds) - done] * np.uint64(state)
        states %= np.uint64(_MINSTD_MODULUS)
        drawn = states - np.uint64(1)
        rejected = np.flatnonzero(drawn >= bounds[done:] * scales[done:])
        good = int(rejected[0]) if len(rejected) else len(drawn)
        numbers[done : done + good] = drawn[:good] // scales[done : done + good]
        done += good
        state = int(states[min(good, len(states) - 1)])
    return numbers, state


def draw_mt19937(seed: int) -> Iterator[int]:
    """The draws of `std::mt19937(seed)`, 32 bits each."""
    # The legacy generator's seeding and full-range draws are the standard's, and are frozen.
    engine = np.random.RandomState(seed)
    while True:
        yield from engine.randint(0, 2**32, 4096, dtype=np.uint32).tolist()


def draw_mt19937_64(seed: int) -> Iterator[int]:
    """The draws of `std::mt19937_64(seed)`, 64 bits each (Nishimura 2000)."""
    for block in draw_from_each([seed]):
        yield from block[:, 0].tolist()


def draw_from_each(seeds: Sequence[int]) -> Iterator[NDArray[np.uint64]]:
    """The draws of a `std::mt19937_64` for each seed, in blocks of (312, engines).

    Those of a single engine are so few at once that NumPy keeps the GIL.
    """
    state = (_seed_each if len(seeds) < _FEW_ENGINES else _seed_all)(seeds)
    while True:
        _twist(state)
        yield _temper(state)


def _seed_each(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """The states of engines, each seeded by itself."""
    states = np.empty((STATE_WORDS, len(seeds)), dtype=np.uint64)
    for k, seed in enumerate(seeds):
        # Python's integers have no 64-bit overflow: cut back each time.
        word = seed & _MASK_64
        words = [word]
        for i in range(1, STATE_WORDS):
            word = (_MT_MULTIPLIER * (word ^ (word >> 62)) + i) & _MASK_64
            words.append(word)
        states[:, k] = words
    return states


def _seed_all(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """The same, seeded all at once; of few it would take longer."""
    states = np.empty((STATE_WORDS, len(seeds)), dtype=np.uint64)
    states[:] = np.arange(STATE_WORDS, dtype=np.uint64)[:, np.newaxis]
    word = states[0]
    word[:] = [seed & _MASK_64 for seed in seeds]
    # An operation on so few words takes a third less with an array than with a scalar.
    shift, multiplier = np.full_like(word, 62), np.full_like(word, _MT_MULTIPLIER)
    mixed = np.empty_like(word)
    for following in states[1:]:
        np.right_shift(word, shift, mixed)
        np.bitwise_xor(word, mixed, mixed)
        np.multiply(mixed, multiplier, mixed)
        following += mixed
        word = following
    return states


def _twist(state: NDArray[np.uint64]) -> None:
    # Each word needs the two after it and the one 156 after it, so half of them go at a time.
    for here, near, far in (
        (slice(0, 156), slice(1, 157), slice(156, 312)),
        (slice(156, 311), slice(157, 312), slice(0, 155)),
        (slice(311, 312), slice(0, 1), slice(155, 156)),
    ):
        word = state[near] & np.uint64(0x7FFFFFFF)
        word |= state[here] & np.uint64(0xFFFFFFFF80000000)
        odd = word & np.uint64(1)
        odd *= np.uint64(0xB5026F5AA96619E9)
        word >>= np.uint64(1)
        word ^= odd
        np.bitwise_xor(word, state[far], out=state[here])


def _temper(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = state >> np.uint64(29)
    mixed &= np.uint64(0x5555555555555555)
    word = state ^ mixed
    for shift, mask in ((17, 0x71D67FFFEDA60000), (37, 0xFFF7EEE000000000)):
        np.left_shift(word, np.uint64(shift), out=mixed)
        mixed &= np.uint64(mask)
        word ^= mixed
    np.right_shift(word, np.uint64(43), out=mixed)
    word ^= mixed
    return word


def _uniform(draws: Iterator[int], bits: int, bound: int) -> int:
    """`uniform_int_distribution` from 0 to bound - 1 over an engine of full words (Lemire 2019)."""
    mask = (1 << bits) - 1
    product = next(draws) * bound
    if product & mask < bound:
        threshold = (1 << bits) % bound
        while product & mask < threshold:
            product = next(draws) * bound
    return product >> bits


def draw_targets(num: int, draws: Iterator[int], bits: int) -> Iterator[int]:
    """With which element `std::shuffle` swaps elements 1, 2, ... of `num`."""
    if ((1 << bits) - 1) // num < num:
        for i in range(1, num):
            yield _uniform(draws, bits, i + 1)
        return
    # Where one draw is wide enough for two elements it serves two.
    if num % 2 == 0:
        yield _uniform(draws, bits, 2)
    for i in range(2 - num % 2, num, 2):
        yield from divmod(_uniform(draws, bits, (i + 1) * (i + 2)), i + 2)


def shuffle(num: int, draws: Iterator[int], bits: int) -> NDArray[np.int64]:
    """What `std::shuffle` makes of 0, 1, ... num - 1 with an engine of full `bits`-bit words."""
    order = [0]
    for i, target in enumerate(draw_targets(num, draws, bits), 1):
        order.append(order[target] if target < i else i)
        order[target] = i
    return np.array(order, dtype=np.int64)
