"""Mixtures whose record n is found by reading those before it: by tokens, or of sources whose rows
are not one for each record.

Which source gives the next row follows from what all of them have given: the one that is furthest
behind its share. So the mixture is walked through, row by row, under a lock, and remembers the
*places* where calls ended: a cursor of each source, and by how much it is behind. A position holds
the last of these (`cursor_at`); without it the walk begins at the start of the stream.
"""

from __future__ import annotations

import json
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ResumeError
from feeder.workers.sources.orders.blocks import OnExhausted
from feeder.workers.sources.orders.blocks import Step as Weights
from feeder.workers.sources.steps.rows import Step, part_of
from feeder.workers.sources.stores.kept import Kept
from feeder.workers.sources.stores.reading import RecordError
from feeder.workers.sources.stores.records import LEFT_OUT, split
from feeder.workers.stream.batch import Call

Unit = Literal["records", "tokens"]

NO_END = 2**62
"""Stands for the number of rows of an epoch, which is not known."""
_TOGETHER = 32
"""Records of a source that are read together."""
_PLACES = 4096
"""Places that are remembered: more calls than a feed is ahead, as a rule."""
_READY = 1024
"""Rows that were walked over for calls that are still to come."""


class Place(NamedTuple):
    """Where a walk stands. Plain values."""

    epoch: int
    row: int
    """Rows of the epoch before it."""
    used: int
    """The same in records or tokens, whichever the weights are of."""
    cursors: tuple[tuple[int, int, int], ...]
    """Of each source its own epoch, the chunk of it, and the row in the chunk that comes next."""
    begun: tuple[tuple[int, int, int], ...]
    """Where they stood when the epoch began."""
    behind: tuple[int, ...]
    """How far each is behind its share, in parts of a record or token."""
    rows: tuple[int, ...]
    """Rows of each source in the epoch."""
    tokens: tuple[int, ...]
    """Their tokens; 0 where a row has no length."""


