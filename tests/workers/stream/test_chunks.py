"""Chunks: fixed in form by the first with rows, checked and sliced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from feeder.workers.stream.chunks import (
    Arranged,
    Column,
    Schema,
    count_bytes,
)


def schema(**settings: Any) -> Schema:
    return Schema(("id", "image"), (0, 1), **settings)


def chunk(rows: int, width: int = 3, dtype: Any = np.float32) -> tuple[Any, Any]:
    return np.arange(rows), np.ones((width, rows), dtype)


COLUMNS = (
    Column(name="id", axis=0, dtype=np.dtype(np.int64), shape=()),
    Column(name="image", axis=1, dtype=np.dtype(np.float32), shape=(3,)),
)


def error_of(arranged: Arranged) -> str:
    return str(arranged.error)


def test_ragged_columns_may_change_their_row_shape_alone() -> None:
    """What others may not is in `tests/workers/fetch/test_bad_input.py`."""
    one = schema(ragged=True)
    assert one.arrange([chunk(2), chunk(2, 5)]).error is None
    assert error_of(one.arrange([chunk(2, 3, np.float64)])) == (
        "column 'image': dtype is float64, expected float32"
    )
    assert error_of(one.arrange([(np.arange(2), np.ones((3, 2, 1), np.float32))])) == (
        "column 'image': ndim is 3, expected 2"
    )


class Tensor:
    """Of another library: its memory is read by DLPack, unless it has a gradient."""

    def __init__(self, values: Any, *, has_gradient: bool = False) -> None:
        self.values, self.has_gradient = values, has_gradient

    def __dlpack__(self, **named: Any) -> Any:
        if self.has_gradient:
            raise BufferError("it has a gradient")
        return self.values.__dlpack__(**named)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()

    def detach(self) -> Tensor:
        return Tensor(self.values)


def test_tensors_of_other_libraries_are_arrays_over_their_memory() -> None:
    schema = Schema(("a", "b"), (0, 0))
    values = np.arange(3)
    chunk: Any = (Tensor(values, has_gradient=True), np.ones(3))
    assert schema.count_rows([chunk]) == 3
    for _ in range(2):
        arranged = schema.arrange([chunk])
        assert arranged.error is None
        assert (arranged.rows, type(arranged.columns[0][0])) == ([3], np.ndarray)
        assert np.shares_memory(arranged.columns[0][0], values)
    text: Any = (Tensor(np.array(["text"])), np.ones(1))
    error = schema.arrange([text]).error
    assert "column 'a': type is Tensor, expected numpy.ndarray" in str(error)


def test_a_chunk_without_rows_or_of_ragged_columns_may_be_of_another_shape_than_is_known() -> None:
    assert schema(known=COLUMNS).arrange([chunk(0, 9), chunk(2)]).rows == [0, 2]
    assert schema(known=COLUMNS, ragged=True).arrange([chunk(2, 5)]).rows == [2]


def test_a_first_chunk_that_is_wrong_fixes_nothing() -> None:
    one = schema()
    assert one.arrange([(np.arange(2), np.ones((3, 5), np.float32)), chunk(2)]).error is not None
    assert one.columns is None
    known = schema(known=COLUMNS)
    assert known.arrange([(None, None)]).error is not None
    assert known.columns == COLUMNS


def test_bytes_of_anything_are_counted() -> None:
    assert count_bytes(chunk(2)) == count_bytes(tuple(map(Tensor, chunk(2)))) == 2 * 8 + 2 * 12
    for nothing in (None, 5, "rows", object(), np.array(3), (None, [1, 2]), {"id": np.arange(3)}):
        assert count_bytes(nothing) == 0


@pytest.mark.parametrize("is_known", [False, True])
def test_who_asks_while_the_first_chunk_is_looked_at_finds_what_was_known(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    known = (Column(name="x", axis=0, dtype=np.dtype("i8"), shape=(3,)),)
    schema, asked, look = (
        Schema(("x",), (0,), known=known if is_known else None),
        [],
        Schema._defect,
    )

    def noted(schema: Schema, *args: Any) -> Any:
        asked.append(schema.columns)
        return look(schema, *args)

    monkeypatch.setattr(Schema, "_defect", noted)
    assert schema.arrange([(np.zeros((0, 3), "i8"),), (np.ones((2, 3), "i8"),)]).rows == [0, 2]
    assert asked == [known if is_known else None] * len(asked) and len(asked) == 2
    assert schema.columns == known
