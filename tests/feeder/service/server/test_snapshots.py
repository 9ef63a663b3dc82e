"""Snapshots of served feeds: what they hold, and what those are told who get none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import reading, served, serving
from feeder.service.client import consumer as consumer_module
from feeder.service.protocol import messages as say
from feeder.service.server.group import ConsumerGroup
from feeds import make
from small import Calls

pytestmark = pytest.mark.served


def factory(last: Exception | None = None) -> feeder.Coordinator:
    """Chunks of 7 rows in batches of 4: rows are left over at most cuts. After four chunks `last`
    is raised; without it there is no end."""

    def fetch(call: feeder.Call) -> Any:
        if call.index == 4 and last is not None:
            raise last
        return [np.full(7, call.index)]

    epochs = None if last is None else 1
    return make(fetch, input_blob_names=["id"], batch_size=4, epochs=epochs)


def failing() -> feeder.Coordinator:
    return factory(OSError("the disk is gone"))


def test_a_feed_that_has_failed_still_tells_where_its_consumer_stands() -> None:
    with serving(failing) as server, reading(server) as consumer:
        with pytest.raises(feeder.FetchError, match="the disk is gone"):
            list(consumer)
        for _ in range(2):
            data = bytes(consumer.snapshot())
    with failing() as coordinator:
        with pytest.raises(feeder.FetchError, match="the disk is gone"):
            list(coordinator["train"])
        assert data == bytes(coordinator.snapshot())


def test_a_server_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    answer = ConsumerGroup.snapshot
    with serving(factory) as server, reading(server) as consumer:
        next(consumer)
        with monkeypatch.context() as patch:
            patch.setattr(consumer_module, "_ANSWER_S", 0.2)
            patch.setattr(ConsumerGroup, "snapshot", lambda *args: asked.append(args))
            for _ in range(3):
                with pytest.raises(feeder.RemoteError, match=r"no answer within 0\.2 s"):
                    consumer.snapshot()
            assert len(asked) == 1

        def answer_late(group: ConsumerGroup) -> None:
            while asked:
                answer(*asked.pop())
            pump(group)

        pump = ConsumerGroup.pump
        monkeypatch.setattr(ConsumerGroup, "pump", answer_late)
        assert consumer.snapshot().states[0].summary[2] == 1


def test_one_that_is_too_large_costs_no_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(factory) as server, reading(server) as consumer:
        next(consumer)
        with monkeypatch.context() as patch:
            patch.setattr(say, "ROWS_BYTES", 100)
            with pytest.raises(feeder.RemoteError, match="more than 256 MiB"):
                consumer.snapshot()
        assert consumer.snapshot().states[0].summary[2] == 1
        assert consumer.stats()["reconnects"] == 0
    assert any("expected at most 100" in record.getMessage() for record in caplog.records)


def test_a_consumer_that_is_closed_is_asked_for_no_snapshot() -> None:
    with serving(factory) as server:
        consumer = feeder.connect(server.addresses[0])
        next(consumer)
        consumer.close()
        with pytest.raises(feeder.ClosedError):
            consumer.snapshot()


@pytest.mark.parametrize("num", [0, 1])
def test_who_had_no_batch_knows_the_columns_at_the_end(num: int) -> None:
    def short() -> feeder.Coordinator:
        fetch = Calls(num, lambda call: [np.full(4, call.index)])
        return make(fetch, input_blob_names=["id"], batch_size=4, epochs=1)

    with short() as coordinator:
        list(coordinator["train"])
        (wanted,) = coordinator.snapshot().states
    with served("ipc", short, num_queues=2) as seen:
        for queue, consumer in enumerate(seen.consumers):
            assert len(list(consumer)) == (queue < num)
            (state,) = feeder.Snapshot.from_bytes(consumer.state_dict()["feeder"]).states
            assert (state.columns, state.summary) == (wanted.columns, wanted.summary)
