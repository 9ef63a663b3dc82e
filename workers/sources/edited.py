"""A source whose run has been edited: the sources that the user gives now, in chapters.

`chapters.Run` says which record of which source comes where. Here are the sources themselves. One
that has been taken out may be missing, and then the batches that it was in cannot be had again,
while all others can. How an edit is made of a run and a source is here, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from threading import Lock
from typing import Any, NamedTuple, NoReturn

import numpy as np

from feeder.workers.errors import ConfigError, ResumeError
from feeder.workers.sources.chapters import (
    Edit,
    EditedRoute,
    Run,
    Settings,
    Standing,
    blocks_of,
    left_of,
    part_of_fields,
    refuse,
)
from feeder.workers.sources.mixture import Mixture
from feeder.workers.sources.orders.blocks import Step
from feeder.workers.sources.orders.edited import (
    Change,
    EditedOrder,
    EditedPlan,
    Numbers,
    Selection,
)
from feeder.workers.sources.orders.options import OrderPlan
from feeder.workers.sources.source import Source
from feeder.workers.sources.steps.ragged import Windowed
from feeder.workers.sources.steps.routed import Excluding, Routed
from feeder.workers.sources.stores.reading import Columns
from feeder.workers.sources.stores.records import Records, Traits
from feeder.workers.stream.batch import Call
from feeder.workers.stream.position import Cut
from feeder.workers.stream.spec import StreamSpec


def why_not(source: Any) -> str:
    """Why the run of a fetch function cannot be edited; empty if it can."""
    if not isinstance(source, Source):
        return (
            "edits are for sources of feeder.sources, and this is a fetch function of your own: "
            "without an edit, devices, threads, buffers and epochs may be others"
        )
    traits = source.traits
    if traits.walks:
        return "a mixture by tokens, or of packed or filtered sources"
    if isinstance(source.records, Windowed):
        (source,) = source.records.parts
    elif traits.one_per_call or traits.is_last:
        return f"{source.kind}, whose rows are not one for each record"
    if not source._order(0).is_computed:
        return "a shuffle of order='dali'"
    return ""


# ---- How a source is read whose set of records changes


class _Core(NamedTuple):
    """A source whose set of records may change: an order of all records of a store."""

    plan: OrderPlan
    base: Source
    """The records of the store as they lie."""


def _core(source: Source) -> _Core | None:
    """A source as an order of a store's records; None if it is anything else."""
    plan, below = source._plan, source.records
    if plan.order == "dali" and not plan.in_sequence:
        return None
    base = source
    while True:
        if isinstance(below, Routed) and isinstance(below.route, Excluding):
            (below,) = below.parts
        if not isinstance(below, Source):
            break
        if not below._plan.in_sequence:
            return None
        base, below = below, below.records
    # Of parts that follow one another none has an end that could grow.
    return None if _is_whole(below) else _Core(plan, base)


def _is_whole(records: Any) -> bool:
    parts = getattr(records, "parts", ())
    return isinstance(records, Routed) or len(parts) > 1 or any(map(_is_whole, parts))


def _changing(core: _Core, sets: Sequence[Selection], changes: Sequence[Change]) -> Source:
    """The source whose records are those of `sets[i]` up to `changes[i]`."""
    source = copy.copy(core.base)
    plan = {field.name: getattr(core.plan, field.name) for field in fields(OrderPlan)}
    source._plan = EditedPlan(**plan, sets=tuple(sets), changes=tuple(changes))
    source._orders, source._lock, source._ahead = {}, Lock(), None
    return source


