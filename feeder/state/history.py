"""The history of a run: its edits, as positions hold them, and how an edit is made.

A position says what the run is made of now, in the fields of its fingerprint. If the run has been
edited, one more field has the edits: of each where it lies, its note, where each source stood, and
those settings that were others before it. So the settings of all chapters follow, from the last one
backwards; and a token of the run, which knows the fields by their digest, is one of this history
alone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from feeder.errors import ConfigError, FeedError, ResumeError
from feeder.state.fingerprint import differences, fingerprint_digest
from feeder.state.snapshot import HISTORY, StreamState
from feeder.state.token import StreamId
from feeder.workers.fetch.resuming import Resume
from feeder.workers.stream.batch import Call
from feeder.workers.stream.position import Cut, Leftover, Position, first_step
from feeder.workers.stream.rounds import Dealing
from feeder.workers.stream.spec import FILE_ORDER

if TYPE_CHECKING:
    # Sources are loaded where a run of one is edited.
    from feeder.config import FeedConfig
    from feeder.state.positions import Positions
    from feeder.workers.sources.chapters import Edit, Part, Run, Settings
    from feeder.workers.sources.edited import Edited, Walk
    from feeder.workers.sources.source import Source

logger = logging.getLogger("feeder")

FORMAT = 1
FORMAT_OF_WINDOWS = 2
"""Of runs whose rows are not one for each record: an edit says what it has found of windows."""
_STEPS_TOLD = 100
"""Of so many records that have come a log line tells the steps."""
_MANY_RANGES = 16
"""Of so many excluded ranges an edit tells what has changed alone: else each one would hold all."""
_SOURCE = "source."
SIZES = ("batch_size", "global_batch_size")
"""The fields of which a feed has one: rows of a call."""
_EDITABLE = "weights and schedule of a mixture, its sources, records that are added at the end of "\
            "a source or excluded, sizes of packing, batch_size, global_batch_size and "\
            "seed"  # fmt: skip

# ---- Edits as plain values


def pack(edits: Sequence[Edit], now: Settings) -> list[Any]:
    """Edits as plain values, which fit what a run is made of now."""
    from feeder.workers.sources.chapters import left_of, short

    chapters = [
        *(e.was._replace(blocks=short(e.was.blocks, _sizes(e.was), e.was.mode)) for e in edits), now
    ]  # fmt: skip
    names = list(dict.fromkeys(name for one in chapters for name in one.parts))
    told: list[dict[str, Any]] = []
    known: dict[str, Part] = {}
    for was, after in zip(chapters[-2::-1], chapters[:0:-1], strict=True):
        known |= after.parts
        told.insert(0, _packed(was, after, known))
    packed: list[list[Any]] = [
        [
            edit.epoch, edit.call, edit.record, edit.step, edit.note,
            [list(edit.standings[name]) if name in edit.standings else None for name in names],
            short(edit.rest, left_of(after, edit.standings), after.mode), changed,
        ]
        for edit, after, changed in zip(edits, chapters[1:], told, strict=True)
    ]  # fmt: skip
    for edit, one in zip(edits, packed, strict=True):
        if now.packing is not None or edit.digest:
            one.append(None if edit.left is None else list(edit.left))
        # Older positions do not say it, and have to keep their own digest.
        if edit.digest:
            one.append(edit.digest)
    return [FORMAT if now.packing is None else FORMAT_OF_WINDOWS, names, packed]


def _packed(one: Settings, after: Settings, known: Mapping[str, Part]) -> dict[str, Any]:
    """Those settings that differ from the ones after. `known` are the sources of later chapters, as
    the next one that has them says."""
    told = {k: v for k, v in one._asdict().items() if v != getattr(after, k) and k != "parts"}
    if "packing" in told:
        told["packing"] = dict(_differing(one.packing or {}, after.packing or {}))
    if list(one.parts) != list(after.parts):
        told["names"] = list(one.parts)
    parts = {
        name: _packed_part(part, known.get(name))
        for name, part in one.parts.items()
        if part != after.parts.get(name)
    }
    return {**told, **({"parts": parts} if parts else {})}


def _packed_part(part: Part, after: Part | None) -> list[Any]:
    """A source; if many records of it are excluded, by what is excluded after and not yet."""
    from feeder.workers.sources.orders.edited import differing

    excluded, more = part.excluded, []
    if after is not None and len(excluded) >= _MANY_RANGES:
        excluded, more = differing(excluded, after.excluded), [True]
    return [part.size, part.kept, part.data, [list(pair) for pair in excluded], *more]


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields that are not alike, as the first one has them; None for one that it has not."""
    for name in dict.fromkeys([*one, *other]):
        if one.get(name) != other.get(name):
            yield name, one.get(name)


