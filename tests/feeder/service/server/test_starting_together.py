"""Trainers that start together: who is waited for, and where they may stand."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest

import feeder
from chaos.soak import break_connections
from conformance.served import reading, serving
from feeder.service.protocol import membership
from feeder.service.protocol import messages as say
from feeder.service.protocol.membership import Asks, Left, Membership, Refuse, Start, State
from feeder.service.server.delivery import Delivery
from feeder.service.server.group import ConsumerGroup
from peers import OPEN, peer_of
from small import WAIT_S, Aside, Pure, make

pytestmark = pytest.mark.served

NUM = 7
"""Batches: the first queue of two has one more than the second."""
ALL = [[0, 2, 4, 6], [1, 3, 5]]


def seven() -> feeder.Coordinator:
    return make(Pure(NUM, rows=4), devices=2)


def many() -> feeder.Coordinator:
    return make(Pure(400, rows=4), devices=2)


def steps(consumer: feeder.Consumer) -> list[int]:
    return [batch.step for batch in consumer]


# ---- at the end of the stream


@pytest.fixture(scope="module")
def ends() -> list[list[dict[str, bytes]]]:
    """The states of both queues after each of their batches, and after the end."""
    with serving(seven) as server, ExitStack() as stack:
        pair = [stack.enter_context(reading(server, queue=i)) for i in range(2)]
        states: list[list[dict[str, bytes]]] = [[one.state_dict()] for one in pair]
        for num in range(4):
            for i, one in enumerate(pair):
                if num < len(ALL[i]):
                    assert next(one).step == ALL[i][num]
                    states[i].append(one.state_dict())
        for i, one in enumerate(pair):
            assert steps(one) == []
            states[i].append(one.state_dict())
    return states


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("first", [-2, -1], ids=["after its last batch", "finished"])
def test_a_job_that_had_everything_may_be_started_from_its_checkpoint(
    ends: list[list[dict[str, bytes]]], order: tuple[int, int], first: int
) -> None:
    """Of the last round one queue has had a batch, and for the other there was none."""
    states = ends[0][first], ends[1][-1]
    with serving(seven) as server, ExitStack() as stack:
        pair = [
            stack.enter_context(reading(server, queue=i, resume=states[i], timeout=WAIT_S))
            for i in order
        ]
        assert [Aside(lambda one=one: steps(one)).result() for one in pair] == [[], []]


@pytest.mark.parametrize(("queue", "num"), [(0, 2), (1, 1)])
def test_nobody_starts_long_before_one_that_had_everything(
    ends: list[list[dict[str, bytes]]], queue: int, num: int
) -> None:
    with (
        serving(seven) as server,
        reading(server, queue=1 - queue, resume=ends[1 - queue][-1]),
        pytest.raises(feeder.ResumeError, match=rf"queue {queue}'s .* \(round {num}\)"),
    ):
        feeder.connect(server.addresses[0], queue=queue, resume=ends[queue][num])


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


# ---- before the first batch


def heard(patch: pytest.MonkeyPatch, num: int) -> threading.Event:
    """Set once consumers have said so often from now on that they live."""
    event, said = threading.Event(), []
    use = ConsumerGroup.use

    def note(group: ConsumerGroup, lease: Any, message: say.Used) -> None:
        use(group, lease, message)
        said.append(message)
        if len(said) >= num:
            event.set()

    patch.setattr(ConsumerGroup, "use", note)
    return event


@pytest.mark.parametrize("has_state", [False, True])
def test_one_whose_connection_breaks_before_all_are_there_waits_as_before(
    monkeypatch: pytest.MonkeyPatch, has_state: bool
) -> None:
    """It was taken for one that comes back, after which nobody waits long for the others."""
    monkeypatch.setattr(membership, "RETURN_S", 0.0)
    with serving(many) as server, ExitStack() as stack:
        settings: dict[str, Any] = {}
        if has_state:
            with make(Pure(400, rows=4), devices=2) as coordinator:
                for i in range(4):
                    next(coordinator["train"].on(i % 2))
                settings["resume"] = coordinator.state_dict()
        first = stack.enter_context(reading(server, queue=0, **settings))
        got = Aside(lambda: [next(first).step for _ in range(40)])
        break_connections(server.addresses[0].removeprefix("ipc://"))
        while not first.stats()["reconnects"]:
            threading.Event().wait(0.01)
        assert heard(monkeypatch, 3).wait(WAIT_S)
        other = stack.enter_context(reading(server, queue=1, **settings))
        begin = 4 * has_state
        assert [next(other).step for _ in range(40)] == [*range(begin + 1, begin + 81, 2)]
        assert got.result() == [*range(begin, begin + 80, 2)]


def test_one_that_has_got_nothing_while_the_others_went_on_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot know that, and asks as one that starts; then it is told, and asks again."""
    pump, is_held = Delivery.pump, True

    def hold(delivery: Delivery, lease: Any, run: Any) -> bool:
        return (is_held and lease.queue == 1) or pump(delivery, lease, run)

    monkeypatch.setattr(Delivery, "pump", hold)
    with serving(many) as server, ExitStack() as stack:
        pair = [stack.enter_context(reading(server, queue=i, credit=4)) for i in range(2)]
        assert [next(pair[0]).step for _ in range(3)] == [0, 2, 4]
        got = Aside(lambda: [next(pair[1]).step for _ in range(40)])
        pair[0].snapshot()  # Answered after what it has used was told.
        is_held = False
        break_connections(server.addresses[0].removeprefix("ipc://"))
        assert [next(pair[0]).step for _ in range(37)] == [*range(6, 80, 2)]
        assert got.result() == [*range(1, 80, 2)]


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