class Gone(Records):
    """The records of a source that has been taken out and is not given any more."""

    kind = ""
    skipped = 0
    may_skip = False
    traits = Traits()

    def __init__(self, name: str, size: int, since: int | None) -> None:
        self.kind, self.size, self.since = name, size, since

    def __len__(self) -> int:
        return self.size

    def read(self, indices: Numbers, call: Call) -> Columns:
        """Raises `ResumeError`."""
        raise ResumeError(
            f"the source {self.kind!r} has been taken out by an edit, and these are records of "
            f"before it: give it to mix with weight 0, as {{{self.kind!r}: (source, 0)}}"
        )

    def name(self, index: int) -> str:
        """What it calls a record."""
        return f"record {index}"

    def origins(self, indices: Numbers, call: Call) -> NoReturn:
        """Raises `ConfigError`."""
        raise ConfigError(
            f"the source {self.kind!r} was taken out by the edit at step {self.since}, and comes no"
            " more since then; which of its records came before is known with it alone: ask the "
            "feed, with the source given to mix with weight 0"
        )

    def places_of(self, source: str, number: int, call: Call) -> NoReturn:
        """Raises `ConfigError`."""
        self.origins(np.empty(0, np.int64), call)

    def describe(self) -> dict[str, Any]:
        """Nothing."""
        return {}


class _EditedRecords(Routed):
    """The records of all chapters. `seeds` are of each source its seeds, from which pass on."""

    def __init__(
        self, parts: Sequence[Records], route: EditedRoute, tags: Sequence[str | None],
        seeds: Sequence[Sequence[tuple[int, int]]],
    ) -> None:  # fmt: skip
        super().__init__("mix" if tags[0] else parts[0].kind, parts, route, tags)
        self.seeds = seeds

    def _own(self, part: int, call: Call) -> Call:
        seed = next(s for first, s in reversed(self.seeds[part]) if first <= call.epoch)
        return super()._own(part, call._replace(seed=seed))

    def applied(self, step: Callable[[Records], Records]) -> _EditedRecords:
        """The same with a step below it."""
        parts = [part.applied(step) for part in self.parts]
        return _EditedRecords(parts, self.route, self.tags, self.seeds)  # type: ignore[arg-type]