class Walked(Step):
    """Rows of the parts, each time of the one that is furthest behind its share.

    Any thread reads: what changes is under the lock, which a walk holds while it reads.
    """

    kind = "mix"

    def __init__(
        self, parts: Sequence[Any], names: Sequence[str], steps: Sequence[Weights],
        mode: OnExhausted, unit: Unit,
    ) -> None:  # fmt: skip
        super().__init__(*parts)
        self.names, self._mode, self.unit = tuple(names), mode, unit
        self._steps = steps
        shares = [[w / sum(weights) for w in weights] for _, weights in steps]
        bottom = lcm(*(share.denominator for each in shares for share in each))
        self._shares = [[int(share * bottom) for share in each] for each in shares]
        self._starts = [start for start, _ in steps]
        # Rows are counted out one by one, and no record of the mixture has a number of its own.
        self.traits = replace(
            self.traits, filters=True, may_skip=True, is_last=False, one_per_call=False,
            by_sample=True, walks=True,
        )  # fmt: skip
        self._begin()

    def _begin(self) -> None:
        self._lock = Lock()
        self._chunks = Kept(4 * len(self.parts))
        self._places: dict[int, list[tuple[tuple[int, int], Place]]] = {}
        self._ready: dict[tuple[int, int, int], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        left = {"_lock": None, "_chunks": None, "_places": None, "_ready": None}
        return {**self.__dict__, **left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def of_parts(self, parts: Sequence[Any]) -> Walked:
        """The same of other parts."""
        return Walked(parts, self.names, self._steps, self._mode, self.unit)

    def __len__(self) -> int:
        return NO_END

    def name(self, index: int) -> str:
        """The row's number: which record it is follows from all before it."""
        return f"mix row {index}"

    def name_in(self, index: int, call: Call) -> str:
        """The same."""
        return self.name(index)

    # ---- reading

    def samples(self, indices: NDArray[np.int64], call: Call) -> list[Any]:
        """The rows of an epoch from the first index to the last, fewer at its end.

        Raises:
            StopIteration: there is none.
        """
        start, stop = int(indices[0]), int(indices[-1]) + 1
        found: list[Any] = []
        with self._lock:
            place = self._place_before(call.seed, call.epoch, start)
            while place.row < stop:
                if place.row == start:
                    self._remember(call.seed, place)
                key = (call.seed, place.epoch, place.row)
                taken = self._ready.pop(key, None) or self._take(place, call)
                if taken is None:
                    break
                if place.row < start:
                    # The call that it belongs to comes a little later.
                    self._ready[key] = taken
                else:
                    found.append(taken[0])
                place = taken[1]
            self._remember(call.seed, place)
            while len(self._ready) > _READY:
                del self._ready[next(iter(self._ready))]
        if not found:
            raise StopIteration
        return found

    def _take(self, place: Place, call: Call) -> tuple[Any, Place] | None:
        """The next row of an epoch, and where it leads to; None at the epoch's end."""
        cursors = list(place.cursors)
        is_once = self._mode == "drop"
        dead = {k for k, cursor in enumerate(cursors) if is_once and cursor[0] > place.epoch}
        number = bisect_right(self._starts, place.used) - 1
        while True:
            shares = self._shares[number]
            alive = [k for k, share in enumerate(shares) if share and k not in dead]
            if self._is_over(cursors, place, number):
                return None
            if not alive:
                # All that this step reads has been read; the next one reads other sources.
                number += 1
                if number == len(self._shares):
                    return None
                continue
            k = max(alive, key=lambda k: (place.behind[k], shares[k], -k))
            found = self._row(k, cursors[k], place.epoch, call)
            if found is None:
                if self._mode == "stop":
                    return None
                dead.add(k)
                continue
            sample, cursors[k] = found
            tokens = _tokens_of(sample, self.unit == "tokens")
            size = tokens if self.unit == "tokens" else 1
            behind = list(place.behind)
            for other in alive:
                behind[other] += shares[other] * size
            behind[k] -= sum(shares[other] for other in alive) * size
            rows = tuple(n + (i == k) for i, n in enumerate(place.rows))
            counted = tuple(n + tokens * (i == k) for i, n in enumerate(place.tokens))
            return sample, place._replace(
                row=place.row + 1, used=place.used + size, cursors=tuple(cursors),
                behind=tuple(behind), rows=rows, tokens=counted,
            )  # fmt: skip

    def _is_over(self, cursors: list[tuple[int, int, int]], place: Place, number: int) -> bool:
        """Whether each source that the last step reads has been read once, and goes on anew."""
        if self._mode != "repeat" or number + 1 < len(self._shares):
            return False
        return all(
            cursor >= (epoch + 1, chunk, row)
            for share, cursor, (epoch, chunk, row) in zip(
                self._shares[-1], cursors, place.begun, strict=True
            )
            if share
        )

    def _row(
        self, k: int, cursor: tuple[int, int, int], epoch: int, call: Call
    ) -> tuple[Any, tuple[int, int, int]] | None:
        """The next row of a source, and its cursor after it; None where the epoch has no more."""
        own, number, row = cursor
        first = own
        while True:
            if self._mode != "repeat" and own > epoch:
                return None
            if own > first + 1:
                raise RecordError(f"mix: source {self.names[k]!r}: no record has a row")
            chunks = self._num_chunks(k, own)
            if number >= chunks:
                own, number, row = own + 1, 0, 0
                continue
            rows = self._chunk(k, own, number, call)
            if row >= len(rows):
                number, row = number + 1, 0
                continue
            if row + 1 < len(rows):
                return rows[row], (own, number, row + 1)
            # So that it is known at once where an epoch has no more rows.
            following = number + 1
            while following < chunks and not self._chunk(k, own, following, call):
                following += 1
            return rows[row], (own, following, 0) if following < chunks else (own + 1, 0, 0)

    def _num_chunks(self, k: int, epoch: int) -> int:
        part: Any = self.parts[k]
        num: int = part.rows(epoch, 1)
        return num if part.traits.one_per_call else -(-num // _TOGETHER)

    def _chunk(self, k: int, epoch: int, number: int, call: Call) -> list[Any]:
        """Rows of a source that are read together."""
        rows: list[Any] = self._chunks.get(
            (call.seed, k, epoch, number), lambda: self._read_chunk(k, epoch, number, call)
        )
        return rows

    def _read_chunk(self, k: int, epoch: int, number: int, call: Call) -> list[Any]:
        part: Any = self.parts[k]
        own = part_of(call._replace(epoch=epoch), self.names[k])
        try:
            if part.traits.one_per_call:
                columns = part.read(np.array([number]), own)
                return [] if columns is None else split(columns)
            start = number * _TOGETHER
            stop = min(start + _TOGETHER, part.rows(epoch, 1))
            samples = part.samples(np.arange(start, stop), own)
        except RecordError as error:
            error.args = (f"mix: source {self.names[k]!r}: {error}",)
            raise
        return [sample for sample in samples if sample is not LEFT_OUT]

    # ---- places

    def _first(self, epoch: int) -> Place:
        """The start of the stream, or of an epoch of sources that are read once in each."""
        num = len(self.parts)
        cursors = ((epoch, 0, 0),) * num
        return Place(epoch, 0, 0, cursors, cursors, (0,) * num, (0,) * num, (0,) * num)

    def _place_before(self, seed: int, epoch: int, row: int) -> Place:
        """The nearest place that is known before a row."""
        places = self._places.setdefault(seed, [])
        at = bisect_right(places, (epoch, row), key=lambda entry: entry[0])
        known = places[at - 1][1] if at else None
        if self._mode != "repeat":
            return known if known and known.epoch == epoch else self._first(epoch)
        known = known or self._first(0)
        return known if known.epoch == epoch else self._walk_to(known, epoch, seed)

    def _walk_to(self, place: Place, epoch: int, seed: int) -> Place:
        """The first place of an epoch, where sources go on from one into the next."""
        while place.epoch < epoch:
            call = Call(0, place.epoch, 0, 1, seed)
            while (taken := self._take(place, call)) is not None:
                place = taken[1]
            place = place._replace(
                epoch=place.epoch + 1, row=0, used=0, begun=place.cursors,
                rows=(0,) * len(self.parts), tokens=(0,) * len(self.parts),
            )  # fmt: skip
            self._remember(seed, place)
        return place

    def _remember(self, seed: int, place: Place) -> None:
        places = self._places.setdefault(seed, [])
        key = (place.epoch, place.row)
        at = bisect_right(places, key, key=lambda entry: entry[0])
        if not at or places[at - 1][0] != key:
            insort(places, (key, place), key=lambda entry: entry[0])
        if len(places) > _PLACES:
            del places[: _PLACES // 4]

    def cursor_at(self, call: Call, row: int) -> bytes:
        """What a fresh mixture needs to go on at a row of the call's epoch at once: the nearest
        place that is known. Empty where none is."""
        with self._lock:
            places = self._places.get(call.seed, [])
            at = bisect_right(places, (call.epoch, row), key=lambda entry: entry[0])
            if not at:
                return b""
            # Numbers of any size: as texts.
            place = places[at - 1][1]
            plain = place._replace(behind=tuple(map(str, place.behind)))  # type: ignore[arg-type]
            return json.dumps(plain, separators=(",", ":")).encode()

    def read_up_to(self, call: Call, row: int, first: int = 0) -> dict[str, dict[str, Any]]:
        """What has been read of each source up to a row of the epoch, or a little less where no
        call ended there."""
        with self._lock:
            places = self._places.get(call.seed, [])
            at = bisect_right(places, (call.epoch, row), key=lambda entry: entry[0])
            place = places[at - 1][1] if at else self._first(call.epoch)
        if place.epoch != call.epoch:
            place = self._first(call.epoch)
        return {
            name: {"rows": rows, "tokens": tokens, "skipped": part.skipped}
            for name, rows, tokens, part in zip(
                self.names, place.rows, place.tokens, self.parts, strict=True
            )
        }

    def seek_to(self, call: Call, cursor: bytes) -> None:
        """Take a cursor. Raises `ResumeError` where it is none of such a mixture."""
        try:
            epoch, row, used, cursors, begun, behind, rows, tokens = json.loads(cursor)
            place = Place(
                epoch, row, used, tuple(map(tuple, cursors)), tuple(map(tuple, begun)),
                tuple(map(int, behind)), tuple(rows), tuple(tokens),
            )  # fmt: skip
            if {len(each) for each in place[3:]} != {len(self.parts)}:
                raise ValueError("it is of other sources")
        except (TypeError, ValueError) as error:
            raise ResumeError(
                f"the position of the mixture cannot be read: {error}; it is one of another feed"
            ) from error
        with self._lock:
            self._remember(call.seed, place)

    def labels(self) -> list[str]:
        """The names of the parts."""
        return list(self.names)

    def describe(self) -> dict[str, Any]:
        """The parts, and how they are mixed."""
        steps = [[start, *map(str, weights)] for start, weights in self._steps]
        return {
            **super().describe(), "mix": 2, "unit": self.unit, "weights": steps,
            "on_exhausted": self._mode, "names": list(self.names),
        }  # fmt: skip


def _tokens_of(sample: Any, must: bool) -> int:
    """Tokens of a row: the length of its first column, or of its tokens; of a packed one those
    that belong to a document."""
    if isinstance(sample, Mapping):
        if "segment_ids" in sample:
            return int(np.count_nonzero(sample["segment_ids"]))
        sample = sample["tokens"] if "tokens" in sample else next(iter(sample.values()))
    elif type(sample) is tuple:
        sample = sample[0]
    try:
        return len(sample)
    except TypeError:
        if not must:
            return 0
        raise RecordError(
            "mix: unit is 'tokens', and a row has no length: its first column is a single number"
        ) from None
