"""What is in the place of a server that is away, and at the addresses before it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest
import zmq

import feeder
from conformance.served import reading, serving
from feeder.service.client.inbox import Inbox
from feeder.service.net import connection as connection_module
from feeder.service.net.addresses import Address, parse
from feeder.service.net.connection import Connection
from feeder.service.net.keys import make_keys
from feeder.service.net.security import Security
from small import WAIT_S, Aside, Pure, make
from watching import CallsOf

pytestmark = pytest.mark.served


def fifty() -> feeder.Coordinator:
    return make(Pure(50, rows=4))


def test_a_consumer_comes_back_to_a_server_that_something_else_stood_in_for() -> None:
    """As a proxy, or a check of health."""
    asked: SimpleQueue[None] = SimpleQueue()

    def answer_as_http(connection: socket.socket) -> None:
        asked.put(None)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        connection.settimeout(WAIT_S)
        while connection.recv(4096):
            pass

    with serving(fifty, "tcp") as server, reading(server, credit=1) as consumer:
        first = [next(consumer).step for _ in range(3)]
        server.close()
        with listening(answer_as_http, int(server.addresses[0].rpartition(":")[2])):
            for _ in range(3):
                asked.get(timeout=WAIT_S)
        with feeder.serve(fifty, server.addresses[0]):
            assert first + [batch.step for batch in consumer] == [*range(50)]


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], object], port: int = 0) -> Iterator[str]:
    """What lets everybody in, and answers each; its address."""

    def let_in() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    answer(connection)

    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = Thread(target=let_in)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(WAIT_S)


def forwarder() -> contextlib.AbstractContextManager[str]:
    """What lets everybody in and has nobody behind it."""
    return listening(lambda connection: None)


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """A server that is stopped, as far as others see."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("other", [forwarder, silent])
def test_the_second_address_is_tried_whatever_is_at_the_first(
    other: Callable[[], contextlib.AbstractContextManager[str]], tmp_path: Path, has_keys: bool
) -> None:
    keys = tmp_path if has_keys else None
    if has_keys:
        make_keys(tmp_path)
    with serving(fifty, "tcp", keys=keys) as server, other() as address:
        addresses, waits = [address, server.addresses[0]], {"timeout": 4.0, "reconnect": 4.0}
        with feeder.connect(addresses, credit=1, keys=keys, **waits) as consumer:
            first = [next(consumer).step for _ in range(3)]
            server.close()
            with feeder.serve(fifty, server.addresses[0], keys=keys):
                assert first + [batch.step for batch in consumer] == [*range(50)]


@pytest.mark.parametrize(("other", "limit_s"), [(forwarder, 60.0), (silent, 1.5)])
def test_a_client_whom_no_address_takes_is_told_so(
    other: Callable[[], contextlib.AbstractContextManager[str]], limit_s: float, tmp_path: Path
) -> None:
    """At once where all refuse; where some are silent, instead of that nobody answered."""
    make_keys(tmp_path)
    with forwarder() as first, other() as second, pytest.raises(feeder.AuthError, match="refuses"):
        feeder.connect([first, second], keys=tmp_path, timeout=limit_s)


def test_before_its_first_batch_a_consumer_may_load_a_state_though_the_server_was_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = CallsOf(monkeypatch, (Inbox, "set_lease"))

    def two_queues() -> feeder.Coordinator:
        return make(Pure(400, rows=4), devices=2)

    address = f"ipc://{tmp_path}/feed"
    with make(Pure(400, rows=4)) as whole:
        assert [next(whole["train"]).step for _ in range(10)] == [*range(10)]
        state = whole.state_dict()
    with contextlib.ExitStack() as stack:
        with feeder.serve(two_queues, address):
            left = stack.enter_context(feeder.connect(address, queue=0))
        stack.enter_context(feeder.serve(two_queues, address))
        calls.wait_until(lambda: left.stats()["reconnects"])
        right = stack.enter_context(feeder.connect(address, queue=1))
        for one in (right, left):
            one.load_state_dict(state)
        assert [next(one).step for _ in range(3) for one in (left, right)] == [*range(10, 16)]


def test_bytes_of_a_message_that_is_still_on_its_way_are_a_sign_of_life() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, Security() as security:
        address = parse(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        connection = Connection(security, address, 1024)
        with contextlib.closing(connection), listener.accept()[0] as peer:
            while connection.reached_at is None:
                assert connection.poll(WAIT_S).trouble
                assert connection.trouble() is None
            assert not connection.has_moved()
            assert not connection.has_moved()
            for byte in (b"\xff", b"\0", b"\0"):  # The first ones of ZMTP's greeting.
                peer.sendall(byte)
                assert connection.has_moved()


# ---- nobody


@pytest.fixture
def to_itself(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first two connections of a consumer lead to themselves, as when the system chooses the
    port that is connected to; those after them go where they should."""
    made: list[str] = []

    def connect(dealer: zmq.Socket[bytes], address: Address) -> None:
        made.append(str(address))
        place = str(address).removeprefix("tcp://")
        dealer.connect(f"tcp://{place};{place}" if len(made) <= 2 else str(address))

    monkeypatch.setattr(connection_module, "connect", connect)
    return made


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def test_a_consumer_that_is_connected_to_itself_waits_for_a_server(
    to_itself: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = CallsOf(monkeypatch, (connection_module, "connect"))
    address = f"tcp://127.0.0.1:{free_port()}"
    waiting = Aside(lambda: feeder.connect(address, timeout=2 * WAIT_S))
    calls.wait_until(lambda: len(to_itself) >= 3)
    # The port is free at once: nothing of those connections is left.
    with feeder.serve(lambda: make(Pure(5, rows=4)), address), waiting.result() as consumer:
        assert [batch.step for batch in consumer] == list(range(5))


# ---- without a position


def test_who_rejoins_without_a_position_begins_at_the_start_of_its_queue(tmp_path: Path) -> None:
    """Also where the server was resumed: its stored place is where all begin together."""
    address, kept = f"ipc://{tmp_path}/feed", tmp_path / "kept"
    settings: dict[str, Any] = {"checkpoints": kept}

    with feeder.serve(fifty, address, **settings), feeder.connect(address) as consumer:
        assert [next(consumer).step for _ in range(5)] == list(range(5))
        consumer.snapshot()
    with feeder.serve(fifty, address, resume="latest", **settings):
        with feeder.connect(address) as together:
            assert next(together).step == 5
        with feeder.connect(address, rejoin=True) as alone:
            assert [batch.step for batch in alone] == list(range(50))