def unpack(history: Any, now: Settings) -> list[Edit]:
    """Edits of plain values. Raises `ResumeError` if there is no sense in them."""
    from feeder.workers.sources.chapters import Edit, Left, Part, Standing
    from feeder.workers.sources.orders.edited import differing

    with _sensible():
        number, names, packed = history
        if number != (FORMAT if now.packing is None else FORMAT_OF_WINDOWS):
            raise ResumeError(
                f"the history of the run has format {number}, expected at most "
                f"{FORMAT_OF_WINDOWS}; update feeder"
            )
        edits: list[Edit] = []
        known = dict(now.parts)
        for epoch, call, record, step, note, at, rest, given, *more in reversed(packed):
            told = dict(given)
            left = Left(*more[0]) if more and more[0] is not None else None
            digest = more[1] if len(more) > 1 else ""
            parts = {}
            for name, (size, kept, data, excluded, *differs) in told.pop("parts", {}).items():
                if differs:
                    excluded = differing(excluded, known[name].excluded)
                parts[name] = Part(size, kept, data, tuple((a, b) for a, b in excluded))
            own = told.pop("names", list(now.parts))
            packing = {**(now.packing or {}), **told.pop("packing", {})}
            packing = {k: v for k, v in packing.items() if v is not None}
            standings = {n: Standing(*s) for n, s in zip(names, at, strict=True) if s is not None}
            # What was before the edit; this is the chapter after the edit before.
            now = now._replace(packing=packing or None, **told)._replace(
                parts={n: parts.get(n) or now.parts[n] for n in own}
            )
            known |= now.parts
            if missing := now.parts.keys() - standings.keys():
                raise ValueError(f"it does not say where {sorted(missing)} stood")
            edits.insert(
                0, Edit(epoch, call, record, step, note, standings, rest, now, left, digest)
            )
        return edits


@contextlib.contextmanager
def _sensible() -> Iterator[None]:
    """Whoever wrote a history may have written anything."""
    try:
        yield
    except FeedError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ResumeError(f"the history of the run cannot be read: {error}") from error


def _sizes(one: Settings) -> list[int]:
    return [len(part.selection) for part in one.parts.values()]


def settings_in(fingerprint: Mapping[str, Any], *, skips: bool) -> Settings:
    """What a run is made of, by the fields of a position, and by whether records may be left out.
    Raises `ConfigError`."""
    from feeder.workers.sources.chapters import settings_of

    asked = next(fingerprint[name] for name in SIZES if name in fingerprint)
    return settings_of(_told(fingerprint), asked, fingerprint["seed"], skips=skips)


def digests_before(fingerprint: Mapping[str, Any], step: int) -> set[bytes]:
    """The digests of the settings that a run has had before those edits that lie at a step or
    behind, by the fields of its positions."""
    with _sensible():
        _, _, edits = fingerprint.get(HISTORY) or (FORMAT, (), ())
        return {bytes.fromhex(edit[9]) for edit in edits if len(edit) > 9 and edit[3] >= step}


def of_windows(history: Any) -> bool:
    """Whether a history says what edits have found of windows."""
    return isinstance(history, list) and history[:1] == [FORMAT_OF_WINDOWS]


def _told(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix(_SOURCE): value
        for name, value in fingerprint.items()
        if name.startswith(_SOURCE) and name != HISTORY
    }


def described(fingerprint: Mapping[str, Any]) -> Source:
    """The source that a position describes, with the edits of its run and without data. Raises
    `ConfigError` if which record comes when does not follow from the description, and
    `ResumeError` if there is no sense in it."""
    from feeder.workers.sources.described import described_source
    from feeder.workers.sources.edited import Edited

    try:
        source = described_source(_told(fingerprint))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # An object of the user's may describe itself, too.
        if isinstance(error, FeedError):
            raise
        raise ConfigError(f"it describes no source of feeder.sources: {error}") from error
    with _sensible():
        if (history := fingerprint.get(HISTORY)) is None:
            return source
        now = settings_in(fingerprint, skips=of_windows(history))
        if now.packing is not None or of_windows(history):
            raise ConfigError("which rows an edited run has depends on what is in the records")
        return Edited(source, unpack(history, now), now, history)


