"""What a position means for one stream: it is written down, read back, and refused where it does
not fit."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from feeder.errors import ConfigError, FeedError, ReplayWarning, ResumeError
from feeder.state.fingerprint import differences, fingerprint_digest, order_differences
from feeder.state.history import Further, check_edit, edit, go_on, number_of, with_history
from feeder.state.snapshot import HISTORY, Rows, Snapshot, StreamState, summarise
from feeder.state.token import StreamId, fingerprint_of
from feeder.workers.fetch.resuming import Resume
from feeder.workers.stream.chunks import Columns
from feeder.workers.stream.position import Cut, LazyPosition, Partitions, Position
from feeder.workers.stream.rounds import Counting, Dealing, Turns, begin
from feeder.workers.stream.skipping import skip_ahead
from feeder.workers.stream.spec import FILE_ORDER

if TYPE_CHECKING:
    from feeder.config import FeedConfig

logger = logging.getLogger("feeder")


class Positions:
    """The meaning of positions for one stream: rules without threads. It never changes."""

    def __init__(self, config: FeedConfig, number: int) -> None:
        self.config = config
        self.number = number
        self.fingerprint = config.fingerprint()
        """The declared fields that must be equal for a position to fit."""
        # A source's stream does not depend on worker ids. Older tokens have them in their digest,
        # and stay readable by it.
        stream = config.stream
        # Forms that older positions have: without the order of files, and with worker ids.
        without = _without_order(self.fingerprint)
        forms = [without] if without != self.fingerprint else []
        if stream.ignores_worker_ids:
            forms += [{**form, **stream.worker_fields} for form in (self.fingerprint, *forms)]
        digests = {fingerprint_digest(form): form for form in forms}
        self._without_order = [
            digest
            for digest, form in digests.items()
            if without != self.fingerprint and not any(map(_is_order, form))
        ]
        dealing = Dealing.from_start(len(config.devices), stream.batch_size, stream.epochs)
        digest = fingerprint_digest(self.fingerprint)
        self.id = StreamId(config.name, number, digest, tuple(digests), dealing)

    @cached_property
    def older(self) -> Positions | None:
        """Those of the stream as it was in an earlier format of its source; None where that is
        none."""
        config = self.config.as_it_was()
        return None if config is None else Positions(config, self.number)

    # ---- written down

    def state(
        self, cut: Cut, rows: Rows | None, columns: Columns | None, *, with_rows: bool
    ) -> StreamState:
        """A place in the stream; with the leftover rows where asked, and where they could not be
        fetched again."""
        has_rows = with_rows or not self.config.stream.repeatable
        # Where the rows are at hand no call is made again, so none is compared. But a cursor that
        # was written with the place, of a stream that has gone no further, stands before that call.
        if has_rows and not any(cut.position.marks):
            cut = replace(cut, checked=None)
        return StreamState(
            name=self.config.name,
            number=self.number,
            fingerprint=self.fingerprint,
            token=cut.token(),
            columns=columns,
            rows=rows if has_rows else None,
            summary=summarise(cut),
            left_out=self.left_out_before(cut.position),
        )

    def left_out_before(self, position: Position) -> tuple[tuple[int, int, str, str], ...]:
        """What the source has left out in calls that are done there: those of calls ahead are not,
        so that it does not depend on timing."""
        fetch: Any = self.config.stream.fetch
        listed = fetch.left_out if hasattr(fetch, "count_skipped") else ()
        epoch, low, done = position.epoch, position.calls[0], position.done
        return tuple(
            one
            for one in listed
            if one.epoch < epoch or (one.epoch == epoch and (one.call < low or one.call in done))
        )

    def state_at(
        self, place: LazyPosition, columns: Columns | None, *, with_rows: bool
    ) -> StreamState:
        """The place where a batch ended."""
        # Once: that the place is the next epoch's start may become known at any moment.
        cut = place.cut()
        rows = () if cut.leftover is None else place.leftover_rows()
        return self.state(cut, rows, columns, with_rows=with_rows)

    # ---- read back

    def origin(self) -> Resume:
        """The start of the stream, as a place to go on at."""
        stream = self.config.stream
        partitions = Partitions.of(
            stream.num_workers, pure=stream.pure, arrival=stream.order == "arrival"
        )
        cut = Cut(
            epoch=0, index=0, step=0, finished=False, position=partitions.origin(), leftover=None,
            encode=self.id.encode,
        )  # fmt: skip
        return Resume(cut=cut, rows=())

    def find(self, state: StreamState | bytes) -> Resume:
        """The place that a state or a token means for this stream. Raises `ResumeError`."""
        epochs = self.config.stream.epochs
        if isinstance(state, bytes):
            resume = Resume(cut=self.id.decode(state, epochs), fingerprint=fingerprint_of(state))
            if fingerprint_of(state) in self._without_order:
                self._tell_of_order()
        else:
            self._compare(state)
            then = fingerprint_digest(state.fingerprint)
            cut = self.id._replace(older=(then,)).decode(state.token, epochs)
            resume = Resume(
                cut=cut, rows=state.rows, columns=state.columns, left_out=state.left_out,
                fingerprint=then,
            )  # fmt: skip
        self._check_partitions(resume.cut)
        self._check_repeatable(resume)
        return resume

    def find_in(self, position: Snapshot | bytes, further: Further | None = None) -> Resume:
        """The same, from a snapshot of perhaps many streams, or a token. Where it is of an earlier
        format of the source, what goes on there has to be the stream of `older`. An edit lies
        behind what has been dealt out further."""
        try:
            return self._find_in(position, further)
        except ResumeError:
            if self.older is None:
                raise
            with contextlib.suppress(ResumeError):
                found = self.older.find_in(position, further)
                return found._replace(owner=found.owner or self.older)
            raise

    def _find_in(self, position: Snapshot | bytes, further: Further | None) -> Resume:
        if isinstance(position, bytes):
            if self.config.edit is not None and fingerprint_of(position) != self.id.fingerprint:
                raise ResumeError(
                    f"feed {self.config.name!r} is given edit={self.config.edit!r}, and a token "
                    "does not say what the run was made of: edit from a state dict or a snapshot"
                )
            return self.find(position)
        for state in position.states:
            if (state.name, state.number) == (self.config.name, self.number):
                return self._find_edited(state, further)
        held = [f"{state.name}[{state.number}]" for state in position.states]
        raise ResumeError(
            f"the snapshot holds feeds {held!r}, expected {self.config.name}[{self.number}]"
        )

    def _find_edited(self, state: StreamState, further: Further | None) -> Resume:
        """The place of a state, whose run may have been edited, or is edited there."""
        note, then = self.config.edit, state.fingerprint
        if note is not None:
            return edit(self, state, note, further)
        if HISTORY not in then or HISTORY in self.fingerprint:
            return self.find(state)
        current = {name: value for name, value in then.items() if name != HISTORY}
        self._compare(state._replace(fingerprint=current))
        return go_on(self, state)

    def _compare(self, state: StreamState) -> None:
        """Raise `ResumeError` with every field in which a snapshot's feed differs from this."""
        then, now, stream = state.fingerprint, self.fingerprint, self.config.stream
        if stream.ignores_worker_ids:
            # Positions that were stored before worker ids were left out still have them.
            then = {name: then[name] for name in then if name not in stream.worker_fields}
        if not any(map(_is_order, then)) and (without := _without_order(now)) != now:
            self._tell_of_order()
            now = without
        if HISTORY in then or HISTORY in now:
            self.compare_histories(then.get(HISTORY), now.get(HISTORY))
        found = differences(then, now) or order_differences(then, now)
        if state.name != self.config.name:
            found.insert(0, f"name: {state.name!r} then, {self.config.name!r} now")
        if found:
            raise ResumeError(
                f"the snapshot is of another feed than {self.config.name!r}: {'; '.join(found)}"
                f"{self._cure(then)}"
            )

    def compare_histories(self, then: Any, now: Any) -> None:
        """Raise `ResumeError` if two histories differ."""
        if then == now:
            return
        raise ResumeError(
            f"the position of feed {self.config.name!r} is of a run with {number_of(then)}, and "
            f"the feed is one with {number_of(now)}: they have two histories. All trainers of a "
            "run go on from positions with one history; FeedLoader takes none that has edits"
        )

    def applied(self, config: FeedConfig) -> FeedConfig:
        """Settings that were made anew, with the fetch function as these positions have it."""
        history = self.fingerprint.get(HISTORY)
        if history is None:
            return config.as_it_was() or config
        found = with_history(Positions(config, self.number), history)
        if what := differences(self.fingerprint, found.fingerprint):
            raise ResumeError(
                f"feed {self.config.name!r} is made otherwise than when it began: {'; '.join(what)}"
            )
        return found.config

    def _cure(self, then: Mapping[str, Any]) -> str:
        """How a position goes on that has other fields; empty if it cannot."""
        try:
            check_edit(self, then)
        except (FeedError, LookupError, TypeError, ValueError):
            return ""
        return "; to go on with what is given now, and keep each source's place, give edit='why'"

    def _tell_of_order(self) -> None:
        logger.info(
            "the position of feed %r does not say which files there were in which order: they are "
            "not compared", self.config.name,
        )  # fmt: skip

    def begin(self, resume: Resume | None) -> tuple[Resume | None, Turns]:
        """Where a run begins that goes on at a place, or at the start of the stream, and how it
        deals: after a whole round, and after the rounds that are to be skipped."""
        return self._begin(resume, self.config.skip)

    def _begin(self, resume: Resume | None, skip: int) -> tuple[Resume | None, Turns]:
        config, num = self.config, len(self.config.devices)
        cut = None if resume is None else resume.cut
        turns = begin(
            0 if cut is None else cut.epoch,
            0 if cut is None else cut.step,
            None if cut is None or cut.finished else cut.dealing,
            num=num,
            batch_size=config.stream.batch_size,
            epochs=config.stream.epochs,
            skip=skip,
        )
        if resume is None or not skip or resume.cut.finished:
            return resume, turns
        found = skip_ahead(config.stream, resume.cut, turns, num)
        return (resume, turns) if found is None else (resume._replace(cut=found[0]), found[1])

    def deal(self, resume: Resume, *, skip: int) -> Resume:
        """The place from which a queue goes on, whose cut says how it is dealt out to these queues:
        after its round. Raises `ResumeError`."""
        # Also where one consumer comes back alone. Its own position is after its own batch of a
        # round. A position of another one says that the round has been used, by all.
        cut, config = resume.cut, self.config
        then, now = cut.dealing, (len(config.devices), config.stream.batch_size)
        # A position that does not say how it was dealt counts as from the start of the stream.
        if cut.finished or (then is None and not skip):
            return resume
        rounds_end = config.stream.rounds == "epoch"
        has_more = then is not None and then.epochs == cut.epoch + 1 != config.stream.epochs
        found, turns = self._begin(resume, skip)
        assert found is not None
        if turns.first and skip and rounds_end:
            raise ConfigError(
                f"skip is {skip}, and rounds is 'epoch': where that leads to is known only where "
                "the source tells its number of rows (rows and gives_all_rows); use a source of "
                "feeder.sources, or skip in process"
            )
        if turns.first and has_more and not rounds_end:
            # Where its round ended follows from how many rows the epoch has.
            known = skip_ahead(config.stream, found.cut, turns, now[0])
            if known is None:
                raise ResumeError(
                    f"the position of feed {config.name!r} is within a round of epoch {cut.epoch}, "
                    "with which the stream ended then and goes on now, and how many batches that "
                    "round had is known only where the source tells its number of rows (rows and "
                    "gives_all_rows); resume from the position of the epoch's end, or in process"
                )
            found, turns = found._replace(cut=known[0]), known[1]
        # What was dealt before tells how many rows the batches have that are left of its round.
        size = then.batch_size if then is not None and turns.first else now[1]
        if turns.first and skip and size != now[1]:
            raise ConfigError(
                f"skip is {skip}, and batches had {size} rows where the position of feed "
                f"{config.name!r} was made, {now[1]} now; start first, and skip from a position of "
                "this number of queues"
            )
        # The batches up to there are nobody's: so the position says it to whoever reads it next.
        first, dealing = found.cut.step - turns.first, turns.dealing
        assert dealing is not None
        dealing = dealing._replace(start=first if turns.first else dealing.start, batch_size=size)
        return found._replace(cut=replace(found.cut, dealing=dealing))

    def within(self, cut: Cut) -> tuple[int, int | None]:
        """How many batches from a place on are nobody's, where queues go on (`deal`), and how many
        of the round of the first other one are before it; None where the position does not say."""
        dealing = cut.dealing
        if dealing is None or (cut.finished and dealing.num != len(self.config.devices)):
            return 0, None
        return dealing.within(cut.step)

    def counting(self, cut: Cut | None) -> Counting:
        """How rounds are counted where queues go on at a place, or at the start of the stream."""
        per_epoch = self.config.stream.rounds == "epoch"
        counting = Counting(len(self.config.devices), per_epoch)
        nobodys, into_round = (0, None) if cut is None else self.within(cut)
        if cut is None or into_round is None:
            return counting
        return counting._replace(begins=counting.number(cut) + nobodys - into_round)

    def begin_within(self, cut: Cut, counting: Counting) -> Turns:
        """How a run deals that goes on at a place from which queues go on, wherever in a round."""
        stream, num = self.config.stream, len(self.config.devices)
        turn = counting.turn(counting.number(cut)) % num
        dealing = Dealing.from_start(num, stream.batch_size, stream.epochs).begun_at(
            cut.step - turn
        )
        then = cut.dealing
        if then is None:
            return Turns(turn, dealing=dealing)
        older = self.within(cut)[0] if then.batch_size != stream.batch_size else 0
        dealing = dealing._replace(skipped=then.skipped)
        return Turns(turn, dealing=dealing, older=older, older_size=then.batch_size)

    def tell_of_dealing(self, cut: Cut) -> None:
        """Log that a round of all devices has another number of rows than where a cut was made."""
        then, now = cut.dealing, (len(self.config.devices), self.config.stream.batch_size)
        if then is None or then.num * then.batch_size == math.prod(now):
            return
        logger.info(
            "feed %r goes on with %d devices of %d rows each, %d rows in a round; before there "
            "were %d of %d, %d in a round: the global batch has changed, global_batch_size= "
            "would keep it", self.config.name, *now, math.prod(now), then.num, then.batch_size,
            then.num * then.batch_size,
        )  # fmt: skip

    def check_round(self, cut: Cut) -> None:
        """Raise `ResumeError` where a cut that does not say how batches were dealt stands in the
        middle of a round of all devices."""
        num = len(self.config.devices)
        # Batch `step` goes to device `step % num`. In the middle of a round some devices would get
        # a batch that their users have had already.
        if cut.step % num and not cut.finished:
            raise ResumeError(
                f"the position is before batch {cut.step}, which is no multiple of {num} devices; "
                "resume with a number of devices that divides it"
            )

    def _check_partitions(self, cut: Cut) -> None:
        stream, found = self.config.stream, len(cut.position.calls)
        expected = 1 if stream.pure else stream.num_workers
        if found != expected:
            raise ResumeError(
                f"the position of feed {self.config.name!r} is one of {found} workers, expected "
                f"{expected}"
            )

    def _check_repeatable(self, resume: Resume) -> None:
        if not self.config.stream.repeatable and resume.rows is None:
            raise ResumeError(
                f"feed {self.config.name!r} has repeatable=False: a bare token does not hold its "
                "leftover rows; resume from a snapshot or state dict"
            )

    def is_replayed(self, cut: Cut) -> bool:
        """Whether calls have to be made again to resume at a cut."""
        stream = self.config.stream
        return not (stream.pure or stream.seekable) and sum(cut.position.calls) > 0

    def warn_of_replay(self, cut: Cut) -> None:
        """Warn where calls have to be made again to resume at a cut, at the user's line."""
        if self.is_replayed(cut):
            warnings.warn(
                f"feed {self.config.name!r} is resumed by replay: {sum(cut.position.calls)} calls "
                "are made again and what they return is discarded; give the fetch function "
                "cursor(worker_id) and seek(worker_id, cursor), or use fetch(call)",
                ReplayWarning,
                stacklevel=_level_of_user(),
            )


def _is_order(field: str) -> bool:
    """Whether a field of a fingerprint says in which order files are read."""
    return field.startswith("source.") and field.endswith(f".{FILE_ORDER}")


def _without_order(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint as it was before it had the order of files."""
    return {name: value for name, value in fingerprint.items() if not _is_order(name)}


def recall(fetch: Any, resume: Resume) -> None:
    """A run goes on from there: its source knows what was left out before."""
    if resume.left_out and hasattr(fetch, "count_skipped"):
        fetch.count_skipped(0, resume.left_out)


def _level_of_user() -> int:
    """The stack level, as the caller's `warnings.warn` counts them, of who called feeder."""
    # A warning at a line of feeder's own would tell the user nothing.
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("feeder."):
        frame, level = frame.f_back, level + 1
    return level
