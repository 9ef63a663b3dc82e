"""Steps that make rows of different lengths into columns: `Padded`, `Offsets`, `Budgeted`.

How long a column is follows from all rows of a call, and not from one record. So these steps make
the columns themselves, and do not give samples to be stacked later.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.sources.collate import exact_array, flat
from feeder.workers.sources.far.ahead import Touch
from feeder.workers.sources.orders.permutation import Permutation
from feeder.workers.sources.steps.rows import (
    Step,
    function,
    plain,
    size_in,
)
from feeder.workers.sources.stores.kept import Kept
from feeder.workers.sources.stores.reading import (
    Columns,
    Faults,
    ReadOnce,
    RecordError,
    masked_error,
)
from feeder.workers.sources.stores.records import LEFT_OUT, Records, split
from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import is_masked

Length = int | Mapping[Any, int] | None


def by_column(
    samples: Sequence[Any],
    name: Callable[[int], str],
    array_of: Callable[[Any], NDArray[Any]] = exact_array,
) -> tuple[dict[Any, list[NDArray[Any]]], bool]:
    """The values of samples, column by column, as arrays; and whether the columns have names.

    Args:
        samples: Of each record one, at least one.
        name: Calls the i-th sample by its name.
        array_of: Makes an array of a value.

    Raises:
        RecordError: a sample has other columns than the first, or a value is no array.
    """
    samples = flat(samples, name)
    first = samples[0]
    columns: dict[Any, list[NDArray[Any]]] = {key: [] for key, _ in items(first)}
    for i, sample in enumerate(samples):
        values = dict(items(sample))
        if values.keys() != columns.keys():
            raise RecordError(
                f"{name(i)}: has the columns {list(values)}, {name(0)} has {list(columns)}"
            )
        for key, value in values.items():
            if is_masked(type(value)):
                raise masked_error(f"{name(i)}: column {key!r}")
            try:
                array = array_of(value)
            except (TypeError, ValueError) as error:
                raise RecordError(f"{name(i)}: column {key!r} is no array: {error}") from error
            if array.dtype.hasobject:
                raise RecordError(f"{name(i)}: column {key!r} holds Python objects")
            columns[key].append(array)
    return columns, isinstance(first, Mapping)


def items(sample: Any) -> list[tuple[Any, Any]]:
    """The values of a sample with their columns: names, or numbers where there are none."""
    if isinstance(sample, Mapping):
        return [*sample.items()]
    return [*enumerate(sample if isinstance(sample, tuple) else (sample,))]


class Padded(Step):
    """Rows made as long as each other along their first axis."""

    kind = "pad"

    def __init__(self, of: Records, length: Length, value: Any) -> None:
        super().__init__(of)
        self._length, self._value = length, value
        # A row of the longest in its call has another shape in another call.
        traits = self.traits
        is_last = traits.is_last or length is None
        self.traits = replace(traits, is_last=is_last, by_sample=traits.may_skip)

    def touches(self, indices: NDArray[np.int64], call: Call) -> Iterator[Touch]:
        """What the records below read."""
        return self.parts[0].touches(indices, call)

    def _read(self, indices: NDArray[np.int64], call: Call) -> tuple[Columns | None, list[int]]:
        samples = self.parts[0].samples(indices, call)
        there = [i for i, sample in enumerate(samples) if sample is not LEFT_OUT]
        if not there:
            return None, there

        def name(i: int) -> str:
            return self.name_in(int(indices[there[i]]), call)

        return padded([samples[i] for i in there], name, self._length, self._value), there

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns | None:
        """The samples, padded and stacked."""
        return self._read(indices, call)[0]

    def samples(self, indices: NDArray[np.int64], call: Call) -> list[Any]:
        """The rows of the padded columns."""
        columns, there = self._read(indices, call)
        samples: list[Any] = [LEFT_OUT] * len(indices)
        for i, row in zip(there, [] if columns is None else split(columns), strict=True):
            samples[i] = row
        return samples

    def describe(self) -> dict[str, Any]:
        """How long rows are made, and what with."""
        length = self._length
        said = {str(k): v for k, v in length.items()} if isinstance(length, Mapping) else length
        return {**super().describe(), "length": said, "value": repr(self._value)}


def padded(
    samples: Sequence[Any], name: Callable[[int], str], length: Length, value: Any
) -> Columns:
    """Stack samples, their columns padded along the first axis of a row to a length: one for all
    columns that have an axis, or one for each that is named; without one to the longest row.

    Raises:
        RecordError: a row is longer, or is not like the others otherwise.
    """
    columns, named = by_column(samples, name)
    if isinstance(length, Mapping) and (unknown := [k for k in length if k not in columns]):
        raise RecordError(f"{name(0)}: has the columns {list(columns)}, length names {unknown}")
    made = {}
    for key, rows in columns.items():
        size = length.get(key) if isinstance(length, Mapping) else length
        untouched = isinstance(length, Mapping) and key not in length
        made[key] = _pad(rows, name, key, size, value, untouched=untouched)
    return made if named else tuple(made.values())


def _pad(
    rows: list[NDArray[Any]],
    name: Callable[[int], str],
    key: Any,
    size: int | None,
    value: Any,
    *,
    untouched: bool,
) -> NDArray[Any]:
    kind = rows[0].dtype.kind
    if kind in "SU" and rows[0].ndim == 0 and not untouched:
        return _pad_strings(rows, name, key, size)
    sizes = [row.shape[0] if row.ndim else -1 for row in rows]
    widest = max(sizes) if size is None or untouched else size
    shape = rows[0].shape[1:]
    for i, row in enumerate(rows):
        unlike = untouched and row.shape != rows[0].shape
        if (
            row.ndim != rows[0].ndim
            or row.shape[1:] != shape
            or row.dtype != rows[0].dtype
            or unlike
        ):
            raise _unlike(rows, i, name, key, ", of columns that length= names" if unlike else "")
        if sizes[i] > widest:
            raise RecordError(f"{name(i)}: column {key!r} has {sizes[i]} values, length is {size}")
    if min(sizes) == widest or rows[0].ndim == 0:
        return np.stack(rows)
    if not _holds(rows[0].dtype, value):
        raise RecordError(
            f"{name(0)} and on: column {key!r} is {rows[0].dtype}, which cannot hold {value!r}, "
            "the value that rows are filled up with: pad columns one by one, by length={name: n}"
        )
    column = np.full((len(rows), widest, *shape), value, rows[0].dtype)
    for i, row in enumerate(rows):
        column[i, : len(row)] = row
    return column


def _holds(dtype: np.dtype[Any], value: Any) -> bool:
    """Whether a column of a dtype can hold a value; one of fractions has the nearest."""
    try:
        with np.errstate(all="ignore"):
            made = np.full(np.shape(value), value, dtype)
    except (TypeError, ValueError, OverflowError):
        return False
    return dtype.kind not in "biu" or bool(np.all(made == value))


def _unlike(
    rows: Sequence[NDArray[Any]], i: int, name: Callable[[int], str], key: Any, where: str = ""
) -> RecordError:
    """The error of row i, which is not like the first one but for its length."""
    a_list = any(row.dtype == np.float64 and row.shape == (0,) for row in (rows[0], rows[i]))
    cure = "; of an empty list NumPy makes floats: make arrays of lists, with map" if a_list else ""
    return RecordError(
        f"{name(i)}: column {key!r} is {rows[i].dtype}{list(rows[i].shape)}, {name(0)} has "
        f"{rows[0].dtype}{list(rows[0].shape)}: rows may differ in their first axis alone{where}"
        f"{cure}"
    )


def _pad_strings(
    rows: list[NDArray[Any]], name: Callable[[int], str], key: Any, size: int | None
) -> NDArray[Any]:
    kind = rows[0].dtype.kind
    if size is None:
        raise RecordError(
            f"{name(0)}: column {key!r} holds strings, which need one width in all batches: give "
            "length="
        )
    for i, row in enumerate(rows):
        if row.ndim or row.dtype.kind != kind:
            what = f"{row.dtype}{list(row.shape) if row.ndim else ''}"
            raise RecordError(f"{name(i)}: column {key!r} is {what}, expected strings")
        if len(row.item()) > size:
            raise RecordError(
                f"{name(i)}: column {key!r} has {len(row.item())} characters, length is {size}"
            )
    return np.array([row.item() for row in rows], f"{kind}{size}")


class Offsets(Step):
    """Rows of different lengths one after the other, with where each begins: one row for a call.

    For a column x of rows with an axis, x.values is (1, total, ...), and x.offsets is int64 of
    (1, rows + 1): row i is `values[0, offsets[0, i]:offsets[0, i + 1]]`. Strings become their bytes
    in UTF-8. A column of single numbers stays as it is, (1, rows).
    """

    kind = "offsets"

    def __init__(self, of: Records) -> None:
        super().__init__(of)
        # Its rows are calls.
        self.traits = replace(self.traits, is_last=True, may_skip=True)

    def touches(self, indices: NDArray[np.int64], call: Call) -> Iterator[Touch]:
        """What the records below read."""
        return self.parts[0].touches(indices, call)

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns | None:
        """The rows of a call, joined."""
        samples = self.parts[0].samples(indices, call)
        there = [i for i, sample in enumerate(samples) if sample is not LEFT_OUT]
        if not there:
            return None

        def name(i: int) -> str:
            return self.name_in(int(indices[there[i]]), call)

        columns, named = by_column([samples[i] for i in there], name, _array_or_octets)
        made: dict[str, NDArray[Any]] = {}
        for key, rows in columns.items():
            first = rows[0]
            for i, row in enumerate(rows):
                # NumPy would join whole numbers and fractions as fractions.
                if row.dtype != first.dtype or row.ndim != first.ndim or (
                    row.shape[1:] != first.shape[1:]
                ):  # fmt: skip
                    raise _unlike(rows, i, name, key)
            if first.ndim == 0:
                made[str(key)] = np.stack(rows)[np.newaxis]
                continue
            values = np.concatenate(rows)
            offsets = np.zeros(len(rows) + 1, np.int64)
            np.cumsum([len(row) for row in rows], out=offsets[1:])
            made[f"{key}.values"], made[f"{key}.offsets"] = values[np.newaxis], offsets[np.newaxis]
        return made if named else tuple(made.values())


def _array_or_octets(value: Any) -> NDArray[Any]:
    """A string as its bytes; anything else as an array."""
    if not isinstance(value, (str, bytes)):
        made = exact_array(value)
        if made.ndim or made.dtype.kind not in "SU":
            return made
        value = made.item()
    # Of the value itself: an array of NumPy's would lose the NULs at its end.
    return np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)


GROUP = 8
"""So many windows are cut side by side, so that several threads have one each."""


class Stretch(NamedTuple):
    """A record, or of a document some of its tokens: those that are put before it and after it
    among them."""

    number: int
    start: int
    stop: int | None
    """None is its end."""


class Windowed(Step):
    """Windows of records, each cut into pieces.

    Record r of this step is piece `r // windows` of window `r % windows` in a group of windows: a
    window has a place for as many pieces as it has records, and the places that are left over have
    no row. So which piece a call gives follows from its index, and nothing is read but its window.
    Windows are dealt out to shards in turn: stretches would differ by a group, and in proportions.
    """

    def __init__(self, of: Records, window: int, group: int = GROUP) -> None:
        super().__init__(of)
        self._window, self._group, self._shards = window, group, 1
        # A piece may have no row, and has as many as it takes.
        self.traits = replace(self.traits, is_last=True, one_per_call=True, may_skip=True)

    def repacked(self, of: Records, packing: Mapping[str, Any]) -> Windowed:
        """The same of other records, with sizes as `describe` tells them."""
        raise NotImplementedError

    def _num_windows(self) -> int:
        return -(-self.parts[0].epoch_size // self._window)

    def __len__(self) -> int:
        return self.records_of(self.parts[0].epoch_size)

    def records_of(self, size: int) -> int:
        """How many records it has of so many."""
        windows = -(-size // self._window)
        per_shard = -(-windows // self._shards)
        return -(-per_shard // self._group) * self._group * self._window * self._shards

    def _place(self, record: int) -> tuple[int, int]:
        """The window and the piece that a record is; a window behind the last has no records."""
        shard, inside = divmod(record, len(self) // self._shards)
        group, inside = divmod(inside, self._group * self._window)
        window = group * self._group + inside % self._group
        return window * self._shards + shard, inside // self._group

    def left_of(self, record: int, rows: int, call: Call) -> tuple[list[Stretch], int]:
        """What has not come of the windows that have been begun if so many rows of a record have,
        and all of those before it; and the number of the first record that is in none of them."""
        window, piece = self._place(record)
        first, size = window - window % self._group, size_in(self.parts[0], call.epoch)
        # A piece of each window of a group comes before a further one of any.
        end = min(first + self._group if piece else window + 1, -(-size // self._window))
        left: list[Stretch] = []
        for one in range(first, end):
            left += self._left_in(one, piece + (one < window), rows * (one == window), call)
        return left, min(end * self._window, size)

    def _left_in(self, window: int, pieces: int, rows: int, call: Call) -> list[Stretch]:
        """What has not come of a window if so many pieces have, and some rows of the next."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """The window."""
        return f"window {self._place(index)[0]}"

    def dealt(self, num_shards: int) -> Self:
        """The same with windows that are dealt out to shards in turn."""
        if num_shards > (windows := self._num_windows()):
            raise ConfigError(
                f"num_shards is {num_shards}, more than the {windows} windows of the source: some "
                "shards would be empty; a smaller window makes more of them"
            )
        step = copy.copy(self)
        step._shards = num_shards
        return step

    def as_it_was(self) -> Step | None:
        """The same as it was in an earlier format, in which shards were stretches."""
        step = copy.copy(self)
        step._shards = 1
        older = super(Windowed, step).as_it_was()
        return step if older is None and self._shards > 1 else older

    def describe(self) -> dict[str, Any]:
        """Whether windows are dealt out."""
        return {**super().describe(), **({"windows": "dealt"} if self._shards > 1 else {})}


class Rows(Windowed):
    """Calls of records that may be left out: a window is a call, and has a row for each of its
    records that is there."""

    def __init__(self, of: Records, window: int) -> None:
        super().__init__(of, window, 1)
        self.kind = of.kind

    def repacked(self, of: Records, packing: Mapping[str, Any]) -> Rows:
        """The same of other records, so many in a call."""
        return Rows(of, packing["window"])

    def records_of(self, size: int) -> int:
        """How many calls so many records are."""
        return -(-size // self._window)

    def _place(self, record: int) -> tuple[int, int]:
        return record, 0

    def _numbers(self, window: int, call: Call) -> NDArray[np.int64]:
        start = window * self._window
        return np.arange(start, min(start + self._window, size_in(self.parts[0], call.epoch)))

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns | None:
        """The rows of a call."""
        return self.parts[0].read(self._numbers(int(indices[0]), call), call)

    def read_origins(self, indices: NDArray[np.int64], call: Call) -> list[tuple[Any, ...]]:
        """The records of the rows of a call."""
        return self.parts[0].read_origins(self._numbers(int(indices[0]), call), call)

    def _left_in(self, window: int, pieces: int, rows: int, call: Call) -> list[Stretch]:
        numbers = self._numbers(window, call)
        samples = self.parts[0].samples(numbers, call)
        there = [
            number
            for number, sample in zip(numbers.tolist(), samples, strict=True)
            if sample is not LEFT_OUT
        ]
        return [Stretch(number, 0, None) for number in there[rows:]]


class Budgeted(Windowed):
    """Batches of as many rows as a budget holds, when each row is as long as the longest.

    The records come in windows. Those of a window are sorted by length and cut into batches, so
    that rows of a batch are about equally long; then its batches are shuffled. Sorting in windows
    is the bucketing of tensor2tensor and fairseq (`batch_by_size`).
    """

    kind = "batch_by_tokens"

    def __init__(
        self, of: Records, budget: int, window: int, length: Callable[[Any], int] | None, value: Any
    ) -> None:
        super().__init__(of, window)
        self._budget, self._value = budget, value
        self._length_of = len if length is None else function("length", length)
        self._windows = Kept(4 * GROUP)

    def of_parts(self, parts: Sequence[Records]) -> Step:
        """The same of other parts, without the windows that were cut of these."""
        (of,) = parts
        step = Budgeted(of, self._budget, self._window, self._length_of, self._value)
        step._shards = self._shards
        return step

    def repacked(self, of: Records, packing: Mapping[str, Any]) -> Budgeted:
        """The same of other records, with a budget and windows as `describe` tells them."""
        budget, window = packing["budget"], packing["window"]
        return Budgeted(of, budget, window, self._length_of, self._value)

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns | None:
        """One batch."""
        window, number = self._place(int(indices[0]))
        if window * self._window >= size_in(self.parts[0], call.epoch):
            return None
        cut: ReadOnce = self._windows.get(
            (call.seed, call.epoch, window), lambda: ReadOnce(lambda: self._cut(window, call))
        )
        cut.note()
        batches: list[Columns] = cut.value
        return batches[number] if number < len(batches) else None

    def _cut(self, window: int, call: Call) -> list[Columns]:
        """The batches of a window."""
        start, samples, batches = self._batches(window, call)
        return [self._padded(samples, sorted(chosen), start, call) for chosen in batches]

    def _left_in(self, window: int, pieces: int, rows: int, call: Call) -> list[Stretch]:
        start, _, batches = self._batches(window, call)
        left = (start + i for chosen in batches[pieces + (rows > 0) :] for i in chosen)
        return [Stretch(number, 0, None) for number in sorted(left)]

    def _batches(self, window: int, call: Call) -> tuple[int, list[Any], list[list[int]]]:
        """The number of a window's first record, its samples, and which of them each batch has."""
        start = window * self._window
        stop = min(start + self._window, size_in(self.parts[0], call.epoch))
        samples = self.parts[0].samples(np.arange(start, stop), call)
        there = [i for i, sample in enumerate(samples) if sample is not LEFT_OUT]
        lengths = {i: self._length(samples[i], start + i, call) for i in there}
        there.sort(key=lambda i: lengths[i])
        batches: list[list[int]] = []
        for i in there:
            # Sorted: the one to be added is the longest.
            if not batches or (len(batches[-1]) + 1) * lengths[i] > self._budget:
                batches.append([])
            batches[-1].append(i)
        order = Permutation(max(1, len(batches)), f"{call.seed}/{call.epoch}/budget/{window}")
        return start, samples, [batches[k] for k in order(0, len(batches)).tolist()]

    def _padded(self, samples: list[Any], chosen: list[int], start: int, call: Call) -> Columns:
        def name(i: int) -> str:
            return self.parts[0].name_in(start + chosen[i], call)

        return padded([samples[i] for i in chosen], name, None, self._value)

    def _length(self, sample: Any, index: int, call: Call) -> int:
        def name(index: int) -> str:
            return self.parts[0].name_in(index, call)

        try:
            value = items(sample)[0][1] if self._length_of is len else plain(sample)
            length = int(self._length_of(value))
        except Exception as error:
            Faults("raise").handle(name, index, error)
            raise
        if not 0 <= length <= self._budget:
            raise RecordError(f"{name(index)}: has {length} tokens, the budget is {self._budget}")
        return length

    def describe(self) -> dict[str, Any]:
        """The budget and the window."""
        return {**super().describe(), "budget": self._budget, "window": self._window}


def check_length(length: Any) -> Length:
    """A length of rows as a user gives it, else a ConfigError."""
    values = list(length.values()) if isinstance(length, Mapping) else [length]
    for value in values:
        is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not (is_whole and value > 0) and (length is not None):
            raise ConfigError(
                f"length is {length!r}, expected a whole number of at least 1, such a number for "
                "each column by its name, or None"
            )
    checked: Length = length
    return checked
