"""Positions that carry many leftover rows, brought to a server."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import feeder
import small
from conformance.served import reading, serving
from feeder.service.net.security import MAX_REQUEST_BYTES

pytestmark = pytest.mark.served


class Once:
    """Counts on; rows of 16 kB, of which 68 are left over by the first batch."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        self.calls += 1
        return [np.full((100, 4000), self.calls, np.float32)]

    def cursor(self, worker_id: int) -> int:
        return self.calls

    def seek(self, worker_id: int, cursor: int) -> None:
        self.calls = cursor


def make() -> feeder.Coordinator:
    return small.make(Once(), ["x"], 32, num_worker_threads=1, epochs=None, repeatable=False)


def rows_of(consumer: feeder.Consumer) -> list[list[float]]:
    return [next(consumer)["x"][:, 0].tolist() for _ in range(8)]


def test_leftover_rows_above_a_control_message_go_to_a_server_of_the_same_user() -> None:
    with serving(make) as server, reading(server) as consumer:
        next(consumer)
        state = consumer.state_dict()
        expected = rows_of(consumer)
    assert len(state["feeder"]) > 2 * MAX_REQUEST_BYTES
    with serving(make) as server, reading(server, resume=state) as consumer:
        assert rows_of(consumer) == expected


def test_a_server_that_does_not_know_its_peers_takes_none_and_the_consumer_says_so() -> None:
    with serving(make, "tcp") as server:
        with reading(server) as consumer:
            next(consumer)
            state = consumer.state_dict()
        with pytest.raises(feeder.ConfigError, match=r"takes at most 131072; use a unix socket"):
            feeder.connect(server.addresses[0], resume=state)
        with reading(server) as consumer:
            assert next(consumer).step == 0
        with reading(server) as consumer:
            # Also when it is asked again, which nobody is there to do any more.
            for ask in (*[lambda: consumer.load_state_dict(state)] * 2, consumer.snapshot):
                with pytest.raises(feeder.ConfigError, match="takes at most 131072"):
                    ask()


@pytest.mark.parametrize("plane", ["shared", "frames"])
def test_a_slot_that_dropped_rows_were_written_to_stays_with_its_queue(plane: str) -> None:
    """What came next as a whole left it for the batch after that, which is another queue's."""
    rows = (4, 2, 2, 2)
    fetch = small.Calls(
        len(rows),
        lambda call: (np.arange(rows[call.index]) + 10 * call.index + 100 * call.epoch,),
    )

    def dropping() -> feeder.Coordinator:
        return small.make(fetch, devices=3, epochs=30, last_batch="drop")

    expected = [
        [100 * epoch + row for row in batch]
        for epoch in range(30)
        for batch in ([0, 1, 2, 3], [10, 11, 20, 21])
    ]
    with serving(dropping) as server, ExitStack() as stack:
        readers = [stack.enter_context(reading(server, queue=i, plane=plane)) for i in range(3)]
        got = [
            small.Aside(lambda one=one: [batch["id"].tolist() for batch in one]) for one in readers
        ]
        assert [one.result() for one in got] == [expected[i::3] for i in range(3)]
        assert [one.stats()["reconnects"] for one in readers] == [0, 0, 0]
