"""Consumers that come without a position: they may load a state, until their user asks for a
batch."""

from __future__ import annotations

import threading
from itertools import islice
from typing import Any

import pytest

import feeder
from conformance.served import reading, serving
from feeder.protocol import messages as say
from feeder.transport.desk import Desk
from unit.small import WAIT_S, Arrays, Aside, Pure, make

NUM = 200
"""Batches of each of two queues: more than there are slots for a queue that nobody holds."""


def two_queues(fetch: Any = None) -> feeder.Coordinator:
    return make(fetch or Pure(2 * NUM, rows=4), devices=2)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A consumer without a batch has said that its user wants one."""
    has_come, use = threading.Event(), Desk.use

    def note(desk: Desk, lease: Any, message: say.Used) -> None:
        use(desk, lease, message)
        if message.begun and not message.sequence:
            has_come.set()

    monkeypatch.setattr(Desk, "use", note)
    return has_come


def test_one_that_starts_anew_while_others_go_on_is_refused_and_they_go_on() -> None:
    """As a trainer that died before its first checkpoint and is started again: all would wait."""
    with serving(two_queues) as server, reading(server, queue=0) as left:
        with reading(server, queue=1) as right:
            assert [next(one).step for _ in range(20) for one in (left, right)] == [*range(40)]
            state = right.state_dict()
        left.snapshot()  # Answered after what it has used was told.
        with reading(server, queue=1) as again:
            for _ in range(2):
                told = (
                    r"queue 1 would start at round 0, but queue 0 at round 20; start all trainers"
                )
                with pytest.raises(feeder.ResumeError, match=told):
                    next(again)
        rest = Aside(lambda: [batch.step for batch in left])
        with reading(server, queue=1, resume=state, rejoin=True) as right:
            assert [batch.step for batch in right] == [*range(41, 2 * NUM, 2)]
        assert rest.result() == [*range(40, 2 * NUM, 2)]


def test_nor_does_one_that_has_begun_let_others_in_at_another_round(
    begun: threading.Event,
) -> None:
    with make(Pure(2 * NUM, rows=4)) as whole:
        assert len(list(islice(whole["train"], 40))) == 40
        state = whole.state_dict()
    with serving(two_queues) as server, reading(server, queue=0) as left:
        first = Aside(lambda: next(left).step)
        assert begun.wait(WAIT_S)
        with pytest.raises(feeder.ResumeError, match=r"queue 1 would start at round 20, but .* 0;"):
            feeder.connect(server.addresses[0], queue=1, resume=state)
        with reading(server, queue=1) as right:
            assert (first.result(), next(right).step) == (0, 1)


def test_who_waits_for_the_first_batch_of_a_feed_that_runs_is_not_refused(
    begun: threading.Event,
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
            begun.clear()
            first = Aside(lambda: next(right).step)
            assert begun.wait(WAIT_S)
            may_go_on.set()
            assert first.result() == 1
    finally:
        may_go_on.set()


def test_a_refused_one_may_load_its_state_after_all() -> None:
    with serving(two_queues) as server, reading(server, queue=0) as left:
        with reading(server, queue=1) as right:
            assert [next(one).step for _ in range(20) for one in (left, right)] == [*range(40)]
            state = right.state_dict()
        left.snapshot()
        with reading(server, queue=1) as again:
            with pytest.raises(feeder.ResumeError):
                next(again)
            again.load_state_dict(state)
            assert [next(one).step for one in (left, again)] == [40, 41]
