"""Consumers that come without a position: they may load a state, until their user asks for a
batch."""

from __future__ import annotations

import math
from itertools import islice
from queue import SimpleQueue
from typing import Any

import pytest

import feeder
from feeder.service.protocol import messages as say
from feeder.service.protocol.membership import (
    Asks,
    Attaches,
    Died,
    Left,
    Membership,
    Start,
    Ticked,
)
from feeder.service.server.group import ConsumerGroup
from served import Aside, outside, reading, serving, wait_until
from small import Pure, make
from watching import around

pytestmark = pytest.mark.usefixtures("world")

NUM = 200
"""Batches of each of two queues: more than there are slots for a queue that nobody holds."""


def two_queues(fetch: Any = None) -> feeder.Coordinator:
    return make(fetch or Pure(2 * NUM, rows=4), devices=2)


def hear(asked: SimpleQueue[None]) -> None:
    """Wait until somebody has asked once more."""
    wait_until(lambda: not asked.empty())
    asked.get()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> SimpleQueue[None]:
    """A consumer says that its user waits for its first batch."""
    asked = SimpleQueue[None]()

    def note(group: ConsumerGroup, lease: Any, message: say.Used) -> None:
        if message.begun and not message.sequence:
            asked.put(None)

    around(monkeypatch, ConsumerGroup, "use", after=note)
    return asked


def test_one_that_starts_anew_while_others_go_on_is_refused_and_they_go_on() -> None:
    """As a trainer that died before its first checkpoint and is started again: all would wait."""
    with serving(two_queues, lease=0.5) as server, reading(server, queue=0) as left:
        with reading(server, queue=1) as right:
            assert [next(one).step for _ in range(20) for one in (left, right)] == [*range(40)]
            state = right.state_dict()
        left.snapshot()  # Answered after what it has used was told.
        with reading(server, queue=1) as again:
            for _ in range(2):
                told = r"queue 1 is at step 0 \(round 0\), and queue 0 is at step 40 \(round 20\)"
                with pytest.raises(feeder.ResumeError, match=told):
                    next(again)
        rest = Aside(lambda: [batch.step for batch in left])
        with reading(server, queue=1, resume=state, rejoin=True) as right:
            assert [batch.step for batch in right] == [*range(41, 2 * NUM, 2)]
        assert rest.result() == [*range(40, 2 * NUM, 2)]


def test_who_begins_another_pass_waits_for_who_still_holds_its_queue(
    asked: SimpleQueue[None],
) -> None:
    """However long: it has had everything, and leaves by itself."""
    with serving(two_queues, lease=0.3) as server:
        left, right = (feeder.connect(server.addresses[0], queue=queue) for queue in range(2))
        others = Aside(lambda: len(list(right)))
        assert (len(list(left)), others.result()) == (NUM, NUM)
        left.close()
        while not asked.empty():
            asked.get()
        again = feeder.connect(server.addresses[0], queue=0)
        steps = Aside(lambda: [batch.step for batch in again])
        for _ in range(5):  # Longer than a lease.
            hear(asked)
        right.close()
        with again, reading(server, queue=1) as right:
            assert [batch.step for batch in right] == [*range(1, 2 * NUM, 2)]
            assert steps.result() == [*range(0, 2 * NUM, 2)]


def test_nobody_waits_for_an_undecided_one_that_died_where_the_queue_had_ended() -> None:
    feed = Membership(2, 30.0)
    feed.handle(Asks(0, "one that goes on", start=Start(6), rejoins=True, ended=(1,)), 0.0)
    feed.handle(Asks(1, "one that takes no part", undecided=True), 0.0)
    assert feed.missing() == [1]
    feed.handle(Died(1), 0.0)
    assert feed.missing() == []


def test_an_end_is_not_the_last_word_while_somebody_who_came_since_may_come_again() -> None:
    """Else a server that ends once all have had everything would end under a job that was put back
    to an older checkpoint and whose connection broke at that moment."""
    feed = Membership(1, 30.0)
    feed.handle(Asks(0, "somebody"), 0.0)
    feed.handle(Attaches(0), 0.0)
    feed.members[0].ending = "end"
    feed.handle(Left(0), 0.0)
    assert feed.are_all_done(0.0)
    feed.handle(Asks(0, "somebody else"), 1.0)
    feed.handle(Died(0), 1.0)
    assert feed.missing() == [], "nobody waits for it"
    assert not feed.are_all_done(1.0)
    assert feed.look_at <= 31.0
    assert feed.are_all_done(31.0)
    # Nor where it was silent for long before it died, and nothing was looked for any more.
    feed.handle(Asks(0, "somebody else"), 31.0)
    feed.handle(Ticked(), 61.0)
    assert feed.look_at == math.inf
    feed.handle(Died(0), 70.0)
    assert feed.look_at == 100.0
    assert [feed.are_all_done(now) for now in (99.0, 100.0)] == [False, True]


def test_states_of_different_rounds_are_refused_when_they_are_loaded_too() -> None:
    with outside(), make(Pure(2 * NUM, rows=4)) as whole:
        states = []
        for _ in range(2):
            assert len(list(islice(whole["train"], 6))) == 6
            states.append(whole.state_dict())
    with (
        serving(two_queues) as server,
        reading(server, queue=0) as left,
        reading(server, queue=1) as right,
    ):
        left.load_state_dict(states[1])
        with pytest.raises(feeder.ResumeError, match=r"checkpoint is of step 6 .*, and queue 0"):
            right.load_state_dict(states[0])


def test_a_refused_one_may_load_its_state_after_all() -> None:
    with serving(two_queues, lease=0.5) as server, reading(server, queue=0) as left:
        with reading(server, queue=1) as right:
            assert [next(one).step for _ in range(20) for one in (left, right)] == [*range(40)]
            state = right.state_dict()
        left.snapshot()
        with reading(server, queue=1) as again:
            with pytest.raises(feeder.ResumeError):
                next(again)
            again.load_state_dict(state)
            assert [next(one).step for one in (left, again)] == [40, 41]
