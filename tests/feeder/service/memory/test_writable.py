"""Arrays of served batches that are written into: the user's own where that was asked for."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import feeder
from project import ROOT
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
            assert array.flags.writeable
            assert np.array_equal(array, rows_of(step, width))
            # As another library does it: by the address.
            ctypes.memset(array.ctypes.data, 0xFF, array.nbytes)
            if step % 7 == 0:
                kept.append(array)
    assert len(kept) == 4
    for array in kept:
        assert (array.view(np.uint8) == 0xFF).all()


WRITES = """
import ctypes, sys
import feeder

with feeder.connect(sys.argv[1], plane="shared", writable=sys.argv[2] == "True") as consumer:
    for batch in consumer:
        ctypes.memset(batch["x"].ctypes.data, 1, 8)
"""


@pytest.mark.process
@pytest.mark.parametrize("writable", [True, False])
def test_who_writes_into_shared_pages_ends_and_who_asked_does_not(writable: bool) -> None:
    def factory() -> feeder.Coordinator:
        return make(feeder.sources.arrays(np.arange(64.0)), names=["x"], batch_size=8)

    with feeder.serve(factory, "tcp://127.0.0.1:0") as server:
        command = [sys.executable, "-c", WRITES, server.addresses[0], str(writable)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == (0 if writable else -11), done.stderr


def test_what_is_no_flag_is_refused() -> None:
    for value in (1, None, "yes"):
        with pytest.raises(feeder.ConfigError, match="writable is"):
            feeder.connect("tcp://127.0.0.1:1", writable=value)  # type: ignore[arg-type]
