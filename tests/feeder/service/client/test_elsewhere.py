"""Consumers whose server is not where they look: two servers at once, or nobody but themselves."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

import feeder
from feeder.service.client import failover
from feeder.service.client.failover import Failover
from feeder.service.client.monitor import Monitor
from feeder.service.net import connection as connection_module
from feeder.service.net.addresses import Address
from feeder.service.net.connection import Connection, Ready
from small import WAIT_S, Aside, Pure, make

pytestmark = pytest.mark.served

NUM = 20
"""Batches of each of two queues."""


def two_queues() -> feeder.Coordinator:
    return make(Pure(2 * NUM, rows=4), devices=2)


def steps(consumer: feeder.Consumer) -> Callable[[], list[int]]:
    return lambda: [batch.step for batch in consumer]


# ---- a server that deals to others


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ((1, 1), (2, 1), "queues: 1 then, 2 now"),
        ((2, 1), (1, 1), "queues: 2 then, 1 now"),
        ((1, 2), (1, 1), "replicas: 2 then, 1 now"),
        ((2, 1), (3, 2), "queues: 2 then, 3 now; replicas: 1 then, 2 now"),
    ],
)
@pytest.mark.parametrize("moves", [False, True])
def test_a_server_that_deals_to_others_is_an_error_in_mid_iteration(
    before: tuple[int, int], after: tuple[int, int], told: str, moves: bool, tmp_path: Path
) -> None:
    """At the same address or at the next one. The position is whole, and fits the new number."""
    first, second = (f"ipc://{tmp_path}/{name}" for name in ("first", "second"))
    (num, replicas), (queues, _) = before, after

    def serve(address: str, queues: int, replicas: int) -> feeder.Server:
        return feeder.serve(lambda: make(Pure(24)), address, queues=queues, replicas=replicas)

    with ExitStack() as stack:
        server = serve(first, num, replicas)
        trainers = [
            stack.enter_context(
                feeder.connect([first, second], queue=i // replicas, replica=i % replicas, credit=1)
            )
            for i in range(num * replicas)
        ]
        for trainer in trainers:
            next(trainer)
        server.close()
        with serve(second if moves else first, *after):
            for trainer in trainers:
                with pytest.raises(feeder.ResumeError, match=re.escape(f"before ({told})")):
                    list(trainer)
            state = trainers[0].state_dict()
            stack.close()
            feeder.connect([first, second], queue=queues - 1, resume=state).close()


# ---- two living servers


@pytest.mark.parametrize("order", ["alike", "reversed"])
def test_trainers_at_two_servers_find_each_other(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "_LEASES_AT_FIRST", 2)
    first, second = (f"ipc://{tmp_path}/{name}" for name in ("first", "second"))
    others = [first, second] if order == "alike" else [second, first]
    with (
        feeder.serve(two_queues, second, lease=0.2) as at_second,
        feeder.connect(others, queue=1) as right,
        feeder.serve(two_queues, first, lease=0.2) as at_first,
        feeder.connect([first, second], queue=0) as left,
    ):
        assert at_first.addresses != at_second.addresses
        readers = Aside(steps(left)), Aside(steps(right))
        assert [reader.result() for reader in readers] == [
            list(range(0, 2 * NUM, 2)), list(range(1, 2 * NUM, 2)),
        ]  # fmt: skip


def test_who_waits_at_the_only_server_comes_back_to_it(tmp_path: Path) -> None:
    here, nowhere = f"ipc://{tmp_path}/here", f"ipc://{tmp_path}/nowhere"
    with (
        feeder.serve(two_queues, here, lease=0.2),
        feeder.connect([nowhere, here], queue=0) as left,
    ):
        reader = Aside(steps(left))
        for _ in range(int(WAIT_S / 0.05)):
            if left.stats()["reconnects"] >= 2:
                break
            reader._thread.join(0.05)
        else:
            pytest.fail("it stays")
        with feeder.connect(here, queue=1) as right:
            assert steps(right)() == list(range(1, 2 * NUM, 2))
        assert reader.result() == list(range(0, 2 * NUM, 2))


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


def test_who_finds_nobody_but_itself_is_told_that_nobody_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect(dealer: zmq.Socket[bytes], address: Address) -> None:
        place = str(address).removeprefix("tcp://")
        dealer.connect(f"tcp://{place};{place}")

    monkeypatch.setattr(connection_module, "connect", connect)
    with pytest.raises(feeder.ConnectTimeout, match="no answer from tcp://127"):
        feeder.connect(f"tcp://127.0.0.1:{free_port()}", timeout=1.0)


def test_so_is_a_monitor_whose_own_question_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be there before the event of the connecting is read, and is no server's answer."""

    def connect(dealer: zmq.Socket[bytes], address: Address) -> None:
        place = str(address).removeprefix("tcp://")
        dealer.connect(f"tcp://{place};{place}")

    def poll(connection: Connection, timeout_s: float) -> Ready:
        return Ready(bool(connection._dealer.poll(1000 * timeout_s)), False)

    monkeypatch.setattr(connection_module, "connect", connect)
    monkeypatch.setattr(Connection, "poll", poll)
    with (
        Monitor(f"tcp://127.0.0.1:{free_port()}") as monitor,
        pytest.raises(feeder.TransportError, match="nobody listens at tcp://127"),
    ):
        monitor.fetch(WAIT_S)


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
