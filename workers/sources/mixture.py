"""`mix`: several sources by weights; which source and which of its records record n is.

Which source record n comes from, and which of that source's records it is, follows from n: a
mixture is blocks of fixed counts for each source, in an order drawn by key. A draw for each record
would be simpler, but then only a walk from the start could tell how many records a source has given
by record n, and a resume or a shard would have to make that walk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Unpack, get_args

import numpy as np
import xxhash

from feeder.workers.errors import ConfigError
from feeder.workers.public import public
from feeder.workers.sources.arguments import whole
from feeder.workers.sources.orders.blocks import (
    MOST_EXACT,
    OnExhausted,
    Segment,
    ShardOfBlocks,
    Step,
    block_of,
    described_segments,
    find_segments,
    stay_the_same,
)
from feeder.workers.sources.orders.options import OrderOptions, OrderPlan
from feeder.workers.sources.orders.orders import LISTS_KEPT
from feeder.workers.sources.orders.sharding import EpochsInTurn, Sharding
from feeder.workers.sources.source import Source, as_part
from feeder.workers.sources.steps import rows
from feeder.workers.sources.steps.routed import Numbers, Places, Route, Routed
from feeder.workers.sources.steps.walked import Unit, Walked
from feeder.workers.sources.stores.records import Records
from feeder.workers.stream.batch import Call

Weights = Mapping[str, float]

_MOST_TURNS = 4096
"""So many sizes of epochs, where each source is sharded otherwise."""
FORMAT = 2
"""Of mixtures whose blocks differ; others are of the first format, which has no number."""


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
        if self.traits.walks:
            raise ConfigError(
                "counts of a mixture by tokens, or of packed or filtered sources: they follow from "
                "the rows that are read, and are known after them"
            )
        # What pads the records, or joins them, stands on the mixture.
        while isinstance(routed, rows.Step) and not isinstance(routed, Routed):
            (routed,) = routed.parts
        assert isinstance(routed, Routed)
        assert isinstance(routed.route, MixRoute | DealtRoute)
        return routed.route.counts(whole("records", records), whole("epoch", epoch), seed)

    unread: Mapping[str, Source] = MappingProxyType({})
    """The sources of weight 0, which are no part of the mixture: a run that has read them before an
    edit can be replayed with them."""

    def applied(self, step: Callable[[Records], Records]) -> Mixture:
        """The same with a step below it, also below what is not read."""
        mixture: Any = super().applied(step)
        mixture.unread = {name: part.applied(step) for name, part in self.unread.items()}
        return mixture  # type: ignore[no-any-return]


@public("feeder.sources")
def mix(
    sources: Mapping[str, tuple[Source, float] | Source],
    schedule: Iterable[tuple[int, Weights]] = (),
    on_exhausted: OnExhausted = "drop",
    *,
    temperature: float = 1.0,
    unit: Unit = "records",
    **options: Unpack[OrderOptions],
) -> Mixture:
    """Several sources by weights, record by record.

    The records come in blocks, each with exactly as many records of each source as the weights say,
    in random order: at the end of a block the proportions are exact, and between they are off by
    less than a block. A block is as small as holds the weights, such as 10 records for 0.7, 0.2 and
    0.1; where that needs more than 4,096 records, blocks have 1,024 records and differ, so that at
    the end of each one every source is less than two records away from its share of the epoch so
    far, however rare it is (with a schedule a few records, however many steps it has). The records
    of a source come in the source's own order, shuffled where it is. Each source has draws and
    shuffles of its own, keyed by its name. Resuming finds record n at once. Each shard of a mixture
    has its proportions at the same time as the others, also where they change in an epoch.

    Args:
        sources: By name, a source and its weight, or a source alone, which weighs as much as it has
            records. Their columns are alike. A source of weight 0 is not read: it is there so that
            batches of before an edit that took it out can be had again.
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
        unit: What the weights, and the records of the schedule, count: "records", or "tokens", the
            length of a record's `tokens` or of its first column. By tokens, and where a source is
            packed or filtered, the rows have no numbers: each comes from the source that is
            furthest behind its share. They are read in order, one call at a time, and a position
            holds a cursor of each source; of all steps only pack can follow, `counts` is not known,
            and there are no options but those of the sources.
        options: `OrderOptions`, of the mixture; `seed` is that of the order in blocks too.

    Raises:
        ConfigError: a weight is not a finite number above 0, a source is an iterator, or is too
            small for a block with "stop"; or another option is wrong.
    """
    if not isinstance(sources, Mapping) or not sources:
        raise ConfigError(f"sources is {sources!r}, expected a mapping of name to (source, weight)")
    if on_exhausted not in get_args(OnExhausted):
        raise ConfigError(
            f"on_exhausted is {on_exhausted!r}, expected one of {get_args(OnExhausted)!r}"
        )
    if unit not in get_args(Unit):
        raise ConfigError(f"unit is {unit!r}, expected one of {get_args(Unit)!r}")
    _no_function("weights", options.get("weights"))
    power = 1 / _positive("temperature", temperature)
    parts, weights = [], {}
    for name, given in sources.items():
        source, weight = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        part = _as_part(source, f"mix, {name!r},")
        parts.append(part)
        weights[name] = part.epoch_size if weight is None else weight
    names = tuple(weights)
    if len(set(map(str, names))) < len(names):
        # Positions, and what is drawn, know them as text.
        raise ConfigError(f"names are {list(names)}, expected different ones as text")
    steps = [(0, _checked(weights, names, power)), *_checked_schedule(schedule, names, power)]
    read = [k for k in range(len(names)) if any(shares[k] for _, shares in steps)]
    unread = {name: parts[k] for k, name in enumerate(names) if k not in read}
    parts, names = [parts[k] for k in read], tuple(names[k] for k in read)
    of_read = [(start, tuple(shares[k] for k in read)) for start, shares in steps]
    mixture = _mixed(parts, names, of_read, on_exhausted, unit, options)
    if unread:
        mixture.unread = unread
    return mixture


def weighed(mixture: Mixture, weights: Mapping[str, Fraction]) -> Mixture:
    """The same sources by other weights, and without a schedule; 0 leaves one out. Raises
    `ConfigError`."""
    records: Any = mixture.records
    route = records.route if isinstance(records, Routed) else None
    if not isinstance(route, MixRoute):
        raise ConfigError(
            "weights of a mixture that is shuffled or sharded itself, by tokens, or of packed "
            "or filtered sources cannot be changed"
        )
    read: dict[str, Any] = dict(zip(route.names, records.parts, strict=True))
    parts = {**read, **mixture.unread}
    if not {*map(str, read)} <= {*weights} <= {*map(str, parts)}:
        raise ConfigError(
            f"weights are of {sorted(weights)}, and the sources are {[*map(str, parts)]}: give "
            "one for each, 0 for a source that is taken out"
        )
    if not any(weights.values()):
        raise ConfigError("every weight is 0, expected one that is more")
    # 0 as `mix` knows it, which takes no fraction for it.
    given: Any = {name: (part, weights.get(str(name)) or 0) for name, part in parts.items()}
    options: OrderOptions = {} if route.seed is None else {"seed": route.seed}
    return mix(given, on_exhausted=route.on_exhausted, **options)


def _mixed(
    parts: list[Source], names: tuple[str, ...], steps: Sequence[Step], on_exhausted: OnExhausted,
    unit: Unit, options: OrderOptions,
) -> Mixture:  # fmt: skip
    if unit == "tokens" or any(part.traits.filters or part.traits.is_last for part in parts):
        if options:
            raise ConfigError(
                f"mix by tokens, or of packed or filtered sources, takes no {sorted(options)}: "
                "shuffle and shard its sources"
            )
        return Mixture(Walked(parts, [*map(str, names)], steps, on_exhausted, unit))
    shards = tuple(part._plan.sharding for part in parts)
    lengths = tuple(epoch_length(sharding, on_exhausted) for sharding in shards)
    route = MixRoute.made(names, lengths, tuple(steps), on_exhausted, options.get("seed"), shards)
    mixture = Mixture(Routed("mix", parts, route, names), **options)
    if route.varies:
        mixture._plan = _in_turn(mixture._plan, route)
        mixture._remember_rows()
    num_shards = mixture._plan.sharding.num_shards
    if num_shards > 1 and mixture._plan.in_sequence and not route.varies:
        mixture.records = Routed("mix", parts, route.dealt(num_shards), names)
    return mixture


def _as_part(source: Any, step: str) -> Source:
    part = as_part(source, step, rows=False, shards=True)
    # Rows of a window of documents are rows; a batch by tokens, and joined rows, are none.
    if part.traits.is_last and part.kind != "pack":
        as_part(source, step, shards=True)
    return part


def epoch_length(sharding: Sharding, mode: OnExhausted) -> int:
    """Records of a source in an epoch; of shards that differ as many as all have, or where a source
    is read again, as the longest one has."""
    if sharding.stick_to_shard:
        return sharding.length(0)
    least, more = divmod(sharding.num_records, sharding.num_shards)
    return least + (mode == "repeat" and more > 0)


def _in_turn(plan: OrderPlan, route: MixRoute) -> OrderPlan:
    """The order of a mixture whose epochs differ in size."""
    turns = math.lcm(*(s.num_shards for s in route.shards if not s.is_even))
    if not plan.in_sequence or plan.sharding.num_shards > 1 or turns > _MOST_TURNS:
        raise ConfigError(
            "the shards of the sources differ in size, and each epoch reads another one: shuffle "
            "the sources instead of the mixture, and give their shards stick_to_shard=True; or "
            "shard the mixture instead of its sources"
        )
    sizes = tuple(route.at(epoch).size for epoch in range(turns))
    sharding = EpochsInTurn(num_records=max(sizes), num_shards=turns, sizes=sizes)
    return replace(plan, sharding=sharding)


def _no_function(what: str, value: Any) -> None:
    """Refuse what would follow from the run, as weights that follow its loss."""
    if callable(value):
        raise ConfigError(
            f"{what} is a function, {value!r}, and batches would no longer follow from numbers "
            "alone: to change the weights as training goes on, call feed.edit(mix(...), why=...) "
            "from its loop, and positions hold the change"
        )


def _positive(what: str, value: Any) -> float:
    _no_function(what, value)
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
    _no_function("weights", weights)
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigError(f"weights are {weights!r}, expected a mapping of name to weight")
    if unknown := sorted(set(weights) - set(names)):
        raise ConfigError(f"weights of {unknown}, expected those of {list(names)}")
    checked = []
    for name in names:
        if name not in weights:
            checked.append(Fraction(0))
            continue
        if weights[name] == 0 and isinstance(weights[name], int | float):
            checked.append(Fraction(0))
            continue
        weight = _positive(f"the weight of {name!r}", weights[name])
        # The decimal that the user wrote, not the binary fraction that is next to it.
        if power != 1:
            what = f"the weight of {name!r}, to the power of 1 / temperature,"
            weight = _positive(what, _to_the_power(weight, power))
        checked.append(Fraction(str(weight)))
    if not any(checked):
        _positive(f"the weight of {next(iter(weights))!r}", 0)
    return tuple(checked)


def _checked_schedule(
    schedule: Any, names: Sequence[str], power: float
) -> list[tuple[int, tuple[Fraction, ...]]]:
    _no_function("schedule", schedule)
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


@dataclass(frozen=True)
class MixRoute:
    """Record n of a mixture → its source and the position there. Never changes."""

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    segments: tuple[Segment, ...]
    on_exhausted: OnExhausted
    seed: int | None
    steps: tuple[Step, ...] = ()
    """The weights, and from which record on; none where the route was only described."""
    shards: tuple[Sharding, ...] = ()
    """How each source is sharded."""
    older: MixRoute | None = None
    """How the same mixture was in the first format; None where it is so now."""

    @classmethod
    def made(
        cls,
        names: tuple[str, ...],
        lengths: tuple[int, ...],
        steps: tuple[Step, ...],
        mode: OnExhausted,
        seed: int | None,
        shards: tuple[Sharding, ...] = (),
    ) -> MixRoute:
        """The route of sources of these lengths.

        Raises:
            ConfigError: it would have no record.
        """
        segments, holds = find_segments(lengths, steps, mode, evens_out=False)
        older = cls(names, lengths, segments, mode, seed, steps, shards) if segments else None
        if not holds:
            segments, _ = find_segments(lengths, steps, mode, evens_out=True)
        if not segments:
            raise ConfigError(
                f"the sources have {dict(zip(names, lengths, strict=True))} records, fewer than "
                "one block of the mixture needs, "
                f"{dict(zip(names, block_of(steps[0][1]), strict=True))}"
            )
        return cls(names, lengths, segments, mode, seed, steps, shards, None if holds else older)

    def resized(self, sizes: Sequence[int]) -> MixRoute:
        """The route of sources that have so many records, in the same format."""
        if tuple(sizes) == self.lengths:
            return self
        made = MixRoute.made(
            self.names, tuple(sizes), self.steps, self.on_exhausted, self.seed, self.shards
        )
        return made if self.older else made.older or made

    @property
    def varies(self) -> bool:
        """Whether epochs differ in size, as those of shards do that are read in turn."""
        return self.on_exhausted == "drop" and not all(s.is_even for s in self.shards)

    def at(self, epoch: int) -> MixRoute:
        """The route of an epoch."""
        if not self.varies:
            return self
        return self._of_lengths(tuple(sharding.length(epoch) for sharding in self.shards))

    @cached_property
    def _of_lengths(self) -> Callable[[tuple[int, ...]], MixRoute]:
        # Shards have one of two sizes each.
        return lru_cache(LISTS_KEPT)(lambda n: replace(self.resized(n), shards=()))

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def size(self) -> int:
        """Records of an epoch."""
        return self.segments[-1].end

    @cached_property
    def _firsts(self) -> Numbers:
        return np.array([segment.first for segment in self.segments])

    def dealt(self, num_shards: int) -> Route:
        """The same in an order of which each shard has the proportions of the whole."""
        stays = self.varies or stay_the_same(self.segments)
        return self if stays else DealtRoute(self, num_shards)

    def __call__(self, indices: Numbers, call: Call) -> Places:
        if self.varies:
            return self.at(call.epoch)(indices, call)
        return self.places(*self.drawn(indices, call.seed, call.epoch), call)

    def drawn(self, indices: Numbers, seed: int, epoch: int) -> tuple[Numbers, Numbers]:
        """The source of each record of an epoch, and its number among the epoch's records of
        that source."""
        found = np.searchsorted(self._firsts, indices, side="right") - 1
        parts, counters = np.empty_like(indices), np.empty_like(indices)
        for number in np.unique(found).tolist():
            chosen = found == number
            parts[chosen], counters[chosen] = self.segments[number].draw(
                indices[chosen], self.key(seed, epoch)
            )
        return parts, counters

    def places(self, parts: Numbers, counters: Numbers, call: Call) -> Places:
        """Where records are found, by their sources and their numbers among the epoch's records of
        these."""
        lengths = np.array(self.lengths)[parts]
        if self.on_exhausted != "repeat":
            return Places(parts, np.full_like(parts, call.epoch), counters)
        counters = counters + np.array(self.segments[-1].after)[parts] * call.epoch
        epochs, positions = np.divmod(counters, lengths)
        for part, sharding in enumerate(self.shards):
            if not sharding.is_even:
                # Passes that differ in length.
                of = parts == part
                passes = [sharding.epoch_at(count) for count in counters[of].tolist()]
                epochs[of] = passes
                positions[of] = counters[of] - [sharding.offset(number) for number in passes]
        return Places(parts, epochs, positions)

    def passes(self, part: int, epoch: int) -> range:
        """The passes of a source that an epoch has records of."""
        if self.on_exhausted != "repeat":
            return range(epoch, epoch + 1)
        num = self.segments[-1].after[part]
        if not num:
            return range(0)
        first, last = (self._pass_of(part, n) for n in (num * epoch, num * (epoch + 1) - 1))
        return range(first, last + 1)

    def _pass_of(self, part: int, count: int) -> int:
        """The pass of a source that has its record number `count` since the start of the stream."""
        if self.shards and not self.shards[part].is_even:
            return self.shards[part].epoch_at(count)
        return count // self.lengths[part]

    def counter_of(self, part: int, in_pass: int, position: int, epoch: int) -> int:
        """The number of a record among the epoch's records of its source: the inverse of `places`.
        It is no number of the epoch's if the epoch does not have the record."""
        if self.on_exhausted != "repeat":
            return position
        is_uneven = self.shards and not self.shards[part].is_even
        before = self.shards[part].offset(in_pass) if is_uneven else in_pass * self.lengths[part]
        return before + position - self.segments[-1].after[part] * epoch

    def find(self, part: int, in_pass: int, position: int, call: Call) -> int | None:
        """Which record of the epoch of the call is that of a source; None if none is."""
        if self.varies:
            return self.at(call.epoch).find(part, in_pass, position, call)
        counter = self.counter_of(part, in_pass, position, call.epoch)
        return self.record_of(part, counter, call.seed, call.epoch)

    def record_of(self, part: int, counter: int, seed: int, epoch: int) -> int | None:
        """Which record of an epoch a source's record of that number is: the inverse of `drawn`."""
        for segment in self.segments:
            if segment.before[part] <= counter < segment.after[part]:
                return segment.find(part, counter, self.key(seed, epoch))
        return None

    def key(self, seed: int, epoch: int, tag: str = "") -> int:
        """What the order within the blocks of an epoch follows from."""
        key = f"{seed if self.seed is None else self.seed}/{epoch}/mix{tag}"
        digest: int = xxhash.xxh3_64_intdigest(key.encode())
        return digest

    def counts(self, records: int, epoch: int, seed: int) -> dict[str, int]:
        """Records of each source among the first of an epoch."""
        if self.varies:
            return self.at(epoch).counts(records, epoch, seed)
        if records > self.size:
            raise ConfigError(f"records is {records}, and an epoch has {self.size}")
        number = max(0, int(np.searchsorted(self._firsts, records, side="right")) - 1)
        segment = self.segments[number]
        blocks, rest = divmod(records - segment.first, segment.size)
        made = np.array(segment.made(blocks))
        if rest:
            indices = np.arange(records - rest, records)
            parts, _ = segment.draw(indices, self.key(seed, epoch))
            made += np.bincount(parts, minlength=len(made))
        return dict(zip(self.names, made.tolist(), strict=True))

    def counts_of(self, first: int, stop: int, epoch: int, seed: int) -> dict[str, int]:
        """The same of a stretch."""
        before = self.counts(first, epoch, seed)
        return {k: n - before[k] for k, n in self.counts(stop, epoch, seed).items()}

    @classmethod
    def described(cls, fields: Mapping[str, Any]) -> MixRoute:
        """The route of a mixture whose `describe` gave these fields."""
        names: list[str] = list(fields.get("names", ()))
        for field in () if names else fields:
            is_below = names and field.startswith(f"{names[-1]}.")
            if field.endswith(".source") and not is_below:
                names.append(field.removesuffix(".source"))
        segments = described_segments(fields["blocks"], len(names))
        lengths = tuple(fields[f"{name}.size"] for name in names)
        mode, seed = fields["on_exhausted"], fields["mix_seed"]
        return cls(tuple(names), lengths, segments, mode, seed)

    def describe(self) -> dict[str, Any]:
        """The blocks of each segment."""
        names = [str(name) for name in self.names]
        # With "a" and "a.b", the fields of the second look like those of a part of the first.
        hidden = any(other.startswith(f"{name}.") for name in names for other in names)
        return {
            **({"mix": FORMAT} if any(segment.varies for segment in self.segments) else {}),
            "blocks": [segment.describe() for segment in self.segments],
            "on_exhausted": self.on_exhausted,
            "mix_seed": self.seed,
            **({"names": names} if hidden else {}),
        }


