"""Positions that consumers bring to a feed whose fetch function is called by workers: it is put
back by its cursors, or called again."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

import pytest

import feeder
from conformance.served import reading, serving
from small import Aside, Counted, Pure, Seekable, ids, make

pytestmark = pytest.mark.served

NUM = 100
"""Batches of each of two queues."""


def test_who_brings_a_cursor_that_cannot_be_sought_is_told_so_alone() -> None:
    class Picky(Seekable):
        def seek(self, worker_id: int, cursor: int) -> None:
            if 0 < cursor < 5:
                raise OSError("no such place")
            super().seek(worker_id, cursor)

    with make(Seekable(NUM, rows=4), devices=2) as coordinator:
        for i in range(3):
            token = next(coordinator["train"].on(i % 2)).cut.token()
    with (
        serving(lambda: make(Picky(NUM, rows=4), devices=2)) as server,
        reading(server, queue=1, credit=2) as innocent,
    ):
        with reading(server, queue=0) as first:
            steps = [next(one).step for _ in range(10) for one in (first, innocent)]
            state = first.state_dict()
        with (
            reading(server, queue=0, resume=token, rejoin=True) as foreign,
            pytest.raises(feeder.ResumeError, match=r"position of queue 0: .*no such place"),
        ):
            next(foreign)
        with reading(server, queue=0, resume=state, rejoin=True) as again:
            steps += [next(one).step for _ in range(10) for one in (again, innocent)]
    assert steps == [*range(40)]


@pytest.mark.parametrize(
    ("form", "last_batch"),
    [(Pure, "carry"), (Counted, "keep"), (Seekable, "drop"), (Seekable, "carry")],
)
def test_positions_of_one_run_agree_wherever_they_are(form: Any, last_batch: str) -> None:
    """In the middle of chunks, at the ends of epochs and beyond, on whichever queue."""

    def feed() -> feeder.Coordinator:
        return make(form(5, 3), devices=3, epochs=4, last_batch=last_batch)

    states: dict[tuple[int, int], Any] = {}
    rest: dict[tuple[int, int], list[int]] = {}
    with serving(feed) as server, ExitStack() as stack:
        readers = [stack.enter_context(reading(server, queue=i)) for i in range(3)]
        rows: dict[int, list[list[int]]] = {i: [] for i in range(3)}
        left = dict(enumerate(readers))
        while left:
            for i, one in [*left.items()]:
                states[i, len(rows[i])] = one.state_dict()
                with suppress(StopIteration):
                    rows[i].append(next(one)["id"].tolist())
                    continue
                states[i, len(rows[i])] = one.state_dict()
                del left[i]
    for i, num in states:
        rest[i, num] = [row for batch in rows[i][num:] for row in batch]
    least = min(map(len, rows.values()))
    for shift in range(0, least, 2):
        at = {i: min(len(rows[i]), (i * shift + shift // 2) % (least + 1)) for i in range(3)}
        with serving(feed) as server, ExitStack() as stack:
            readers = [
                stack.enter_context(reading(server, queue=i, resume=states[i, num], rejoin=True))
                for i, num in at.items()
            ]
            got = [Aside(lambda one=one: ids(one)) for one in readers]
            assert [one.result() for one in got] == [rest[i, num] for i, num in at.items()]
