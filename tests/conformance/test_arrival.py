"""order="arrival": the order is open, but no row is lost or doubled, over any number of resumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from threading import Event
from typing import Any

import pytest

from feeder import Batch, Call
from feeds import CARRIERS, running
from fetches import make_rows

WAIT_S = 10.0


def ids_of(batches: Iterable[Batch]) -> list[int]:
    """Return the ids of the real rows."""
    return [int(row_id) for batch in batches for row_id in batch["id"][: batch.rows]]


@pytest.mark.parametrize(("carrier", "threads"), (("snapshot", 2), ("token", 8)))
def test_an_index_that_dawdles_holds_nobody_up(carrier: str, threads: int) -> None:
    let_go = Event()
    called: list[int] = []

    def fetch(call: Call) -> Any:
        called.append(call.index)
        assert call.index or let_go.wait(WAIT_S)
        if call.index >= 40:
            raise StopIteration
        return make_rows(0, 0, call.index, 3)

    settings: dict[str, Any] = {"order": "arrival", "num_threads": threads}
    with running(fetch, **settings) as (coordinator, feed):
        batches = [next(feed) for _ in range(3)]
        position = CARRIERS[carrier](coordinator, batches[-1])
        let_go.set()
    done = {(row_id - 1) // 1000 for row_id in ids_of(batches)}
    assert 0 not in done
    (straddled,) = {(int(batches[-1]["id"][-1]) - 1) // 1000}
    called.clear()
    with running(fetch, resume=position, **settings) as (_, feed):
        rest = list(feed)
    assert Counter(ids_of(batches + rest)) == Counter(
        1 + row + 1000 * index for index in range(40) for row in range(3)
    )
    assert not (done - {straddled}) & set(called), "what was done is not fetched again"


@pytest.mark.parametrize(("carrier", "threads"), (("bytes", 1), ("token", 2)))
def test_an_open_index_below_the_rows_left_over_is_not_forgotten(
    carrier: str, threads: int
) -> None:
    let_go = Event()

    def fetch(call: Call) -> Any:
        assert call.index or let_go.wait(WAIT_S)
        if call.index >= 3:
            raise StopIteration
        return make_rows(0, 0, call.index, 2)

    stream: dict[str, Any] = {"order": "arrival", "batch_size": 1, "num_worker_threads": 1}
    ids: list[int] = []
    position, at_first = None, {"num_threads": 2}
    while True:
        run = at_first if position is None else {"num_threads": threads}
        with running(fetch, resume=position, **stream, **run) as (coordinator, feed):
            batch = next(feed, None)
            let_go.set()
            if batch is None:
                break
            ids += ids_of([batch])
            position = CARRIERS[carrier](coordinator, batch)
    assert sorted(ids) == [1, 2, 1001, 1002, 2001, 2002]
