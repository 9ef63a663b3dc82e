"""Batches that a forked child has too, while its parent goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import reading, serving
from feeder.service.client.lease import ClientLease
from feeder.service.memory import forking
from feeder.service.server.group import ConsumerGroup
from lineage import forked, status_of
from small import Aside, make
from watching import around

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]

ROWS = 1000
"""Slots of 8,000 bytes, which share pages."""


def factory() -> feeder.Coordinator:
    return make(lambda call: [np.full(ROWS, call.index)], batch_size=ROWS, epochs=None)


def check(*batches: feeder.Batch) -> None:
    """That they are what was fetched for them."""
    for batch in batches:
        assert batch["id"].tolist() == [batch.step] * len(batch["id"])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slots that consumers have told to be free."""
    slots: list[int] = []
    around(
        monkeypatch, ConsumerGroup, "use",
        before=lambda group, lease, message: slots.extend(message.slots),
    )  # fmt: skip
    return slots


def fork_and_go_on(consumer: feeder.Consumer, held: list[feeder.Batch]) -> None:
    """Let a child look at batches after its parent has let go of them and gone on."""
    has_gone_on, goes_on = os.pipe()
    parts = [held[-1]["id"][5:]]
    step = held[-1].step

    def look() -> None:
        os.close(goes_on)
        assert os.read(has_gone_on, 1) == b""
        check(*held)
        assert parts[0].tolist() == [step] * (ROWS - 5)
        for use in (lambda: next(consumer), consumer.state_dict, consumer.snapshot):
            with pytest.raises(feeder.ForkedError):
                use()
        consumer.close()

    pid = forked(look)
    try:
        last = held[-1].step
        held.clear()
        parts.clear()
        for step in range(last + 1, last + 101):
            check(batch := next(consumer))
            assert batch.step == step
    finally:
        for descriptor in (goes_on, has_gone_on):
            os.close(descriptor)
        assert status_of(pid) == 0


@pytest.mark.parametrize("plane", ["shared", "frames"])
def test_a_child_keeps_what_it_looks_at(plane: Any) -> None:
    with serving(factory) as server, reading(server, plane=plane, hold=4) as consumer:
        fork_and_go_on(consumer, [next(consumer) for _ in range(3)])


def test_until_it_has_copied_them_its_parent_tells_of_none(
    monkeypatch: pytest.MonkeyPatch, told: list[int]
) -> None:
    is_there, comes = os.pipe()

    def wait(lease: ClientLease) -> None:
        os.close(comes)
        assert os.read(is_there, 1) == b""

    around(monkeypatch, ClientLease, "copy_for_child", before=wait)
    try:
        with serving(factory) as server, reading(server, hold=4, credit=4) as consumer:
            held = [next(consumer) for _ in range(3)]
            pid = forked(lambda: check(*held))
            num = len(told)
            held.clear()
            next(consumer)
            # It is answered after what was told before it.
            consumer.snapshot()
            assert len(told) == num
            os.close(comes)
            assert [next(consumer).step for _ in range(100)] == [*range(4, 104)]
            assert len(told) > num
            assert status_of(pid) == 0
    finally:
        os.close(is_there)
        with contextlib.suppress(OSError):
            os.close(comes)


def test_a_child_that_dies_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ClientLease, "copy_for_child", lambda lease: os.kill(os.getpid(), signal.SIGKILL)
    )
    with serving(factory) as server, reading(server) as consumer:
        held = next(consumer)
        pid = forked(lambda: None)
        assert status_of(pid) == -signal.SIGKILL
        check(held)
        assert [next(consumer).step for _ in range(100)] == [*range(1, 101)]


class Slots:
    """What is lent, and by how many forks it is frozen."""

    def __init__(self) -> None:
        self.frozen: set[object] = set()
        self.is_thawed = threading.Event()

    def freeze(self, why: object) -> None:
        self.frozen.add(why)

    def thaw(self, why: object) -> None:
        self.frozen.discard(why)
        self.is_thawed.set()

    def copy_for_child(self) -> None:
        pass


def test_what_is_lent_while_a_fork_is_under_way_is_frozen_until_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork = forking._Fork()
    monkeypatch.setattr(forking, "_under_way", [fork])
    early, late = Slots(), Slots()
    forking.register_lent(early)
    assert early.frozen == {fork}
    monkeypatch.setattr(forking, "_BLIND_S", 0.01)
    fork.finish_in_parent()
    assert early.is_thawed.wait(10.0)
    # It had looked before the fork was over.
    forking.register_lent(late)
    assert not late.frozen
    for slots in (early, late):
        forking.unregister_lent(slots)


def test_a_child_has_no_connection_and_wakes_nobody() -> None:
    """Else a trainer that is killed would hold its queue for as long as its child lives."""
    with serving(factory, "tcp") as server, reading(server) as consumer:
        port = int(server.addresses[0].rpartition(":")[2])
        next(consumer)
        waker = consumer._loop.waker

        def look() -> None:
            assert not list(connections(port))
            with tempfile.TemporaryFile() as file:
                os.dup2(file.fileno(), waker.fileno())
                for _ in range(2):
                    waker.wake()
                    waker._awake = False
                assert os.fstat(file.fileno()).st_size == 0

        assert len(list(connections(port))) >= 2
        assert status_of(forked(look)) == 0
        assert [next(consumer).step for _ in range(100)] == [*range(1, 101)]


def connections(port: int) -> Iterator[int]:
    """The descriptors of connections from and to a port."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            sock = socket.socket(fileno=int(name))
            ends = [sock.getsockname()]
            with contextlib.suppress(OSError):
                ends.append(sock.getpeername())
            descriptor = sock.detach()
            if any(isinstance(end, tuple) and end[1] == port for end in ends):
                yield descriptor


def test_children_that_several_threads_make_at_once() -> None:
    with serving(factory) as server, reading(server) as consumer:
        held = next(consumer)

        def fork_often() -> list[int]:
            pids = [forked(lambda: check(held)) for _ in range(5)]
            return [*map(status_of, pids)]

        forks = [Aside(fork_often) for _ in range(3)]
        assert [next(consumer).step for _ in range(300)] == [*range(1, 301)]
        assert [fork.result() for fork in forks] == [[0] * 5] * 3
        assert not forking._under_way


def test_a_fork_that_was_interrupted_as_it_waited_ends_no_other() -> None:
    """Its own hook before it failed."""
    has_begun, may_end = threading.Event(), threading.Event()

    def fork() -> None:
        forking._before_fork()
        has_begun.set()
        assert may_end.wait(10.0)
        forking._after_fork_in_parent()

    other = Aside(fork)
    assert has_begun.wait(10.0)
    forking._after_fork_in_parent()
    assert len(forking._under_way) == 1
    may_end.set()
    other.result()
    assert not forking._under_way