# ---- A run goes on


def go_on(given: Positions, state: StreamState) -> Resume:
    """Where the edited run of a state goes on, with the sources that are given. Raises
    `ResumeError`."""
    owner = with_history(given, state.fingerprint[HISTORY])
    found = owner.find(state)._replace(owner=owner)
    check_shapes(given.config.name, owner.config.stream.fetch.run, found.cut)  # type: ignore[attr-defined]
    return found


def check_shapes(name: str, run: Run, cut: Cut) -> None:
    """Raise `ResumeError` if batches have another size from an edit on that a place is before."""
    for made in reversed(run.edits):
        what = [
            f"{field} {one!r} then"
            for field, (one, other) in _shapes(made.was, run.settings).items()
            if one != other
        ]
        if what and cut.step < made.step:
            raise ResumeError(
                f"the position of feed {name!r} is before step {made.step}, from which on batches "
                f"have another size, {', '.join(what)}: what comes before such an edit cannot be "
                "had again"
            )


def _shapes(*chapters: Settings) -> dict[str, list[Any]]:
    """What batches of one feed have in common."""
    return {
        "rows of a call": [one.asked for one in chapters],
        "seq_len": [(one.packing or {}).get("seq_len") for one in chapters],
    }


def with_history(given: Positions, history: Any) -> Positions:
    """The positions of a stream whose run has this history. Raises `ResumeError`."""
    now = settings_in(given.fingerprint, skips=of_windows(history))
    with _sensible():
        return _edited(given, unpack(history, now), now, history)


def _edited(
    given: Positions, edits: Sequence[Edit], now: Settings, history: Sequence[Any]
) -> Positions:
    """The positions of a stream whose run has been edited so: `history` is that as values."""
    from feeder.state.positions import Positions

    check_can_be_edited(given.config)
    fetch = _source(given, edits, now, history)
    return Positions(given.config.with_fetch(fetch)._replace(edit=None), given.number)


def _source(
    given: Positions, edits: Sequence[Edit], now: Settings, history: Sequence[Any] = ()
) -> Edited:
    """The source of a run that has been edited so."""
    from feeder.workers.sources.edited import Edited
    from feeder.workers.sources.repacked import Repacked

    source: Any = given.config.stream.fetch
    return (Edited if now.packing is None else Repacked)(source, edits, now, history)


def is_same_place(cut: Cut, then: Any, now: Any) -> bool:
    """Whether a place of a run is one of the run, too, that edits have made of it, by the histories
    alone: it is before the first edit that it lacks, and none of those changes the rows of a
    call."""
    known, edits = [] if then is None else then[2], now[2]
    begins = [one[:5] for one in edits[: len(known)]]
    if len(edits) <= len(known) or begins != [one[:5] for one in known]:
        return False
    edits = edits[len(known) :]
    epoch, call, _, step = edits[0][:4]
    # A call in which the edit lies has fewer rows from then on.
    left, at = cut.leftover, cut.position.epoch
    is_whole = left is None or (at, left.call + 1) < (epoch, call)
    return is_whole and first_step(cut) < step and not any("asked" in one[7] for one in edits)


def number_of(history: Any) -> str:
    """How many edits a history has, in words."""
    num = 0 if history is None else len(history[2])
    return f"{num} edit{'s' * (num != 1)}"


class Further(NamedTuple):
    """What a run that goes on has dealt out beyond the round of its position."""

    batches: int
    dealing: Dealing
    """How it deals."""


