"""Who merges waits a moment for a user who was waiting, so that few slots go round."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from feeder.devices import host
from feeder.devices.host import HostQueue
from feeder.waking import OneShotEvent
from small import WAIT_S, Aside, make

ANY: Any = object()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> HostQueue:
    """A queue at which the moment does not pass."""
    monkeypatch.setattr(host, "_YIELD_S", 10 * WAIT_S)
    return HostQueue(10, str)


def take_beside(queue: HostQueue, monkeypatch: pytest.MonkeyPatch) -> Aside:
    """A user who waits for a batch."""
    waits, wait = threading.Event(), OneShotEvent.wait

    def noted(bell: OneShotEvent, seconds: float) -> bool:
        waits.set()
        return wait(bell, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(OneShotEvent, "wait", noted)
        user = Aside(queue.get)
        assert waits.wait(WAIT_S)
    return user


def test_a_user_who_waited_takes_what_was_put_before_more_is_made(
    queue: HostQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(50):
        user = take_beside(queue, monkeypatch)
        queue.put([ANY])
        queue.yield_to_user()
        assert len(queue) == 0
        assert [*user.result()] == [ANY]
        queue.given = None


def test_nobody_waits_for_a_user_who_did_not(queue: HostQueue) -> None:
    for _ in range(3):
        queue.put([ANY])
        queue.yield_to_user()
    assert len(queue) == 3


def test_nobody_waits_long(queue: HostQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    user = take_beside(queue, monkeypatch)
    monkeypatch.setattr(host, "_YIELD_S", 0.001)
    with queue._lock:
        # A user who is woken and does not come: it is not told.
        monkeypatch.setattr(queue, "_wake_all", lambda: None)
    queue.put([ANY])
    queue.yield_to_user()
    assert len(queue) == 1
    monkeypatch.undo()
    with queue._lock:
        queue._wake_all()
    assert [*user.result()] == [ANY]


@pytest.mark.parametrize(
    ("chunk_rows", "buffered", "yields"),
    [(1, 64, True), (1, 4, False), (4, 64, False)],
    ids=["copied, much", "copied, little", "passed on"],
)
def test_it_is_done_where_more_goes_round_than_caches_hold(
    monkeypatch: pytest.MonkeyPatch, chunk_rows: int, buffered: int, yields: bool
) -> None:
    asked: list[HostQueue] = []
    monkeypatch.setattr(HostQueue, "yield_to_user", lambda queue: asked.append(queue))

    def fetch(worker_id: int, batch_size: int) -> Any:
        return (np.zeros((chunk_rows, 10_000)),)

    with make(fetch, max_buffered_batches=buffered) as coordinator:
        for _ in range(20):
            next(coordinator["train"])
    assert bool(asked) is yields
