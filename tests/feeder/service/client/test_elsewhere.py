"""Consumers whose server is not where they look: another one, or nobody but themselves."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import zmq

import feeder
from feeder.service.client.failover import Failover
from feeder.service.net import connection as connection_module
from feeder.service.net.addresses import Address
from small import WAIT_S, Aside, Pure, make

pytestmark = pytest.mark.served

NUM = 20
"""Batches."""


# ---- a server that deals to others (all directions: `test_other_numbers`)


def test_how_long_a_server_is_waited_with() -> None:
    assert Failover(("a",)).patience_s(10.0) == float("inf")
    several = Failover(("a", "b", "c"))
    places = []
    for _ in range(4):
        places.append(several.next_address(0.0))
        least = 40.0 if places[-1] == "a" else 10.0
        found = {several.patience_s(10.0) for _ in range(50)}
        assert all(least <= patience <= 2 * least for patience in found)
        assert len(found) > 40, "several consumers leave at several times"
        several.move_on()
    assert places == ["a", "b", "a", "b"]


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


def test_a_consumer_that_is_connected_to_itself_waits_for_a_server(to_itself: list[str]) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    waiting = Aside(lambda: feeder.connect(address, timeout=2 * WAIT_S))
    for _ in range(int(WAIT_S / 0.01)):
        if len(to_itself) >= 3:
            break
        waiting._thread.join(0.01)
    # The port is free at once: nothing of those connections is left.
    with feeder.serve(lambda: make(Pure(5, rows=4)), address), waiting.result() as consumer:
        assert [batch.step for batch in consumer] == list(range(5))
    assert len(to_itself) >= 3


# ---- without a position


def test_who_rejoins_without_a_position_begins_at_the_start_of_its_queue(tmp_path: Path) -> None:
    """Also where the server was resumed: its stored place is where all begin together."""
    address, kept = f"ipc://{tmp_path}/feed", tmp_path / "kept"
    settings: dict[str, Any] = {"checkpoints": kept}

    def one() -> feeder.Coordinator:
        return make(Pure(NUM, rows=4))

    with feeder.serve(one, address, **settings), feeder.connect(address) as consumer:
        assert [next(consumer).step for _ in range(5)] == list(range(5))
        consumer.snapshot()
    with feeder.serve(one, address, resume="latest", **settings):
        with feeder.connect(address) as together:
            assert next(together).step == 5
        with feeder.connect(address, rejoin=True) as alone:
            assert [batch.step for batch in alone] == list(range(NUM))
