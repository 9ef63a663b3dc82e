"""Servers that are away while something happens, or come back with other numbers of queues or
replicas, and trainers that are: on virtual time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

import feeder
from feeder.service.client.machine import HAS_ALL
from feeder.service.protocol import membership
from feeder.service.protocol.membership import (
    Asks,
    Attaches,
    Died,
    Membership,
    NoteHung,
    NoteLacking,
    StartRun,
    State,
    StopRun,
    Ticked,
)
from feeder.service.server.group import ConsumerGroup
from served import Aside, Server, here, pass_time, process_of, reading, serving, wait_until
from simulation.network import Router
from small import Pure, make

pytestmark = pytest.mark.usefixtures("world")

NUM = 200
"""Batches of each of two queues: more than there are slots for a queue that nobody holds."""
FIRST, SECOND = "ipc:///virtual/first", "ipc:///virtual/second"


def ten() -> feeder.Coordinator:
    return make(Pure(10, rows=4))


def two_queues() -> feeder.Coordinator:
    return make(Pure(2 * NUM, rows=4), devices=2)


def end_one_of_two(knows: bool) -> Iterator[tuple[feeder.Consumer, str]]:
    """Read one queue to its end, and of the other five batches and what has come; then the server
    goes, and the first consumer. The other goes on at the next server."""
    with ExitStack() as stack:
        with serving(two_queues) as server:
            first = feeder.connect(server.address, queue=0)
            other = stack.enter_context(reading(server, queue=1, credit=4, hold=250))
            assert len(list(islice(other, 5))) == 5
            assert len(list(first)) == NUM
            if knows:
                # Both are answered after what was told before.
                first.snapshot()
                other.snapshot()
        first.close()
        yield other, server.address


@pytest.mark.parametrize("knows", [True, False])
def test_who_ends_while_no_server_is_there_holds_nobody_back(
    monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    if not knows:
        # As one whose server was killed before it had heard of the end.
        monkeypatch.setattr(ConsumerGroup, "tell_waiting", lambda group: None)
    for other, address in end_one_of_two(knows):
        with serving(two_queues, address):
            assert [batch.step for batch in other] == [*range(11, 2 * NUM, 2)]


def test_what_was_known_before_a_restart_ends_the_server_after_a_lease() -> None:
    for other, address in end_one_of_two(True):
        with serving(two_queues, address, exit_when="acknowledged", lease=20) as server:
            assert [batch.step for batch in other] == [*range(11, 2 * NUM, 2)]
            other.close()
            assert not server.wait(10.0)
            assert server.wait(20.0)


@pytest.mark.parametrize("goes_on", [True, False])
def test_who_comes_back_with_its_last_batches_unused_holds_the_end_up(goes_on: bool) -> None:
    """Else its server ends, and who would start from its checkpoint finds none."""
    with serving(ten) as server:
        consumer = feeder.connect(server.address, credit=20)
        steps = [next(consumer).step for _ in range(3)]
        state = consumer.state_dict()
        wait_until(lambda: consumer._loop.machine.state in HAS_ALL)
        server.kill()
    with consumer, serving(ten, server.address, exit_when="acknowledged") as server:
        wait_until(lambda: server.group.membership.members[0].pending == 7)
        assert not server.wait(5.0)
        if goes_on:
            steps += [batch.step for batch in consumer]
        else:
            consumer.close()
            with reading(server, resume=state) as again:
                steps += [batch.step for batch in again]
        assert server.wait(60.0)
        assert steps == [*range(10)]


def is_stopped_before_it_is_ready(server: Server, queue: int, **settings: Any) -> Aside:
    """Connect, and be stopped once the server has given the queue, before it can take batches."""
    connecting = Aside(lambda: feeder.connect(server.address, queue=queue, **settings))
    members = server.group.membership.members
    wait_until(lambda: members[queue].state is State.JOINING)
    here().consumers[-1].pause()
    return connecting


@pytest.mark.parametrize(("goes_back", "wait_s"), [(True, membership.RETURN_S), (False, 30.0)])
def test_how_long_those_who_come_back_wait_for_others(goes_back: bool, wait_s: float) -> None:
    """Where the feed could not go back for who comes later, for as long as for one that hangs."""
    feed = Membership(2, 30.0, goes_back=goes_back)
    feed.handle(Asks(0, "me", rejoins=True), 0.0)
    assert feed.look_at == 30.0  # It waits for nothing but that the lease runs out.
    assert feed.handle(Attaches(0), 1.0) == [StopRun()]
    # Who hangs before it can take batches is not here, and the time does not begin anew.
    feed.handle(Asks(1, "other", rejoins=True), 1.0)
    feed.members[0].expires, feed.members[1].expires = 100.0, 2.0
    feed.handle(Ticked(), 2.0)
    if not goes_back:  # Else it is waited for, until it is gone.
        assert feed.look_at == 100.0
        feed.handle(Died(1), 1.0)
    until = feed.look_at
    assert until == 1.0 + wait_s
    assert feed.handle(Ticked(), until - 0.01) == []
    assert feed.handle(Ticked(), until) == [
        NoteLacking([1], wait_s), StartRun((0,), [0, math.inf], [0, math.inf], True)
    ]  # fmt: skip
    assert feed.handle(membership.Used(0), until) == []


@pytest.mark.parametrize("is_ready", [False, True])
def test_who_was_taken_for_hung_and_goes_on_ends_the_others_wait(
    is_ready: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(two_queues, lease=3) as server:
        if is_ready:
            stopped = Aside(lambda: feeder.connect(server.address, queue=0))
            process_of(stopped.result()).pause()
        else:
            stopped = is_stopped_before_it_is_ready(server, 0)
        wait_until(lambda: server.group.membership.members[0].hangs)
        (told,) = [one.getMessage() for one in caplog.records if "not heard" in one.getMessage()]
        assert told == (
            f"feed 'train': {server.group.membership.members[0].who}, queue 0, was not heard of "
            "for 3 s: it is stopped or overloaded, or the network to it is cut; another may take "
            "its queue"
        )
        with reading(server, queue=1) as consumer:
            consumer.snapshot()  # Answered once it can take batches.
            here().consumers[0].go_on()
            assert next(consumer).step == 1
            with stopped.result() as other:
                assert next(other).step == 0


def test_a_feed_that_cannot_go_back_waits_for_who_hangs_before_it_is_ready() -> None:
    feed = Membership(2, 30.0, goes_back=False)
    for queue in range(2):
        feed.handle(Asks(queue, "somebody", rejoins=True), 0.0)
    feed.handle(Attaches(0), 20.0)
    feed.members[0].expires = math.inf
    assert [type(one) for one in feed.handle(Ticked(), 30.0)] == [NoteHung, StopRun]
    assert feed.look_at == math.inf
    assert feed.handle(Ticked(), 1e9) == []


# ---- servers that answer late, and what crosses on the way


def be_far() -> None:
    """From now on a message takes up to a second, longer than a silent address is tried."""
    here().plan = replace(here().plan, delay_s=1.0)


def test_the_first_of_two_addresses_may_answer_late() -> None:
    be_far()
    with serving(ten) as server, reading(server, "ipc:///virtual/nobody", timeout=60) as consumer:
        assert [batch.step for batch in consumer] == list(range(10))


def test_an_error_of_the_lease_before_is_none_of_the_next() -> None:
    """It is on its way while the consumer starts elsewhere."""

    def fetch(call: feeder.Call) -> Any:
        raise ValueError("this is raised")

    be_far()
    with serving(lambda: make(fetch)) as server, reading(server, timeout=60) as consumer:
        state = consumer.state_dict()
        wait_until(lambda: server.feed.ended_with is not None)
        consumer.load_state_dict(state)
        with pytest.raises(feeder.FetchError, match="this is raised"):
            next(consumer)


def test_a_state_may_be_loaded_more_often_than_a_connection_is_good_for() -> None:
    with serving(ten) as server, reading(server) as consumer:
        state = consumer.state_dict()
        for _ in range(40):
            consumer.load_state_dict(state)
        assert [batch.step for batch in consumer] == list(range(10))


def test_a_server_that_is_gone_is_told_of_with_the_time_that_it_had() -> None:
    with serving(ten) as server:
        consumer = feeder.connect(server.address, timeout=7.5, reconnect=600.0)
    with consumer, pytest.raises(feeder.ConnectTimeout, match=r"within 7\.5 s"):
        consumer.load_state_dict(consumer.state_dict())


def test_what_an_interrupted_loop_had_taken_is_not_handed_out_after_a_state_was_loaded() -> None:
    with serving(ten) as server:
        with reading(server) as consumer:
            assert [next(consumer).step for _ in range(2)] == [0, 1]
            state = consumer.state_dict()
        with reading(server) as consumer:
            consumer._refill()
            consumer.load_state_dict(state)
            assert [batch.step for batch in consumer] == [*range(2, 10)]
            assert consumer.stats()["rows"] == 32


@pytest.mark.parametrize("order", ["alike", "reversed"])
def test_trainers_at_two_servers_find_each_other(order: str) -> None:
    others = [FIRST, SECOND] if order == "alike" else [SECOND, FIRST]
    with (
        serving(two_queues, SECOND),
        reading(*others, queue=1) as right,
        serving(two_queues, FIRST),
        reading(FIRST, SECOND, queue=0) as left,
    ):
        rest = Aside(lambda: [batch.step for batch in left])
        assert [batch.step for batch in right] == [*range(1, 2 * NUM, 2)]
        assert rest.result() == [*range(0, 2 * NUM, 2)]


def test_a_hung_consumer_loses_its_queue_after_its_lease_and_not_before() -> None:
    with serving(ten, lease=3) as server, reading(server, credit=2) as consumer:
        member = server.group.membership.members[0]
        assert next(consumer).step == 0
        pass_time(9.0)
        assert not member.hangs
        process_of(consumer).pause()
        pass_time(1.9)
        assert not member.hangs
        pass_time(2.0)
        assert member.hangs
        process_of(consumer).go_on()
        assert [batch.step for batch in consumer] == [*range(1, 10)]


# ---- servers that are stopped while their connections stand


@pytest.mark.parametrize("plane", ["shared", "frames"])
def test_a_stopped_server_is_left_for_the_next_one_within_two_leases(
    plane: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And when it goes on again it holds nobody up."""
    with (
        serving(two_queues, FIRST, lease=3) as first,
        serving(two_queues, SECOND, lease=3),
        reading(FIRST, SECOND, queue=0, credit=2, plane=plane) as left,
        reading(FIRST, SECOND, queue=1, credit=2, plane=plane) as right,
    ):
        steps = [next(one).step for _ in range(3) for one in (left, right)]
        first.pause()
        began = here().world.now
        rest = Aside(lambda: [batch.step for batch in left])
        assert steps + [next(right).step for _ in range(4)] == [*range(6), 7, 9, 11, 13]
        assert here().world.now - began < 6.0
        first.go_on()
        assert [batch.step for batch in right] == [*range(15, 2 * NUM, 2)]
        assert rest.result() == [*range(6, 2 * NUM, 2)]
    lost = [one.getMessage() for one in caplog.records if "silent" in one.getMessage()]
    assert lost == 2 * [
        "consumer: the server has been silent for 4 s: it is stopped or overloaded, or the network "
        "to it is cut; looking for a server"
    ]


