"""The chapters of a run that has been edited, by their numbers alone.

An *edit* lies between two calls of an epoch. What came before it stays as it was; from it on the
records come by other weights, of other sources, or so many in a call. Each source goes on at its
own place: the pass that it is in, and how many records of the pass have come. So a chapter begins
with the *rest* of its epoch, a mixture of what is left of the passes, and each later epoch is an
epoch of the mixture that the user has given.

`Settings` say what a chapter was made of, and `Edit` where it ended; from these follows which
record comes when. Nothing here reads, or knows a source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import numpy as np
import xxhash

from feeder.workers.errors import ConfigError
from feeder.workers.sources.mixture import MixRoute
from feeder.workers.sources.orders.blocks import OnExhausted, Step, described_segments
from feeder.workers.sources.orders.edited import Numbers, Ranges, Selection
from feeder.workers.sources.steps.routed import Places
from feeder.workers.stream.batch import Call

# ---- What a chapter was made of


class Part(NamedTuple):
    """What a source was in a chapter."""

    size: int
    """Its records, those that are excluded too."""
    kept: bytes
    """Digest of the fields that an edit cannot change: what it reads, and in which order."""
    data: bytes
    """Digest of the fields that grow with it, such as its files; empty if it has none."""
    excluded: Ranges

    @property
    def selection(self) -> Selection:
        """Its records without those that are excluded."""
        return Selection(self.size, self.excluded)


class Settings(NamedTuple):
    """What a chapter was made of: all that an edit can change."""

    asked: int
    """Rows of a call: of a batch, or of a global batch."""
    seed: int
    """The feed's seed."""
    mode: OnExhausted
    """What became of a source without further records."""
    mix_seed: int | None
    """The seed of the mixture's own, if it has one."""
    blocks: Sequence[Any]
    """The blocks of an epoch, as `MixRoute.describe` tells them, or as `short` does; none if it is
    no mixture."""
    parts: Mapping[str, Part]
    """The sources, in the order of the mixture; one without a name if it is none."""
    packing: Mapping[str, Any] | None = None
    """How its records become rows, if these are not one for each: what `describe` says of `pack`
    or `batch_by_tokens` alone, or of how many records a call is, of which some are left out."""


class Standing(NamedTuple):
    """Where a source stands: its next record."""

    epoch: int
    """The pass that it is in."""
    position: int
    """How many records of the pass have come."""
    length: int
    """How many records the pass has."""


ALL = -1
"""Stands for all rows of a call."""


class Left(NamedTuple):
    """What an edit finds of windows of documents that are under way."""

    rows: int
    """Rows of the last call before it that had come."""
    num: int
    """How many stretches of documents are left, which come first."""


class Edit(NamedTuple):
    """An edit, and the chapter that it ended."""

    epoch: int
    """The epoch that it lies in."""
    call: int
    """The number of the first call after it, in the epoch."""
    record: int
    """How many records of the epoch come before it."""
    step: int
    """The number of the first batch after it."""
    note: str
    """Why it was made, in the user's words."""
    standings: Mapping[str, Standing]
    """Where each source stands that the run has had, those that were taken out too."""
    rest: Sequence[Any] | None
    """The blocks of the rest of its epoch; None if the records go on as they did."""
    was: Settings
    """What the run was made of before it."""
    left: Left | None = None
    """What it has found of windows, in a run of them."""
    digest: str = ""
    """The digest of the position's settings before it, in hex; empty if nobody knows."""


WEIGHTS = "w"
"""Begins blocks that are told by their weights."""
_ORDER = ("shard_id", "num_shards", "stick_to_shard", "pad_last_batch", "shuffle", "seed", "window",
          "initial_fill")  # fmt: skip
_PLAIN = {"shard_id": 0, "num_shards": 1, "stick_to_shard": False, "pad_last_batch": False,
          "shuffle": "none"}  # fmt: skip
PACKINGS = {
    "pack": ("seq_len", "window", "window_tokens"),
    "batch_by_tokens": ("budget", "window"),
}
"""The steps whose rows are not one for each record, and what an edit can change of each."""
ROWS = "rows"
"""Stands for them where records may be left out."""
_GROW = ("file ", "files ", "file_order", "tokens")
"""How the names of fields begin that change when a source grows."""


