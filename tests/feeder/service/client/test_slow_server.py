"""Servers that answer late, and what crosses on the way."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest

import feeder
from conformance.served import reading, serving
from feeder.errors import ConnectTimeout, FetchError
from small import Heard, Pure, make

pytestmark = pytest.mark.served

LATENCY_S = 0.15
"""Each way. A queue is held after four ways: later than an address that is silent is given up."""


@contextlib.contextmanager
def far(server: feeder.Server) -> Iterator[str]:  # noqa: C901  (four small functions)
    """The server's address over a link with a latency."""
    host, port = server.addresses[0].removeprefix("tcp://").rsplit(":", 1)
    ends: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def start(body: Callable[..., None], *args: Any) -> None:
        threads.append(threading.Thread(target=body, args=args))
        threads[-1].start()

    def read(of: socket.socket, late: SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            data = b""
            with contextlib.suppress(OSError):
                data = of.recv(65536)
            late.put((time.monotonic() + LATENCY_S, data))
            if not data:
                return

    def write(to: socket.socket, late: SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            at, data = late.get()
            over.wait(max(0.0, at - time.monotonic()))
            with contextlib.suppress(OSError):
                if data:
                    to.sendall(data)
                else:
                    to.shutdown(socket.SHUT_RDWR)
            if not data:
                return

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                pair = listener.accept()[0], socket.create_connection((host, int(port)))
                ends.extend(pair)
                for of, to in (pair, pair[::-1]):
                    late: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
                    start(read, of, late)
                    start(write, to, late)

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        start(accept)
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            for end in (listener, *ends):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(10.0)
            for end in ends:
                end.close()


def test_the_first_of_two_addresses_may_answer_late() -> None:
    with (
        serving(lambda: make(Pure(5, rows=4)), "tcp") as server,
        far(server) as address,
        feeder.connect([address, "tcp://127.0.0.1:1"], timeout=20.0) as consumer,
    ):
        assert [batch.step for batch in consumer] == list(range(5))


def test_an_error_of_the_lease_before_is_none_of_the_next() -> None:
    """It is on its way while the consumer starts elsewhere."""

    def fetch(call: feeder.Call) -> Any:
        raise ValueError("this is raised")

    logging.getLogger("feeder").addHandler(handler := Heard("this is raised"))
    try:
        with (
            serving(lambda: make(fetch), "tcp") as server,
            far(server) as address,
            feeder.connect(address, timeout=10.0) as consumer,
        ):
            state = consumer.state_dict()
            assert handler.event.wait(10.0)
            consumer.load_state_dict(state)
            with pytest.raises(FetchError, match="this is raised"):
                next(consumer)
    finally:
        logging.getLogger("feeder").removeHandler(handler)


def test_a_state_may_be_loaded_more_often_than_a_connection_is_good_for() -> None:
    with serving(lambda: make(Pure(5, rows=4))) as server, reading(server) as consumer:
        state = consumer.state_dict()
        for _ in range(40):
            consumer.load_state_dict(state)
        assert [batch.step for batch in consumer] == list(range(5))


def test_a_server_that_is_gone_is_told_of_with_the_time_that_it_had() -> None:
    with serving(lambda: make(Pure(5, rows=4))) as server:
        consumer = feeder.connect(server.addresses[0], timeout=0.3, reconnect=600.0)
    with consumer, pytest.raises(ConnectTimeout, match=r"within 0\.3 s"):
        consumer.load_state_dict(consumer.state_dict())


def test_what_an_interrupted_loop_had_taken_is_not_handed_out_after_a_state_was_loaded() -> None:
    with serving(lambda: make(Pure(5, rows=4))) as server:
        with reading(server) as consumer:
            assert [next(consumer).step for _ in range(2)] == [0, 1]
            state = consumer.state_dict()
        with reading(server) as consumer:
            consumer._refill()
            consumer.load_state_dict(state)
            assert [batch.step for batch in consumer] == [2, 3, 4]
            assert consumer.stats()["rows"] == 12
