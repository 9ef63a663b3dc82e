"""The source of an edited run whose rows are not one for each record: that packs documents, makes
batches of them by tokens, or leaves records out.

Its documents are those of an edited run (`edited.Edited`), each of which comes once. A chapter
packs what is left of the windows that were under way when it began, and then the documents that no
window had: so an edit needs no more than the last call before it and how many rows of it had come.
What is left is found anew by packing these windows, when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn

import numpy as np

from feeder.workers.errors import ResumeError
from feeder.workers.sources.chapters import ALL, Edit, Left, Settings
from feeder.workers.sources.edited import Edited, edit_at, steps_of
from feeder.workers.sources.orders.edited import EditedPlan, Numbers
from feeder.workers.sources.packing import Remainder
from feeder.workers.sources.source import Source
from feeder.workers.sources.steps.ragged import Rows, Stretch, Windowed
from feeder.workers.sources.steps.rows import (
    Step,
    size_in,
)
from feeder.workers.sources.stores.reading import Columns, Record, RecordError, aside
from feeder.workers.sources.stores.records import LEFT_OUT
from feeder.workers.stream.batch import Call
from feeder.workers.stream.position import Cut
from feeder.workers.stream.spec import StreamSpec


class Documents(Step):
    """The documents of a chapter: in the epoch that it begins in first what the chapter before has
    left. Any thread reads; what is left is assigned whole, whichever thread found it."""

    def __init__(
        self, of: Edited, edit: Edit | None, until: Edit | None, before: _Chapter | None
    ) -> None:
        super().__init__(of.records)
        self.kind = of.kind
        self._of, self._edit, self._until, self._before = of, edit, until, before
        self._left: list[Stretch] | None = None

    def __len__(self) -> int:
        return self.parts[0].epoch_size

    def begin(self, epoch: int) -> tuple[int, int]:
        """The first document of an epoch, and how many stretches come before it."""
        if self._edit is None or self._edit.epoch != epoch:
            return 0, 0
        return self._edit.record, 0 if self._edit.left is None else self._edit.left.num

    def rows(self, epoch: int, batch_size: int) -> int:
        """How many there are in an epoch."""
        first, num = self.begin(epoch)
        until = self._until
        is_cut = until is not None and until.epoch == epoch
        end = until.record if until and is_cut else self._of.run.route.length(epoch)
        return num + end - first

    def left(self, call: Call) -> list[Stretch]:
        """What the chapter before has left, without what is excluded from now on."""
        left = self._left
        if left is None:
            assert self._edit is not None and self._before is not None
            with aside():
                found = self._before.left(self._edit, call)
            is_out = self._excluded(np.array([one.number for one in found], np.int64), call)
            left = self._left = [
                one for one, out in zip(found, is_out, strict=True) if not out
            ]  # fmt: skip
        return left

    def _excluded(self, numbers: Numbers, call: Call) -> list[bool]:
        places = self._of.run.route(numbers, call)
        told = []
        for part, epoch, position in np.stack(places).T.tolist():
            source: Any = self._of.records.parts[part]
            out = False
            now = self._settings.parts.get(self._of.run.names[part])
            if now is not None and isinstance(getattr(source, "_plan", None), EditedPlan):
                own = self._of.records._own(part, call._replace(epoch=epoch))
                record = source._order(own.seed).at(epoch, np.array([position]))
                ranks = now.selection.ranks(np.concatenate((record, record + 1)))
                out = bool(ranks[0] == ranks[1])
            told.append(out)
        return told

    @property
    def _settings(self) -> Settings:
        return self._of.run.settings if self._until is None else self._until.was

    def stretches(self, indices: Numbers, call: Call) -> list[Stretch]:
        """Which documents, and what of them, some of an epoch are."""
        first, num = self.begin(call.epoch)
        has_left = num and len(indices) and int(indices.min()) < num
        left = self.left(call) if has_left else []
        if has_left and len(left) != num:
            raise ResumeError(
                f"{num} documents were left at the edit at step "
                f"{self._edit.step if self._edit else 0}, and {len(left)} are now: "
                "the documents before it are others than they were"
            )
        return [left[i] if i < num else Stretch(first + i - num, 0, None) for i in indices.tolist()]

    def samples(self, indices: Numbers, call: Call) -> list[Any]:
        """The documents, or what is left of them."""
        found = self.stretches(indices, call)
        numbers = np.array([one.number for one in found], np.int64)
        samples = self.parts[0].samples(numbers, call) if found else []
        return [
            sample if sample is LEFT_OUT or (one.start, one.stop) == (0, None)
            else Remainder(sample, one.start, one.stop)
            for sample, one in zip(samples, found, strict=True)
        ]  # fmt: skip

    def read(self, indices: Numbers, call: Call) -> Columns | None:
        """Records, which are left as a whole."""
        numbers = [one.number for one in self.stretches(indices, call)]
        return self.parts[0].read(np.array(numbers, np.int64), call)

    def origins(self, indices: Numbers, call: Call) -> list[tuple[Record, ...]]:
        """The records that documents are of."""
        numbers = [one.number for one in self.stretches(indices, call)]
        return self.parts[0].origins(np.array(numbers, np.int64), call)

    def name_in(self, index: int, call: Call) -> str:
        """What the source calls the document."""
        (one,) = self.stretches(np.array([index]), call)
        return self.parts[0].name_in(one.number, call)


class _Chapter:
    """Calls that pack in one way."""

    def __init__(
        self, step: Windowed, documents: Documents, edit: Edit | None, until: Edit | None,
        of: Settings,
    ) -> None:  # fmt: skip
        self.step, self.documents, self.seed = step, documents, of.seed
        assert of.packing is not None
        self._sizes = ", ".join(f"{k}={v}" for k, v in of.packing.items() if k != "source")
        self.epoch, self.call = (edit.epoch, edit.call) if edit else (-1, 0)
        self.until = until
        self._rowless: Columns | None = None

    def record(self, epoch: int, index: int) -> int:
        """The record that a call gives."""
        return index - self.call if epoch == self.epoch else index

    def num_calls(self, epoch: int) -> int:
        """The number of the call after the last of an epoch."""
        first = self.call if epoch == self.epoch else 0
        return first + self.step.records_of(self.documents.rows(epoch, 1))

    def own(self, call: Call) -> Call:
        """A call as the windows see it."""
        return call._replace(seed=self.seed)

    def read(self, call: Call, record: int) -> Columns | None:
        """The rows of a call: before an edit those that came then."""
        columns = self.step.read(np.array([record]), self.own(call))
        num = self._num_rows(call)
        return columns if columns is None or num is None else _first(columns, num)

    def read_origins(self, call: Call, record: int) -> list[tuple[Any, ...]]:
        """What these rows are made of."""
        rows = self.step.read_origins(np.array([record]), self.own(call))
        return rows[: self._num_rows(call)]

    def _num_rows(self, call: Call) -> int | None:
        """So many rows of a call come before an edit; None if all do."""
        until = self.until
        if until is None or until.left is None or until.left.rows == ALL:
            return None
        is_last = (until.epoch, until.call) == (call.epoch, call.index + 1)
        return until.left.rows if is_last else None

    def rowless(self, call: Call) -> Columns:
        """Columns without rows."""
        made = self._rowless
        if made is None:
            size = self.step.records_of(size_in(self.documents, call.epoch))
            at = self.record(call.epoch, call.index)
            own = self.own(call)
            for record in chain(range(at, size), range(min(at, size))):
                columns = self.step.read(np.array([record]), own)
                if columns is not None:
                    made = self._rowless = _first(columns, 0)
                    break
            else:
                raise RecordError(
                    f"{self.step.kind}: no document of epoch {call.epoch} has a row: each is "
                    f"left out, empty, or does not fit ({self._sizes})"
                )
        return made

    def left(self, edit: Edit, call: Call) -> list[Stretch]:
        """What has not come before an edit that ends it."""
        assert edit.left is not None
        return self.end(edit.epoch, edit.call, edit.left.rows, call)[0]

    def end(self, epoch: int, call: int, rows: int, like: Call) -> tuple[list[Stretch], int]:
        """What has not come before a call of an epoch, of whose call before only so many rows have,
        and the first document that no window has had."""
        like = self.own(like._replace(epoch=epoch))
        record = self.record(epoch, call) - 1
        first, num = self.documents.begin(epoch)
        left: list[Stretch] = []
        end = 0
        if record >= 0:
            found, end = self.step.left_of(record, 2**62 if rows == ALL else rows, like)
            whole = self.documents.stretches(
                np.array([one.number for one in found], np.int64), like
            )
            left = [
                Stretch(of.number, one.start, one.stop)
                for one, of in zip(found, whole, strict=True)
            ]  # fmt: skip
        # What the chapter before has left, and this one has had in no window either.
        left += self.documents.stretches(np.arange(end, num), like)
        return left, first + max(0, end - num)


@contextmanager
def _finding() -> Iterator[None]:
    """Windows are packed, to find a place: what cannot be read is an error of the resume."""
    try:
        with aside():
            yield
    except RecordError as error:
        raise ResumeError(f"what is left of windows cannot be found: {error}") from error


def _first(columns: Columns, num: int) -> Columns:
    """So many rows."""
    if isinstance(columns, Mapping):
        return {name: column[:num].copy() for name, column in columns.items()}
    return tuple(column[:num].copy() for column in columns)


class _Windows(Step):
    """The windows of all chapters: record n of an epoch is its call n."""

    def __init__(self, chapters: Sequence[_Chapter]) -> None:
        # Reads that were left out are those of the documents, which are the same in all chapters.
        super().__init__(chapters[-1].step)
        self.kind = self.parts[0].kind
        self.chapters = chapters

    def name_in(self, index: int, call: Call) -> str:
        """The window of a call."""
        chapter = self.of(call.epoch, index)
        return chapter.step.name(chapter.record(call.epoch, index))

    def of(self, epoch: int, index: int) -> _Chapter:
        """The chapter that a call is of."""
        return next(c for c in reversed(self.chapters) if (c.epoch, c.call) <= (epoch, index))

    def read(self, indices: Numbers, call: Call) -> Columns | None:
        """The rows of a call."""
        chapter = self.of(call.epoch, call.index)
        return chapter.read(call, chapter.record(call.epoch, call.index))

    def read_origins(self, indices: Numbers, call: Call) -> list[tuple[Any, ...]]:
        """What the rows of a call are made of."""
        chapter = self.of(call.epoch, call.index)
        return chapter.read_origins(call, chapter.record(call.epoch, call.index))


def _step(given: Source) -> Windowed:
    """What makes rows of a source's records."""
    records: Any = given.records
    return records if isinstance(records, Windowed) else Rows(given, 1)


