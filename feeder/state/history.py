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
from typing import TYPE_CHECKING, Any

from feeder.errors import ConfigError, FeedError, ResumeError
from feeder.state.fingerprint import differences, fingerprint_digest
from feeder.state.snapshot import HISTORY, StreamState
from feeder.state.token import StreamId
from feeder.workers.fetch.resuming import Resume
from feeder.workers.stream.position import Cut, Position
from feeder.workers.stream.spec import FILE_ORDER

if TYPE_CHECKING:
    # Sources are loaded where a run of one is edited.
    from feeder.config import FeedConfig
    from feeder.state.positions import Positions
    from feeder.workers.sources.chapters import Edit, Part, Run, Settings
    from feeder.workers.sources.source import Source

logger = logging.getLogger("feeder")

FORMAT = 1
_STEPS_TOLD = 100
"""Of so many records that have come a log line tells the steps."""
_SOURCE = "source."
_SIZES = ("batch_size", "global_batch_size")
_EDITABLE = "weights and schedule of a mixture, its sources, records that are added at the end of "\
            "a source or excluded, batch_size, global_batch_size and seed"  # fmt: skip

# ---- Edits as plain values


def pack(edits: Sequence[Edit], now: Settings) -> list[Any]:
    """Edits as plain values, which fit what a run is made of now."""
    from feeder.workers.sources.chapters import left_of, short

    chapters = [
        *(e.was._replace(blocks=short(e.was.blocks, _sizes(e.was), e.was.mode)) for e in edits), now
    ]  # fmt: skip
    names = list(dict.fromkeys(name for one in chapters for name in one.parts))
    packed = [
        [
            edit.epoch, edit.call, edit.record, edit.step, edit.note,
            [list(edit.standings[name]) if name in edit.standings else None for name in names],
            short(edit.rest, left_of(after, edit.standings), after.mode), _packed(was, after),
        ]
        for edit, was, after in zip(edits, chapters[:-1], chapters[1:], strict=True)
    ]  # fmt: skip
    return [FORMAT, names, packed]


def _packed(one: Settings, after: Settings) -> dict[str, Any]:
    """Those settings that differ from the ones after."""
    told = {k: v for k, v in one._asdict().items() if v != getattr(after, k) and k != "parts"}
    if list(one.parts) != list(after.parts):
        told["names"] = list(one.parts)
    parts = {
        name: [part.size, part.kept, part.data, [list(pair) for pair in part.excluded]]
        for name, part in one.parts.items()
        if part != after.parts.get(name)
    }
    return {**told, **({"parts": parts} if parts else {})}


def unpack(history: Any, now: Settings) -> list[Edit]:
    """Edits of plain values. Raises `ResumeError` if there is no sense in them."""
    from feeder.workers.sources.chapters import Edit, Part, Standing

    with _sensible():
        number, names, packed = history
        if number != FORMAT:
            raise ResumeError(
                f"the history of the run has format {number}, expected at most {FORMAT}; update "
                "feeder"
            )
        edits: list[Edit] = []
        for epoch, call, record, step, note, at, rest, given in reversed(packed):
            told = dict(given)
            parts = {
                name: Part(size, kept, data, tuple((a, b) for a, b in excluded))
                for name, (size, kept, data, excluded) in told.pop("parts", {}).items()
            }
            own = told.pop("names", list(now.parts))
            standings = {n: Standing(*s) for n, s in zip(names, at, strict=True) if s is not None}
            # What was before the edit; this is the chapter after the edit before.
            now = now._replace(parts={n: parts.get(n) or now.parts[n] for n in own}, **told)
            edits.insert(0, Edit(epoch, call, record, step, note, standings, rest, now))
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


def settings_in(fingerprint: Mapping[str, Any]) -> Settings:
    """What a run is made of, by the fields of a position. Raises `ConfigError`."""
    from feeder.workers.sources.chapters import settings_of

    asked = next(fingerprint[name] for name in _SIZES if name in fingerprint)
    return settings_of(_told(fingerprint), asked, fingerprint["seed"])


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
        now = settings_in(fingerprint)
        return Edited(source, unpack(history, now), now, history)


# ---- A run goes on


def go_on(given: Positions, state: StreamState) -> Resume:
    """Where the edited run of a state goes on, with the sources that are given. Raises
    `ResumeError`."""
    owner = with_history(given, state.fingerprint[HISTORY])
    found = owner.find(state)._replace(owner=owner)
    run: Run = owner.config.stream.fetch.run  # type: ignore[attr-defined]
    for made in reversed(run.edits):
        if made.was.asked != run.settings.asked and found.cut.step < made.step:
            raise ResumeError(
                f"the position of feed {given.config.name!r} is before step {made.step}, from which"
                f" on batches have another size, {made.was.asked} rows of a call then: what comes "
                "before such an edit cannot be had again"
            )
    return found


