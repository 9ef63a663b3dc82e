"""Consumers that hang, ones that only rest, and feeds that are begun again too often."""

from __future__ import annotations

import logging
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

import feeder
from conformance.served import reading, serving
from feeder.service.server import run as served_feeds
from feeder.service.server.run import ServedFeed
from feeds import make
from fetches import BATCH_SIZE, make_rows
from peers import WAIT_S
from small import Heard

pytestmark = pytest.mark.served


def factory() -> feeder.Coordinator:
    return make(lambda call: make_rows(0, 0, call.index, BATCH_SIZE), epochs=None)


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
