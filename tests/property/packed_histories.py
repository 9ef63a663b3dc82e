"""Runs of packed documents that are edited, drawn: each row is what a naive model of the run says.

The documents are those of `histories.Model`, which has lists of them. Here is what windows make of
them: what is left of a window that is half-used comes first, and each token once. Which documents
the window would have had, the run tells that goes on without the edit. Each document has a tag of
its own in each pass, so that no two are taken for one another.

`python -m property.histories` draws these, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from feeder import sources
from feeder.state.snapshot import Snapshot
from property.histories import NAMES, PLAIN, UNIT, Data, History, Made, Model, draw_edit
from property.histories import draw_made as draw_records

COLUMNS = ["tokens", "segment_ids", "positions", "loss_mask"]
TAGS = 2**24
LONGEST = 13
KINDS = ("seq_len", "window", "both")

Instance = tuple[int, int]
"""A document: its number among those of all sources, and the tag of the pass."""


def length(number: int) -> int:
    """Tokens of a document."""
    return number * 7919 % LONGEST + 1


def document(number: Any, rng: Any) -> Any:
    """Its tokens: each says which one it is, and of which pass."""
    tag, number = int(rng.integers(TAGS)), int(number)
    return (number * LONGEST + np.arange(length(number))) * TAGS + tag


@dataclass(frozen=True)
class PackedMade(Made):
    """What a run of packed documents is made of."""

    seq_len: int = 8
    window: int = 4
    long: str = "split"

    def source(self, *, all_known: bool) -> Any:
        documents = super().source(all_known=all_known).map(document)
        return sources.pack(documents, self.seq_len, self.window, self.long)  # type: ignore[arg-type]


@dataclass
class Stretch:
    """What is to come of a document."""

    of: Instance
    start: int
    stop: int
    came: list[tuple[int, int]] = field(default_factory=list)

    def has(self, of: Instance, start: int, stop: int) -> bool:
        return self.of == of and self.start <= start and stop <= self.stop

    def end(self, made: PackedMade) -> int:
        """Where it ends in rows of these."""
        cut = made.long == "truncate"
        return min(self.stop, self.start + made.seq_len) if cut else self.stop

    def is_done(self, made: PackedMade) -> bool:
        return sum(b - a for a, b in self.came) == self.end(made) - self.start

    def left(self, made: PackedMade) -> list[Stretch]:
        """What has not come of it."""
        if not self.came:
            return [self]
        left, at = [], self.start
        for start, stop in (*sorted(self.came), (self.end(made), self.end(made))):
            if at < start:
                left.append(Stretch(self.of, at, start))
            at = stop
        return left


class PackedModel:
    """A run, row by row. Raises `AssertionError` at the first row that cannot be."""

    def __init__(self, made: PackedMade) -> None:
        self.made, self.documents = made, Model(made)
        self.left: list[Stretch] = []
        self._begin()

    def _begin(self) -> None:
        self.window: list[Stretch] = []
        self.rows = 0

    # -- windows

    @property
    def _size(self) -> int:
        """Documents of the window."""
        return min(self.made.window, len(self.left) + self.documents.left)

    @property
    def is_begun(self) -> bool:
        """Whether the window at hand has had a row."""
        return self.rows > 0

    @property
    def is_over(self) -> bool:
        """Whether the epoch has no row more."""
        return not self.is_begun and not self._size

    def row(self, tokens: Sequence[int], segments: Sequence[int]) -> None:
        """The next row of the run."""
        assert not self.is_over, "a row behind the end of the epoch"
        self.rows += 1
        assert len(tokens) == self.made.seq_len
        at = 0
        for number in range(1, max(segments) + 1):
            size = list(segments).count(number)
            assert list(segments[at : at + size]) == [number] * size
            self._piece([int(token) for token in tokens[at : at + size]])
            at += size
        assert not any(segments[at:])
        done = sum(one.is_done(self.made) for one in self.window)
        if done == len(self.window) == self._size:
            self._end()

    def _piece(self, tokens: list[int]) -> None:
        numbers = [token // TAGS for token in tokens]
        number, first = divmod(numbers[0], LONGEST)
        of, stop = (number, tokens[0] % TAGS), first + len(tokens)
        assert tokens == [(number * LONGEST + i) * TAGS + of[1] for i in range(first, stop)], (
            "tokens of two documents"
        )
        known = next((one for one in self.window if one.has(of, first, stop)), None)
        known = known or next((one for one in self.left if one.has(of, first, stop)), None)
        known = known or Stretch(of, 0, length(number))
        if not any(one is known for one in self.window):
            self.window.append(known)
        seq_len, end = self.made.seq_len, known.end(self.made)
        assert (first - known.start) % seq_len == 0, "a piece begins within a row of a document"
        assert stop == min(end, first + seq_len), "a piece ends before its row"
        assert not any(a < stop and first < b for a, b in known.came), "a token comes twice"
        known.came.append((first, stop))

    def _end(self) -> None:
        """All of the window has come."""
        old = [one for one in self.window if any(one is other for other in self.left)]
        assert len(old) == min(len(self.left), self.made.window), "what is left comes first"
        sizes = [
            min(self.made.seq_len, one.end(self.made) - at)
            for one in self.window
            for at in range(one.start, one.end(self.made), self.made.seq_len)
        ]
        assert self.rows == num_rows(sizes, self.made.seq_len)
        new = [one.of[0] for one in self.window if not any(one is other for other in old)]
        self.left = [one for one in self.left if not any(one is other for other in old)]
        while new:
            # Within a block they come in any order.
            number = next(number for number in new if self._is_next(number))
            new.remove(number)
            self.documents.row(number)
        self._begin()

    def _is_next(self, number: int) -> bool:
        """Whether a document may be the next one."""
        documents, (kind, record) = self.documents, divmod(number, UNIT)
        assert documents.left
        name = PLAIN if PLAIN in documents.made.parts else NAMES[kind]
        if not documents._block[name]:
            return False
        now = documents.passes[name]
        if not now.num_left:
            # The next pass has begun.
            of_pass = documents.made.parts[name].pass_of(now.epoch + 1, documents.made.seed)
            return of_pass[0] == record
        return record in now.left if now.any_order else now.left[0] == record

    # -- what changes

    def end_epochs(self) -> None:
        """An epoch ends if it has no row more."""
        while self.is_over:
            self.documents.end_epoch()

    def edit(self, made: PackedMade, came: list[Stretch]) -> None:
        """From here on the run is made of this; of the window at hand so much had come."""
        had = {(one.of, one.start): one for one in came}
        left = [
            rest
            for one in (had.get((one.of, one.start), replace(one, came=[])) for one in self.last)
            for rest in one.left(self.made)
        ]
        self.left = [one for one in [*left, *self.left] if not is_excluded(one.of[0], made)]
        self.documents.edit(made)
        self.made = made
        self._begin()

    last: Sequence[Stretch] = ()
    """What the window had in all, if it is half-used."""


def is_excluded(number: int, made: PackedMade) -> bool:
    """Whether a document is excluded."""
    kind, record = divmod(number, UNIT)
    data: Data | None = made.parts.get(PLAIN) or made.parts.get(NAMES[kind])
    return data is not None and any(a <= record < b for a, b in data.excluded)


def num_rows(sizes: list[int], seq_len: int) -> int:
    """Rows of documents of these lengths: the longest first, each in the fullest row with room."""
    room: list[int] = []
    for size in sorted(sizes, reverse=True):
        fits = [free for free in room if free >= size]
        if fits:
            room.remove(min(fits))
        room.append((min(fits) if fits else seq_len) - size)
    return len(room)


class PackedHistory(History):
    """A run of packed documents that is edited, beside its model."""

    names = COLUMNS
    last_batches = ("keep",)

    def draw_made(self) -> Any:
        of, draw = draw_records(self.draw), self.draw
        return PackedMade(
            of.parts, of.weights, of.mode, of.batch, of.seed, seq_len=draw.randint(3, 16),
            window=draw.randint(1, 9), long=draw.choice(["split", "split", "truncate"]),
        )  # fmt: skip

    def draw_edit(self, made: Any) -> tuple[str, Any]:
        if self.draw.random() < 0.7:
            return draw_edit(self.draw, made)
        kind = self.draw.choice(KINDS)
        sizes = {"seq_len": self.draw.randint(3, 16), "window": self.draw.randint(1, 9)}
        return kind, replace(made, **(sizes if kind == "both" else {kind: sizes[kind]}))

    def model_of(self, made: Any) -> Any:
        return PackedModel(made)

    def _end_epochs(self) -> None:
        self.model.end_epochs()

    def _edit(self, made: Any) -> None:
        model: PackedModel = self.model
        was = model.made
        then, now = ((m.parts, m.shares, m.seed, m.seq_len, m.window) for m in (was, made))
        if then == now:
            model.made = model.documents.made = made
            return
        self.keeps_batch = self.keeps_batch and made.seq_len == was.seq_len
        came, model.last = [replace(one, came=[*one.came]) for one in model.window], ()
        if model.is_begun:
            window = self._rest_of_window()
            model.last = window
        model.edit(made, came)

    def _rest_of_window(self) -> list[Stretch]:
        """The window at hand, by the run that goes on without an edit."""
        model: PackedModel = self.model
        window = model.window
        with self.feed(self.made, 1, self.state) as coordinator:
            for batch in coordinator["train"]:
                for row in self._rows_of(batch):
                    if model.window is not window:
                        return window
                    model.row(*row)
                if model.window is not window:
                    return window
        raise AssertionError("the window does not end")

    def _rows_of(self, batch: Any) -> list[Any]:
        return list(zip(batch["tokens"].tolist(), batch["segment_ids"].tolist(), strict=True))

    def _note(self, batch: Any) -> None:
        assert batch.step == len(self.batches), (batch.step, len(self.batches))
        rows = self._rows_of(batch)
        self.batches[batch.step] = rows
        self._end_epochs()
        assert batch.epoch == self.model.documents.epoch, (batch.epoch, self.model.documents.epoch)
        for row in rows:
            self.model.row(*row)
        assert len(rows) == self._rows or self.model.is_over, "short"

    def replay(self) -> None:
        data = self.state["feeder"] if isinstance(self.state, dict) else self.state
        start = Snapshot.from_bytes(data).at_start()
        with self.feed(self.made, 1, start) as coordinator:
            for batch in islice(coordinator["train"], len(self.batches)):
                assert self._rows_of(batch) == self.batches[batch.step], batch.step
        self.done["replays"] += 1
