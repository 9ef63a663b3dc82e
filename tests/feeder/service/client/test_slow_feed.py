"""Consumers that came without a position, while a feed that is slow makes its first batch."""

from __future__ import annotations

import threading
from itertools import islice
from queue import SimpleQueue
from typing import Any

import pytest

import feeder
from conformance.served import reading, serving
from feeder.service.protocol import messages as say
from feeder.service.server.group import ConsumerGroup
from small import WAIT_S, Arrays, Aside, Pure, make

pytestmark = pytest.mark.served

NUM = 200
"""Batches of each of two queues."""


def two_queues(fetch: Any) -> feeder.Coordinator:
    return make(fetch, devices=2)


@pytest.mark.parametrize("asks_first", [0, 1])
def test_one_that_loads_no_state_is_refused_where_another_has_loaded_one(asks_first: int) -> None:
    """Also where the feed had run for both before: a loader connects first, and loads then. One
    rank's checkpoint is missing, as after a kill between two first saves."""
    with make(Pure(2 * NUM, rows=4)) as whole:
        assert len(list(islice(whole["train"], 40))) == 40
        state = whole.state_dict()
    may_go_on = threading.Event()

    class Slow(Pure):
        def __call__(self, call: feeder.Call) -> Arrays:
            assert may_go_on.wait(WAIT_S)
            return super().__call__(call)

    told = r"queue 1 is at step 0 \(round 0\), and queue 0's checkpoint is of step 40 \(round 20\)"
    try:
        with (
            serving(lambda: two_queues(Slow(2 * NUM, rows=4)), lease=0.5) as server,
            reading(server, queue=0) as left,
            reading(server, queue=1) as right,
        ):
            left.load_state_dict(state)
            queues = [(0, left), (1, right)] if asks_first == 0 else [(1, right), (0, left)]
            both = {queue: Aside(lambda one=one: next(one).step) for queue, one in queues}
            with pytest.raises(feeder.ResumeError, match=told):
                both[1].result()
            right.load_state_dict(state)
            may_go_on.set()
            assert (both[0].result(), next(right).step) == (40, 41)
    finally:
        may_go_on.set()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[None]:
    """A consumer without a batch has said that its user wants one."""
    asked = SimpleQueue[None]()
    use = ConsumerGroup.use

    def note(group: ConsumerGroup, lease: Any, message: say.Used) -> None:
        use(group, lease, message)
        if message.begun and not message.sequence:
            asked.put(None)

    monkeypatch.setattr(ConsumerGroup, "use", note)
    return asked


def test_who_waits_for_the_first_batch_of_a_feed_that_runs_is_not_refused(
    asked: SimpleQueue[None],
) -> None:
    """However far the others are."""
    may_go_on = threading.Event()

    class Slow(Pure):
        def __call__(self, call: feeder.Call) -> Arrays:
            if call.index == 1:
                assert may_go_on.wait(WAIT_S)
            return super().__call__(call)

    fetch = Slow(2 * NUM, rows=4)
    try:
        with (
            serving(lambda: two_queues(fetch)) as server,
            reading(server, queue=0) as left,
            reading(server, queue=1) as right,
        ):
            assert next(left).step == 0
            left.snapshot()  # Answered after what it has used was told.
            while not asked.empty():
                asked.get()
            first = Aside(lambda: next(right).step)
            asked.get(timeout=WAIT_S)
            may_go_on.set()
            assert first.result() == 1
    finally:
        may_go_on.set()
