"""With `rows_per_call` processes change not one byte, also where one dies half-way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import remote
from conformance.served import TRANSPORTS, served
from conformance.test_rows_per_call import BAD, WAYS, Even, into_out, plain
from feeder import Call, Processes
from feeds import assert_same, drain, make, note
from parts import few

pytestmark = pytest.mark.process

LAST_BATCH = ("keep", "drop", "pad")


@pytest.mark.parametrize("way", WAYS)
def test_the_stream_is_the_same(way: str) -> None:
    for rows, num, devices, last_batch in few((way,), (2, 4, 8), (1, 2, 3), (1, 3), LAST_BATCH):
        settings: dict[str, Any] = {"epochs": 3, "last_batch": last_batch, "devices": devices}
        got = drain(
            Even(WAYS[way], rows), rows_per_call=rows, executor=Processes(num),
            batch_columns=[0, 1, 0], **settings,
        )  # fmt: skip
        assert_same(got, plain(rows, **settings), rows, num, devices, last_batch)


class DiesHalfWay(Even):
    """Its processes die in three calls, when half of a call's rows are written."""

    def __init__(self, rows: int, marks: Path) -> None:
        super().__init__(into_out, rows)
        self.marks = marks

    def __call__(self, call: Call) -> Any:
        # The first call of a process, as which it is made again, has no place yet.
        if call.out is not None and len(list(self.marks.iterdir())) < 3:
            for array in call.out.values():
                array[: len(array) // 2 + 1] = BAD
            (self.marks / f"{call.epoch}-{call.index}").touch()
            remote.die()
        return super().__call__(call)


@pytest.mark.parametrize("num", (1, 3))
@pytest.mark.parametrize("rows", (2, 8))
def test_no_row_is_of_a_process_that_died_half_way(rows: int, num: int, tmp_path: Path) -> None:
    got = drain(
        DiesHalfWay(rows, tmp_path), rows_per_call=rows, executor=Processes(num), epochs=3,
        batch_columns=[0, 1, 0],
    )  # fmt: skip
    assert_same(got, plain(rows, epochs=3), rows, num)
    assert len(list(tmp_path.iterdir())) >= 3, "nobody has died"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nor_is_one_when_served(transport: str, tmp_path: Path) -> None:
    coordinator = make(
        DiesHalfWay(8, tmp_path), rows_per_call=8, executor=Processes(2), epochs=3,
        batch_columns=[0, 1, 0],
    )  # fmt: skip
    with served(transport, coordinator) as seen:
        assert_same(list(map(note, seen)), plain(8, epochs=3), transport)
    assert len(list(tmp_path.iterdir())) >= 3, "nobody has died"
