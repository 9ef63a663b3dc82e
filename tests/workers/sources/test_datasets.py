"""Samples made one at a time: by a function, by a dataset with `__getitem__`."""

from __future__ import annotations

import cmath
import errno
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from calls import call, epoch_of
from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, SampleInfo, arrays, pack, records, samples
from feeder.workers.sources.stores import reading
from feeder.workers.stream.copying import is_sole_owner
from needs import needs_counts


def test_what_a_function_is_told() -> None:
    seen: list[SampleInfo] = []

    def fn(info: SampleInfo) -> int:
        seen.append(info)
        return info.idx_in_epoch

    source = samples(fn, 5)
    assert [chunk.tolist() for (chunk,) in epoch_of(source, 2, epoch=3)] == [[0, 1], [2, 3], [4]]
    told = [(i.idx_in_epoch, i.idx_in_batch, i.iteration, i.epoch_idx) for i in seen]
    assert told == [(0, 0, 0, 3), (1, 1, 0, 3), (2, 0, 1, 3), (3, 1, 1, 3), (4, 0, 2, 3)]


def test_a_collate_function_of_ones_own() -> None:
    def collate(samples: Any) -> Any:
        return (np.array([sum(sample) for sample in samples]),)

    (column,) = records([[1], [1, 2], [1, 2, 3]], collate=collate)(call(0, 3))
    assert column.tolist() == [1, 3, 6]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ((1, 2, 3), "sample 1: is a tuple of 3, sample 0 is a tuple of 2"),
        (5, "sample 1: is a int, sample 0 is a tuple of 2"),
        ({"a": 1, "b": 2}, "sample 1: is a dict of 2, sample 0 is a tuple of 2"),
        (
            (1, [2]),
            r"sample 1: column 1 is int64\[1\], sample 0 has int64\[\]: the rows of a batch must "
            r"be alike: bring them to one shape, or give collate= a function that does$",
        ),
        ((1, 2.0), r"sample 1: column 1 is float64\[\], sample 0 has int64\[\]: .* must be alike$"),
        ((1, [[1], [1, 2]]), "sample 1: column 1 is no array"),
        ((1, None), "sample 1: column 1 is None, expected numbers"),
        ((1, 1 << 90), "sample 1: column 1 holds Python objects"),
        (None, "sample 1: is None, sample 0 is a tuple of 2"),
    ],
)
def test_samples_that_do_not_fit_each_other(other: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        records([(1, 2), other])(call(0, 2))


@pytest.mark.parametrize("samples", [[None, None], [0, None]])
def test_a_sample_that_is_none_is_named(samples: Any) -> None:
    told = f"sample {samples.index(None)}: sample is None, expected numbers"
    with pytest.raises(RecordError, match=told):
        records(samples)(call(0, 2))


short_bytes = st.binary(max_size=3)
short_texts = st.text("a\0é", max_size=3)
strings = st.one_of(
    *(st.lists(one | st.lists(one, min_size=1, max_size=2), min_size=1, max_size=4)
      for one in (short_bytes, short_texts)),
    st.lists(st.lists(short_texts | st.integers(0, 9), min_size=2, max_size=2), min_size=1),
)  # fmt: skip


@given(strings)
@example([b"ab", b"a\0"])
@example([["a", "b\0"]])
@example([["a", 1]])
@pytest.mark.parametrize("step", ["none", "pad", "offsets"])
def test_strings_are_the_same_in_a_batch_or_an_error(step: str, values: list[Any]) -> None:
    source = records([{"x": value} for value in values])
    source = {"none": source, "pad": source.pad(5), "offsets": source.offsets()}[step]
    try:
        made = source(call(0, len(values)))
    except RecordError:
        return
    if step != "offsets":
        rows = made["x"].tolist()
        if step == "pad" and isinstance(values[0], list):
            rows = [row[: len(value)] for row, value in zip(rows, values, strict=True)]
        assert rows == values
        return
    joined, places = made["x.values"][0], made["x.offsets"][0].tolist()
    rows = [joined[a:b] for a, b in pairwise(places)]
    if joined.dtype == np.uint8:
        wanted = [v.encode() if isinstance(v, str) else v for v in values]
        assert [row.tobytes() for row in rows] == wanted
    else:
        assert [row.tolist() for row in rows] == values


def test_a_string_that_an_array_cannot_hold_is_named() -> None:
    for value in (b"b\0", "b\0", ["a", "b\0"]):
        with pytest.raises(RecordError, match=r"sample 1: .*'b\\x00' ends with a zero, .* map"):
            records([{"x": value}] * 2)(call(1, 1))
    with pytest.raises(RecordError, match="sample 0: column 'x' is no array: int beside str, of"):
        records([{"x": ["a", 1]}])(call(0, 1))


whole = st.integers(-(2**63), 2**64 - 1) | st.sampled_from([2**53, 2**53 + 1, 2**60])


@given(st.lists(whole | st.floats(allow_nan=False), min_size=1, max_size=3))
@example([2**63, -1])
@example([2**53 + 1, 0.5])
def test_numbers_of_a_list_are_the_same_or_an_error(value: list[Any]) -> None:
    try:
        made = records([{"x": value}])(call(0, 1))
    except RecordError as error:
        assert re.search("which cannot hold it: make an array|holds Python objects", str(error))
        return
    assert made["x"][0].tolist() == value  # type: ignore[call-overload]


one_number = st.integers(-(2**65), 2**65) | st.floats() | st.booleans() | st.complex_numbers()
kinds = st.sampled_from([int, float, np.int16, np.uint64, np.float32, np.bool_, np.complex64])


@given(st.lists(one_number, min_size=1, max_size=4), st.none() | kinds)
@example([2**63, 1], None)
@example([1, 2**63], None)
def test_a_column_of_numbers_is_what_numpy_makes_of_each(values: list[Any], kind: Any) -> None:
    if kind is not None:
        values = [kind(one.real % 100 if cmath.isfinite(one) else 0) for one in values]
    each = [np.asarray(value) for value in values]
    is_like = len({one.dtype for one in each}) == 1 and not each[0].dtype.hasobject
    try:
        (made,) = records(values)(call(0, len(values)))
    except RecordError:
        assert not is_like
        return
    assert is_like and isinstance(made, np.ndarray)
    assert made.dtype == each[0].dtype and made.tobytes() == np.stack(each).tobytes()


errors = st.sampled_from([
    OSError(errno.EIO, "a moment"), OSError("a moment"), TimeoutError("late"), ConnectionError(),
    FileNotFoundError(errno.ENOENT, "gone"), PermissionError(errno.EACCES, "no"), ValueError("bad"),
])  # fmt: skip


@given(
    st.dictionaries(st.integers(0, 9), st.tuples(errors, st.integers(1, 5)), max_size=4),
    st.sampled_from(["samples", "records", "map", "map that draws"]),
)
def test_an_error_that_passes_is_no_defect(
    failing: dict[int, tuple[Exception, int]], kind: str
) -> None:
    seen, rows = Counter[int](), {}

    def read(record: int) -> int:
        seen[record] += 1
        error, times = failing.get(record, (None, 0))
        if error is not None and seen[record] <= times:
            raise error
        return record

    def sample(info: SampleInfo) -> Any:
        rows[info.idx_in_epoch] = info.idx_in_batch
        return read(info.idx_in_epoch), info.rng.random()

    class Dataset:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> Any:
            return read(index), 0

    def drawing(record: int, rng: Any) -> Any:
        # Drawn before it fails: another attempt draws the same.
        draw = rng.random()
        return read(record), draw

    def make(on_error: Any) -> Any:
        if kind == "samples":
            return samples(sample, 10, on_error=on_error)
        if kind == "records":
            return records(Dataset(), on_error=on_error)
        fn = drawing if "draws" in kind else lambda record: (read(record), 0)
        return records(range(10)).map(fn, on_error=on_error)

    def lasts(error: Exception) -> bool:
        return isinstance(error, ValueError | FileNotFoundError | PermissionError)

    lost = {i for i, (error, times) in failing.items() if lasts(error) or times > 3}
    source = make("skip")
    chunks = [*epoch_of(source, 4)]
    assert np.concatenate([c[0] for c in chunks]).tolist() == [*({*range(10)} - lost)]
    assert source.skipped == len(lost)
    draws = np.concatenate([c[1] for c in chunks])
    assert {i: seen[i] for i in failing} == {
        i: 1 if lasts(error) else min(times, 3) + 1 for i, (error, times) in failing.items()
    }
    if kind == "samples":
        assert rows == {i: i % 4 for i in range(10)}
    failing.clear()
    wanted = np.concatenate([c[1] for c in epoch_of(make("raise"), 4)])
    assert draws.tolist() == np.delete(wanted, [*lost]).tolist()


def test_records_that_are_left_out_are_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_SKIPS_LISTED", 3)

    def read(record: int) -> int:
        if record % 2:
            raise (
                FileNotFoundError(errno.ENOENT, "No such file") if record == 1 else ValueError("x")
            )
        return record

    source = records(range(12)).map(read, on_error="skip")
    assert [n for (c,) in epoch_of(source, 5) for n in c.tolist()] == [0, 2, 4, 6, 8, 10]
    assert [record.message for record in caplog.records] == [
        "left out sample 1: No such file", "left out sample 3: x", "left out sample 5: x",
        "more records that are left out are counted alone: source.skipped",
    ]  # fmt: skip
    assert source.skipped == 6


def test_an_error_that_passes_is_for_the_feed_if_no_record_is_left_out() -> None:
    seen = Counter[int]()

    def read(record: int) -> int:
        seen[record] += 1
        raise TimeoutError("late")

    for source in (samples(lambda info: read(0), 1), records(range(1)).map(read)):
        seen.clear()
        with pytest.raises(RecordError, match="sample 0: late"):
            source(call(0, 1))
        assert seen[0] == 1


@pytest.mark.parametrize("masked", [np.ma.array([1, 2], mask=[0, 1]), np.ma.masked])
def test_a_mask_is_not_lost(masked: Any) -> None:
    given = [np.array([1, 2]), masked]
    with pytest.raises(RecordError, match=r"^sample 1: sample has a mask, .*: give filled\(\)$"):
        records(given)(call(0, 2))
    source = arrays(np.arange(2)).map(lambda number: given[number])
    with pytest.raises(RecordError, match=r"^row 1: sample has a mask"):
        source(call(0, 2))
    with pytest.raises(RecordError, match=r"^row 1: column 0 has a mask"):
        source.pad(2)(call(0, 2))
    with pytest.raises(RecordError, match=r"^row 1: the document has a mask"):
        pack(source, 4)(call(0, 1))


def test_a_number_of_samples_that_cannot_be_is_refused_when_the_source_is_made() -> None:
    whole = samples(number_of, 2**63 - 1)
    assert whole(call(0, 2))[0].tolist() == [0, 1]
    with pytest.raises(ConfigError, match=r"^epoch_size is 9223372036854775808, expected at most "):
        samples(number_of, 2**63)
    assert len(samples(number_of, 2**62, random_shuffle=True)(call(0, 2))[0]) == 2
    with pytest.raises(ConfigError, match=r"records, expected at most 4611686018427387904 to shu"):
        samples(number_of, 2**62 + 1, random_shuffle=True)


def number_of(info: SampleInfo) -> int:
    return info.idx_in_epoch


def test_a_function_may_end_the_epoch() -> None:
    def fn(info: SampleInfo) -> int:
        if info.iteration == 2:
            raise StopIteration
        return info.idx_in_epoch

    assert [chunk.tolist() for (chunk,) in epoch_of(samples(fn, 100), 2)] == [[0, 1], [2, 3]]


def test_no_sample_is_lost_to_an_end() -> None:
    def fn(info: SampleInfo) -> int:
        if info.idx_in_epoch == 3:
            raise StopIteration
        return info.idx_in_epoch

    with pytest.raises(RecordError, match=r"^sample 3: raised StopIteration, which cannot end an"):
        samples(fn, 6)(call(1, 2))

    class Ends:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            raise StopIteration

    with pytest.raises(RecordError, match=r"^sample 0: raised StopIteration, which cannot end an"):
        records(Ends(), on_error="skip")(call(0, 2))


class Batched:
    """A dataset that gives several samples at once, but for a defective one."""

    def __init__(self, *, defective: int = -1, surplus: int = 0) -> None:
        self.defective = defective
        self.surplus = surplus
        self.asked: list[Any] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        self.asked.append(index)
        if index == self.defective:
            raise ValueError("a broken file")
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.asked.append(indices)
        if self.defective in indices:
            raise ValueError("one of them")
        return indices + [0] * self.surplus


def test_of_samples_at_once_the_defective_one_is_found() -> None:
    with pytest.raises(RecordError, match=r"^sample 4: a broken file$"):
        list(epoch_of(records(Batched(defective=4)), 3))
    dataset = Batched(defective=4)
    source = records(dataset, on_error="skip")
    assert [chunk.tolist() for (chunk,) in epoch_of(source, 3)] == [[0, 1, 2], [3, 5]]
    assert source.skipped == 1 and dataset.asked == [[0, 1, 2], [3, 4, 5], 3, 4, 5]


def test_samples_at_once_are_as_many_as_were_asked_for() -> None:
    told = r"^sample 3 and on: __getitems__ returned 4 samples, expected a list of 3$"
    with pytest.raises(RecordError, match=told):
        records(Batched(surplus=1))(call(1, 3))


@pytest.mark.parametrize("fails", [True, False])
def test_a_dataset_may_change_the_list_of_what_is_asked_for(fails: bool) -> None:
    class Empties(Batched):
        def __getitems__(self, indices: list[int]) -> list[int]:
            taken = [indices.pop(0) for _ in range(2)]
            indices.reverse()
            if fails:
                raise OSError("try each by itself")
            return taken + [indices.pop() for _ in range(len(indices))]

    chunks = [chunk.tolist() for (chunk,) in epoch_of(records(Empties()), 3)]
    assert chunks == [[0, 1, 2], [3, 4, 5]]


def test_a_stop_of_ours_is_no_defect_of_samples_at_once() -> None:
    class Stops(Batched):
        def __getitems__(self, indices: list[int]) -> list[int]:
            raise ConfigError("not now")

    with pytest.raises(ConfigError, match="not now"):
        records(Stops(), on_error="skip")(call(0, 3))


ROWS: dict[str, Any] = {
    "not contiguous": np.arange(24).reshape(2, 3, 4).transpose(0, 2, 1),
    "dates": np.array([["2020-01-01"], ["2021-01-01"]], "M8[D]"),
    "big-endian": np.arange(6, dtype=">i4").reshape(2, 3),
    "strings": np.array([["a", "bc"], ["d", "e"]]),
    "structures": np.zeros((2, 3), [("a", "i4"), ("b", "u1")]),
    "empty": np.empty((2, 0), np.float32),
    "large": np.arange(1 << 19).reshape(2, -1),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_rows_of_all_kinds_are_stacked(rows: Any) -> None:
    (column,) = records(rows)(call(0, 2))
    assert (column.dtype, column.shape) == (rows.dtype, rows.shape)
    assert (column == rows).all() and column.flags.c_contiguous and column.flags.writeable


@needs_counts
def test_stacked_rows_are_passed_on_without_a_copy() -> None:
    columns = records([np.arange(3)] * 2)(call(0, 2))
    assert is_sole_owner(columns, 0)


def ends(samples: Any) -> Any:
    raise StopIteration


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda samples: None, "sample 2 and on: collate returned None, expected columns"),
        (ends, "sample 2 and on: collate raised StopIteration"),
    ],
)
def test_a_collate_function_that_makes_no_columns(collate: Any, message: str) -> None:
    with pytest.raises(RecordError, match=f"^{message}$"):
        records([1, 2, 3, 4], collate=collate)(call(1, 2))


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="fn is 3, expected a function of a SampleInfo"):
        samples(3, 5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="epoch_size is 0, expected a whole number of at least 1"):
        samples(number_of, 0)
    with pytest.raises(ConfigError, match="dataset is generator, expected an object with __len__"):
        records(i for i in range(3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the source holds no records"):
        records([])
    with pytest.raises(ConfigError, match="collate is 3, expected a function of a list of samples"):
        records([1], collate=3)  # type: ignore[arg-type]