@pytest.mark.parametrize("plane", ["shared", "frames"])
def test_a_stopped_server_without_another_is_an_error_after_reconnect(plane: str) -> None:
    with (
        serving(ten, lease=3) as server,
        reading(server, credit=1, reconnect=5, plane=plane) as consumer,
    ):
        assert next(consumer).step == 0
        server.pause()
        began = here().world.now
        with pytest.raises(feeder.ConnectTimeout, match=r"within 5\.0 s"):
            list(consumer)
        assert here().world.now - began < 10.0


def test_a_server_that_waits_for_others_is_heard_of() -> None:
    with serving(two_queues, lease=3) as server, reading(server, queue=0) as one:
        rest = Aside(lambda: [batch.step for batch in one])
        pass_time(100.0)
        assert one.stats()["reconnects"] == 0
        with reading(server, queue=1) as other:
            assert [batch.step for batch in other] == [*range(1, 2 * NUM, 2)]
        assert rest.result() == [*range(0, 2 * NUM, 2)]


# ---- servers that come back with other numbers


def twenty_four() -> feeder.Coordinator:
    return make(Pure(24))


def test_the_position_of_who_is_told_fits_the_new_number() -> None:
    """Here at the next address. `test_other_settings.py` tells of all that may be another."""
    with ExitStack() as stack:
        with serving(twenty_four, FIRST) as server:
            trainer = stack.enter_context(reading(FIRST, SECOND, credit=1))
            assert next(trainer).step == 0
            server.kill()
        stack.enter_context(serving(twenty_four, SECOND, queues=2, replicas=2))
        with pytest.raises(feeder.ResumeError, match="queues: 1 then, 2 now; replicas: 1 then, 2"):
            list(trainer)
        state = trainer.state_dict()
        trainer.close()
        with reading(FIRST, SECOND, queue=1, replica=1, resume=state):
            pass


