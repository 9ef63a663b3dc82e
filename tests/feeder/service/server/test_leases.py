"""Who may have a queue, alone or with others, and what those are told who may not."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import islice, zip_longest
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import zmq

import feeder
from conformance.served import TRANSPORTS, reading, serving
from feeder import (
    ConfigError,
    ConnectTimeout,
    Consumer,
    Coordinator,
    LeaseLost,
    SnapshotFormatError,
)
from feeder.service.net.security import read_event
from feeder.service.protocol import messages as say
from feeder.service.server import io_loop as serving_module
from feeder.service.server.group import ConsumerGroup
from feeder.service.server.io_loop import ServerLoop
from feeder.service.server.outbox import FanOut, Outbox
from feeder.workers.stats import Stopwatch
from feeder.workers.stream import copying
from feeds import Record, assert_same, expected, make, note
from fetches import make_fetch
from peers import OPEN, RawPeer, Stalled, peer_of, used
from watching import CallsOf, Clock

pytestmark = pytest.mark.served

EPOCHS = 2
WAIT_S = 10.0


def factory(**settings: Any) -> Coordinator:
    return make(make_fetch("pure", "ragged"), **({"epochs": EPOCHS} | settings))


@pytest.fixture(scope="module")
def stream() -> list[Record]:
    return expected(make_fetch("pure", "ragged"), pure=True, epochs=EPOCHS)


@pytest.fixture
def address() -> Iterator[str]:
    """Where a server is, on whose one queue a consumer reads on whatever happens."""
    stream = expected(make_fetch("pure", "ragged"), pure=True, epochs=EPOCHS)
    with serving(factory) as server, reading(server) as consumer:
        first = [note(batch) for batch in islice(consumer, 3)]
        yield server.addresses[0]
        assert_same(first + [note(batch) for batch in consumer], stream)
        assert consumer.stats()["reconnects"] == 0


@pytest.mark.parametrize("scheme", ("ipc", "tcp"))
def test_who_died_before_it_was_read_holds_no_queue(
    monkeypatch: pytest.MonkeyPatch, stream: list[Record], scheme: str
) -> None:
    """As a trainer that is killed just after it said Open: the end of its connection is known when
    that is read. ZeroMQ looks for what has ended once in a millisecond, and takes the answer."""
    events: deque[Any] = deque()
    send, has_ended = ServerLoop.send, Event()

    def read(monitor: Any) -> Any:
        event = events.popleft() if events else read_event(monitor)
        if event is not None and event.kind == zmq.EVENT_ACCEPTED and not has_ended.is_set():
            while not events or events[-1].kind != zmq.EVENT_DISCONNECTED:
                assert monitor.poll(WAIT_S * 1000)
                events.append(read_event(monitor))
            has_ended.set()
        return event

    def take(self: ServerLoop, peer: Any, message: say.Message, frames: Any) -> bool:
        is_ghost = peer in self._leases and self._leases[peer][1].who == "ghost"
        return is_ghost or send(self, peer, message, frames)

    monkeypatch.setattr(serving_module, "read_event", read)
    monkeypatch.setattr(ServerLoop, "send", take)
    with serving(factory, scheme) as server:
        with closing(RawPeer(server.addresses[0])) as peer:
            peer.say(say.Open(**(OPEN | {"feed": "", "who": "ghost"})))
        assert has_ended.wait(WAIT_S)
        with reading(server) as consumer:
            assert_same([note(batch) for batch in consumer], stream)


def test_a_lease_that_was_renewed_in_time_outlives_a_stall_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    with serving(factory) as server, peer_of(server.addresses[0]) as peer:
        generation = peer.opens(feed="").generation
        stalled, group = Stalled(monkeypatch, server), server._groups["train"]
        calls = CallsOf(monkeypatch, (ConsumerGroup, "use"))
        for is_first in (True, False):
            peer.say(used(generation, 0))
            assert not is_first or stalled.entered.wait(WAIT_S)
        clock.set_ahead(group.leases[0].expires - time.monotonic())
        stalled.go_on.set()
        calls.wait_until(lambda: len(stalled.expired) == 2)
    assert stalled.expired == [0, 0]


def test_what_a_peer_says_of_itself_moves_no_terminals_cursor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "feeder")
    said = "someone\n\x1b[2J\u202efeeder: all is well"
    with serving(factory) as server, peer_of(server.addresses[0]) as peer:
        generation = peer.opens(feed="", who=said).generation
        peer.say(say.Attached(generation=generation, plane="frames", reason=said))
        peer.hear(say.Batches)
        with pytest.raises(LeaseLost, match=r"held by someone\?\?\[2J\?feeder: all is well; pid"):
            feeder.connect(server.addresses[0])
    lines = [record.getMessage() for record in caplog.records]
    assert any("frames, because someone??[2J?feeder" in line for line in lines)
    assert all(line.isprintable() for line in lines)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, LeaseLost, r"queue 0 is held by pid PID on .*takeover=True"),
    ({"queue": 1}, ConfigError, "queue is 1.*expected 0 to 0"),
    ({"queue": 2**31 - 1}, ConfigError, "queue is 2147483647.*expected 0 to 0"),
    ({"feed": "tarin"}, ConfigError, r"feed is 'tarin', expected one of \['train'\]"),
    ({"replica": 1}, ConfigError, "replica is 1, but feed 'train' has 1"),
    ({"resume": b"x" * 100, "takeover": True}, SnapshotFormatError, "expected"),
]


@pytest.mark.parametrize(("wish", "error", "told"), REFUSED)
def test_who_may_not_have_it_is_told_why(
    address: str, wish: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told.replace("PID", str(os.getpid()))):
        feeder.connect(address, **wish)


def test_rank_of_the_launcher_is_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with serving(factory, queues=2) as server, reading(server) as consumer:
        assert "queue 1" in repr(consumer)


# ---- who is there, and who may come in


@pytest.mark.parametrize("address", ("tcp://127.0.0.1:9", "ipc:///tmp/feeder-nobody.sock"))
def test_address_with_nobody_behind(address: str) -> None:
    with pytest.raises(ConnectTimeout, match=rf"no answer from {address} within 0\.2 s"):
        feeder.connect(address, timeout=0.2)


# ---- shared queues: several trainers are given the same batches, out of one copy


@contextmanager
def sharing(
    server: feeder.Server, *seats: tuple[int, int], resume: Any = None, **settings: Any
) -> Iterator[list[Consumer]]:
    """A consumer in each of these seats: queue and replica."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                reading(server, queue=queue, replica=replica, resume=resume, **settings)
            )
            for queue, replica in seats
        ]