def edit(given: Positions, state: StreamState, note: str, further: Further | None = None) -> Resume:
    """Where the run of a state goes on after an edit that makes it what is given. If it is that
    already, and the last edit has this note, it goes on as without one. Raises `ResumeError`."""
    then_fields = {k: v for k, v in state.fingerprint.items() if k != HISTORY}
    check_edit(given, then_fields)
    history = state.fingerprint.get(HISTORY)
    source: Any = given.config.stream.fetch
    skips = source.traits.may_skip if history is None else of_windows(history)
    now, was = (settings_in(one, skips=skips) for one in (given.fingerprint, then_fields))
    if now.packing is None and source.traits.may_skip:
        raise ConfigError(
            f"the run of feed {given.config.name!r} cannot be edited: none of its records could be "
            "left out when it was edited before, and now on_error='skip' may leave some out"
        )
    edits = [] if history is None else unpack(history, was)
    is_same = now == was and list(now.parts) == list(was.parts)
    if is_same and edits and edits[-1].note == note:
        return go_on(given, state)
    run, cut, found = _place(given, state, edits, was, further)
    check_after(given.config.name, edits, cut)
    _check_back(given.config.name, run.run, now)
    made = run.edit_at(
        source, now, note, epoch=cut.position.epoch, call=cut.position.calls[0], step=cut.step,
        **found,
    )._replace(digest=fingerprint_digest(state.fingerprint).hex())  # fmt: skip
    # Of the rows left over none belongs to the place: the edited run makes them anew.
    rows: tuple[Any, ...] | None = None if state.rows is None else ()
    if now.packing is not None and made.left is None:
        if further is not None and further.batches:
            raise ResumeError(
                f"the run of feed {given.config.name!r} cannot be edited so now: its rows would go "
                "on within a window, and some devices are a round ahead of others; change the "
                "packing or the sources too, or edit when all devices have had their batch"
            )
        # Rows go on as they did, within a window, too.
        cut, rows = _cut(given, state), state.rows
        made = made._replace(step=cut.step)
    owner = _edited(given, [*edits, made], now, pack([*edits, made], now))
    last = cut.checked if state.rows is None else None
    more = [*_came(given, edits, made, now), *_not_compared(run.run, made, now, last)]
    tell(given.config.name, made, now, more)
    # Rows of another length are other columns.
    is_alike = (was.packing or {}).get("seq_len") == (now.packing or {}).get("seq_len")
    return Resume(
        cut=replace(cut, encode=owner.id.encode), rows=rows,
        columns=state.columns if is_alike else None, left_out=state.left_out, owner=owner,
        fingerprint=fingerprint_digest(state.fingerprint),
    )  # fmt: skip


def check_after(name: str, edits: Sequence[Edit], cut: Cut) -> None:
    """Raise `ResumeError` if the place of an edit is before another one."""
    if edits and cut.step < edits[-1].step:
        raise ResumeError(
            f"the position of feed {name!r} is at step {cut.step}, before an edit at "
            f"step {edits[-1].step} of its own history: edit from a position after it"
        )


def _place(
    given: Positions, state: StreamState, edits: Sequence[Edit], was: Settings,
    further: Further | None,
) -> tuple[Edited, Cut, dict[str, int]]:  # fmt: skip
    """The run as it was; the place of an edit, and what of the epoch comes before it: the end of
    the round that the position is in, or of a further one, or the start of the next epoch if this
    one has no more batches."""
    config = given.config
    with _sensible():
        source = _source(given, edits, was)
    cut = _cut(given, state)
    if cut.dealing is None:
        given.check_round(cut)
    drops = config.stream.last_batch == "drop"
    cut, found = after_round(
        config.name, source.walk(cut, config.stream), edits, was, cut, further, drops=drops,
        epochs=config.stream.epochs, by_calls=config.stream.dont_rebatch,
    )  # fmt: skip
    if not source.is_whole:
        # The last call is compared if it can be made again.
        cut = replace(cut, checked=None)
    return source, cut, found


def after_round(
    name: str, walk: Walk, edits: Sequence[Edit], was: Settings, cut: Cut,
    further: Further | None = None, *, drops: bool, epochs: int | None, by_calls: bool = False,
) -> tuple[Cut, dict[str, int]]:  # fmt: skip
    """The same of a walk from a place on. `drops` says whether an epoch's rows that do not fill a
    batch are left out, and `by_calls` whether a batch is a call."""
    dealing, size, rest = cut.dealing, was.asked, 0
    if dealing is not None:
        size, rest = dealing.batch_size, dealing.rest(cut.epoch, cut.step)
    sizes = [size] * rest
    if further is not None:
        dealing = further.dealing
        sizes += [dealing.batch_size] * further.batches
    index = cut.index
    last = max([walk.epoch, *(one.epoch for one in edits)])
    for made in (*sizes, 0):
        size = made or size
        least = size if drops else 1
        # The place is the next epoch's start also if the position does not say so yet.
        while not cut.finished and not walk.has(least):
            walk.next_epoch()
            index = 0
            # Behind the last edit's all epochs are alike.
            is_empty = walk.epoch > last + 1 and not walk.has(least)
            if walk.epoch == epochs or is_empty:
                raise ResumeError(
                    f"the run of feed {name!r} has ended at its position, or ends within the round "
                    "that it is in: an edit would change nothing, unless there are more epochs"
                )
        if made:
            walk.go(None if by_calls else made)
            index += 1
    if cut.finished:
        raise ResumeError(
            f"the run of feed {name!r} has ended at its position: an edit would change nothing, "
            "unless there are more epochs"
        )
    call, found = walk.place()
    step = cut.step + len(sizes)
    # The last call is compared, if it is still the last one, of this epoch or the one before.
    passed, checked = walk.epoch - cut.position.epoch, cut.checked
    if checked is not None and checked.call >= cut.position.calls[0]:
        passed += passed > 0
    cut = replace(
        cut, epoch=walk.epoch, index=index, step=step, leftover=None,
        position=Position(walk.epoch, 0, (True,), (call,), (0,), (None,)),
        checked=None if sizes or passed > 1 else checked,
        dealing=dealing and dealing.begun_at(step),
    )  # fmt: skip
    return cut, found


