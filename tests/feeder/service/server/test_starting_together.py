"""Trainers that start together: who is waited for, and where they may stand."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

import feeder
from conformance.served import reading, serving
from feeder.service.protocol import messages as say
from feeder.service.protocol.membership import Asks, Left, Membership, Refuse, Start, State
from peers import OPEN, peer_of
from small import Pure, make

pytestmark = pytest.mark.served


def many() -> feeder.Coordinator:
    return make(Pure(400, rows=4), devices=2)


# ---- at the end of the stream


def test_the_rounds_of_queues_that_had_everything() -> None:
    feed = Membership(3, 30.0)
    feed.handle(Asks(0, "first", start=Start(7, finished=True)), 0.0)
    for queue, step in ((1, 7), (2, 8), (1, 6), (2, 9)):
        asked = Asks(queue, "other", start=Start(step))
        assert not any(isinstance(one, Refuse) for one in feed.handle(asked, 0.0))
        feed.handle(Left(queue), 0.0)
    for queue, step in ((1, 2), (2, 12)):
        (refused,) = feed.handle(Asks(queue, "other", start=Start(step)), 0.0)
        assert "queue 0's checkpoint is of step 6 (round 2)" in str(refused.error)


# ---- what peers say of themselves and of others


def test_a_queue_whose_consumer_lives_has_not_ended_whatever_others_say() -> None:
    feed = Membership(2, 30.0)
    feed.handle(Asks(0, "one that lives", start=Start(6), rejoins=True, ended=(0, 1)), 0.0)
    assert [member.state for member in feed.members] == [State.JOINING, State.ENDED]


def test_a_question_that_comes_after_a_later_one_of_its_own_is_refused() -> None:
    """Two connections of one consumer: what was sent over the first may come last."""
    with serving(many) as server:
        (address,) = server.addresses
        wish = {"feed": "train", "consumer": b"the same.a trainer"[:16]}
        with peer_of(address) as late, peer_of(address) as early:
            generation = early.opens(**wish, attempt=5).generation
            late.say(say.Open(**(OPEN | wish | {"attempt": 4})))
            late.is_refused("ProtocolError", "came after a later one of its own")
            early.say(say.Attached(generation=generation, plane="frames", reason=""))
            with reading(server, queue=1) as other:
                early.hear(say.Batches)
                assert next(other).step == 1
            late.opens(**wish, attempt=6)


def test_states_of_different_rounds_are_refused_when_they_are_loaded_too() -> None:
    with serving(many) as server, ExitStack() as stack:
        pair = [stack.enter_context(reading(server, queue=i)) for i in range(2)]
        states = []
        for _ in range(10):
            assert [next(one).step % 2 for one in pair] == [0, 1]
            states.append([one.state_dict() for one in pair])
    with serving(many) as server, ExitStack() as stack:
        pair = [stack.enter_context(reading(server, queue=i)) for i in range(2)]
        pair[0].load_state_dict(states[9][0])
        with pytest.raises(feeder.ResumeError, match=r"checkpoint is of step 6 .*, and queue 0"):
            pair[1].load_state_dict(states[2][1])
