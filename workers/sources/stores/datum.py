"""Caffe's `Datum`: one image and its label, as they lie in an LMDB.

Records of one data set have nearly the same bytes before and behind their pixels. What was parsed
once is known again by these bytes; a record that is not known is parsed field by field, and both
ways give the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feeder.workers.sources.stores.mapped import MappedRows
from feeder.workers.sources.stores.reading import JOIN_BYTES, EvenRows
from feeder.workers.sources.stores.wire import BYTES, VARINT, Data, WireError, fields, int32

_MAX_TAILS = 64 * 1024
"""So many different ends of records are remembered, with the labels that they mean."""
# A record whose ends were seen before is not parsed. The memory is bounded for data sets in
# which each label is another (2026-11-22).

_CHANNELS, _HEIGHT, _WIDTH, _DATA, _LABEL, _FLOATS, _ENCODED = range(1, 8)
_NUMBERS = {_CHANNELS: "channels", _HEIGHT: "height", _WIDTH: "width", _LABEL: "label"}


class Datum(NamedTuple):
    """A parsed Datum. Its data is not copied: `start` and `stop` say where it lies."""

    channels: int = 0
    height: int = 0
    width: int = 0
    start: int = 0
    stop: int = 0
    label: int | None = None
    """None where the record has no label."""
    encoded: bool | None = None
    """Whether the data is an image file; None where the record does not say."""


def parse_datum(value: Data) -> Datum:
    """Parse a Datum. Fields may stand in any order, the last of a kind counts, and others are
    passed over; so is `float_data`.

    Raises:
        WireError: the bytes are not a protobuf message.
    """
    # By name: the last field of a kind counts, as protobuf has it.
    found: dict[str, Any] = {}
    for number, kind, first, second in fields(value):
        if kind == BYTES and number == _DATA:
            found["start"], found["stop"] = first, second
        elif kind == VARINT and number == _ENCODED:
            found["encoded"] = first != 0
        elif kind == VARINT and number in _NUMBERS:
            found[_NUMBERS[number]] = int32(first)
        elif kind == BYTES and number == _FLOATS and (second - first) % 4:
            raise WireError(f"float_data has {second - first} bytes, which is no multiple of 4")
    return Datum(**found)


class Sample(NamedTuple):
    """What a reader makes of a Datum."""

    start: int
    """Where its data starts in the record."""
    stop: int
    """Where its data ends."""
    shape: tuple[int, ...] | None
    """Of raw pixels the shape of the row, of an image file None."""
    label: int


_SHAPE_OF, _LABEL_OF = (itemgetter(Sample._fields.index(name)) for name in ("shape", "label"))


class Parsed(NamedTuple):
    """What became of some records."""

    labels: NDArray[np.int32]
    """Of the sound ones."""
    shapes: Sequence[tuple[int, ...] | None]
    """Of the sound ones."""
    data: Sequence[memoryview]
    """Their data, of small records alone copied."""
    errors: dict[int, ValueError]
    """What is wrong with the others, by their place among all."""


def _parsed(
    samples: Sequence[Sample], data: Sequence[memoryview], errors: dict[int, ValueError]
) -> Parsed:
    labels = np.fromiter(map(_LABEL_OF, samples), np.int32, len(samples))
    return Parsed(labels, list(map(_SHAPE_OF, samples)), data, errors)


class _Tail(NamedTuple):
    """What stands after the data of a record: bytes that others share, but for its label."""

    octets: bytes
    start: int
    """Where the varint of the label starts."""
    stop: int
    """Where it ends."""
    sample: Sample

    @classmethod
    def of(cls, tail: bytes, sample: Sample) -> _Tail | None:
        """The tail of a record; None where it does not hold one label."""
        # Two labels: the last would count, and the bytes of the first could differ as well.
        ends = [end for number, kind, _, end in fields(tail) if (number, kind) == (_LABEL, VARINT)]
        if len(ends) != 1:
            return None
        start = stop = ends[0]
        start -= 1
        while tail[start - 1] >= 128:
            start -= 1
        return cls(tail, start, stop, sample)

    def labels(self, tails: NDArray[np.uint8]) -> NDArray[np.int32] | None:
        """The labels of tails as long as this one; None where one differs in anything else."""
        num, octets, start, stop = len(tails), self.octets, self.start, self.stop
        # Everything but the label has to be the same: then the sample is, too.
        if tails[:, :start].tobytes() != octets[:start] * num:
            return None
        if tails[:, stop:].tobytes() != octets[stop:] * num:
            return None
        digits = tails[:, start:stop]
        # Varints of one length: each byte but the last has its top bit set.
        if digits[:, -1].max() > 127 or digits[:, :-1].min(initial=255) < 128:
            return None
        shifts = np.arange(stop - start, dtype=np.uint64) * np.uint64(7)
        values: NDArray[np.uint64] = ((digits & 127).astype(np.uint64) << shifts).sum(axis=1)
        return values.astype(np.uint32).view(np.int32)


class _Alike(NamedTuple):
    """Records whose data stands in the same place behind the same head."""

    head: bytes
    stop: int
    samples: dict[bytes, Sample]
    """By what stands after the data, which is never nothing."""
    tails: dict[int, _Tail | None]
    """The first of those of each length."""

    def all_of(self, values: Sequence[memoryview]) -> Parsed | None:
        """What the records are, or None where one of them is another or unknown."""
        # Large records: looked at where they lie, by strided arrays over the map.
        if isinstance(values, MappedRows):
            return self._all_mapped(values)
        sizes = set(map(len, values))
        if len(sizes) == 1 and max(sizes) <= JOIN_BYTES:
            return self._all_even(b"".join(values), max(sizes))
        # Written as maps over C functions: it takes a third of what a loop does.
        start = len(self.head)
        heads = map(memoryview.tobytes, map(itemgetter(slice(start)), values))
        if set(heads) != {self.head}:
            return None
        tails = map(memoryview.tobytes, map(itemgetter(slice(self.stop, None)), values))
        try:
            samples = list(map(self.samples.__getitem__, tails))
        except KeyError:
            return None
        return _parsed(samples, list(map(itemgetter(slice(start, self.stop)), values)), {})

    def _all_mapped(self, values: MappedRows) -> Parsed | None:
        """The same of large records, whose tails may differ in length."""
        start, stop = len(self.head), self.stop
        sizes = values.sizes.tolist()
        if not 0 < start <= stop < min(sizes):
            return None
        if values.cut(0, start).octets().tobytes() != self.head * len(values):
            return None
        labels = np.empty(len(values), np.int32)
        shapes: list[tuple[int, ...] | None] = [None] * len(values)
        for size in set(sizes):
            # Tails of one length make one array; a varint label has five lengths at most.
            which = np.flatnonzero(values.sizes == size)
            some = values if len(which) == len(values) else values.take(which)
            tail = self.tails.get(size - stop)
            found = None if tail is None else tail.labels(some.cut(stop, size).octets())
            if tail is None or found is None:
                return None
            labels[which] = found
            for i in which.tolist():
                shapes[i] = tail.sample.shape
        return Parsed(labels, shapes, values.cut(start, stop), {})

    def _all_even(self, joined: bytes, size: int) -> Parsed | None:
        """The same of records of equally many bytes, which takes a quarter."""
        start, stop = len(self.head), self.stop
        if not 0 < start <= stop < size:
            return None
        heads = EvenRows(joined, size, 0, start)
        if heads.tobytes() != self.head * len(heads):
            return None
        data, tails = EvenRows(joined, size, start, stop), EvenRows(joined, size, stop, size)
        tail = self.tails.get(size - stop)
        labels = None if tail is None else tail.labels(tails.octets())
        if tail is not None and labels is not None:
            return Parsed(labels, [tail.sample.shape] * len(data), data, {})
        try:
            samples = list(map(self.samples.__getitem__, tails.tolist()))
        except KeyError:
            return None
        return _parsed(samples, data, {})


class SampleParser:
    """Parses records, fast where they are alike.

    In most stores only the data and the label differ from record to record. All that a reader
    makes of a record, but for the data, follows from what stands before and after the data: a
    record whose head and tail were seen before is parsed already. Any thread.
    """

    def __init__(self, read: Callable[[Datum], Sample]) -> None:
        """`read` says what becomes of a Datum, from anything but its data; it may raise
        ValueError. A label it takes as it is."""
        self._read = read
        self._alike = _Alike(b"", 0, {}, {})

    def parse(self, values: Sequence[memoryview]) -> Parsed:
        """Parse records."""
        # All at once where they are alike; else one by one, which finds the one that is not.
        parsed = self._alike.all_of(values)
        if parsed is not None:
            return parsed
        samples, data, errors = [], [], {}
        for i, value in enumerate(values):
            try:
                sample = self._parse(value)
            except ValueError as error:
                errors[i] = error
            else:
                samples.append(sample)
                data.append(value[sample.start : sample.stop])
        return _parsed(samples, data, errors)

    def _parse(self, value: memoryview) -> Sample:
        head, stop, samples, _ = self._alike
        if value[: len(head)] == head:
            sample = samples.get(value[stop:].tobytes())
            if sample is not None:
                return sample
        sample = self._read(parse_datum(value))
        # Assigned whole: another thread sees the old set or the new one.
        self._remember(value, sample)
        return sample

    def _remember(self, value: memoryview, sample: Sample) -> None:
        # Without a head or a tail there is nothing to recognise a record by.
        if sample.start == 0 or sample.stop == len(value):
            return
        head, alike = value[: sample.start].tobytes(), self._alike
        # Another head means another kind of store, and too many tails that nothing repeats: begun
        # again, so that memory is bounded.
        if alike[:2] != (head, sample.stop) or len(alike.samples) >= _MAX_TAILS:
            alike = self._alike = _Alike(head, sample.stop, {}, {})
        tail = value[sample.stop :].tobytes()
        alike.samples[tail] = sample
        if len(tail) not in alike.tails:
            alike.tails[len(tail)] = _Tail.of(tail, sample)