@dataclass(frozen=True)
class DealtRoute:
    """A mixture whose proportions change in the course of an epoch, in an order of which each shard
    has them at the same time as the others. Never changes.

    Sources that are read once in an epoch are dealt out in stretches, so that a shard reads what
    lies together; others in turn, so that the shards are in the same pass.
    """

    route: MixRoute
    num_shards: int

    @property
    def size(self) -> int:
        """Records of an epoch, of all shards."""
        return self.route.size

    @property
    def older(self) -> MixRoute:
        """Stretches of the mixture, as shards were in the first format."""
        return self.route.older or self.route

    @cached_property
    def _sharding(self) -> Sharding:
        return Sharding(num_records=self.size, num_shards=self.num_shards)

    @cached_property
    def _shards(self) -> Callable[[int], tuple[ShardOfBlocks, Numbers]]:
        return lru_cache(maxsize=LISTS_KEPT)(self._shard)

    def __getstate__(self) -> dict[str, Any]:
        return {"route": self.route, "num_shards": self.num_shards}

    def _shard(self, shard: int) -> tuple[ShardOfBlocks, Numbers]:
        """The blocks of a shard, and the first of its records of each source."""
        segments, num = self.route.segments, self.num_shards
        blocks = ShardOfBlocks(segments, self._sharding.residue(shard), num)
        if self.route.on_exhausted == "repeat":
            return blocks, blocks.firsts
        every = np.array(segments[-1].after)
        residues = [self._sharding.residue(before) for before in range(shard)]
        held = [ShardOfBlocks(segments, residue, num).held(every) for residue in residues]
        return blocks, np.sum(held, axis=0, dtype=np.int64) if held else np.zeros_like(every)

    def __call__(self, indices: Numbers, call: Call) -> Places:
        sharding, route = self._sharding, self.route
        shards = sharding.shards_of(indices)
        parts, counters = np.empty_like(indices), np.empty_like(indices)
        step = self.num_shards if route.on_exhausted == "repeat" else 1
        for shard in np.unique(shards).tolist():
            chosen = shards == shard
            blocks, firsts = self._shards(shard)
            key = self._key(shard, call.epoch, call.seed)
            own, numbers = blocks.draw(indices[chosen] - sharding.bound(shard), key)
            parts[chosen], counters[chosen] = own, firsts[own] + numbers * step
        return route.places(parts, counters, call)

    def passes(self, part: int, epoch: int) -> range:
        """The passes of a source that an epoch has records of."""
        return self.route.passes(part, epoch)

    def find(self, part: int, in_pass: int, position: int, call: Call) -> int | None:
        """Which record of the epoch of the call is that of a source; None if none is."""
        route, num = self.route, self.num_shards
        counter = route.counter_of(part, in_pass, position, call.epoch)
        if not 0 <= counter < route.segments[-1].after[part]:
            return None
        if route.on_exhausted == "repeat":
            firsts = self._firsts[:, part]
            (shard,) = np.flatnonzero(firsts == counter % num).tolist()
            number = (counter - int(firsts[shard])) // num
        else:
            shard = int(np.searchsorted(self._firsts[:, part], counter, side="right")) - 1
            number = counter - int(self._firsts[shard, part])
        blocks, _ = self._shards(shard)
        place = blocks.find(part, number, self._key(shard, call.epoch, call.seed))
        return self._sharding.bound(shard) + place

    @cached_property
    def _firsts(self) -> Numbers:
        """Of each shard the first record of each source, as `_shard` says it."""
        segments, num = self.route.segments, self.num_shards
        each = [ShardOfBlocks(segments, self._sharding.residue(shard), num) for shard in range(num)]
        if self.route.on_exhausted == "repeat":
            return np.array([blocks.firsts for blocks in each])
        every = np.array(segments[-1].after)
        held = np.cumsum([np.zeros_like(every), *(blocks.held(every) for blocks in each)], axis=0)
        return held[:-1]

    def _key(self, shard: int, epoch: int, seed: int) -> int:
        return self.route.key(seed, epoch, f"/{shard}/{self.num_shards}")

    def counts_of(self, first: int, stop: int, epoch: int, seed: int) -> dict[str, int]:
        """Records of each source among those from the first one of a shard on."""
        (shard,) = self._sharding.shards_of(np.array([first])).tolist()
        blocks, _ = self._shards(shard)
        counts = blocks.counts(stop - first, self._key(shard, epoch, seed)).tolist()
        return dict(zip(self.route.names, counts, strict=True))

    def counts(self, records: int, epoch: int, seed: int) -> dict[str, int]:
        """Records of each source among the first of an epoch, of the mixture without shards."""
        return self.route.counts(records, epoch, seed)

    def resized(self, sizes: Sequence[int]) -> Route:
        return self.route.resized(sizes).dealt(self.num_shards)

    def describe(self) -> dict[str, Any]:
        """The blocks of each segment, and that they are dealt out."""
        return {**self.route.describe(), "mix": FORMAT, "dealt": self.num_shards}


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
    has_shards = any(name.endswith(".num_shards") and of[name] != 1 for name in of)
    if of["source"] != "mix" or not is_in_order or has_shards:
        return None
    route = MixRoute.described(of)
    # No mixture has larger blocks: the fields are those of something else.
    if max(segment.size for segment in route.segments) > max(MOST_EXACT, len(route.names)):
        return None
    records = min(max(0, calls * per_call - carried), route.size)
    return route.counts(records, epoch, settings["seed"])