def _cut(given: Positions, state: StreamState) -> Cut:
    """The place of a state of the run before an edit."""
    here = given.id._replace(older=(fingerprint_digest(state.fingerprint),))
    return here.decode(state.token, given.config.stream.epochs)


def tell(name: str, made: Edit, now: Settings, more: Sequence[str] = ()) -> None:
    """Log what an edit changes."""
    logger.warning(
        "feed %r is edited at step %d (%s): %s", name, made.step, made.note,
        "; ".join([*changes(made, now), *more]) or "nothing changes",
    )  # fmt: skip


def _came(given: Positions, edits: Sequence[Edit], made: Edit, now: Settings) -> list[str]:
    """What is excluded too late: records that have come in the pass, and at which steps."""
    told = []
    run = _source(given, edits, made.was)
    for name, part in now.parts.items():
        old = made.was.parts.get(name)
        if old is None or old.excluded == part.excluded:
            continue
        numbers = part.selection.taken_out(old.selection)
        at = made.standings[name]
        positions = run.positions_of(name, numbers, at.epoch)
        waiting = run.waiting(name, at.epoch, made)
        came = [
            position for position in sorted(positions.tolist())
            if position < at.position and position not in waiting
        ]  # fmt: skip
        if not came:
            continue
        where = ""
        is_told = now.packing is None and given.config.stream.global_batch_size is None
        if is_told and run.run.is_of(name, at, made.epoch):
            records = [run.run.record_of(name, one, made.epoch) for one in came[:_STEPS_TOLD]]
            calls = [run.run.call_of_record(made.epoch, record) for record in records]
            steps = sorted({made.step - (made.call - call) for call in calls})
            where = f", at steps {steps}{' and more' * (len(came) > _STEPS_TOLD)}"
        told.append(
            f"{len(came)} of the {len(numbers)} records that are excluded have come already{where}"
        )
    return told


def _not_compared(run: Run, made: Edit, now: Settings, last: Leftover | None) -> list[str]:
    """What has grown where nobody sees whether that was at its end: no file tells, and it has no
    record of the last call, if that is made again and compared."""
    was = made.was.parts
    grown = {
        name: number
        for number, name in enumerate(run.names)
        if name in was and name in now.parts and now.parts[name].size > was[name].size
        and not now.parts[name].data and made.standings[name].position
    }  # fmt: skip
    if grown and last is not None:
        # A call that is not done in the position's epoch has ended the one before.
        epoch = made.epoch - (last.call >= made.call)
        records = np.arange(*run.rows_of(epoch, last.call))
        compared = {*run.route(records, Call(last.call, epoch, 0, 1, 0)).parts.tolist()}
        grown = {name: number for name, number in grown.items() if number not in compared}
    return [
        f"whether {repr(name) if name else 'the source'} has grown at its end is not compared: the "
        "position does not say what its last call had of it"
        for name in grown
    ]


# ---- What an edit may change


def check_can_be_edited(config: FeedConfig) -> None:
    """Raise `ConfigError` if no run with such settings can be edited."""
    from feeder.workers.sources.edited import why_not

    stream = config.stream
    what = {
        "last_batch": stream.last_batch == "carry" and "last_batch='carry'",
        "order": stream.order == "arrival" and "order='arrival'",
        "rounds": stream.rounds == "epoch" and len(config.devices) > 1
        and "rounds='epoch' and several queues",
        "fetch": why_not(stream.fetch),
    }  # fmt: skip
    for why in filter(None, what.values()):
        raise ConfigError(f"the run of feed {config.name!r} cannot be edited: {why}")