class Edited(Source):
    """A source whose run has been edited: `given` from the last edit on. Never changes."""

    records: Any

    def __init__(
        self, given: Source, edits: Sequence[Edit], now: Settings, history: Sequence[Any]
    ) -> None:
        """`history` is what `describe` says of the edits."""
        self.given, self._history = given, history
        self.run = run = Run(edits, now)
        records = _EditedRecords(
            [self._part(name, run.chapters) for name in run.names],
            run.route,
            [name or None for name in run.names],
            [self._seeds(name, run.chapters) for name in run.names],
        )
        super().__init__(records)

    def _given(self, name: str) -> Any:
        """The source of a name that the user gives; None if none is given."""
        if not name:
            return self.given
        if not isinstance(self.given, Mixture):
            return None
        records: Any = self.given.records
        parts = dict(zip(map(str, records.tags), records.parts, strict=True))
        return parts.get(name) or {str(k): v for k, v in self.given.unread.items()}.get(name)

    def _part(self, name: str, chapters: Sequence[Settings]) -> Records:
        given = self._given(name)
        sets: list[Selection] = []
        changes: list[Change] = []
        for number, one in enumerate(chapters):
            if (part := one.parts.get(name)) is None:
                continue
            if sets and part.selection != sets[-1]:
                at = self.run.edits[number - 1].standings[name]
                changes.append(Change(at.epoch, at.position))
            if not sets or part.selection != sets[-1]:
                sets.append(part.selection)
        last = next(one.parts[name] for one in reversed(chapters) if name in one.parts)
        if given is None:
            return Gone(name, last.size, self.run.out_since(name))
        mine = part_of_fields(given.describe())[0]
        is_other = mine.kept != last.kept or (mine.size == last.size and mine.data != last.data)
        if is_other or not mine.selection.follows(last.selection):
            raise ResumeError(
                f"the source {name!r} is another than the one that the run has read before"
            )
        if sets == [mine.selection]:
            return given  # type: ignore[no-any-return]
        core = _core(given)
        if core is None:
            refuse(
                f"grown or excluded records of {name or 'the source'!r}: a source of one store can "
                "change, shuffled or not, and no composition of sources"
            )
        return _changing(core, sets, changes)

    def _seeds(self, name: str, chapters: Sequence[Settings]) -> list[tuple[int, int]]:
        """The seeds of a source, and the pass from which on each counts: a pass that has begun
        keeps its own."""
        seeds: list[tuple[int, int]] = []
        for number, one in enumerate(chapters):
            at = self.run.edits[number - 1].standings.get(name) if number else None
            if not seeds and (name in one.parts or at):
                seeds = [(0, one.seed)]
            elif at is not None and one.seed != seeds[-1][1]:
                seeds.append((at.epoch + (at.position > 0), one.seed))
        return seeds

    # ---- as a source

    def _span(self, call: Call) -> tuple[int, int]:
        return self.run.rows_of(call.epoch, call.index)

    def indices(self, call: Call) -> Numbers:
        """The numbers of a call's records in the epoch.

        Raises:
            StopIteration: the call lies behind the end of its epoch.
        """
        start, stop = self._span(call)
        if start >= stop:
            raise StopIteration
        return np.arange(start, stop, dtype=np.int64)

    def carrying(self) -> Source:
        """Not had: `last_batch="carry"` is refused before."""
        raise NotImplementedError

    def rows(self, epoch: int, batch_size: int) -> int:
        """Rows of an epoch: see `Run.rows`."""
        return self.run.rows(epoch, batch_size)

    def may_be_empty(self, epoch: int) -> bool:
        """Whether an epoch may have no row, though those to come have some: one that an edit lies
        in has what is left of the passes, which may be less than a block of the mixture."""
        return any(edit.epoch == epoch for edit in self.run.edits)

    @property
    def num_turns(self) -> int:
        """Not told: epochs differ, and do not come again."""
        raise NotImplementedError

    def places_of(self, source: str, number: int, call: Call) -> Iterator[int]:
        """The records of the call's epoch that are made of a record of a source."""
        return self.records.places_of(source, number, call)  # type: ignore[no-any-return]

    def leaves_out(self, source: str, number: int, call: Call) -> bool:
        """Whether a record is excluded by now, or its source taken out."""
        is_out = self.run.out_since(source) is not None
        return is_out or self.records.leaves_out(source, number, call)

    def rows_of(self, source: str, number: int, call: Call) -> Iterator[int]:
        """The same: none is repeated."""
        return self.places_of(source, number, call)

    def positions_of(self, name: str, records: Numbers, epoch: int) -> Numbers:
        """Where records of a source come in a pass."""
        number = self.run.names.index(name)
        source: Any = self.records.parts[number]
        seed = self.records._own(number, Call(0, epoch, 0, 1, 0)).seed
        positions: Numbers = source._order(seed).find(epoch, records)
        return positions

    def waiting(self, name: str, epoch: int, edit: Edit) -> set[int]:
        """Where records of a source lie in a pass that have been taken before an edit, and have
        not come."""
        return set()

    def read_of_sources(self, call: Call) -> dict[str, dict[str, Any]]:
        """What has been read of each source of a mixture in the epoch, up to the end of a call."""
        names = self.run.names
        if names == ("",):
            return {}
        counts = self.run.route.counts(self._span(call)[1], call.epoch).tolist()
        return {
            name: {"rows": num, "tokens": None, "skipped": 0}
            for name, num in zip(names, counts, strict=True)
        }

    @property
    def is_whole(self) -> bool:
        """Whether each call that has been made can be made again."""
        return not any(isinstance(part, Gone) for part in self.records.parts)

    def walk(self, cut: Cut, stream: StreamSpec) -> Walk:
        """A walk from a place on."""
        return Walk(self.run, cut)

    def edit_at(self, given: Source, now: Settings, note: str, **place: int) -> Edit:
        """The edit that makes the run go on with a source at a place: see `edit_at`."""
        return edit_at(self.run, given, steps_of(given), now, note, **place)

    def as_it_was(self) -> None:
        """An edited run has had one format only."""
        return

    def describe(self) -> dict[str, Any]:
        """What the source says that is given now, and the edits."""
        return {**self.given.describe(), "history": self._history}


# ---- An edit is made


def steps_of(given: Source) -> Sequence[Step]:
    """The weights of a mixture, and from which record of an epoch on; none if it is none."""
    steps: Sequence[Step] = getattr(getattr(given.records, "route", None), "steps", ())
    return steps