def test_who_has_had_everything_is_told_nothing() -> None:
    """It comes with the end, which is the same however the feed is dealt."""
    with serving(twenty_four, FIRST) as server:
        trainer = feeder.connect(FIRST, credit=64)
        first = next(trainer).step
        wait_until(lambda: trainer._loop.machine.state in HAS_ALL)
        server.kill()
    with trainer, serving(twenty_four, FIRST, queues=2, replicas=2):
        wait_until(lambda: trainer._loop.inbox.num_opened == 2)
        assert [first, *(batch.step for batch in trainer)] == [*range(18)]


@pytest.mark.parametrize("turns", [3, 40])
def test_last_words_count_behind_those_of_others(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is late finds many messages, reads some of them in a turn, and finds in the
    same turn that those who sent them are gone. Nobody who floods it puts that off for ever."""
    left = turns

    def read_others(router: Router) -> Any:
        nonlocal left
        left -= 1
        return iter(()) if left >= 0 else read_all(router)

    with serving(ten, exit_when="acknowledged") as server:
        consumer = feeder.connect(server.address)
        steps = [next(consumer).step for _ in range(9)]
        pass_time(1.0)
        server.pause()
        assert [*steps, next(consumer).step] == list(range(10))
        consumer.close()
        read_all = Router.read_messages
        monkeypatch.setattr(Router, "read_messages", read_others)
        monkeypatch.setattr(Router, "is_behind", property(lambda router: left > 0 or router.inbox))
        server.go_on()
        assert server.wait(20.0) == (turns < 16)
