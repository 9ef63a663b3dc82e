"""Caffe's `Datum`: one image and its label, as they lie in an LMDB."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from workers.sources.reading import JOIN_BYTES, EvenRows
from workers.sources.wire import BYTES, VARINT, Data, WireError, fields, int32

_CHANNELS, _HEIGHT, _WIDTH, _DATA, _LABEL, _FLOATS, _ENCODED = range(1, 8)
_NUMBERS = {_CHANNELS: "channels", _HEIGHT: "height", _WIDTH: "width", _LABEL: "label"}
_MAX_TAILS = 65536


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


class Parsed(NamedTuple):
    """What became of some records."""

    samples: list[Sample]
    """The sound ones."""
    data: Sequence[memoryview]
    """Their data, of small records alone copied."""
    errors: dict[int, ValueError]
    """What is wrong with the others, by their place among all."""


class _Alike(NamedTuple):
    """Records whose data stands in the same place behind the same head."""

    head: bytes
    stop: int
    samples: dict[bytes, Sample]
    """By what stands after the data, which is never nothing."""

    def all_of(self, values: Sequence[memoryview]) -> Parsed | None:
        """What the records are, or None where one of them is another or unknown."""
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
        return Parsed(samples, list(map(itemgetter(slice(start, self.stop)), values)), {})

    def _all_even(self, joined: bytes, size: int) -> Parsed | None:
        """The same of records of equally many bytes, which takes a quarter."""
        start, stop = len(self.head), self.stop
        if not 0 < start <= stop < size:
            return None
        heads = EvenRows(joined, size, 0, start)
        if heads.tobytes() != self.head * len(heads):
            return None
        try:
            tails = EvenRows(joined, size, stop, size).tolist()
            samples = list(map(self.samples.__getitem__, tails))
        except KeyError:
            return None
        return Parsed(samples, EvenRows(joined, size, start, stop), {})


class SampleParser:
    """Parses records, fast where they are alike.

    In most stores only the data and the label differ from record to record. All that a reader
    makes of a record, but for the data, follows from what stands before and after the data: a
    record whose head and tail were seen before is parsed already. Any thread.
    """

    def __init__(self, read: Callable[[Datum], Sample]) -> None:
        """`read` says what becomes of a Datum, from anything but its data; it may raise
        ValueError."""
        self._read = read
        self._alike = _Alike(b"", 0, {})

    def parse(self, values: Sequence[memoryview]) -> Parsed:
        """Parse records."""
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
        return Parsed(samples, data, errors)

    def _parse(self, value: memoryview) -> Sample:
        head, stop, samples = self._alike
        if value[: len(head)] == head:
            sample = samples.get(value[stop:].tobytes())
            if sample is not None:
                return sample
        sample = self._read(parse_datum(value))
        self._remember(value, sample)
        return sample

    def _remember(self, value: memoryview, sample: Sample) -> None:
        if sample.start == 0 or sample.stop == len(value):
            return
        head, alike = value[: sample.start].tobytes(), self._alike
        if alike[:2] != (head, sample.stop) or len(alike.samples) >= _MAX_TAILS:
            alike = self._alike = _Alike(head, sample.stop, {})
        alike.samples[value[sample.stop :].tobytes()] = sample