def part_of_fields(told: Mapping[str, Any]) -> tuple[Part, dict[str, Any]]:
    """A source, by what its `describe` gave, and the fields that grow with it."""
    levels = []
    level = {name: _plain(value) for name, value in told.items()}
    while level:
        levels.append({k: v for k, v in level.items() if not k.startswith("of.")})
        level = {k.removeprefix("of."): v for k, v in level.items() if k.startswith("of.")}
    excluded: Ranges = ()
    order, kinds = None, []
    kept: dict[str, Any] = {}
    data: dict[str, Any] = {}
    for one, below in zip(levels, [*levels[1:], None], strict=True):
        kind, size, rules = one["source"], one["size"], {k: one[k] for k in _ORDER if k in one}
        out = [(a, b) for a, b in one.get("excluded", ())]
        num_out = sum(b - a for a, b in out)
        is_same = below is None or size == below["size"] - num_out
        if not is_same or (out and excluded) or (order and rules.get("shuffle", "none") != "none"):
            # A composition of which nothing can change.
            size = levels[0]["size"]
            return Part(size, _digest([(k, _plain(v)) for k, v in told.items()]), b"", ()), {}
        excluded = tuple(out) or excluded
        order = rules if rules and rules != _PLAIN else order
        # Levels that leave everything as it is may be there or not.
        if below is None or kind not in (below["source"], "exclude"):
            kinds.append(kind)
        for name, value in one.items():
            if name not in ("source", "size", "excluded", *_ORDER):
                (data if name.startswith(_GROW) else kept)[name] = value
    kept_digest = _digest([kinds, order, sorted(kept.items())])
    return Part(size, kept_digest, _digest(list(data.items())) if data else b"", excluded), data


def _plain(value: Any) -> Any:
    """A value as it comes out of a position."""
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else value


def _digest(value: Any) -> bytes:
    digest: bytes = xxhash.xxh3_64_digest(repr(value).encode())
    return digest


