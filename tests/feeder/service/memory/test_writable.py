"""Arrays of served batches that are written into, as another library may do it, asked or not."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import feeder
from small import Calls, make

pytestmark = pytest.mark.served
NUM, ROWS = 22, 8
SMALL, LARGE = 3, 17_000
"""Float64s in a row: batches of 192 bytes and of a mebibyte, which come in other ways in frames."""


def rows_of(step: int, width: int) -> Any:
    return np.full((ROWS, width), step + 1.0)


@contextmanager
def reading(width: int, plane: Any, *, served: bool, wanted: bool) -> Iterator[feeder.Consumer]:
    """A consumer that may write, because the feed says so or since it asks for it."""

    def factory() -> feeder.Coordinator:
        fetch = Calls(NUM, lambda call: [rows_of(call.index, width)])
        return make(fetch, names=["x"], batch_size=ROWS, writable=served)

    with feeder.serve(factory, "tcp://127.0.0.1:0") as server:
        address = server.addresses[0]
        with feeder.connect(address, plane=plane, writable=wanted, credit=4) as consumer:
            yield consumer


@pytest.mark.usefixtures("large_frames")
@pytest.mark.parametrize(
    ("plane", "width", "served", "wanted"),
    [
        ("shared", SMALL, True, False), ("shared", LARGE, False, True),
        ("frames", SMALL, False, True), ("frames", LARGE, True, True),
        ("shared", SMALL, False, False), ("shared", LARGE, False, False),
        ("frames", SMALL, False, False), ("frames", LARGE, False, False),
    ],
)  # fmt: skip
def test_what_is_written_is_the_user_s_and_never_comes_again(
    plane: str, width: int, served: bool, wanted: bool
) -> None:
    """Slots are used again many times; some batches are kept meanwhile."""
    kept: list[Any] = []
    with reading(width, plane, served=served, wanted=wanted) as consumer:
        for step, batch in enumerate(consumer):
            array = batch["x"]
            assert array.flags.writeable is (served or wanted)
            assert np.array_equal(array, rows_of(step, width))
            # As another library does it: by the address, with or without NumPy's leave.
            ctypes.memset(array.ctypes.data, 0xFF, array.nbytes)
            if step % 7 == 0:
                kept.append(array)
    assert len(kept) == 4
    for array in kept:
        assert (array.view(np.uint8) == 0xFF).all()


def test_what_is_no_flag_is_refused() -> None:
    for value in (1, None, "yes"):
        with pytest.raises(feeder.ConfigError, match="writable is"):
            feeder.connect("tcp://127.0.0.1:1", writable=value)  # type: ignore[arg-type]
