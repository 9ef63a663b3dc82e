"""Who may have a queue, and what those are told who may not."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from threading import Event
from typing import Any

import pytest
import zmq

import feeder
from conformance.served import reading, serving
from feeder import (
    ConfigError,
    ConnectTimeout,
    Coordinator,
    LeaseLost,
    ResumeError,
    SnapshotFormatError,
)
from feeder.service.net.security import read_event
from feeder.service.protocol import messages as say
from feeder.service.server import io_loop as serving_module
from feeder.service.server.io_loop import ServerLoop
from feeds import Record, assert_same, expected, make, note
from fetches import make_fetch
from peers import OPEN, RawPeer, Stalled, peer_of, used

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
        is_ghost = peer in self._leases and self._leases[peer][1].member.who == "ghost"
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
    with serving(factory) as server, peer_of(server.addresses[0]) as peer:
        generation = peer.opens(feed="").generation
        stalled, group = Stalled(monkeypatch, server), server._groups["train"]
        group.membership.lease_s = 0.3
        for is_first in (True, False):
            peer.say(used(generation, 0))
            assert not is_first or stalled.entered.wait(WAIT_S)
        assert group.leases[0] is not None
        while time.monotonic() < group.leases[0].member.expires:
            Event().wait(0.01)
        stalled.go_on.set()
        while len(stalled.expired) < 2:
            Event().wait(0.01)
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


def position_of(**settings: Any) -> dict[str, bytes]:
    with factory(**settings) as coordinator:
        (name,) = coordinator
        next(coordinator[name])
        return coordinator.state_dict()


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, LeaseLost, r"queue 0 is held by pid PID on .*takeover=True"),
    ({"queue": 1}, ConfigError, "queue is 1.*expected 0 to 0"),
    ({"queue": 2**31 - 1}, ConfigError, "queue is 2147483647.*expected 0 to 0"),
    ({"feed": "tarin"}, ConfigError, r"feed is 'tarin', expected one of \['train'\]"),
    ({"resume": b"x" * 100, "takeover": True}, SnapshotFormatError, "expected"),
]


@pytest.mark.parametrize(("wish", "error", "told"), REFUSED)
def test_who_may_not_have_it_is_told_why(
    address: str, wish: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told.replace("PID", str(os.getpid()))):
        feeder.connect(address, **wish)


@pytest.mark.parametrize(
    ("settings", "told"),
    (
        ({"input_source_name": "val"}, "val"),
        ({"batch_size": 5}, "batch_size"),
        ({"seed": 3}, "seed: 3 then, 0 now"),
        ({"last_batch": "drop"}, "last_batch: 'drop' then, 'keep' now"),
        ({"version": "2"}, "version"),
    ),
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_position_of_another_feed(address: str, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ResumeError, match=told):
        feeder.connect(address, resume=position_of(**settings), takeover=True)


def test_whoever_takes_over_goes_on_and_the_old_one_is_told() -> None:
    stream = expected(make_fetch("pure", "ragged"), pure=True, epochs=5)
    with serving(lambda: factory(epochs=None)) as server, reading(server, credit=2) as old:
        first = [note(batch) for batch in islice(old, 4)]
        with reading(server, takeover=True, resume=old.state_dict()) as new:
            with pytest.raises(LeaseLost, match="queue 0 was taken over by pid"):
                list(islice(old, 100))
            with pytest.raises(LeaseLost):
                next(old)
            rest = [note(batch) for batch in islice(new, len(stream) - 5)]
            assert_same(first + rest, stream[:-1])


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
