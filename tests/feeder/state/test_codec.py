"""Cursors and settings as bytes: what goes in comes out, of the same type and value."""

from __future__ import annotations

import enum
import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from feeder.state.codec import pack, unpack

BF16 = ml_dtypes.bfloat16

KEYS = st.one_of(
    st.text(max_size=8), st.integers(), st.binary(max_size=8), st.booleans(),
    st.tuples(st.integers(), st.text(max_size=8)),
)  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**200), 2**200), st.floats(), st.text(max_size=20),
    st.binary(max_size=20),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(KEYS, inner, max_size=5),
    ),
    max_leaves=10,
)  # fmt: skip
BORDERS = [border + i for border in (2**63, 2**64, -(2**63), 10**100) for i in (-1, 0, 1)]
TEXTS = ["", "é", "\0", "a/\udcff.jpg", "😀"]
"""File names that are not UTF-8 hold lone surrogates."""


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, and of equal type, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (a != a and b != b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


@given(VALUES)
@example({"at": (2**63, BORDERS)})
@example(TEXTS)
def test_what_goes_in_comes_out(value: Any) -> None:
    data = pack(value)
    assert same(unpack(data), value)
    assert pack(unpack(data)) == data, "equal values have equal bytes"


ARRAYS = {
    "integers": np.arange(6),
    "two axes": np.arange(6, dtype=np.uint8).reshape(2, 3),
    "no axis": np.array(3.5),
    "nothing": np.zeros((0, 3), np.int16),
    "big-endian": np.arange(4, dtype=">i4"),
    "dates": np.arange(3).astype("M8[s]"),
    "text": np.array(["a", "bc"]),
    "bool": np.array([True, False]),
    "a state of MT19937": np.random.MT19937(1).state["state"]["key"],
    "not contiguous": np.arange(12).reshape(3, 4)[:, ::2],
    "Fortran order": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "bfloat16": np.arange(3).astype(BF16),
    "float8_e5m2": np.arange(3).astype(ml_dtypes.float8_e5m2),
    "int4": np.arange(3).astype(ml_dtypes.int4).reshape(3, 1),
    "structured with bfloat16": np.array([(1, 2.5)], dtype=[("x", BF16), ("y", "f8")]),
    "gaps": np.ones(2, np.dtype([("x", "i1"), ("y", "f8")], align=True)),
    "structured": np.array([(1, 2.5)], dtype=[("x", ">i4"), ("y", "f8")]),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
def test_arrays_keep_dtype_shape_and_values(array: np.ndarray) -> None:
    (got,) = unpack(pack([array]))
    assert (got.dtype, got.shape) == (array.dtype, array.shape)
    assert np.array_equal(got, array)
    assert got.flags.writeable


class Colour(enum.IntEnum):
    RED = 3


class Size(str):
    """As members of an `Enum` of texts, it is one text, and `str` makes another of it."""

    def __str__(self) -> str:
        return "Size.SMALL"


class Place(NamedTuple):
    file: str
    line: int


class Name(str):
    pass


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int64(3), 3), (np.float32(0.5), 0.5), (np.bool_(True), True), (np.str_("a"), "a"),
        (Colour.RED, 3), (Name("a"), "a"), (bytearray(b"a"), b"a"), (BF16(1.5), 1.5),
        (np.float32("inf"), math.inf), (np.float64("nan"), math.nan),
    ],
    ids=repr,
)  # fmt: skip
def test_relatives_of_plain_values_become_plain(value: Any, plain: Any) -> None:
    assert same(unpack(pack([value])), [plain])


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        1j,
        print,
        np.array([None]),
        np.zeros(1, [("x", object)]),
        range(3),
        Place("a", 2),
        Size("s"),
        np.ma.array([1, 2], mask=[True, False]),
        np.zeros(1, "i4").view(np.recarray),
        np.datetime64("2026-01-01"),
        np.datetime64(5, "ns"),
        np.timedelta64(5, "ns"),
        np.longdouble("0.1"),
        np.void(b"abc"),
        np.zeros(1, "i4,i4")[0],
        np.complex64(1j),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_by_its_type(value: Any) -> None:
    with pytest.raises(TypeError, match=f"^cannot save {type(value).__name__}; expected "):
        pack({"at": value})
