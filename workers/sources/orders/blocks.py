"""The blocks of a mixture: how many records of each source come when, at which place of a block.

An epoch of a mixture is made of *segments*, in which the weights stay the same. How many segments
there are depends on the schedule and the number of sources, not on the number of records; so record
n is found by its segment, its block, and its place in the block. Within a block the records come in
a random order, which follows from the seed, the epoch and the number of the block.

Where a block of at most 4,096 records can hold the weights, each block of a segment holds the same
number of records of each source. Else blocks of 1,024 records hold now one more of a source and now
one less: `Apportionment` says how many of the first n records each source has, so that a source of
one record in a million comes once in a million. What a segment gives too many of a source, or too
few, its successor makes up for.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError

OnExhausted = Literal["drop", "stop", "repeat"]
Numbers = NDArray[np.int64]
Shares = Sequence[Fraction]

MOST_EXACT = 4096
"""Blocks are alike where a block of so many records can hold the weights."""
ROUNDED = 1024
"""Else a block has so many records."""
_FLOATS_ERR = Fraction(1, 2**46)
_MOST_RECORDS = 2**62
_DEBT_UNIT = 2**32
"""Debts are rounded to such parts of a record: else their denominators would grow with each step of
a schedule."""


class Apportionment:
    """How many of the first n records each source has: whole numbers that add up to n, that never
    shrink, and that are less than two records away from n times the share, however many sources
    there are. Never changes; any thread asks.

    The sources are the leaves of a Huffman tree. A node's records are dealt out to its two children
    by rounding. What a rounding is off by shrinks on the way down by the child's share, and in such
    a tree a share halves at least at every second node.
    """

    def __init__(self, shares: Shares, debts: Shares) -> None:
        """`shares` are of 1, 0 for a source that has none. `debts` are records that a source was
        given too few of before."""
        # A heap entry is a weight, the number of its node, and what the node is owed.
        heap = [(s, k, debts[k]) for k, s in enumerate(shares) if s]
        heapq.heapify(heap)
        self._num = len(shares)
        splits: list[tuple[int, int, int, int, int, int]] = []
        node = self._num
        while len(heap) > 1:
            (w, left, owed), (v, right, other) = heapq.heappop(heap), heapq.heappop(heap)
            share, total = w / (w + v), owed + other
            begun = Fraction(1, 2) + owed - total * share
            # The left one's records of n are floor(n * share + begun), reckoned in whole numbers.
            bottom = math.lcm(share.denominator, begun.denominator)
            splits.append((node, left, right, int(share * bottom), int(begun * bottom), bottom))
            heapq.heappush(heap, (w + v, node, total))
            node += 1
        self._root = heap[0][1]
        self._splits = splits[::-1]

    def at(self, n: int) -> list[int]:
        """Records of each source among the first n."""
        counts = [0] * (self._num + len(self._splits))
        counts[self._root] = n
        for node, left, right, top, begun, bottom in self._splits:
            held = counts[node]
            # Never less than none, nor more than there are; so both of them grow with `held`.
            counts[left] = given = min(held, max(0, (held * top + begun) // bottom))
            counts[right] = held - given
        return counts[: self._num]

    def last(self, most: Sequence[int], n: int) -> int:
        """The greatest number of first records, up to n, that take at most so many of each."""
        return _bisect(lambda m: all(a <= b for a, b in zip(self.at(m), most, strict=True)), n)

    def first(self, least: Sequence[int]) -> int:
        """The smallest number of first records with so many of each at least."""

        def lacks(n: int) -> bool:
            return any(a < b for a, b in zip(self.at(n), least, strict=True))

        n = 1
        while lacks(n):
            n *= 2
            if n > _MOST_RECORDS:
                raise ConfigError(
                    "an epoch of the mixture that reads each source once has more than 2**62 "
                    "records: a weight is too small; give larger ones, or on_exhausted='drop'"
                )
        return _bisect(lacks, n) + 1


def _bisect(holds: Callable[[int], bool], most: int) -> int:
    """The greatest number up to `most` that it holds for, as it does for all smaller ones; -1 where
    it holds for none."""
    if holds(most):
        return most
    low, high = -1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Segment:
    """Blocks of a mixture between which the weights stay the same."""

    first: int
    """The first record of the segment."""
    block: int
    """The number of its first block in the epoch."""
    blocks: int
    """How many blocks it has."""
    counts: tuple[int, ...]
    """Records of each source in a block; in all blocks where these differ."""
    before: tuple[int, ...]
    """Records of each source in the epoch before it."""
    weights: tuple[int, ...] = ()
    """The weights, where blocks differ; else empty."""
    debts: tuple[Fraction, ...] = ()
    """What it begins with, where blocks differ: records that the epoch has given too few of."""

    @property
    def varies(self) -> bool:
        """Whether its blocks differ."""
        return bool(self.weights)

    @property
    def size(self) -> int:
        """Records of a block. The last one may have fewer where blocks differ."""
        return max(ROUNDED, len(self.weights)) if self.varies else sum(self.counts)

    @property
    def end(self) -> int:
        """The first record after it."""
        return self.first + sum(self.counts) * (1 if self.varies else self.blocks)

    @property
    def after(self) -> tuple[int, ...]:
        """Records of each source in the epoch up to its end."""
        return self.made(self.blocks)

    @cached_property
    def shares(self) -> Apportionment:
        """What its blocks hold, where they differ."""
        total = sum(self.weights)
        return Apportionment([Fraction(w, total) for w in self.weights], self.debts)

    def made(self, blocks: int) -> tuple[int, ...]:
        """Records of each source in the epoch up to the end of so many of its blocks."""
        if not self.varies:
            given = [blocks * c for c in self.counts]
        else:
            given = self.shares.at(min(blocks * self.size, self.end - self.first))
        return tuple(b + g for b, g in zip(self.before, given, strict=True))

    def made_each(self, blocks: Numbers) -> Numbers:
        """The same for each of many numbers of blocks: an array of (numbers, sources)."""
        if self.varies:
            return np.array([self.made(b) for b in blocks.tolist()], np.int64)
        made: Numbers = np.array(self.before) + blocks[:, None] * np.array(self.counts)
        return made

    def draw(self, indices: Numbers, key: int) -> tuple[Numbers, Numbers]:
        """The source of each record of it, and its number among the epoch's records of that
        source."""
        numbers, inside = np.divmod(indices - self.first, self.size)
        blocks, rows = np.unique(numbers, return_inverse=True)
        begins = self.made_each(blocks)
        counts = self.made_each(blocks + 1) - begins
        return shuffled(blocks + self.block, begins, counts, rows.reshape(-1), inside, key)

    def find(self, part: int, counter: int, key: int) -> int:
        """The record that is one of a source, by its number among the epoch's records of that
        source: the inverse of `draw`. The source has it in this segment."""
        block = _bisect(lambda b: self.made(b)[part] <= counter, self.blocks - 1)
        start = self.first + block * self.size
        indices = np.arange(start, min(start + self.size, self.end))
        return start + _found(self.draw(indices, key), part, counter)

    def describe(self) -> list[Any]:
        """Where it begins, and the blocks that it has: their number, and what each holds; or where
        they differ how many records there are, and the weights as texts."""
        if self.varies:
            return [self.first, self.end - self.first, *map(str, self.weights)]
        return [self.first, self.blocks, *self.counts]


Step = tuple[int, Sequence[Fraction]]
"""A record of the epoch, and the weights from it on; 0 for a source that is not read."""


def find_segments(
    lengths: Sequence[int], steps: Sequence[Step], mode: OnExhausted, *, evens_out: bool
) -> tuple[tuple[Segment, ...], bool]:
    """The segments of an epoch, and whether they hold the weights.

    With `evens_out` they do. Else they are those of the first format, where weights were rounded to
    one block, and blocks that a schedule cuts short each had at least one record of each source.
    """
    segments: list[Segment] = []
    last, holds = nothing(len(lengths)), True
    off = debts = (Fraction(0),) * len(lengths)
    ends = [start for start, _ in steps[1:]]
    for (_, weights), end in zip(steps, [*ends, None], strict=True):
        while end is None or last.end < end:
            left = [n - used for n, used in zip(lengths, last.after, strict=True)]
            alive = [w if mode == "repeat" or n > 0 else Fraction(0)
                     for w, n in zip(weights, left, strict=True)]  # fmt: skip
            if not any(alive):
                # All that this step reads has been read; the next one reads other sources.
                break
            place = _Place(last, left, None if end is None else end - last.end, mode)
            exact = _exact_block(alive)
            if evens_out and (exact is None or place.is_cut(exact)):
                segment = place.evened_out(alive, debts)
            else:
                segment = place.alike(block_of(alive))
            if segment is None or (mode == "stop" and alive != list(weights)):
                return tuple(segments), holds
            if not segment.blocks:
                break
            last = segment
            segments.append(segment)
            debts = owed(debts, segment)
            if exact is None:
                holds = holds and evens_out
            elif place.is_cut(exact):
                off = _off(off, segment, alive)
                # One cut is off by a record of each source at most.
                holds = holds and max(map(abs, off)) < min(sum(exact), 2 * len(off))
    return tuple(segments), holds


def described_segments(told: Sequence[Sequence[Any]], num: int) -> tuple[Segment, ...]:
    """The segments of so many sources whose `describe` gave this."""
    segments: list[Segment] = []
    last, debts = nothing(num), (Fraction(0),) * num
    for first, records, *held in told:
        if not segments:
            last = replace(last, first=first)
        block = last.block + last.blocks
        if held and isinstance(held[0], str):
            weights = tuple(map(int, held))
            size = max(ROUNDED, num)
            made = Segment(first, block, -(-records // size), (), last.after, weights, debts)
            made = replace(made, counts=tuple(made.shares.at(records)))
        else:
            made = Segment(first, block, records, tuple(held), last.after)
        last, debts = made, owed(debts, made)
        segments.append(made)
    return tuple(segments)


def _off(off: Shares, segment: Segment, weights: Shares) -> tuple[Fraction, ...]:
    """By how many records a mixture is off after one more block."""
    total, num = sum(weights), sum(segment.counts)
    return tuple(
        o + num * w / total - c for o, w, c in zip(off, weights, segment.counts, strict=True)
    )


def nothing(num: int) -> Segment:
    """What is before the first segment of so many sources."""
    return Segment(0, 0, 0, (0,) * num, (0,) * num)


def owed(debts: Shares, segment: Segment) -> tuple[Fraction, ...]:
    """The debts after a segment: those of before where its blocks hold the weights."""
    if not segment.varies:
        return tuple(debts)
    exact = _off(debts, segment, [Fraction(w) for w in segment.weights])
    return tuple(Fraction(round(d * _DEBT_UNIT), _DEBT_UNIT) for d in exact)


@dataclass(frozen=True)
class _Place:
    """Where a segment begins."""

    last: Segment
    """The segment before it."""
    left: Sequence[int]
    """Records of each source that have not been read; below 0 where it has been read again."""
    room: int | None
    """Records up to the next step of the schedule; None where there is none."""
    mode: OnExhausted

    def is_cut(self, counts: Sequence[int]) -> bool:
        """Whether the schedule has no room for one block."""
        return self.room is not None and self.room < sum(counts)

    def _segment(self, blocks: int, counts: Sequence[int]) -> Segment:
        last = self.last
        return Segment(last.end, last.block + last.blocks, blocks, tuple(counts), last.after)

    def alike(self, counts: tuple[int, ...]) -> Segment | None:
        """Whole blocks, or where there is room for none, a block cut short; None where the epoch
        ends instead."""
        room, mode, size = self.room, self.mode, sum(counts)
        drawn = [(n, c) for n, c in zip(self.left, counts, strict=True) if c]
        if mode == "repeat":
            # Until each has been read once, or the weights change.
            blocks = max(0, *(-(-n // c) for n, c in drawn))
            fits = True
            if room is not None:
                blocks = room // size
        else:
            blocks = min(n // c for n, c in drawn)
            fits = blocks > 0
            if room is not None:
                blocks = min(blocks, room // size)
        if blocks or (mode == "repeat" and room is None):
            return self._segment(blocks, counts)
        if not fits and mode == "stop":
            return None
        if room is not None and room < size:
            counts = _apportioned([Fraction(c, size) for c in counts], room)
        if mode != "repeat":
            counts = tuple(min(n, c) for n, c in zip(self.left, counts, strict=True))
        return self._segment(1, counts) if sum(counts) else None

    def evened_out(self, weights: Shares, debts: Shares) -> Segment | None:
        """Blocks that differ, up to the next step, or to where a source has no more records; None
        where the epoch ends instead."""
        bottom = math.lcm(*(w.denominator for w in weights))
        whole = [int(w * bottom) for w in weights]
        common, total = math.gcd(*whole), sum(weights)
        shares = Apportionment([w / total for w in weights], debts)
        size = max(ROUNDED, len(weights))
        if self.mode == "repeat":
            # Whole blocks, until each has been read once; one that has no weight is not waited for.
            least = [n if w else 0 for n, w in zip(self.left, weights, strict=True)]
            num = -(-shares.first(least) // size) * size if self.room is None else self.room
        else:
            most = sum(max(0, n) for n in self.left) if self.room is None else self.room
            num = shares.last(self.left, most)
            if self.mode == "stop" and num != self.room:
                num = num // size * size
                if not num:
                    return None
        segment = self._segment(-(-num // size), shares.at(num))
        return replace(segment, weights=tuple(w // common for w in whole), debts=tuple(debts))


def _exact_block(weights: Shares) -> tuple[int, ...] | None:
    """The records of each source in a block that holds the weights, unless that is too large."""
    total = sum(weights)
    counts = block_of(weights)
    size = sum(counts)
    # Weights may be off by what a float is: three to one, taken to a power, is three to one.
    is_held = all(
        abs(count * total - weight * size) <= weight * size * _FLOATS_ERR
        for count, weight in zip(counts, weights, strict=True)
    )
    return counts if is_held else None


def block_of(weights: Shares) -> tuple[int, ...]:
    """The records of each source in one of blocks that are alike, rounded where that must be."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    size = math.lcm(*(share.denominator for share in shares))
    if size <= MOST_EXACT:
        return tuple(int(share * size) for share in shares)
    counts = _apportioned(shares, max(ROUNDED, len(weights)))
    common = math.gcd(*counts)
    return tuple(count // common for count in counts)


def _apportioned(shares: Shares, size: int) -> tuple[int, ...]:
    """So many records, as near to the shares as whole numbers are: by largest remainders."""
    counts = [int(share * size) for share in shares]
    rests = sorted(
        range(len(shares)), key=lambda k: (counts[k] - shares[k] * size, k)
    )  # The largest remainder first.
    for k in rests[: size - sum(counts)]:
        counts[k] += 1
    # Each comes at least once in a block, at the cost of the most frequent one.
    for k, share in enumerate(shares):
        if share and not counts[k] and max(counts) > 1:
            counts[counts.index(max(counts))] -= 1
            counts[k] = 1
    return tuple(counts)


def shuffled(
    blocks: Numbers, begins: Numbers, counts: Numbers, rows: Numbers, inside: Numbers, key: int
) -> tuple[Numbers, Numbers]:
    """The source of each record, and its number among those of that source, where each block has so
    many records of each source, in random order.

    Args:
        blocks: The numbers of the blocks, by which they are shuffled.
        begins: (blocks, sources): so many records of each source come before a block.
        counts: (blocks, sources): so many are in it.
        rows: Of each record its block, by the place in `blocks`.
        inside: Of each record its place in the block.
        key: What all random numbers follow from.
    """
    parts, counters = np.empty_like(inside), np.empty_like(inside)
    sizes = counts.sum(axis=1)
    # Blocks of one size together: most are alike.
    for size in np.unique(sizes).tolist():
        alike = np.flatnonzero(sizes == size)
        chosen = slice(None) if len(alike) == len(sizes) else np.isin(rows, alike)
        at, place = np.searchsorted(alike, rows[chosen]), inside[chosen]
        # A slot of a block belongs to a source; sorting random numbers shuffles the slots.
        every: Any = np.tile(np.arange(counts.shape[1]), len(alike))
        slots = np.repeat(every, counts[alike].reshape(-1)).reshape(len(alike), size)
        order = np.argsort(_mixed(blocks[alike], size, key), axis=1, kind="stable")
        kinds = np.take_along_axis(slots, order, 1)
        found = kinds[at, place]
        numbers = np.empty_like(found)
        for part in np.unique(found).tolist():
            of = found == part
            ranks = np.cumsum(kinds == part, axis=1)[at[of], place[of]] - 1
            numbers[of] = begins[alike][at[of], part] + ranks
        parts[chosen], counters[chosen] = found, numbers
    return parts, counters


def _found(drawn: tuple[Numbers, Numbers], part: int, counter: int) -> int:
    """Which of some records that were drawn is that of a source."""
    parts, counters = drawn
    return int(np.flatnonzero((parts == part) & (counters == counter))[0])


@dataclass(frozen=True)
class ShardOfBlocks:
    """The blocks of one of several shards of an epoch, which have the proportions of the whole at
    each place. Never changes.

    The records of the epoch are numbered, source after source, and dealt out in turn. So all shards
    have as many records, but for one, and as many of each source, but for one, of any stretch of
    blocks. What a shard has of as many blocks as there are shards is a block of its own.
    """

    segments: tuple[Segment, ...]
    residue: int
    """It has each record whose number leaves this rest, divided by the number of shards."""
    num_shards: int

    @cached_property
    def firsts(self) -> Numbers:
        """Of each source, the first record that it has."""
        every = np.array(self.segments[-1].after)
        firsts: Numbers = (self.residue - (np.cumsum(every) - every)) % self.num_shards
        return firsts

    def held(self, counts: Numbers) -> Numbers:
        """How many it has of the first records of each source."""
        held: Numbers = np.maximum(0, -(-(counts - self.firsts) // self.num_shards))
        return held

    @cached_property
    def _starts(self) -> Numbers:
        """The place in the shard where each segment begins."""
        before = np.array([segment.before for segment in self.segments], np.int64)
        starts: Numbers = self.held(before).sum(axis=1)
        return starts

    def draw(self, places: Numbers, key: int) -> tuple[Numbers, Numbers]:
        """The source of the record at each place of the shard, and its number among the shard's
        records of that source."""
        parts, counters = np.empty_like(places), np.empty_like(places)
        found = np.searchsorted(self._starts, places, side="right") - 1
        for number in np.unique(found).tolist():
            chosen = found == number
            parts[chosen], counters[chosen] = self._draw(number, places[chosen], key)
        return parts, counters

    def counts(self, places: int, key: int) -> Numbers:
        """How many of each source the first so many of its records are."""
        number = int(np.searchsorted(self._starts, places, side="right")) - 1
        groups, _ = self._groups(number, np.array([places]))
        made: Numbers = self._held(number, groups)[0]
        if rest := places - int(made.sum()):
            parts, _ = self._draw(number, np.arange(places - rest, places), key)
            made = made + np.bincount(parts, minlength=len(made))
        return made

    def find(self, part: int, number: int, key: int) -> int:
        """The place of a record of a source, by its number among the shard's records of that
        source: the inverse of `draw`. The shard has it."""
        befores = np.array([segment.before for segment in self.segments], np.int64)
        of = int(np.searchsorted(self.held(befores)[:, part], number, side="right")) - 1

        def held(group: int) -> Numbers:
            made: Numbers = self._held(of, np.array([group]))[0]
            return made

        last = -(-self.segments[of].blocks // self.num_shards) - 1
        group = _bisect(lambda g: int(held(g)[part]) <= number, last)
        start = int(held(group).sum())
        places = np.arange(start, int(held(group + 1).sum()))
        return start + _found(self._draw(of, places, key), part, number)

    def _held(self, number: int, groups: Numbers) -> Numbers:
        """How many it has of each source before groups of blocks of a segment."""
        segment = self.segments[number]
        blocks = np.minimum(groups * self.num_shards, segment.blocks)
        return self.held(segment.made_each(blocks))

    def _groups(self, number: int, places: Numbers) -> tuple[Numbers, Numbers]:
        """The groups of blocks of a segment that places are in, and of each place which of them."""
        segment = self.segments[number]
        # A group is as large as a block, but for a record of each source; so its number is near.
        near = (places - self._starts[number]) // segment.size
        off = 2 + 2 * len(segment.before) // segment.size
        around = np.unique(near)[:, None] + np.arange(-off, off + 2)
        candidates = np.unique(np.clip(around, 0, -(-segment.blocks // self.num_shards)))
        sizes = self._held(number, candidates).sum(axis=1)
        at = np.searchsorted(sizes, places, side="right") - 1
        numbers, rows = np.unique(at, return_inverse=True)
        return candidates[numbers], rows.reshape(-1)

    def _draw(self, number: int, places: Numbers, key: int) -> tuple[Numbers, Numbers]:
        groups, rows = self._groups(number, places)
        begins = self._held(number, groups)
        counts = self._held(number, groups + 1) - begins
        inside = places - begins.sum(axis=1)[rows]
        return shuffled(groups + self.segments[number].block, begins, counts, rows, inside, key)


def stay_the_same(segments: Sequence[Segment]) -> bool:
    """Whether any stretch of an epoch has the proportions of the whole, but for half a block."""
    last = segments[-1]
    most = max(min(segment.size, segment.end - segment.first) for segment in segments)
    return all(
        abs(made * last.end - every * segment.end) * 2 < most * last.end
        for segment in segments
        for made, every in zip(segment.after, last.after, strict=True)
    )


def _mixed(blocks: Numbers, size: int, key: int) -> Any:
    """A random number for each slot of each block: SplitMix64's (Steele et al., OOPSLA 2014)."""
    first = _finish(blocks.astype(np.uint64) * _GAMMA ^ np.uint64(key))
    return _finish(first[:, None] + np.arange(1, size + 1, dtype=np.uint64) * _GAMMA)


_GAMMA = np.array(0x9E3779B97F4A7C15, np.uint64)
_MIX_1 = np.array(0xBF58476D1CE4E5B9, np.uint64)
_MIX_2 = np.array(0x94D049BB133111EB, np.uint64)


def _finish(numbers: Any) -> Any:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _MIX_1
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _MIX_2
    return numbers ^ (numbers >> np.uint64(31))
