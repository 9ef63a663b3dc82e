"""A reader of a log gives what is there: after a resume a call may give more rows than before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import feeder
from small import WAIT_S, Calls, make
from watching import says

MOST = 5
"""Rows of a call at most."""


class Log:
    """A log of each worker, and a reader that gives what it finds there."""

    def __init__(self, num_workers: int, rows: int) -> None:
        self.logs = [[1000 * worker + i for i in range(rows)] for worker in range(num_workers)]
        self.at = [0] * num_workers
        self.is_closed = False

    def grown(self, rows: int) -> Log:
        """The same log later, closed, to be read from its start."""
        later = Log(len(self.logs), rows)
        later.is_closed = True
        return later

    def fetch(self, worker_id: int, batch_size: int) -> Any:
        at = self.at[worker_id]
        rows = self.logs[worker_id][at : at + MOST]
        if not rows and self.is_closed:
            raise StopIteration
        self.at[worker_id] += len(rows)
        return [np.array(rows)] if rows else None

    def cursor(self, worker_id: int) -> int:
        return self.at[worker_id]

    def seek(self, worker_id: int, cursor: int) -> None:
        self.at[worker_id] = cursor

    def feed(self, batch_size: int, **settings: Any) -> feeder.Coordinator:
        return feeder.init_data_input_workers(
            ["x"], self.fetch, batch_size, len(self.logs), timeout=WAIT_S,
            coordinator=feeder.Coordinator(), **settings,
        )  # fmt: skip


def rows_of(feed: Any) -> list[int]:
    return [row for batch in feed for row in batch["x"].tolist()]


def begin(
    log: Log, batch_size: int, carrier: str = "token", **settings: Any
) -> tuple[list[int], Any]:
    """The first batch, which ends in a chunk of the two rows that were there; and the position."""
    with log.feed(batch_size, **settings) as coordinator:
        batch = next(coordinator["train"])
        position = batch.cut.token() if carrier == "token" else coordinator.state_dict()
    return batch["x"].tolist(), position


@pytest.mark.parametrize(("num_workers", "batch_size"), [(1, 6), (2, 11)])
@pytest.mark.parametrize("order", ["ticket", "arrival"])
@pytest.mark.parametrize("carrier", ["token", "state_dict"])
@pytest.mark.parametrize("rows", [7, 8, 30])
def test_each_row_comes_once_though_the_log_has_grown(
    num_workers: int, batch_size: int, order: str, carrier: str, rows: int
) -> None:
    log = Log(num_workers, 7)
    first, position = begin(log, batch_size, carrier, order=order)
    with log.grown(rows).feed(batch_size, order=order, resume=position) as coordinator:
        got = first + rows_of(coordinator["train"])
    for worker, of_worker in enumerate(log.grown(rows).logs):
        assert [row for row in got if row // 1000 == worker] == of_worker


def test_a_position_in_a_chunk_that_has_grown_is_one_like_any_other() -> None:
    got, position = list[int](), None
    for rows in (7, 13, 19, 30):
        with Log(1, 0).grown(rows).feed(6, resume=position) as coordinator:
            batch = next(coordinator["train"])
            got += batch["x"].tolist()
            position = batch.cut.token()
    assert got == list(range(24))


@pytest.mark.parametrize("rows", [7, 30])
def test_rows_that_are_others_are_named_with_a_cure_for_who_has_cursors(rows: int) -> None:
    log = Log(1, 7)
    _, position = begin(log, 6)
    later = log.grown(rows)
    later.logs[0][6] += 1
    told = (
        "fetch function is not deterministic: worker 0, call 1: other rows than before; resume "
        "from a snapshot, which holds the rows left over, make it give these rows again after "
        "seek(worker_id, cursor), or make the feed with repeatable=False, whose states hold them, "
        "too"
    )
    with later.feed(6, resume=position) as coordinator, says(feeder.ResumeError, told):
        next(coordinator["train"])


def test_a_pure_function_gives_as_many_rows_as_before() -> None:
    """The call after it begins where it began then."""

    def feed(rows: int, resume: Any = None) -> feeder.Coordinator:
        return make(Calls(2, lambda call: [np.arange(rows)]), batch_size=2, resume=resume)

    with feed(3) as coordinator:
        token = next(coordinator["train"]).cut.token()
    told = (
        "fetch function is not deterministic: worker 0, call 0: 3 rows then, 5 now; resume from a "
        "snapshot, which holds the rows left over, or make it repeat itself; a source needs the "
        "data that it had"
    )
    with feed(5, token) as coordinator, says(feeder.ResumeError, told):
        next(coordinator["train"])


@pytest.mark.served
@pytest.mark.parametrize(("num_workers", "batch_size"), [(1, 6), (2, 11)])
def test_a_server_goes_on_with_the_log_of_one_worker(num_workers: int, batch_size: int) -> None:
    """Of several workers other batches would come than queues that are ahead have had."""
    log = Log(num_workers, 7)
    first, position = begin(log, batch_size)
    with (
        feeder.serve(lambda: log.grown(30).feed(batch_size), "tcp://127.0.0.1:0") as server,
        feeder.connect(server.addresses[0], resume=position) as consumer,
    ):
        if num_workers == 1:
            assert first + rows_of(consumer) == list(range(30))
        else:
            with pytest.raises(feeder.ResumeError, match="2 rows then, 5 now"):
                next(consumer)
