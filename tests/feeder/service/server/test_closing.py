"""A server that is closed under its consumer lets go of everything that it held of it."""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import TRANSPORTS, serving
from feeder.service.server import run as served_feeds
from feeder.service.server import serve
from feeder.service.server.outbox import Outbox
from feeder.service.server.run import Request, ServedFeed
from feeder.workers.fetch.threads import ThreadGroup
from feeder.workers.stats import Stopwatch
from feeder.workers.stream.rounds import Counting
from feeds import make
from leaks import held
from small import WAIT_S
from watching import around

pytestmark = pytest.mark.served


def endless() -> feeder.Coordinator:
    return make(
        lambda call: [np.full(4, call.index)], input_blob_names=["id"], batch_size=4, epochs=None
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_closed_under_its_consumer_keeps_no_descriptor_of_it(transport: str) -> None:
    scheme, plane = TRANSPORTS[transport]
    before = held().descriptors["file descriptor of anon_inode:[pidfd]"]
    with serving(endless, scheme) as server:
        consumer = feeder.connect(server.addresses[0], plane=plane)
        next(consumer)
    assert held().descriptors["file descriptor of anon_inode:[pidfd]"] == before
    consumer.close()


def num_arenas() -> int:
    return sum(num for what, num in held().descriptors.items() if "memfd:feeder" in what)


def test_it_lets_go_of_memory_that_was_ready_though_a_fetch_function_does_not_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called, goes_on = threading.Event(), threading.Event()

    def stuck(call: feeder.Call) -> Any:
        called.set()
        goes_on.wait()
        return [np.full(4, call.index)]

    monkeypatch.setattr(served_feeds, "_CLOSE_S", 0.1)
    before = num_arenas()
    try:
        with (
            pytest.raises(feeder.StuckWorkerError, match="fetcher 0"),
            serving(lambda: make(stuck, input_blob_names=["id"], batch_size=4)) as server,
        ):
            consumer = feeder.connect(server.addresses[0])
            assert called.wait(WAIT_S)
            assert num_arenas() > before
        assert num_arenas() == before
    finally:
        goes_on.set()
        consumer.close()


def test_an_outbox_that_is_closed_with_batches_has_not_come_to_the_end() -> None:
    """A server that was closed then told the end to a consumer that had not got the last batch,
    which asked no other server for it."""
    batch: Any = SimpleNamespace(step=0)
    ending: Any = object()
    for taken in (0, 1):
        outbox = Outbox(Stopwatch())
        outbox.put([batch])
        outbox.finish(ending)
        assert len(outbox.pop_batches(taken)) == taken
        assert outbox.ending is (ending if taken else None)
        outbox.close()
        assert outbox.ending is None and outbox.result is ending


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_interrupt_while_a_server_starts_its_threads_leaves_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nth: int
) -> None:
    """Nobody has a server to close where `serve` did not return."""
    started = count(1)

    def interrupt(*_: Any) -> None:
        if next(started) == nth:
            raise KeyboardInterrupt

    around(monkeypatch, ThreadGroup, "start", after=interrupt)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        feeder.serve(endless, f"ipc://{tmp_path}/socket", checkpoints=tmp_path / "checkpoints")
    assert set(threading.enumerate()) == before


def served_feed() -> ServedFeed:
    config = endless()["train"].streams[0].config
    factory: Any = SimpleNamespace(name="train", config=config, num_seats=1)
    slots: Any = SimpleNamespace(drop=lambda: None)
    return ServedFeed(factory, slots, lambda: None)


def request() -> Request:
    return Request(None, [0], lambda batches: None, Counting(1))


def test_a_feed_that_is_closed_is_not_begun_again() -> None:
    feed = served_feed()
    feed.close()
    feed.start_run(request())
    feed.run_maker()
    assert (feed.run, feed.failure) == (None, None)


def test_a_feed_that_is_begun_again_too_often_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_feeds, "time", SimpleNamespace(monotonic=lambda: 100.0))
    feed, asked = served_feed(), request()
    feed.start_run(asked)
    assert [feed._may_rewind(asked) for _ in range(8)] == [True] * 8
    waiting = threading.Thread(target=lambda: outcome.append(feed._may_rewind(asked)))
    outcome: list[bool] = []
    monkeypatch.setattr(served_feeds, "_REWIND_INTERVAL_S", 1e6)
    waiting.start()
    feed.stop_run()
    waiting.join(WAIT_S)
    assert outcome == [False]


def test_of_several_reasons_why_nothing_more_comes_the_first_is_told() -> None:
    with serving(endless) as server, feeder.connect(server.addresses[0]) as consumer:
        inbox = consumer._loop.inbox
        first = feeder.RemoteError("the first")
        inbox.finish(first)
        inbox.finish(feeder.RemoteError("the second"))
        assert inbox.failure is first


def test_servers_of_two_networks_that_share_a_folder_do_not_collide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(endless, "tcp") as server:
        # In this network the port is the server's, and so is the socket for descriptors.
        with pytest.raises(feeder.TransportError, match="Address already in use"):
            server._listen()
        monkeypatch.setattr(serve, "_network", lambda: 1)
        server._listen()
        with pytest.raises(feeder.TransportError, match="Address already in use"):
            server._listen()
