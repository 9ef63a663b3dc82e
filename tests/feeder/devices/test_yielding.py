"""Who merges waits a moment for a user who was waiting, so that few slots go round."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from feeder.devices import host
from feeder.devices.host import HostQueue
from feeder.waking import OneShotEvent
from small import WAIT_S, Aside
from watching import around

MUCH: Any = SimpleNamespace(held_bytes=1 << 20, _is_copied=True)
PASSED: Any = SimpleNamespace(held_bytes=1 << 20, _is_copied=False)
LITTLE: Any = SimpleNamespace(held_bytes=1 << 10, _is_copied=True)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> HostQueue:
    """A queue at which the moment does not pass."""
    monkeypatch.setattr(host, "_YIELD_S", 10 * WAIT_S)
    return HostQueue(10, str)


def take_beside(queue: HostQueue, monkeypatch: pytest.MonkeyPatch) -> Aside:
    """A user who waits for a batch."""
    waits = threading.Event()
    with monkeypatch.context() as patch:
        around(patch, OneShotEvent, "wait", before=lambda *_: waits.set())
        user = Aside(queue.get)
        assert waits.wait(WAIT_S)
    return user


def test_a_user_who_waited_takes_what_was_put_before_more_is_made(
    queue: HostQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(50):
        user = take_beside(queue, monkeypatch)
        queue.put([MUCH])
        assert len(queue) == 0
        assert [*user.result()] == [MUCH]
        queue.given = None


@pytest.mark.parametrize("batch", [LITTLE, PASSED], ids=["little", "passed on"])
def test_nobody_waits_where_caches_hold_what_goes_round(
    batch: Any, queue: HostQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = take_beside(queue, monkeypatch)
    monkeypatch.setattr(queue, "_drained", None)
    queue.put([batch])
    assert [*user.result()] == [batch]


def test_nobody_waits_for_a_user_who_did_not(queue: HostQueue) -> None:
    for _ in range(3):
        queue.put([MUCH])
    assert len(queue) == 3


def test_nobody_waits_long(queue: HostQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    user = take_beside(queue, monkeypatch)
    monkeypatch.setattr(host, "_YIELD_S", 0.001)
    with queue._lock:
        # A user who is woken and does not come: it is not told.
        monkeypatch.setattr(queue, "_wake_all", lambda: None)
    queue.put([MUCH])
    assert len(queue) == 1
    monkeypatch.undo()
    with queue._lock:
        queue._wake_all()
    assert [*user.result()] == [MUCH]
