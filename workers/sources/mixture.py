"""`mix`: several sources by weights, and the arithmetic that finds record n of a mixture.

An epoch of a mixture is made of *segments*, each of blocks that hold the same number of records of
each source. How many segments there are depends on the schedule and the number of sources, not on
the number of records; so record n is found by its segment, its block, and its place in the block.
Within a block the records come in a random order, which follows from the seed, the epoch and the
number of the block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Unpack, get_args

import numpy as np
import xxhash

from feeder.workers.errors import ConfigError
from feeder.workers.public import public
from feeder.workers.sources.arguments import whole
from feeder.workers.sources.orders.options import OrderOptions
from feeder.workers.sources.source import Source, as_part
from feeder.workers.sources.steps.routed import Numbers, Places, Routed
from feeder.workers.sources.steps.rows import Step
from feeder.workers.stream.batch import Call

OnExhausted = Literal["drop", "stop", "repeat"]
Weights = Mapping[str, float]

_MOST_EXACT = 4096
"""Weights are exact where a block of so many records can hold them."""
_ROUNDED = 1024
"""Else a block has so many records, and the weights are rounded to it."""


@public("feeder.sources")
class Mixture(Source):
    """Several sources by weights; what `mix` returns. Never changes; any thread reads."""

    def counts(self, records: int, *, epoch: int = 0, seed: int = 0) -> dict[str, int]:
        """How many records of each source the first `records` of an epoch are, by its name.

        Args:
            records: So many records of the mixture, in its own order: no shuffle and no filter.
            epoch: The epoch.
            seed: The feed's seed, where `mix` was given none. At the end of a block the numbers are
                the same for all seeds.

        Raises:
            ConfigError: `records` is no whole number, or more than an epoch has.
        """
        routed = self.records
        # What pads the records, or joins them, stands on the mixture.
        while isinstance(routed, Step) and not isinstance(routed, Routed):
            (routed,) = routed.parts
        assert isinstance(routed, Routed) and isinstance(routed.route, MixRoute)
        return routed.route.counts(whole("records", records), whole("epoch", epoch), seed)


@public("feeder.sources")
def mix(
    sources: Mapping[str, tuple[Source, float] | Source],
    schedule: Iterable[tuple[int, Weights]] = (),
    on_exhausted: OnExhausted = "drop",
    *,
    temperature: float = 1.0,
    **options: Unpack[OrderOptions],
) -> Mixture:
    """Several sources by weights, record by record.

    The records come in blocks, each with exactly as many records of each source as the weights say,
    in random order: at the end of a block the proportions are exact, and between they are off by
    less than a block. A block is as small as holds the weights, such as 10 records for 0.7, 0.2 and
    0.1; where that needs more than 4,096 records, the weights are rounded to a block of 1,024. The
    records of a source come in the source's own order, shuffled where it is. Each source has draws
    and shuffles of its own, keyed by its name. Resuming finds record n at once.

    Args:
        sources: By name, a source and its weight, or a source alone, which weighs as much as it has
            records. Their columns are alike.
        schedule: Pairs of a record of the epoch and the weights from that record on, by name; a
            source without a weight is not read then. A block that would reach beyond such a record
            is cut short.
        on_exhausted: What becomes of a source without further records in the epoch: "drop" goes on
            with the others in their proportions, so that an epoch has each record once; "stop" ends
            the epoch with the last block that all sources can fill; "repeat" begins it again, in
            its own next epoch, and ends the epoch of the mixture when each source has been read
            once. With "repeat" the next epoch goes on where each source stands.
        temperature: Weights are taken to the power of 1/temperature: above 1 they come closer to
            each other, as in multilingual training (Arivazhagan et al., arXiv:1907.05019).
        options: `OrderOptions`, of the mixture; `seed` is that of the order in blocks too.

    Raises:
        ConfigError: a weight is not a finite number above 0, a source has no known length, has
            shards, or is too small for a block with "stop"; or another option is wrong.
    """
    if not isinstance(sources, Mapping) or not sources:
        raise ConfigError(f"sources is {sources!r}, expected a mapping of name to (source, weight)")
    if on_exhausted not in get_args(OnExhausted):
        raise ConfigError(
            f"on_exhausted is {on_exhausted!r}, expected one of {get_args(OnExhausted)!r}"
        )
    power = 1 / _positive("temperature", temperature)
    parts, weights = [], {}
    for name, given in sources.items():
        source, weight = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        part = as_part(source, f"mix, {name!r},", counts=True)
        parts.append(part)
        weights[name] = part.epoch_size if weight is None else weight
    names = tuple(weights)
    if len(set(map(str, names))) < len(names):
        # Positions, and what is drawn, know them as text.
        raise ConfigError(f"names are {list(names)}, expected different ones as text")
    steps = [(0, _checked(weights, names, power)), *_checked_schedule(schedule, names, power)]
    lengths = tuple(part.epoch_size for part in parts)
    segments = tuple(_segments(lengths, steps, on_exhausted))
    if not segments:
        raise ConfigError(
            f"the sources have {dict(zip(names, lengths, strict=True))} records, fewer than one "
            f"block of the mixture needs, {dict(zip(names, _block(steps[0][1]), strict=True))}"
        )
    route = MixRoute(names, lengths, segments, on_exhausted, options.get("seed"))
    return Mixture(Routed("mix", parts, route, names), **options)


def _positive(what: str, value: Any) -> float:
    is_number = isinstance(value, (int, float, Fraction, np.number)) and not isinstance(value, bool)
    if not is_number or value <= 0 or not _is_finite(value):
        raise ConfigError(f"{what} is {value!r}, expected a finite number above 0")
    number: float = value
    return number


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _to_the_power(weight: float, power: float) -> float:
    try:
        return math.pow(weight, power)
    except OverflowError:
        return math.inf


def _checked(weights: Weights, names: Sequence[str], power: float) -> tuple[Fraction, ...]:
    """The weight of each source; 0 for one that is left out."""
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigError(f"weights are {weights!r}, expected a mapping of name to weight")
    if unknown := sorted(set(weights) - set(names)):
        raise ConfigError(f"weights of {unknown}, expected those of {list(names)}")
    checked = []
    for name in names:
        if name not in weights:
            checked.append(Fraction(0))
            continue
        weight = _positive(f"the weight of {name!r}", weights[name])
        # The decimal that the user wrote, not the binary fraction that is next to it.
        if power != 1:
            what = f"the weight of {name!r}, to the power of 1 / temperature,"
            weight = _positive(what, _to_the_power(weight, power))
        checked.append(Fraction(str(weight)))
    return tuple(checked)


def _checked_schedule(
    schedule: Any, names: Sequence[str], power: float
) -> list[tuple[int, tuple[Fraction, ...]]]:
    try:
        pairs = [(record, weights) for record, weights in schedule]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"schedule is {schedule!r}, expected pairs of a record and weights by name"
        ) from error
    steps = [
        (whole("a record of the schedule", record, 1), _checked(weights, names, power))
        for record, weights in pairs
    ]
    if any(a[0] >= b[0] for a, b in pairwise(steps)):
        raise ConfigError(
            f"schedule has the records {[r for r, _ in steps]}, expected them to grow"
        )
    return steps


def _block(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """The records of each source in one block."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    size = math.lcm(*(share.denominator for share in shares))
    if size <= _MOST_EXACT:
        return tuple(int(share * size) for share in shares)
    counts = _apportioned(shares, max(_ROUNDED, len(weights)))
    common = math.gcd(*counts)
    return tuple(count // common for count in counts)


def _apportioned(shares: Sequence[Fraction], size: int) -> tuple[int, ...]:
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


@dataclass(frozen=True, slots=True)
class Segment:
    """Blocks that hold the same number of records of each source."""

    first: int
    """The first record of the segment."""
    block: int
    """The number of its first block in the epoch."""
    blocks: int
    """How many blocks it has."""
    counts: tuple[int, ...]
    """Records of each source in a block."""
    before: tuple[int, ...]
    """Records of each source in the epoch before it."""

    @property
    def size(self) -> int:
        """Records of a block."""
        return sum(self.counts)

    @property
    def end(self) -> int:
        """The first record after it."""
        return self.first + self.blocks * self.size

    @property
    def after(self) -> tuple[int, ...]:
        """Records of each source in the epoch up to its end."""
        return tuple(b + self.blocks * c for b, c in zip(self.before, self.counts, strict=True))


def _segments(
    lengths: Sequence[int], steps: Sequence[tuple[int, Sequence[Fraction]]], mode: OnExhausted
) -> Iterator[Segment]:
    """The segments of an epoch."""
    last = Segment(0, 0, 0, (0,) * len(lengths), (0,) * len(lengths))
    ends = [start for start, _ in steps[1:]]
    for (_, weights), end in zip(steps, [*ends, None], strict=True):
        while end is None or last.end < end:
            left = [n - used for n, used in zip(lengths, last.after, strict=True)]
            alive = [w if mode == "repeat" or n > 0 else Fraction(0)
                     for w, n in zip(weights, left, strict=True)]  # fmt: skip
            if not any(alive):
                # All that this step reads has been read; the next one reads other sources.
                break
            segment = _next(last, _block(alive), left, end, mode)
            if segment is None or (mode == "stop" and alive != list(weights)):
                return
            if not segment.blocks:
                break
            last = segment
            yield segment


def _next(
    last: Segment, counts: tuple[int, ...], left: Sequence[int], end: int | None, mode: OnExhausted
) -> Segment | None:
    """The segment after one: whole blocks, or where there is room for none, a block cut short;
    None where the epoch ends instead."""
    size, drawn = sum(counts), [(n, c) for n, c in zip(left, counts, strict=True) if c]
    room = None if end is None else end - last.end
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
    place = last.end, last.block + last.blocks
    if blocks or (mode == "repeat" and room is None):
        return Segment(*place, blocks, counts, last.after)
    if not fits and mode == "stop":
        return None
    if room is not None and room < size:
        counts = _apportioned([Fraction(c, size) for c in counts], room)
    if mode != "repeat":
        counts = tuple(min(n, c) for n, c in zip(left, counts, strict=True))
    return Segment(*place, 1, counts, last.after) if sum(counts) else None


@dataclass(frozen=True)
class MixRoute:
    """Record n of a mixture → its source and the position there. Never changes."""

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    segments: tuple[Segment, ...]
    on_exhausted: OnExhausted
    seed: int | None

    @property
    def size(self) -> int:
        """Records of an epoch."""
        return self.segments[-1].end

    @cached_property
    def _firsts(self) -> Numbers:
        return np.array([segment.first for segment in self.segments])

    def __call__(self, indices: Numbers, call: Call) -> Places:
        found = np.searchsorted(self._firsts, indices, side="right") - 1
        parts, counters = np.empty_like(indices), np.empty_like(indices)
        for number in np.unique(found).tolist():
            chosen = found == number
            parts[chosen], counters[chosen] = _draw(
                self.segments[number], indices[chosen], self._key(call.seed, call.epoch)
            )
        lengths = np.array(self.lengths)[parts]
        if self.on_exhausted != "repeat":
            return Places(parts, np.full_like(indices, call.epoch), counters)
        counters += np.array(self.segments[-1].after)[parts] * call.epoch
        return Places(parts, *np.divmod(counters, lengths))

    def _key(self, seed: int, epoch: int) -> int:
        key = f"{seed if self.seed is None else self.seed}/{epoch}/mix"
        digest: int = xxhash.xxh3_64_intdigest(key.encode())
        return digest

    def counts(self, records: int, epoch: int, seed: int) -> dict[str, int]:
        """Records of each source among the first of an epoch."""
        if records > self.size:
            raise ConfigError(f"records is {records}, and an epoch has {self.size}")
        number = max(0, int(np.searchsorted(self._firsts, records, side="right")) - 1)
        segment = self.segments[number]
        blocks, rest = divmod(records - segment.first, segment.size)
        made = np.array(segment.before) + blocks * np.array(segment.counts)
        if rest:
            indices = np.arange(records - rest, records)
            parts, _ = _draw(segment, indices, self._key(seed, epoch))
            made += np.bincount(parts, minlength=len(made))
        return dict(zip(self.names, made.tolist(), strict=True))

    @classmethod
    def described(cls, fields: Mapping[str, Any]) -> MixRoute:
        """The route of a mixture whose `describe` gave these fields."""
        names: list[str] = list(fields.get("names", ()))
        for field in () if names else fields:
            is_below = names and field.startswith(f"{names[-1]}.")
            if field.endswith(".source") and not is_below:
                names.append(field.removesuffix(".source"))
        segments: list[Segment] = []
        nothing = (0,) * len(names)
        for first, blocks, *counts in fields["blocks"]:
            last = segments[-1] if segments else Segment(first, 0, 0, nothing, nothing)
            segments.append(
                Segment(first, last.block + last.blocks, blocks, tuple(counts), last.after)
            )
        lengths = tuple(fields[f"{name}.size"] for name in names)
        mode, seed = fields["on_exhausted"], fields["mix_seed"]
        return cls(tuple(names), lengths, tuple(segments), mode, seed)

    def describe(self) -> dict[str, Any]:
        """The blocks of each segment."""
        names = [str(name) for name in self.names]
        # With "a" and "a.b", the fields of the second look like those of a part of the first.
        hidden = any(other.startswith(f"{name}.") for name in names for other in names)
        return {
            "blocks": [[s.first, s.blocks, *s.counts] for s in self.segments],
            "on_exhausted": self.on_exhausted,
            "mix_seed": self.seed,
            **({"names": names} if hidden else {}),
        }


def counts_of_calls(
    fields: Mapping[str, Any], epoch: int, calls: int, settings: Mapping[str, Any]
) -> dict[str, int] | None:
    """What the first calls of an epoch have read of each source; None where it cannot be told: the
    fields are not those of a mixture in its own order, or of one that is packed so.

    Args:
        fields: What `describe` of the source gave.
        epoch: The epoch.
        calls: So many of its calls.
        settings: Of the feed: `batch_size`, `last_batch` and `seed`.
    """
    kind, carried, of = fields["source"], 0, fields
    if kind in ("pack", "pad", "offsets"):
        prefix = "of."
        of = {k.removeprefix(prefix): v for k, v in fields.items() if k.startswith(prefix)}
    per_call = fields["window"] if kind == "pack" else settings["batch_size"]
    if settings["last_batch"] == "carry" and kind != "pack":
        carried = epoch * fields["size"] % per_call
    # A step that stands on the mixture itself says nothing of an order between them.
    is_in_order = all(
        field.get("shuffle", "none") == "none" and field.get("num_shards", 1) == 1
        for field in (fields, of)
    )
    if of["source"] != "mix" or not is_in_order:
        return None
    route = MixRoute.described(of)
    # No mixture has larger blocks: the fields are those of something else.
    if max(segment.size for segment in route.segments) > max(_MOST_EXACT, len(route.names)):
        return None
    records = min(max(0, calls * per_call - carried), route.size)
    return route.counts(records, epoch, settings["seed"])


def _draw(segment: Segment, indices: Numbers, key: int) -> tuple[Numbers, Numbers]:
    """The source of each record, and its number among the epoch's records of that source."""
    size = segment.size
    numbers, inside = np.divmod(indices - segment.first, size)
    blocks, rows = np.unique(numbers, return_inverse=True)
    # A slot of a block belongs to a source; sorting random numbers shuffles the slots.
    slots = np.repeat(np.arange(len(segment.counts)), segment.counts)
    kinds = slots[np.argsort(_mixed(blocks + segment.block, size, key), axis=1, kind="stable")]
    parts: Numbers = kinds[rows.reshape(-1), inside]
    counters = np.empty_like(indices)
    for part in np.unique(parts).tolist():
        chosen = parts == part
        ranks = np.cumsum(kinds == part, axis=1)[rows.reshape(-1)[chosen], inside[chosen]] - 1
        counters[chosen] = segment.before[part] + numbers[chosen] * segment.counts[part] + ranks
    return parts, counters


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