class Repacked(Edited):
    """See the module. Never changes, but for what chapters know of what is left."""

    records: Any

    def __init__(
        self, given: Source, edits: Sequence[Edit], now: Settings, history: Sequence[Any]
    ) -> None:
        """As of `Edited`; `given` packs, or makes batches."""
        step: Any = _step(given)
        self.documents = Edited(step.parts[0], edits, now, ())
        begins: list[Edit | None] = [None, *(edit for edit in edits if edit.left is not None)]
        chapters: list[_Chapter] = []
        for edit, until in zip(begins, [*begins[1:], None], strict=True):
            before = chapters[-1] if chapters else None
            documents = Documents(self.documents, edit, until, before)
            of = until.was if until else now
            packed = step.repacked(documents, of.packing)
            chapters.append(_Chapter(packed, documents, edit, until, of))
        Source.__init__(self, _Windows(chapters))
        self.given, self._history, self.run = given, history, self.documents.run

    def _span(self, call: Call) -> tuple[int, int]:
        chapter = self.records.of(call.epoch, call.index)
        return call.index, min(call.index + 1, chapter.num_calls(call.epoch))

    def num_calls(self, epoch: int) -> int:
        """The calls that an epoch has."""
        num: int = self.records.of(epoch, 2**62).num_calls(epoch)
        return num

    def _no_rows(self, call: Call) -> Columns:
        rowless: Columns = self.records.of(call.epoch, call.index).rowless(call)
        return rowless

    def waiting(self, name: str, epoch: int, edit: Edit) -> set[int]:
        """Where documents of a source lie in a pass that are left of windows."""
        if edit.left is None:
            return set()
        left = self.records.chapters[-1].left(edit, Call(0, edit.epoch, 0, 1, 0))
        numbers = np.array([one.number for one in left], np.int64)
        places = np.stack(self.run.route(numbers, Call(0, edit.epoch, 0, 1, 0)))
        return {
            position
            for part, of_pass, position in places.T.tolist()
            if (self.run.names[part], of_pass) == (name, epoch)
        }

    is_whole = False

    def walk(self, cut: Cut, stream: StreamSpec) -> Any:
        """A walk from a place on."""
        return _Walk(self, cut, stream)

    def edit_at(self, given: Source, now: Settings, note: str, **place: int) -> Edit:
        """The edit that makes the run go on with a source at a place, of whose last call so many
        `rows` have come."""
        documents: Any = _step(given).parts[0]
        rows = place.pop("rows")
        edit = edit_at(self.run, documents, steps_of(documents), now, note, **place)
        if edit.rest is None and now.packing == self.run.settings.packing:
            return edit
        draft = Repacked(given, [*self.run.edits, edit._replace(left=Left(rows, 0))], now, ())
        with _finding():
            left = draft.records.chapters[-1].documents.left(Call(0, edit.epoch, 0, 1, now.seed))
        return edit._replace(left=Left(rows, len(left)))

    def rows(self, epoch: int, batch_size: int) -> NoReturn:
        """Raises TypeError: nobody knows how many rows there are before they are read."""
        raise TypeError(f"the number of rows of {self.kind} is not known before they are read")

    def positions_of(self, name: str, records: Numbers, epoch: int) -> Numbers:
        """Where documents of a source come in a pass."""
        return self.documents.positions_of(name, records, epoch)

    def read_of_sources(self, call: Call) -> dict[str, dict[str, Any]]:
        """Nothing: windows read ahead of their rows."""
        return {}


