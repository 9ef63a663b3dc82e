"""Monitors: they are shown what feeds do, never take a queue, and come in as consumers do."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import feeder
from conformance.served import reading, serving
from feeder.errors import (
    ClosedError,
    ConnectTimeout,
    ProtocolError,
    RemoteError,
)
from feeder.observe.figures import FeedFigures
from feeder.service.client.monitor import Monitor
from feeder.service.protocol import messages as say
from feeder.service.server import figures as figures_module
from feeder.service.server import serve as server_module
from feeder.service.server.delivery import Delivery
from feeder.service.server.figures import Monitors
from feeder.service.server.group import ConsumerGroup
from feeder.workers.stats import FetchStats
from peers import OPEN, peer_of
from small import WAIT_S, Pure, make
from watching import CallsOf

pytestmark = pytest.mark.served

LOOK = say.Look(version=say.PROTOCOL_VERSION, receipt=b"")


@pytest.fixture(autouse=True)
def a_slow_server_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_LOOK_S", 8.0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> CallsOf:
    """Those that change what a monitor sees, which is shown at once."""
    monkeypatch.setattr(figures_module, "_FRESH_S", 0.0)
    return CallsOf(
        monkeypatch, (ConsumerGroup, "use"), (Delivery, "send_end"), (FetchStats, "end_list")
    )


def factory(num_calls: int = 5) -> feeder.Coordinator:
    return make(Pure(num_calls, 4), coordinator=feeder.Coordinator())


def only(figures: Any) -> FeedFigures:
    (feed,) = figures.feeds
    return feed


def seen(calls: CallsOf, monitor: Monitor, is_so: Any) -> FeedFigures:
    """Return the feed once it is so."""

    def look() -> FeedFigures | None:
        feed = only(monitor.fetch())
        return feed if is_so(feed) else None

    found: FeedFigures = calls.wait_until(look)
    return found


def test_a_monitor_sees_a_feed_from_its_start_to_its_end(calls: CallsOf) -> None:
    with serving(factory) as server, Monitor(server.addresses[0]) as monitor:
        feed = only(monitor.fetch())
        assert (feed.name, feed.state, feed.missing) == ("train", "waiting", (0,))
        assert feed.queues[0].consumer is None
        with reading(server) as consumer:
            next(consumer)
            feed = seen(
                calls,
                monitor,
                lambda feed: (
                    feed.queues[0].batches == 1 and feed.queues[0].consumer.state == "ended"
                ),
            )
            assert (feed.state, feed.missing) == ("running", ())
            assert feed.queues[0].rows == 4
            assert feed.queues[0].bytes == 32
            held = feed.queues[0].consumer
            assert held is not None and held.who.startswith("pid ")
            assert (held.plane, held.state) == ("shared", "ended")
            assert feed.service is not None
            assert (feed.service.opened, feed.service.rewinds) == (1, 0)
            assert feed.service.arena_bytes > 0
            assert feed.batches == 5
            assert len(list(consumer)) == 4
            feed = seen(calls, monitor, lambda feed: feed.state == "ended")
            assert feed.queues[0].batches == 5


def test_counts_go_on_when_the_feed_is_begun_again(calls: CallsOf) -> None:
    with serving(factory) as server, Monitor(server.addresses[0]) as monitor:
        for taken in (5, 10):
            with reading(server) as consumer:
                assert len(list(consumer)) == 5
                seen(calls, monitor, lambda feed, taken=taken: feed.queues[0].batches == taken)
        feed = seen(calls, monitor, lambda feed: sum(worker.calls for worker in feed.workers) >= 10)
        assert feed.batches == 10


# ---- who comes in


def test_nobody_is_there(tmp_path: Path) -> None:
    told = pytest.raises(ConnectTimeout, match=r"no answer from ipc://.* within 0\.1 s")
    with Monitor(f"ipc://{tmp_path}/nobody.sock") as monitor, told:
        monitor.fetch(0.1)


# ---- those who say something else


@pytest.mark.parametrize("message", [
    say.Open(**{**OPEN, "feed": "train"}),
    say.Bye(generation=bytes(24)),
    say.Attached(generation=bytes(24), plane="frames", reason=""),
], ids=lambda message: type(message).__name__)  # fmt: skip
def test_a_monitor_that_wants_more_is_refused(message: Any) -> None:
    with serving(factory) as server, peer_of(server.addresses[0]) as peer:
        peer.say(LOOK)
        peer.hear(say.Seen)
        peer.say(message)
        peer.is_refused("ProtocolError")
        assert no_seat_is_taken(server)


def test_a_consumer_that_asks_as_a_monitor_is_refused() -> None:
    with serving(factory) as server, peer_of(server.addresses[0]) as peer:
        peer.opens(feed="train")
        peer.say(LOOK)
        peer.is_refused("ProtocolError")
        assert no_seat_is_taken(server)
        peer.opens(feed="train")


def no_seat_is_taken(server: feeder.Server) -> bool:
    return all(queue.consumer is None for feed in server.figures().feeds for queue in feed.queues)


def test_a_monitor_of_another_version_is_told_so() -> None:
    with serving(factory) as server, peer_of(server.addresses[0]) as peer:
        peer.say(say.Look(version=1, receipt=b""))
        peer.is_refused("ProtocolError", "version 1 of the protocol")


def test_a_server_that_speaks_nonsense_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feeder.service.server.figures.to_json", lambda figures: b'{"feeds": 3}')
    told = pytest.raises(ProtocolError, match=r"figures cannot be read.*same feeder")
    with serving(factory) as server, Monitor(server.addresses[0]) as monitor, told:
        monitor.fetch()


# ---- asked from within


def test_a_closed_server_says_so() -> None:
    with serving(factory) as server:
        pass
    with pytest.raises(ClosedError, match="the server is closed"):
        server.figures()


def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(factory) as server:
        monkeypatch.setattr(server_module, "_LOOK_S", 0.05)
        entered, gate = threading.Event(), threading.Event()

        def hang(*_: Any) -> None:
            entered.set()
            gate.wait(WAIT_S)

        monkeypatch.setattr("feeder.service.server.figures.feed_figures", hang)
        with pytest.raises(RemoteError, match="has not answered for 0 s"):
            server.figures()
        assert entered.wait(WAIT_S)
        monkeypatch.undo()
        gate.set()


def test_peers_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CallsOf(monkeypatch, (Monitors, "forget"))
    with serving(factory) as server:
        monitors = server._loop.monitors
        for _ in range(3):
            with peer_of(server.addresses[0]) as peer:
                peer.say(LOOK)
                peer.hear(say.Seen)
        calls.wait_until(lambda: not monitors._sessions)