def all_seats(queues: int, replicas: int) -> list[tuple[int, int]]:
    return [(queue, replica) for queue in range(queues) for replica in range(replicas)]


def read_together(consumers: Sequence[Consumer]) -> list[list[Record]]:
    """What each is handed, up to its end: all of them take a batch before one takes the next."""
    rounds = zip_longest(*[map(note, consumer) for consumer in consumers])
    columns = zip(*rounds, strict=True)
    return [[record for record in column if record is not None] for column in columns]


@pytest.mark.parametrize(
    ("transport", "queues", "replicas"),
    [("shared", 1, 1), ("shared", 2, 2), ("shared", 1, 4), ("ipc", 3, 2), ("tcp", 2, 2)],
)
def test_all_replicas_get_the_batches_of_their_queue(
    stream: list[Record], transport: str, queues: int, replicas: int
) -> None:
    scheme, plane = TRANSPORTS[transport]
    seats = all_seats(queues, replicas)
    with (
        serving(factory, scheme, queues=queues, replicas=replicas) as server,
        sharing(server, *seats, plane=plane) as consumers,
    ):
        got = read_together(consumers)
        for (queue, _), records in zip(seats, got, strict=True):
            assert_same(records, stream[queue::queues], queue)
        (figures,) = server.figures().feeds
        assert figures.buffered_rows == 0


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("pattern", ["ragged", "whole"])
def test_one_may_read_frames_and_another_shared_memory(pattern: str, repeatable: bool) -> None:
    fetch = make_fetch("pure", pattern)
    stream = expected(fetch, pure=True, epochs=EPOCHS)
    with (
        # As large columns are, those of whole chunks are sent from where they lie, where no replica
        # reads a slot.
        mock.patch.object(copying, "_KEPT_BYTES", 0),
        serving(lambda: make(fetch, epochs=EPOCHS, repeatable=repeatable), replicas=3) as server,
        reading(server, plane="frames") as one,
        reading(server, replica=1, plane="shared", checksum="full") as two,
        reading(server, replica=2, plane="frames", checksum="sampled") as three,
    ):
        for records in read_together([one, two, three]):
            assert_same(records, stream)