class _Walk:
    """As `edited.Walk`, of windows: they are packed to count their rows. So many rows of a call
    have come, and all of the calls before it."""

    def __init__(self, source: Repacked, cut: Cut, stream: StreamSpec) -> None:
        self._source, self._stream = source, stream
        self._known: dict[tuple[int, int], int] = {}
        self.epoch, self._call, self._taken = cut.position.epoch, cut.position.calls[0], 0
        if (leftover := cut.leftover) is not None:
            self._call, self._taken = leftover.call, leftover.taken
            if (now := self._rows(self._call)) != leftover.rows:
                what = f"{leftover.rows} rows then, {now} now"
                raise stream.not_repeatable(0, leftover.call, what)

    def _rows(self, call: int) -> int:
        """The rows of a call of the epoch; -1 behind its end."""
        key = self.epoch, call
        if call >= self._source.records.of(*key).num_calls(self.epoch):
            return -1
        if key not in self._known:
            with _finding():
                columns = self._source.records.read(np.array([call]), self._stream.call(*key))
            arrays = columns.values() if isinstance(columns, Mapping) else columns or [()]
            self._known[key] = len(next(iter(arrays)))
        return self._known[key]

    def has(self, num: int) -> bool:
        """Whether the epoch has so many rows more."""
        call, num = self._call, num + self._taken
        while num > 0 and (rows := self._rows(call)) >= 0:
            call, num = call + 1, num - rows
        return num <= 0

    def go(self, num: int | None) -> None:
        """Over so many rows, or to the epoch's end; over those of a call if None."""
        while (rows := self._rows(self._call)) >= 0:
            if num is not None and self._taken + num < rows:
                self._taken += num
                return
            left = None if num is None else num - (rows - self._taken)
            self._call, self._taken = self._call + 1, 0
            if left == 0 or (left is None and rows):
                return
            num = left

    def next_epoch(self) -> None:
        """To the start of the next one."""
        self.epoch, self._call, self._taken = self.epoch + 1, 0, 0

    def place(self) -> tuple[int, dict[str, int]]:
        """The next call of which no row has come, and what `edit_at` has to know more."""
        call, rows = (self._call + 1, self._taken) if self._taken else (self._call, ALL)
        chapter = self._source.records.of(self.epoch, call)
        with _finding():
            _, record = chapter.end(self.epoch, call, rows, self._stream.call(self.epoch, 0))
        return call, {"record": record, "rows": rows}