def check_edit(given: Positions, then: Mapping[str, Any]) -> None:
    """Raise `ConfigError` or `ResumeError` if an edit cannot make of a run, by its fields, what is
    given."""
    check_can_be_edited(given.config)
    now = given.fingerprint
    then = {k: v for k, v in then.items() if k not in given.config.stream.worker_fields}
    fixed = differences(
        {k: v for k, v in then.items() if not _may_change(k)},
        {k: v for k, v in now.items() if not _may_change(k)},
    )
    for size in SIZES:
        if (size in then) != (size in now):
            fixed.append(f"{size}: {then.get(size)!r} then, {now.get(size)!r} now")
    was, to = _told(then), _told(now)
    fixed += _fixed(was, to)
    if fixed:
        raise ResumeError(
            f"an edit of feed {given.config.name!r} cannot change these: {'; '.join(fixed)}. It can"
            f" change {_EDITABLE}"
        )
    _check_parts(given.config.name, was, to)


def _fixed(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs of two sources that no edit can change, beside the sources of a mixture."""
    from feeder.workers.sources.chapters import PACKINGS, documents_of

    fields = ["on_exhausted", "source", "shuffle", "num_shards"]
    both = [{f"source.{name}": one.get(name) for name in fields} for one in (was, now)]
    if was["source"] == now["source"] in PACKINGS:
        may = ("size", *PACKINGS[now["source"]])
        both = [
            {f"source.{k}": v for k, v in one.items() if k not in may and not k.startswith("of.")}
            for one in (was, now)
        ]
        below = [documents_of(one) for one in (was, now)]
        for told, one in zip(both, below, strict=True):
            told |= {f"source.of.{name}": one.get(name) for name in fields}
    before, after = both
    return [
        f"{name}: {before.get(name)!r} then, {after.get(name)!r} now"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
        and "exclude" not in (before.get(name), after.get(name))
    ]  # fmt: skip


def _may_change(field: str) -> bool:
    return field.startswith(_SOURCE) or field in (*SIZES, "seed")


def _check_parts(feed: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `ResumeError` if a source has become another one."""
    from feeder.workers.sources.chapters import documents_of, part_of_fields, told_by_name

    before = told_by_name(documents_of(was))
    for name, told in told_by_name(documents_of(now)).items():
        if name not in before:
            continue
        (old, old_data), (new, new_data) = part_of_fields(before[name]), part_of_fields(told)
        what = f"the source {name!r} of feed {feed!r}" if name else f"the source of feed {feed!r}"
        if old.kept != new.kept:
            every = differences(before[name], told)
            # One that is made of others may not grow either.
            fields = [field for field in every if "size: " not in field] or every
            raise ResumeError(
                f"{what} is another than it was, which an edit cannot change: {'; '.join(fields)};"
                " give it another name, as a source that is added"
            )
        if not new.selection.follows(old.selection):
            raise ResumeError(_why_unlike(what, old, new))
        if why := _not_appended(old_data, new_data, is_same=new.size == old.size):
            raise ResumeError(
                f"{what} has grown, but not at its end: {why}; records that came before have to "
                "stay as they were"
            )


def _check_back(feed: str, run: Run, now: Settings) -> None:
    """Raise `ResumeError` if a source that is put back has other files: of those that it had, the
    history has a digest alone."""
    for name in set(now.parts) & set(run.names) - set(run.settings.parts):
        last = next(one.parts[name] for one in reversed(run.chapters) if name in one.parts)
        if now.parts[name].data != last.data:
            raise ResumeError(
                f"the source {name!r} of feed {feed!r} is put back with other files than it had: "
                "put it back as it was, and let it grow by an edit after that"
            )


def _why_unlike(what: str, old: Part, new: Part) -> str:
    if new.size < old.size:
        return (
            f"{what} has {new.size} records, and had {old.size}: it may grow at its end, and "
            "records may be excluded"
        )
    return f"{what} had the records {[*old.excluded]} excluded, which cannot come back"


def _not_appended(old: Mapping[str, Any], new: Mapping[str, Any], *, is_same: bool) -> str:
    """Why data has not grown at its end; empty if it has."""
    if is_same or old == new:
        # Older positions do not say in which order files are read.
        new = {k: v for k, v in new.items() if k in old or k != FILE_ORDER}
        changed = differences(old, new)
        return changed[0] if changed else ""
    for field, told in old.items():
        if field == FILE_ORDER:
            continue
        is_list = isinstance(told, list) and isinstance(new.get(field), list)
        if (new[field][: len(told)] if is_list else new.get(field)) != told:
            return f"{field}: {told!r} then, {new.get(field)!r} now"
    files = [k for k in old if k != FILE_ORDER]
    if [k for k in new if k != FILE_ORDER][: len(files)] != files:
        return f"the first files were {files}"
    return ""


def changes(made: Edit, now: Settings) -> list[str]:
    """What an edit changes, in words."""
    from feeder.workers.sources.chapters import ROWS, weights_of

    was = made.was
    told = [
        f"{what} {old} -> {new}"
        for what, old, new in (
            ("rows of a call", was.asked, now.asked), ("seed", was.seed, now.seed),
            ("seed of the mixture", was.mix_seed, now.mix_seed),
        )
        if old != new
    ]  # fmt: skip
    after = now.packing or {"source": ROWS}
    if after["source"] != ROWS:
        differing = _differing(was.packing or {}, after)
        told += [f"{name} {old} -> {after.get(name)}" for name, old in differing]
    told += [f"{name!r} is added" for name in now.parts if name not in was.parts]
    told += [f"{name!r} is taken out" for name in was.parts if name not in now.parts]
    for name, part in now.parts.items():
        old = was.parts.get(name)
        if old is None or old == part:
            continue
        what = repr(name) if name else "the source"
        if part.size != old.size:
            told.append(f"{what} has {part.size} records, {part.size - old.size} more")
        num = part.selection.num_excluded - old.selection.num_excluded
        if num:
            told.append(f"{num} records of {what} are excluded")
    if was.blocks and now.blocks:
        weights, others = (
            dict(zip(one.parts, weights_of(one.blocks), strict=True)) for one in (was, now)
        )
        if weights != others:
            told.append(f"weights {weights} -> {others}")
        elif not told and made.rest is not None and list(was.blocks) != list(now.blocks):
            told.append("another schedule")
    return told


# ---- The history is told


def chapters_of(state: StreamState) -> list[dict[str, Any]]:
    """What the run of a state was made of, from step to step, as plain values; by numbers alone.
    Raises `ConfigError` if it is a run that cannot be edited."""
    from feeder.workers.sources.chapters import ROWS, Run, weights_of

    history = state.fingerprint.get(HISTORY)
    now = settings_in(state.fingerprint, skips=of_windows(history))
    run = Run([] if history is None else unpack(history, now), now)
    id = StreamId(state.name, state.number, fingerprint_digest(state.fingerprint))
    cut = id.decode(state.token, None)
    position, leftover = cut.position, cut.leftover
    if now.packing is not None:
        # Windows are read whole: the one that a position is in, too.
        number = sum((e.epoch, e.call) <= (position.epoch, position.calls[0]) for e in run.edits)
        record = run.documents_before(number, position.epoch, position.calls[0])
    elif leftover is not None:
        record = run.rows_of(position.epoch, leftover.call)[0] + leftover.taken
    else:
        record = run.rows_of(position.epoch, position.calls[0])[0]
    places = [(0, 0), *((e.epoch, e.record) for e in run.edits), (position.epoch, record)]
    steps = [0, *(edit.step for edit in run.edits), cut.step]
    notes = [None, *(edit.note for edit in run.edits)]
    told = []
    for number, one in enumerate(run.chapters):
        since, until = places[number], places[number + 1]
        # A replayed run may stand before its edits.
        read = run.read(since, min(until, places[-1])) if since < places[-1] else {}
        weights = weights_of(one.blocks) if one.blocks else [1]
        told.append({
            "note": notes[number],
            "from_step": steps[number],
            "to_step": min(steps[number + 1], cut.step),
            "epoch": since[0],
            "rows_of_a_call": one.asked,
            "seed": one.seed,
            **({"packing": one.packing} if one.packing and one.packing["source"] != ROWS else {}),
            "sources": {
                name: {
                    "weight": weight,
                    "records": part.size,
                    "excluded": part.selection.num_excluded,
                    "excluded_ranges": [[first, end - 1] for first, end in part.excluded],
                    "read": read.get(name, 0),
                }
                for (name, part), weight in zip(one.parts.items(), weights, strict=True)
            },
        })  # fmt: skip
    return told