def with_history(given: Positions, history: Any) -> Positions:
    """The positions of a stream whose run has this history. Raises `ResumeError`."""
    now = settings_in(given.fingerprint)
    with _sensible():
        return _edited(given, unpack(history, now), now, history)


def _edited(
    given: Positions, edits: Sequence[Edit], now: Settings, history: Sequence[Any]
) -> Positions:
    """The positions of a stream whose run has been edited so: `history` is that as values."""
    from feeder.state.positions import Positions
    from feeder.workers.sources.edited import Edited

    check_can_be_edited(given.config)
    source: Any = given.config.stream.fetch
    fetch = Edited(source, edits, now, history)
    return Positions(given.config.with_fetch(fetch)._replace(edit=None), given.number)


def number_of(history: Any) -> str:
    """How many edits a history has, in words."""
    num = 0 if history is None else len(history[2])
    return f"{num} edit{'s' * (num != 1)}"


def edit(given: Positions, state: StreamState, note: str) -> Resume:
    """Where the run of a state goes on after an edit that makes it what is given. If it is that
    already, and the last edit has this note, it goes on as without one. Raises `ResumeError`."""
    then_fields = {k: v for k, v in state.fingerprint.items() if k != HISTORY}
    check_edit(given, then_fields)
    now, was = settings_in(given.fingerprint), settings_in(then_fields)
    history = state.fingerprint.get(HISTORY)
    edits = [] if history is None else unpack(history, was)
    if now == was and edits and edits[-1].note == note:
        return go_on(given, state)
    fetch: Any = given.config.stream.fetch
    run, cut, record = _place(given, state, edits, was)
    if edits and cut.step < edits[-1].step:
        raise ResumeError(
            f"the position of feed {given.config.name!r} is at step {cut.step}, before an edit at "
            f"step {edits[-1].step} of its own history: edit from a position after it"
        )
    _check_back(given.config.name, run, now)
    from feeder.workers.sources.edited import edit_at

    made = edit_at(
        run, fetch, now, note,
        epoch=cut.position.epoch, call=cut.position.calls[0], record=record, step=cut.step,
    )  # fmt: skip
    owner = _edited(given, [*edits, made], now, pack([*edits, made], now))
    _tell(given.config.name, made, now, _came(given, edits, made, now))
    return Resume(
        cut=replace(cut, encode=owner.id.encode), rows=state.rows, columns=state.columns,
        left_out=state.left_out, owner=owner,
    )  # fmt: skip


def _place(
    given: Positions, state: StreamState, edits: Sequence[Edit], was: Settings
) -> tuple[Run, Cut, int]:
    """The run as it was; the place of an edit, and how many records of the epoch come before it:
    the end of the round that the position is in, or the start of the next epoch if this one has no
    more batches."""
    from feeder.workers.sources.edited import Edited, Gone

    config, name, epochs = given.config, given.config.name, given.config.stream.epochs
    fetch: Any = config.stream.fetch
    with _sensible():
        source = Edited(fetch, edits, was, ())
    run = source.run
    digest = fingerprint_digest(state.fingerprint)
    cut = given.id._replace(older=(digest,)).decode(state.token, epochs)
    dealing, size, rest = cut.dealing, was.asked, 0
    if dealing is None:
        given.check_round(cut)
    else:
        size, rest = dealing.batch_size, dealing.rest(cut.epoch, cut.step)
    position = cut.position
    epoch, index = position.epoch, cut.index
    record = run.rows_of(epoch, position.calls[0])[0]
    if cut.leftover is not None:
        # Batches of several queues may end within a call.
        record = run.rows_of(epoch, cut.leftover.call)[0] + cut.leftover.taken
    least = size if config.stream.last_batch == "drop" else 1
    last = max([epoch, *(one.epoch for one in edits)])
    for is_made in (*[True] * rest, False):
        # The place is the next epoch's start also if the position does not say so yet.
        while not cut.finished and run.route.length(epoch) - record < least:
            epoch, index, record = epoch + 1, 0, 0
            # Behind the last edit's all epochs are alike.
            is_empty = epoch > last + 1 and run.route.length(epoch) < least
            if epoch == epochs or is_empty:
                raise ResumeError(
                    f"the run of feed {name!r} has ended at its position, or ends within the round "
                    "that it is in: an edit would change nothing, unless there are more epochs"
                )
        if is_made:
            index += 1
            record = min(record + size, run.route.length(epoch))
    if cut.finished:
        raise ResumeError(
            f"the run of feed {name!r} has ended at its position: an edit would change nothing, "
            "unless there are more epochs"
        )
    # The last call is compared, if it is still the last one, and can be made again.
    is_same = not rest and not any(isinstance(part, Gone) for part in source.records.parts)
    step = cut.step + rest
    cut = replace(
        cut, epoch=epoch, index=index, step=step, leftover=None,
        position=Position(epoch, 0, (True,), (run.call_at(epoch, record),), (0,), (None,)),
        checked=cut.checked if is_same else None,
        dealing=dealing and dealing.begun_at(step),
    )  # fmt: skip
    return run, cut, record


