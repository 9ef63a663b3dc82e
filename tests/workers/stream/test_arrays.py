"""Arrays of every kind that is fine: their values arrive, whichever way they are copied."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import feeder
from small import make

CALLS = 5
SIZES = {"tiny": 2, "middle": 4_000, "large": 70_000}
"""Columns of a row. Rows of each kind are copied in another way: joined, one by one, by NumPy."""


def values(index: int, width: int) -> NDArray[np.int64]:
    """Return six rows that no other call returns."""
    return np.arange(6 * width).reshape(6, width) % 30_000 + index + 1


class Annotated(np.ndarray):
    """An array class of the user's own."""


def structured(rows: NDArray[Any]) -> Any:
    made = np.zeros(rows.shape, [("x", ">i8"), ("y", "u1")])
    made["x"], made["y"] = rows, 7
    return made


KINDS: dict[str, Callable[[NDArray[Any]], Any]] = {
    "plain": lambda rows: rows,
    "every second row": lambda rows: np.repeat(rows, 2, axis=0)[::2],
    "every second column": lambda rows: np.repeat(rows, 2, axis=1)[:, ::2],
    "Fortran order": np.asfortranarray,
    "upside down": lambda rows: rows[::-1].copy()[::-1],
    "transposed": lambda rows: np.ascontiguousarray(rows.T).T,
    "a view of larger memory": lambda rows: np.concatenate([rows, rows])[: len(rows)],
    "unaligned": lambda rows: np.frombuffer(b"!" + rows.tobytes(), rows.dtype, offset=1).reshape(
        rows.shape
    ),
    "big-endian": lambda rows: rows.astype(">i8"),
    "big-endian floats": lambda rows: rows.astype(">f4"),
    "read-only": lambda rows: np.frombuffer(rows.tobytes(), rows.dtype).reshape(rows.shape),
    "a subclass": lambda rows: rows.view(Annotated),
    "bool": lambda rows: rows % 2 == 0,
    "float16": lambda rows: rows.astype(np.float16),
    "longdouble": lambda rows: rows.astype(np.longdouble),
    "complex": lambda rows: rows * (1 + 2j),
    "text": lambda rows: rows.astype("U6"),
    "bytes": lambda rows: rows.astype("S6"),
    "dates": lambda rows: rows.astype("M8[s]"),
    "structured": structured,
}


def feed_them(kind: Callable[[Any], Any], width: int, batch_size: int) -> list[NDArray[Any]]:
    """Return the batches of a feed whose chunks are made so."""

    def fetch(call: feeder.Call) -> Any:
        if call.index == CALLS:
            raise StopIteration
        return (kind(values(call.index, width)),)

    with make(fetch, ["x"], batch_size) as coordinator:
        return [batch["x"].copy() for batch in coordinator["train"]]


FEW = ("plain", "every second column", "Fortran order", "big-endian", "read-only")


@pytest.mark.parametrize(
    ("kind", "size", "batch_size"),
    [*product(KINDS, ["tiny"], [1, 4, 6, 17]), *product(FEW, ["middle", "large"], [4])],
)
def test_rows_of_every_kind_arrive(kind: str, size: str, batch_size: int) -> None:
    make_rows, width = KINDS[kind], SIZES[size]
    got = feed_them(make_rows, width, batch_size)
    wanted = np.concatenate([make_rows(values(index, width)) for index in range(CALLS)])
    assert got[0].dtype == wanted.dtype.newbyteorder("=")
    assert got[0].dtype.isnative
    assert np.array_equal(np.concatenate(got), wanted)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (), (3, 1, 2)], ids=str)
def test_rows_may_have_any_shape_and_hold_nothing(shape: tuple[int, ...]) -> None:
    def fetch(call: feeder.Call) -> Any:
        if call.index == CALLS:
            raise StopIteration
        return np.full((6, *shape), call.index), np.arange(6) + 6 * call.index

    with make(fetch, ["x", "number"], 4) as coordinator:
        batches = list(coordinator["train"])
    assert [len(batch["x"]) for batch in batches] == [4] * 7 + [2]
    assert batches[0]["x"].shape[1:] == shape
    numbers = np.concatenate([batch["number"] for batch in batches])
    assert np.array_equal(numbers, np.arange(30))


@pytest.mark.parametrize("shared", (0, 1))
@pytest.mark.parametrize("carrier", ("snapshot", "token"))
def test_chunks_may_share_an_array_with_one_another(shared: int, carrier: str) -> None:
    same = np.ones((7, 4))

    def fetch(call: feeder.Call) -> Any:
        if call.index == 12:
            raise StopIteration
        labels = np.arange(7) + 100 * call.index
        return [same, labels] if shared == 0 else [labels, same]

    label = ("first", "second")[1 - shared]
    places, labels = [], []
    with make(fetch, ["first", "second"], 16) as coordinator:
        for batch in coordinator["train"]:
            labels.append(batch[label].tolist())
            places.append(
                bytes(coordinator.snapshot()) if carrier == "snapshot" else batch.cut.token()
            )
    assert [label for of_batch in labels for label in of_batch] == [
        100 * i + j for i in range(12) for j in range(7)
    ]
    for i, place in enumerate(places):
        with make(fetch, ["first", "second"], 16, resume=place) as coordinator:
            assert [batch[label].tolist() for batch in coordinator["train"]] == labels[i + 1 :]