def test_a_replica_runs_ahead_within_the_slots_and_no_further(stream: list[Record]) -> None:
    with (
        serving(factory, replicas=2) as server,
        sharing(server, (0, 0), (0, 1), credit=2, hold=0) as (fast, slow),
    ):
        ahead = [note(next(fast))]
        behind = [note(next(slow))]
        num_slots = server._groups["train"].feed.slots.num_slots(0)
        assert 0 < num_slots < len(stream) - 2
        reader = threading.Thread(target=lambda: ahead.extend(map(note, fast)))
        reader.start()
        for batch in slow:
            assert len(ahead) <= len(behind) + num_slots + 1
            behind.append(note(batch))
        reader.join(WAIT_S)
        assert_same(ahead, stream)
        assert_same(behind, stream)


@pytest.mark.parametrize("credit", [0, 4])
def test_memory_does_not_grow_with_the_replicas(credit: int) -> None:
    sizes = []
    for replicas in (1, 4):
        with (
            serving(lambda: factory(epochs=20), replicas=replicas) as server,
            sharing(server, *all_seats(1, replicas), credit=credit) as consumers,
        ):
            read_together(consumers)
            (figures,) = server.figures().feeds
            assert figures.service is not None
            sizes.append(figures.service.arena_bytes)
    assert len(set(sizes)) == 1 and sizes[0] > 0


def test_what_a_replica_keeps_is_written_by_nobody_when_another_is_gone(
    stream: list[Record],
) -> None:
    with (
        serving(lambda: factory(epochs=40), replicas=2) as server,
        sharing(server, (0, 0)) as (one,),
    ):
        with reading(server, replica=1) as two:
            kept = [(next(one), next(two))[0] for _ in range(2)]
        with reading(server, replica=1, rejoin=True) as two:
            for _ in range(200):
                next(two)
                next(one, None)
        assert [note(batch) for batch in kept] == stream[:2]


def test_a_seat_has_one_consumer() -> None:
    with (
        serving(lambda: factory(epochs=None), replicas=2) as server,
        sharing(server, (0, 0), (0, 1)) as (one, two),
    ):
        for _ in range(3):
            next(one), next(two)
        with pytest.raises(LeaseLost, match=r"queue 0, replica 1 is held by pid"):
            feeder.connect(server.addresses[0], replica=1)
        with reading(server, replica=1, takeover=True, resume=two.state_dict(), rejoin=True) as new:
            for step in range(3, 300):
                assert next(new).step == next(one).step == step
            with pytest.raises(LeaseLost, match=r"queue 0, replica 1 was taken over"):
                list(two)


@pytest.mark.parametrize("replicas", [0, -1, True, 1.5, "2", None, 1025])
def test_a_number_of_replicas_that_cannot_be_is_refused(replicas: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"replicas is {replicas!r}, expected")):
        feeder.serve(factory, "ipc://replicas", replicas=replicas)


