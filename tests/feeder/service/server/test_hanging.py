"""Consumers that hang, ones that only rest, and feeds that are begun again too often."""

from __future__ import annotations

import logging
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

import feeder
from conformance.served import reading, serving
from feeder.service.client import lease as lease_module
from feeder.service.protocol import messages as say
from feeder.service.server import run as served_feeds
from feeder.service.server.group import ConsumerGroup
from feeder.service.server.run import ServedFeed
from feeds import make
from fetches import BATCH_SIZE, make_fetch, make_rows
from peers import OPEN, WAIT_S, Stalled, peer_of, used
from small import Heard

pytestmark = pytest.mark.served

LEASE_S = 0.3


def factory() -> feeder.Coordinator:
    return make(lambda call: make_rows(0, 0, call.index, BATCH_SIZE), epochs=None)


def test_a_hung_consumer_loses_its_queue_after_its_lease_and_not_before() -> None:
    heard = Heard("was not heard of")
    logging.getLogger("feeder").addHandler(heard)
    try:
        with serving(factory) as server, peer_of(server.addresses[0]) as peer:
            peer.say(say.Open(**(OPEN | {"feed": ""})))
            generation = peer.hear(say.Opened).generation
            peer.say(say.Attached(generation=generation, plane="frames", reason=""))
            peer.hear(say.Batches)
            with pytest.raises(feeder.LeaseLost, match="somebody"):
                feeder.connect(server.addresses[0])
            server._groups["train"].membership.lease_s = LEASE_S
            peer.say(used(generation, 0))
            assert heard.event.wait(WAIT_S)
            with reading(server) as consumer:
                assert next(consumer).step == 0
                peer.say(used(generation, 1))
                assert [next(consumer).step for _ in range(20)] == list(range(1, 21))
    finally:
        logging.getLogger("feeder").removeHandler(heard)


def test_a_consumer_that_rests_keeps_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    renewed = threading.Semaphore(0)
    use = ConsumerGroup.use

    def count(self: ConsumerGroup, lease: Any, message: say.Used) -> None:
        use(self, lease, message)
        if not message.slots and message.sequence == 1:
            renewed.release()

    monkeypatch.setattr(ConsumerGroup, "use", count)
    monkeypatch.setattr(lease_module, "_TELL_S", 0.1)
    with serving(factory, lease=1.0) as server, reading(server) as consumer:
        next(consumer)
        for _ in range(21):  # more than two leases
            assert renewed.acquire(timeout=WAIT_S)
        with pytest.raises(feeder.LeaseLost):
            feeder.connect(server.addresses[0])
        assert next(consumer).step == 1


def test_a_lease_that_was_renewed_in_time_outlives_a_stall_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(factory) as server, peer_of(server.addresses[0]) as peer:
        generation = peer.opens(feed="").generation
        stalled = Stalled(monkeypatch, server)
        server._groups["train"].membership.lease_s = LEASE_S
        peer.say(used(generation, 0))
        assert stalled.entered.wait(WAIT_S)
        peer.say(used(generation, 0))
        lease = server._groups["train"].leases[0]
        assert lease is not None
        while time.monotonic() < lease.member.expires:
            threading.Event().wait(0.01)
        stalled.go_on.set()
        while len(stalled.expired) < 2:
            threading.Event().wait(0.01)
    assert stalled.expired == [0, 0]


def test_a_feed_that_is_closed_is_not_begun_again() -> None:
    config = factory()["train"].streams[0].config
    feed_factory: Any = SimpleNamespace(name="train", config=config, num_seats=1)
    feed = ServedFeed(feed_factory, SimpleNamespace(drop=lambda: None), lambda: None)  # type: ignore[arg-type]
    feed.close()
    feed.start_run(None, [0], lambda batches: None)
    feed.run_maker()
    assert (feed.run, feed.failure) == (None, None)


def test_a_feed_that_is_begun_again_too_often_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_feeds, "time", SimpleNamespace(monotonic=lambda: 100.0))
    config = factory()["train"].streams[0].config
    feed_factory: Any = SimpleNamespace(name="train", config=config, num_seats=1)
    feed = ServedFeed(feed_factory, SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    assert [feed._may_rewind(0) for _ in range(8)] == [True] * 8
    waiting = threading.Thread(target=lambda: outcome.append(feed._may_rewind(0)))
    outcome: list[bool] = []
    monkeypatch.setattr(served_feeds, "_REWIND_INTERVAL_S", 1e6)
    waiting.start()
    feed.stop_run()
    waiting.join(WAIT_S)
    assert outcome == [False]


def test_a_new_server_goes_on_without_a_queue_whose_consumer_has_had_everything() -> None:
    def short() -> feeder.Coordinator:
        return make(make_fetch("pure", "ragged"), epochs=1)

    with serving(short, queues=2) as server, reading(server, queue=1) as late:
        with reading(server, queue=0) as early:
            steps = [batch.step for batch in early]
        first, state = next(late).step, late.state_dict()
    with (
        serving(short, queues=2, lease=LEASE_S) as server,
        reading(server, queue=1, resume=state, rejoin=True) as late,
    ):
        rest = [batch.step for batch in late]
    assert sorted([*steps, first, *rest]) == list(range(len(steps) + 1 + len(rest)))
    assert first == 1 and len(rest) >= len(steps) - 2


def test_who_comes_after_many_that_came_and_went_waits_for_one_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is not wanted any more when its turn has come costs nothing."""
    made, make_run = [], ServedFeed._make

    def count(self: ServedFeed, *args: Any) -> None:
        made.append(time.monotonic())
        make_run(self, *args)

    monkeypatch.setattr(ServedFeed, "_make", count)
    monkeypatch.setattr(served_feeds, "_REWIND_INTERVAL_S", 0.2)
    with serving(factory) as server:
        for _ in range(60):
            feeder.connect(server.addresses[0]).close()
        asked = time.monotonic()
        with reading(server) as consumer:
            assert next(consumer).step == 0
    # One interval by the clock of the limit, and what a slow machine takes: not sixty of them.
    assert made[-1] - asked < 6.0


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f"])
def test_of_who_is_hung_up_on_before_it_asks_there_is_a_line_in_the_log(said: bytes) -> None:
    heard = Heard("before it had asked for anything")
    logging.getLogger("feeder").addHandler(heard)
    try:
        with serving(factory, "tcp") as server, reading(server) as consumer:
            port = int(server.addresses[0].rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(said)
            assert heard.event.wait(WAIT_S)
            assert next(consumer).step == 0
    finally:
        logging.getLogger("feeder").removeHandler(heard)


def test_of_many_who_present_no_good_nonce_there_are_few_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(factory) as server, reading(server) as consumer:
        path = consumer._lease.opened.shared.path
        for _ in range(200):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(path)
                sock.send(bytes(16))
                assert sock.recv(1) == b""
    lines = [record for record in caplog.records if "was sent away" in record.getMessage()]
    assert 1 <= len(lines) < 100