def _tell(name: str, made: Edit, now: Settings, more: Sequence[str]) -> None:
    logger.warning(
        "feed %r is edited at step %d (%s): %s", name, made.step, made.note,
        "; ".join([*changes(made.was, now), *more]) or "nothing changes",
    )  # fmt: skip


def _came(given: Positions, edits: Sequence[Edit], made: Edit, now: Settings) -> list[str]:
    """What is excluded too late: records that have come in the pass, and at which steps."""
    from feeder.workers.sources.edited import Edited

    told = []
    fetch: Any = given.config.stream.fetch
    run = Edited(fetch, edits, made.was, ())
    for name, part in now.parts.items():
        old = made.was.parts.get(name)
        if old is None or old.excluded == part.excluded:
            continue
        numbers = part.selection.taken_out(old.selection)
        at = made.standings[name]
        positions = run.positions_of(name, numbers, at.epoch)
        came = [position for position in sorted(positions.tolist()) if position < at.position]
        if not came:
            continue
        where = ""
        if given.config.stream.global_batch_size is None and run.run.is_of(name, at, made.epoch):
            records = [run.run.record_of(name, one, made.epoch) for one in came[:_STEPS_TOLD]]
            calls = [run.run.call_of_record(made.epoch, record) for record in records]
            steps = sorted({made.step - (made.call - call) for call in calls})
            where = f", at steps {steps}{' and more' * (len(came) > _STEPS_TOLD)}"
        told.append(
            f"{len(came)} of the {len(numbers)} records that are excluded have come already{where}"
        )
    return told


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
    for size in _SIZES:
        if (size in then) != (size in now):
            fixed.append(f"{size}: {then.get(size)!r} then, {now.get(size)!r} now")
    was, to = _told(then), _told(now)
    for name in ("on_exhausted", "source", "shuffle", "num_shards"):
        if was.get(name) != to.get(name) and not (name == "source" and "exclude" in
                                                  (was.get(name), to.get(name))):  # fmt: skip
            fixed.append(f"source.{name}: {was.get(name)!r} then, {to.get(name)!r} now")
    if fixed:
        raise ResumeError(
            f"an edit of feed {given.config.name!r} cannot change these: {'; '.join(fixed)}. It can"
            f" change {_EDITABLE}"
        )
    _check_parts(given.config.name, was, to)


def _may_change(field: str) -> bool:
    return field.startswith(_SOURCE) or field in (*_SIZES, "seed")


def _check_parts(feed: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `ResumeError` if a source has become another one."""
    from feeder.workers.sources.chapters import part_of_fields, told_by_name

    before = told_by_name(was)
    for name, told in told_by_name(now).items():
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


def changes(was: Settings, now: Settings) -> list[str]:
    """What differs, in words."""
    from feeder.workers.sources.chapters import weights_of

    told = [
        f"{what} {old} -> {new}"
        for what, old, new in (
            ("rows of a call", was.asked, now.asked), ("seed", was.seed, now.seed),
            ("seed of the mixture", was.mix_seed, now.mix_seed),
        )
        if old != new
    ]  # fmt: skip
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
        before, after = (
            dict(zip(one.parts, weights_of(one.blocks), strict=True)) for one in (was, now)
        )
        if before != after:
            told.append(f"weights {before} -> {after}")
        elif not told and list(was.blocks) != list(now.blocks):
            told.append("another schedule")
    return told


# ---- The history is told


def chapters_of(state: StreamState) -> list[dict[str, Any]]:
    """What the run of a state was made of, from step to step, as plain values; by numbers alone.
    Raises `ConfigError` if it is a run that cannot be edited."""
    from feeder.workers.sources.chapters import Run, weights_of

    now = settings_in(state.fingerprint)
    run = Run(unpack(state.fingerprint.get(HISTORY, [FORMAT, [], []]), now), now)
    id = StreamId(state.name, state.number, fingerprint_digest(state.fingerprint))
    cut = id.decode(state.token, None)
    position, leftover = cut.position, cut.leftover
    record = run.rows_of(position.epoch, position.calls[0])[0]
    if leftover is not None:
        record = run.rows_of(position.epoch, leftover.call)[0] + leftover.taken
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
            "to_step": steps[number + 1],
            "epoch": since[0],
            "rows_of_a_call": one.asked,
            "seed": one.seed,
            "sources": {
                name: {
                    "weight": weight,
                    "records": part.size,
                    "excluded": part.selection.num_excluded,
                    "read": read.get(name, 0),
                }
                for (name, part), weight in zip(one.parts.items(), weights, strict=True)
            },
        })  # fmt: skip
    return told