def test_more_seats_than_a_message_can_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 2 queues with 513 replicas, expected at most 1024"):
        feeder.serve(factory, "ipc://replicas", queues=2, replicas=513)


@pytest.mark.parametrize("replica", [-1, True, 1.5, "1", None])
def test_a_replica_that_is_no_number_is_refused(replica: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"replica is {replica!r}, expected")):
        feeder.connect("ipc://replicas", replica=replica)


class Fan:
    """Batches fanned out to replicas, the first batch that each wants given; what was counted
    out."""

    def __init__(self, *first_steps: int) -> None:
        self.freed: list[int] = []
        self.outboxes = [Outbox(Stopwatch()) for _ in first_steps]
        self.fan = FanOut(
            self.outboxes, first_steps, number=lambda batch: batch.step,
            check=lambda batches: None, free=lambda batch: self.freed.append(batch.step),
        )  # fmt: skip
        self.counted = 0
        self.held = [0] * 4
        self.fan.count_out = self._count

    def _count(self, held: Any) -> None:
        self.counted += held.batches
        new = (held.batches, held.rows, held.num_bytes, held.kept_rows)
        self.held = [sum(both) for both in zip(self.held, new, strict=True)]

    def sent(self, replica: int, num: int) -> int:
        """How many more are counted out once a replica was sent so many."""
        before = self.counted
        self.fan.note_sent(replica, batches(num))
        return self.counted - before


def batches(num: int) -> list[Any]:
    return [SimpleNamespace(step=step, rows=8, held_bytes=64, kept_rows=5) for step in range(num)]


def test_what_all_replicas_are_past_is_counted_once() -> None:
    fan = Fan(0, 0, 0)
    assert [fan.sent(0, 5), fan.sent(1, 2), fan.sent(2, 3)] == [0, 0, 2]
    assert [fan.sent(1, 4), fan.sent(2, 1), fan.sent(2, 9)] == [1, 1, 1]
    assert [fan.sent(0, 1), fan.sent(0, 7), fan.sent(1, 7)] == [1, 0, 7]
    assert [Fan(0).sent(0, num) for num in (3, 0)] == [3, 0]


def test_what_was_sent_and_what_was_used_are_counted_apart() -> None:
    fan, told = Fan(0, 0), []
    for tell, replica, num in (
        (fan.fan.note_sent, 0, 3), (fan.fan.note_used, 0, 3), (fan.fan.note_sent, 1, 2),
        (fan.fan.note_used, 1, 1),
    ):  # fmt: skip
        tell(replica, batches(num))
        told.append(fan.held)
    assert told == [[0, 0, 0, 0], [0, 0, 0, 0], [2, 16, 128, 0], [2, 16, 128, 5]]


def test_a_replica_that_begins_later_is_past_what_it_is_not_sent() -> None:
    fan = Fan(0, 2)
    fan.fan.put(batches(3))
    assert [len(outbox) for outbox in fan.outboxes] == [3, 1]
    assert (fan.freed, fan.counted) == ([0, 1], 0)
    assert [fan.sent(0, 3), fan.sent(1, 1)] == [2, 1]


def test_replicas_that_keep_different_batches_hold_nobody_up(stream: list[Record]) -> None:
    """Six batches are kept in all, and no slot is free but those that are there for this."""
    replicas, hold = 3, 2
    kept: list[list[feeder.Batch]] = [[] for _ in range(replicas)]
    with (
        serving(factory, replicas=replicas) as server,
        sharing(server, *all_seats(1, replicas), credit=1, hold=hold) as consumers,
    ):
        for i in range(len(stream)):
            for replica, consumer in enumerate(consumers):
                batch = next(consumer)
                assert note(batch) == stream[i]
                if i // hold == replica:
                    kept[replica].append(batch)
        for replica, batches in enumerate(kept):
            assert [note(one) for one in batches] == stream[hold * replica :][:hold]