class Walk:
    """Goes along the rows of a run from a place on, to find that of an edit."""

    def __init__(self, run: Run, cut: Cut) -> None:
        self._run, self.epoch = run, cut.position.epoch
        self._record = run.rows_of(self.epoch, cut.position.calls[0])[0]
        if cut.leftover is not None:
            # Batches of several queues may end within a call.
            self._record = run.rows_of(self.epoch, cut.leftover.call)[0] + cut.leftover.taken

    def has(self, num: int) -> bool:
        """Whether the epoch has so many rows more."""
        return self._run.route.length(self.epoch) - self._record >= num

    def go(self, num: int | None) -> None:
        """Over so many rows, or to the epoch's end; over those of a call if None."""
        if num is None:
            call = self._run.call_at(self.epoch, self._record)
            self._record = self._run.rows_of(self.epoch, call)[1]
        else:
            self._record = min(self._record + num, self._run.route.length(self.epoch))

    def next_epoch(self) -> None:
        """To the start of the next one."""
        self.epoch, self._record = self.epoch + 1, 0

    def place(self) -> tuple[int, dict[str, int]]:
        """The next call, and what `edit_at` has to know more."""
        return self._run.call_at(self.epoch, self._record), {"record": self._record}


def edit_at(
    run: Run,
    given: Source | None,
    steps: Sequence[Step],
    now: Settings,
    note: str,
    *,
    epoch: int,
    call: int,
    record: int,
    step: int,
) -> Edit:
    """The edit that makes a run go on with a source, from a record of an epoch on: with that call,
    and with that batch. The source is needed if its set of records changes. Raises `ConfigError` if
    it cannot go on so."""
    was = run.settings
    same_records = was == _in_order_of(was, now, steps)._replace(
        asked=was.asked, packing=was.packing
    )
    standings = dict(run.edits[-1].standings) if run.edits else {}
    for number, at in run.route.standing(record, epoch).items():
        standings[run.names[number]] = at
    edit = Edit(epoch, call, record, step, note, standings, None, was)
    if same_records:
        return edit
    begins = epoch if now.mode != "repeat" else 0
    for name, part in now.parts.items():
        known = standings.get(name)
        size = len(part.selection)
        if known is None:
            standings[name] = Standing(begins, 0, size)
        elif (
            name not in was.parts and now.mode != "repeat"
            and known.epoch < epoch and known.position >= known.length
        ):  # fmt: skip
            # It was taken out when all of it had come. One that is read, and whose pass of before
            # has come to its end in this epoch, waits for the next.
            standings[name] = Standing(epoch, 0, size)
    draft = None if given is None else Edited(given, [*run.edits, edit._replace(rest=())], now, ())
    for name in now.parts if draft else ():
        assert draft is not None
        at, source = standings[name], draft.records.parts[draft.run.names.index(name)]
        plan = getattr(source, "_plan", None)
        if isinstance(plan, EditedPlan) and at.epoch >= plan.changes[-1].epoch:
            number = draft.run.names.index(name)
            own = draft.records._own(number, Call(0, at.epoch, 0, 1, 0))
            order = plan.make(own.seed)
            assert isinstance(order, EditedOrder)
            standings[name] = at._replace(length=order.length(at.epoch))
    return edit._replace(rest=_rest(steps, now, standings, record))


def _in_order_of(was: Settings, now: Settings, steps: Sequence[Step]) -> Settings:
    """What a run is made of now, as its mixture would be with the sources in the order of before.
    The order is no change, and blocks that began anew for it would end before their proportions
    are exact."""
    names = list(now.parts)
    if list(was.parts) == names or was.parts.keys() != now.parts.keys():
        return now
    order = [names.index(name) for name in was.parts]
    steps = [(start, [weights[k] for k in order]) for start, weights in steps]
    sizes = [len(now.parts[name].selection) for name in was.parts]
    return now._replace(blocks=blocks_of(steps, sizes, now.mode))


def _rest(
    steps: Sequence[Step], now: Settings, standings: Mapping[str, Standing], record: int
) -> Sequence[Any]:
    """The blocks of the rest of an epoch, as `describe` tells them."""
    if not now.blocks:
        return []  # As it is read from a file, where it has no tuples.
    steps = [(max(0, start - record), weights) for start, weights in steps]
    current = max(i for i, (start, _) in enumerate(steps) if start == 0)
    return blocks_of(steps[current:], left_of(now, standings), now.mode)