def told_by_name(told: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a description says of each source: of a mixture by name, else of one without."""
    if told["source"] != "mix" or "blocks" not in told:
        return {"": dict(told)}
    names = map(str, MixRoute.described(told).names)
    return {
        name: {k.removeprefix(f"{name}."): v for k, v in told.items() if k.startswith(f"{name}.")}
        for name in names
    }


def documents_of(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a description says of the records that are packed; all of it if none are."""
    if told["source"] not in PACKINGS:
        return dict(told)
    return {k.removeprefix("of."): v for k, v in told.items() if k.startswith("of.")}


def settings_of(told: Mapping[str, Any], asked: int, seed: int, *, skips: bool) -> Settings:
    """What a run is made of, by what `describe` of its source gave, and by whether records may be
    left out, which that does not say. Raises `ConfigError` if a run of such a source cannot be
    edited."""
    packing: dict[str, Any] | None = {"source": ROWS, "window": asked} if skips else None
    if (kind := told["source"]) in PACKINGS:
        if "windows" in told or any(told.get(k) != v for k, v in _PLAIN.items()):
            refuse(f"{kind} that is shuffled or sharded itself: shuffle its sources instead")
        left_out = ("size", *_ORDER[:-2], "initial_fill")
        packing = {k: v for k, v in told.items() if k not in left_out and k[:3] != "of."}
        told = documents_of(told)
    parts = {name: part_of_fields(of)[0] for name, of in told_by_name(told).items()}
    is_mixture = "" not in parts
    if "names" in told or "dealt" in told:
        refuse("names of a mixture that hide one another" if "names" in told else "shards")
    if is_mixture and any(told.get(k) != v for k, v in _PLAIN.items()):
        refuse("a mixture that is shuffled or sharded itself: shuffle its sources instead")
    sharded = [k for k, v in told.items() if k.rpartition(".")[2] == "num_shards" and v != 1]
    if sharded or any(k.rpartition(".")[2] == "pad_last_batch" and v for k, v in told.items()):
        refuse("shards, which a feed of several queues does not need")
    mode: OnExhausted = told["on_exhausted"] if is_mixture else "drop"
    blocks = told["blocks"] if is_mixture else ()
    return Settings(asked, seed, mode, told.get("mix_seed"), blocks, parts, packing)


def refuse(what: str) -> NoReturn:
    raise ConfigError(f"a run cannot be edited that has {what}")


def route_of(one: Settings, blocks: Sequence[Any], lengths: Sequence[int]) -> MixRoute | None:
    """The mixture of blocks that `describe` told, or that `short` did; None if it is no mixture."""
    if not blocks:
        return None
    if blocks[0] == WEIGHTS:
        blocks = _long(blocks, lengths, one.mode)
    segments = described_segments(blocks, len(one.parts))
    return MixRoute(tuple(one.parts), tuple(lengths), segments, one.mode, one.mix_seed)


def short(blocks: Any, lengths: Sequence[int], mode: OnExhausted) -> Any:
    """Blocks, or the weights alone if they follow from these."""
    if not blocks or len(blocks) < 2 or blocks[0] == WEIGHTS:
        return blocks
    # No position holds a number of more than 64 bits; segments tell these weights as texts, too.
    told = [WEIGHTS, *(one if one < 2**63 else str(one) for one in weights_of(blocks))]
    return told if _long(told, lengths, mode) == [list(one) for one in blocks] else blocks


def _long(told: Sequence[Any], lengths: Sequence[int], mode: OnExhausted) -> list[list[Any]]:
    return blocks_of([(0, [Fraction(one) for one in told[1:]])], lengths, mode)


def weights_of(blocks: Sequence[Any]) -> list[int]:
    """The weights that blocks begin with."""
    return [int(one) for one in (blocks[1:] if blocks[0] == WEIGHTS else blocks[0][2:])]


def rest_of(one: Settings, edit: Edit) -> MixRoute | None:
    """The mixture of the rest of an edit's epoch; None if nothing is left of it."""
    if not edit.rest:
        return None
    seed = one.seed if one.mix_seed is None else one.mix_seed
    key = xxhash.xxh3_64_intdigest(f"{seed}/edit/{edit.record}".encode())
    route = route_of(one, edit.rest, left_of(one, edit.standings))
    assert route is not None
    return MixRoute(route.names, route.lengths, route.segments, route.on_exhausted, key)


def left_of(one: Settings, standings: Mapping[str, Standing]) -> list[int]:
    """How many records are left of the pass that each source of a chapter begins in."""
    return [standings[name].length - standings[name].position for name in one.parts]


def blocks_of(steps: Sequence[Step], lengths: Sequence[int], mode: OnExhausted) -> list[list[Any]]:
    """The blocks of an epoch of so many records of each source, as `describe` tells them; none if
    it has no record."""
    names = tuple(map(str, range(len(lengths))))
    try:
        route = MixRoute.made(names, tuple(lengths), tuple(steps), mode, None)
    except ConfigError:
        return []
    return [segment.describe() for segment in route.segments]


# ---- Which record comes where


@dataclass(frozen=True)
class Chapter:
    """The records of a chapter, by number. Never changes."""

    epoch: int
    """The epoch that it begins in; -1 for the first one, which begins with epoch 0."""
    record: int
    """The record of that epoch."""
    seed: int
    parts: Numbers
    """The number of each of its sources among all that the run has had."""
    settings: Settings
    edit: Edit | None
    """What it begins with; None for the first one."""
    standings: tuple[Standing, ...]
    """Where each of its sources stands at its beginning."""
    sizes: tuple[int, ...]
    """Records of a pass of each from then on."""

    # Made when they are wanted: a run that goes on needs those of its last chapter.
    @cached_property
    def route(self) -> MixRoute | None:
        """Of a whole epoch; None if it is no mixture."""
        return route_of(self.settings, self.settings.blocks, self.sizes)

    @cached_property
    def rest(self) -> MixRoute | None:
        """Of the rest of the epoch that it begins in; None if nothing is left of it."""
        return None if self.edit is None else rest_of(self.settings, self.edit)

    def size(self, epoch: int) -> int:
        """Records of an epoch, those of chapters before included."""
        if epoch == self.epoch:
            rest = self.rest.size if self.rest else self._left if self.route is None else 0
            return self.record + rest
        return self.sizes[0] if self.route is None else self.route.size

    @property
    def _left(self) -> int:
        (one,) = self.standings
        return one.length - one.position

    def _drawn(self, records: Numbers, epoch: int) -> tuple[Numbers, Numbers]:
        """The source of each record, and its number among those of the source: in the rest from the
        chapter's beginning on, else in the epoch."""
        route = self.route
        if epoch == self.epoch:
            records, route = records - self.record, self.rest
        if route is None:
            return np.zeros_like(records), records
        return route.drawn(records, self.seed, epoch)

    def places(self, records: Numbers, epoch: int) -> Places:
        """Where records of an epoch are found."""
        parts, counters = self._drawn(records, epoch)
        passes, positions = self._advanced(parts, counters, epoch)
        return Places(self.parts[parts], passes, positions)

    def _advanced(self, parts: Numbers, counters: Numbers, epoch: int) -> tuple[Numbers, Numbers]:
        """The pass and the position of records, by their numbers among those of the source."""
        is_rest = epoch == self.epoch
        repeats = self.route is not None and self.route.on_exhausted == "repeat"
        if not (is_rest or repeats):
            return np.full_like(parts, epoch), counters
        at = np.array(self.standings, np.int64)[parts]
        if not repeats:
            return at[:, 0], at[:, 1] + counters
        assert self.route is not None
        if not is_rest:
            if self.rest is not None:
                counters = counters + np.array(self.rest.segments[-1].after)[parts]
            after = np.array(self.route.segments[-1].after)
            counters = counters + after[parts] * (epoch - self.epoch - 1)
        positions, sizes = at[:, 1] + counters, np.array(self.sizes)[parts]
        more = positions - at[:, 2]
        is_later = more >= 0
        return (
            at[:, 0] + np.where(is_later, 1 + more // sizes, 0),
            np.where(is_later, more % sizes, positions),
        )

    def passes(self, number: int, epoch: int) -> range:
        """The passes of one of its sources that an epoch has records of, from its beginning on."""
        if self.route is None:
            num = self.size(epoch) - (self.record if epoch == self.epoch else 0)
        else:
            route = self.rest if epoch == self.epoch else self.route
            num = 0 if route is None else route.segments[-1].after[number]
        if not num:
            return range(0)
        ends = np.array([0, num - 1])
        passes, _ = self._advanced(np.full_like(ends, number), ends, epoch)
        return range(int(passes[0]), int(passes[1]) + 1)

    def find(self, number: int, in_pass: int, position: int, epoch: int) -> int | None:
        """Which record of an epoch is that of one of its sources, by its pass and the position
        there: the inverse of `places`. None if none is."""
        is_rest = epoch == self.epoch
        counter = self._counter(number, in_pass, position, epoch)
        if counter is None or counter < 0:
            return None
        first = self.record if is_rest else 0
        if self.route is None:
            return first + counter if first + counter < self.size(epoch) else None
        route = self.rest if is_rest else self.route
        found = None if route is None else route.record_of(number, counter, self.seed, epoch)
        return None if found is None else first + found

    def _counter(self, number: int, in_pass: int, position: int, epoch: int) -> int | None:
        """The number of a record among those of its source, as `_advanced` is given it."""
        at, is_rest = self.standings[number], epoch == self.epoch
        if self.route is None or self.route.on_exhausted != "repeat":
            begun, first = (at.epoch, at.position) if is_rest else (epoch, 0)
            return position - first if in_pass == begun else None
        if in_pass < at.epoch:
            return None
        counter = position - at.position
        if in_pass > at.epoch:
            counter += at.length + (in_pass - at.epoch - 1) * self.sizes[number]
        if not is_rest:
            counter -= 0 if self.rest is None else self.rest.segments[-1].after[number]
            counter -= self.route.segments[-1].after[number] * (epoch - self.epoch - 1)
        return counter

    def counts(self, record: int, epoch: int) -> Numbers:
        """How many records of each of its sources come in an epoch from its beginning on, up to a
        record."""
        route, first = (self.rest, self.record) if epoch == self.epoch else (self.route, 0)
        if self.route is None:
            return np.array([record - first])
        if route is None or record == first:
            return np.zeros(len(self.parts), np.int64)
        return np.array(list(route.counts(record - first, epoch, self.seed).values()))

    def counts_before(self, after: Chapter) -> Numbers:
        """How many records of each of its sources come in all, if the chapter after it begins in
        the same epoch: as far as these have moved. No blocks are made for it."""
        assert after.edit is not None
        counts = []
        for name, then, size in zip(self.settings.parts, self.standings, self.sizes, strict=True):
            now = after.edit.standings[name]
            passes = now.epoch - then.epoch
            passed = then.length + (passes - 1) * size if passes else 0
            counts.append(now.position - then.position + passed)
        return np.array(counts, np.int64)

    def standing(self, record: int, epoch: int) -> dict[int, Standing]:
        """Where each of its sources stands before a record, by its number."""
        parts = np.arange(len(self.parts))
        passes, positions = self._advanced(parts, self.counts(record, epoch), epoch)
        return {
            number: Standing(
                epoch=in_pass, position=at,
                length=then.length if in_pass == then.epoch else size,
            )
            for number, in_pass, at, then, size in zip(
                self.parts.tolist(), passes.tolist(), positions.tolist(), self.standings,
                self.sizes, strict=True,
            )
        }  # fmt: skip


class EditedRoute:
    """Record n of an edited run → its source, the pass, and the position there. Never changes."""

    def __init__(self, chapters: Sequence[Chapter], num_parts: int) -> None:
        self.chapters, self.num_parts = tuple(chapters), num_parts

    @property
    def size(self) -> int:
        """Records of an epoch to come."""
        last = self.chapters[-1]
        return last.size(last.epoch + 1)

    def length(self, epoch: int) -> int:
        """Records of an epoch."""
        return self._of(epoch)[-1].size(epoch)

    def _of(self, epoch: int) -> list[Chapter]:
        """The chapters that an epoch has records of."""
        within = [c for c in self.chapters if c.epoch == epoch]
        before = [c for c in self.chapters if c.epoch < epoch]
        return [before[-1], *within] if before else within

    def __call__(self, indices: Numbers, call: Call) -> Places:
        places = Places(*(np.empty_like(indices) for _ in range(3)))
        of = self._of(call.epoch)
        firsts = [0 if c.epoch < call.epoch else c.record for c in of]
        found = np.searchsorted(firsts, indices, side="right") - 1
        for number in np.unique(found).tolist():
            chosen = found == number
            for to, values in zip(
                places, of[number].places(indices[chosen], call.epoch), strict=True
            ):
                to[chosen] = values
        return places

    def passes(self, part: int, epoch: int) -> range:
        """The passes of a source that an epoch has records of."""
        each = [
            chapter.passes(number, epoch)
            for chapter in self._of(epoch)
            for number in np.flatnonzero(chapter.parts == part).tolist()
        ]
        return range(min((one.start for one in each), default=0),
                     max((one.stop for one in each), default=0))  # fmt: skip

    def find(self, part: int, in_pass: int, position: int, call: Call) -> int | None:
        """Which record of the epoch of the call is that of a source, by its pass and the position
        there. None if none is."""
        of = self._of(call.epoch)
        for chapter, end in zip(of, [*(c.record for c in of[1:]), None], strict=True):
            first = chapter.record if chapter.epoch == call.epoch else 0
            for number in np.flatnonzero(chapter.parts == part).tolist():
                found = chapter.find(number, in_pass, position, call.epoch)
                if found is not None and first <= found and (end is None or found < end):
                    return found
        return None

    def counts(self, record: int, epoch: int) -> Numbers:
        """Records of each source among the first of an epoch."""
        made, of = np.zeros(self.num_parts, np.int64), self._of(epoch)
        for chapter, after in zip(of, [*of[1:], None], strict=True):
            first = chapter.record if chapter.epoch == epoch else 0
            until = record if after is None else min(after.record, record)
            if after is not None and after.record <= record and chapter.epoch == epoch:
                made[chapter.parts] += chapter.counts_before(after)
            elif until > first:
                made[chapter.parts] += chapter.counts(until, epoch)
        return made

    def standing(self, record: int, epoch: int) -> dict[int, Standing]:
        """Where each source of the chapter stands before a record of an epoch."""
        of = [c for c in self._of(epoch) if c.epoch < epoch or c.record <= record]
        return of[-1].standing(record, epoch)

    def resized(self, sizes: Sequence[int]) -> EditedRoute:
        """The same: sizes are of chapters."""
        return self

    def describe(self) -> dict[str, Any]:
        """Nothing of its own."""
        return {}


class Run:
    """An edited run by its numbers alone, without its sources. Never changes."""

    def __init__(self, edits: Sequence[Edit], now: Settings) -> None:
        self.edits, self.settings = tuple(edits), now
        self.chapters = [*(edit.was for edit in edits), now]
        """What each chapter is made of."""
        self.names = tuple(dict.fromkeys(name for one in self.chapters for name in one.parts))
        """All sources that it has had."""
        self.route = EditedRoute(self._made(), len(self.names))
        begins = [(-1, 0, 0), *((edit.epoch, edit.call, edit.record) for edit in edits)]
        # Of each chapter the epoch and the call that it begins with, the record, and rows of a
        # call.
        self._calls = [(*at, one.asked) for at, one in zip(begins, self.chapters, strict=True)]

    def _made(self) -> list[Chapter]:
        made: list[Chapter] = []
        for number, one in enumerate(self.chapters):
            edit = self.edits[number - 1] if number else None
            if edit is not None and edit.rest is None:
                continue
            names, sizes = list(one.parts), tuple(len(p.selection) for p in one.parts.values())
            standings = tuple(
                edit.standings[name] if edit else Standing(0, 0, size)
                for name, size in zip(names, sizes, strict=True)
            )
            made.append(
                Chapter(
                    epoch=edit.epoch if edit else -1,
                    record=edit.record if edit else 0,
                    seed=one.seed,
                    parts=np.array([self.names.index(name) for name in names]),
                    settings=one,
                    edit=edit,
                    standings=standings,
                    sizes=sizes,
                )
            )
        return made

    def out_since(self, source: str) -> int | None:
        """The step from which on a source comes no more, since an edit has taken it out; None if it
        is read."""
        is_in = [
            any(source == name or source.startswith(f"{name}/") for name in one.parts)
            for one in self.chapters
        ]
        steps = [edit.step for edit, was in zip(self.edits, is_in[:-1], strict=True) if was]
        return None if is_in[-1] or not steps else steps[-1]

    def rows_of(self, epoch: int, index: int) -> tuple[int, int]:
        """The first record of a call in its epoch, and the one after its last."""
        number = max(i for i, one in enumerate(self._calls) if one[:2] <= (epoch, index))
        begins, first, record, asked = self._calls[number]
        index, start = (index - first, record) if begins == epoch else (index, 0)
        end = self.route.length(epoch)
        for at in self._calls[number + 1 : number + 2]:
            end = min(end, at[2]) if at[0] == epoch else end
        start = min(end, start + index * asked)
        return start, min(end, start + asked)

    def call_at(self, epoch: int, record: int) -> int:
        """The first call that gives no record before this one."""
        number = max(
            i for i, (begins, _, first, _) in enumerate(self._calls)
            if begins < epoch or (begins == epoch and first <= record)
        )  # fmt: skip
        begins, call, first, asked = self._calls[number]
        call, first = (call, first) if begins == epoch else (0, 0)
        return call + -(-(record - first) // asked)

    def is_of(self, name: str, at: Standing, epoch: int) -> bool:
        """Whether the pass that a source is in has begun with an epoch."""
        return self.settings.mode != "repeat" and at.epoch == epoch and name in self.settings.parts

    def record_of(self, name: str, position: int, epoch: int) -> int:
        """Which record of an epoch is that of a source at a position of the pass that has begun
        with the epoch: found by halving, since what has come of it grows."""
        number, low, high = self.names.index(name), 0, self.route.length(epoch)
        while high - low > 1:
            middle = (low + high) // 2
            is_before = self.route.counts(middle, epoch)[number] <= position
            low, high = (middle, high) if is_before else (low, middle)
        return low

    def call_of_record(self, epoch: int, record: int) -> int:
        """The call that gives a record of an epoch."""
        call = self.call_at(epoch, record)
        return call if self.rows_of(epoch, call)[0] == record else call - 1

    def rows(self, epoch: int, batch_size: int) -> int:
        """Rows of an epoch, as if each of its calls had given as many as they do now: so that call
        n begins with row n * batch_size, whatever the calls before an edit gave."""
        calls, rest, asked = 0, 0, batch_size
        within = [one for one in self._calls if one[0] == epoch]
        before = next(one for one in reversed(self._calls) if one[0] < epoch)
        ends = [*(one[2] for one in within), self.route.length(epoch)]
        for (at, _, record, asked), end in zip([before, *within], ends, strict=True):
            num, rest = divmod(end - (record if at == epoch else 0), asked)
            calls += num + (rest > 0)
        if asked == batch_size or not rest:
            return calls * batch_size - (asked - rest if rest else 0)
        return (calls - 1) * batch_size + min(rest, max(1, batch_size - 1))

    def call_of(self, step: int, last_batch: str) -> tuple[int, int]:
        """The epoch and the index of the call that gives a batch, of one queue or of each its
        own."""
        begins = [(0, 0, 0), *((e.epoch, e.call, e.step) for e in self.edits)]
        epoch, call, first = next(one for one in reversed(begins) if one[2] <= step)
        left, last = step - first, self._calls[-1][0]
        while True:
            num = self._batches(epoch, call, last_batch) - call
            if left < num:
                return epoch, call + left
            if epoch > last:
                # From here on all epochs are alike.
                return epoch + left // max(1, num), left % max(1, num)
            left, epoch, call = left - num, epoch + 1, 0

    def documents_before(self, number: int, epoch: int, call: int) -> int:
        """How many documents of an epoch windows have had before a call of a chapter; of windows
        in pieces as nearly as can be told."""
        edit = self.edits[number - 1] if number else None
        packing = self.chapters[number].packing
        assert packing is not None
        first = left = 0
        if edit is not None and edit.epoch == epoch:
            call, first = call - edit.call, edit.record
            left = 0 if edit.left is None else edit.left.num
        window: int = packing["window"]
        is_whole = packing["source"] in ("pack", ROWS) and "window_tokens" not in packing
        had = (call if is_whole else call // window) * window
        return min(first + max(0, had - left), self.route.length(epoch))

    def step_of(self, epoch: int, call: int, last_batch: str) -> int | None:
        """The batch that a call gives: the inverse of `call_of`. None if it gives none."""
        begins = [(0, 0, 0), *((e.epoch, e.call, e.step) for e in self.edits)]
        at, first, step = next(one for one in reversed(begins) if one[:2] <= (epoch, call))
        last = self._calls[-1][0]
        while at < epoch:
            # From the second epoch after the last edit on all are alike.
            num = epoch - at if at > last else 1
            step += num * (self._batches(at, first, last_batch) - first)
            at, first = at + num, 0
        is_given = call < self._batches(epoch, call, last_batch)
        return step + call - first if is_given else None

    def _batches(self, epoch: int, call: int, last_batch: str) -> int:
        """The calls of an epoch that give a batch, those of before `call` included."""
        asked = next(one[3] for one in reversed(self._calls) if one[:2] <= (epoch, call))
        rows = self.rows(epoch, asked)
        return max(call, rows // asked if last_batch == "drop" else -(-rows // asked))

    def read(self, since: tuple[int, int], until: tuple[int, int]) -> dict[str, int]:
        """How many records of each source lie between two places, each an epoch and a record."""
        (epoch, record), made = since, np.zeros(len(self.names), np.int64)
        last = max([0, *(edit.epoch for edit in self.edits)]) + 1
        while epoch < until[0]:
            num = 1 if epoch < last or record else until[0] - epoch
            made += num * self.route.counts(self.route.length(epoch), epoch)
            made -= self.route.counts(record, epoch)
            epoch, record = epoch + num, 0
        made += self.route.counts(until[1], epoch) - self.route.counts(record, epoch)
        return dict(zip(self.names, made.tolist(), strict=True))
