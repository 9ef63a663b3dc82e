"""A trainer that is interrupted, as by Ctrl-C, while its consumer loads a state, which counts, and
is gone on from; or while it asks for a snapshot."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

import feeder
from conformance.served import reading, serving
from feeder.devices.host import HostQueue
from feeder.service.client.inbox import Inbox, Loading
from feeder.service.client.io_loop import ClientLoop
from feeder.service.server.group import ConsumerGroup
from feeder.waking import OneShotEvent
from small import WAIT_S, Aside, Pure, make
from watching import CallsOf, around

pytestmark = pytest.mark.served

NUM, AT = 40, 10


class Interrupt(BaseException):
    """What a signal's handler raises, as KeyboardInterrupt is."""


def factory(**settings: Any) -> feeder.Coordinator:
    return make(Pure(NUM, rows=4), **settings)


@pytest.fixture(scope="module")
def state() -> dict[str, bytes]:
    """After ten batches."""
    with factory() as coordinator:
        for _ in range(AT):
            next(coordinator["train"])
        return coordinator.state_dict()


@pytest.fixture
def _held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """The I/O thread does not come to it until it is let, and the user is interrupted as it
    waits."""
    may_go_on, is_first = threading.Event(), [True]

    def interrupt_once(inbox: Inbox, number: int) -> None:
        if number and is_first:
            is_first.clear()
            raise Interrupt

    around(monkeypatch, ClientLoop, "reopen", before=lambda *_: may_go_on.wait(WAIT_S))
    around(monkeypatch, Inbox, "wait_for_opened", before=interrupt_once)
    yield may_go_on.set
    may_go_on.set()


@pytest.mark.parametrize("has_batches", [False, True])
@pytest.mark.parametrize("had_taken", [False, True])
def test_what_was_loaded_comes_and_is_told(
    _held_up: Callable[[], None], monkeypatch: pytest.MonkeyPatch, state: dict[str, bytes],
    has_batches: bool, had_taken: bool,
) -> None:  # fmt: skip
    calls = CallsOf(monkeypatch, (HostQueue, "put"))
    num_queues = 1 if has_batches or had_taken else 2
    with serving(factory, queues=num_queues) as server, reading(server, queue=0) as consumer:
        if has_batches:
            calls.wait_until(lambda: consumer.stats()["prefetched_batches"])
        if had_taken:
            consumer._refill()  # As by a `next` that was interrupted.
        with pytest.raises(Interrupt):
            consumer.load_state_dict(state)
        assert consumer.state_dict() == state
        steps = Aside(lambda: [next(consumer).step for _ in range(8)])
        _held_up()
        if num_queues == 2:
            with reading(server, queue=1, resume=state):
                assert steps.result() == [*range(AT, AT + 16, 2)]
        else:
            assert steps.result() == [*range(AT, AT + 8)]


def test_a_state_that_is_refused_does_not_count(state: dict[str, bytes]) -> None:
    with serving(lambda: factory(batch_size=5)) as server, reading(server) as consumer:
        start = consumer.state_dict()
        for _ in range(2):
            with pytest.raises(feeder.ResumeError, match="batch_size: 4 then, 5 now"):
                consumer.load_state_dict(state)
            assert consumer.state_dict() == start
        consumer.load_state_dict(start)
        assert next(consumer).step == 0


@pytest.fixture
def interrupted() -> Iterator[Callable[[float, Callable[[], object]], None]]:
    """What has a call interrupted so many seconds after it has begun, where it is not over."""
    is_on = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal is_on
        if is_on:
            is_on = False
            raise Interrupt

    def call(after_s: float, what: Callable[[], object]) -> None:
        nonlocal is_on
        try:
            is_on = True
            signal.setitimer(signal.ITIMER_REAL, after_s)
            what()
            is_on = False
        except Interrupt:
            pass

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield call
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def step_of(position: dict[str, bytes]) -> int:
    return feeder.Snapshot.from_bytes(position["feeder"]).states[0].summary[2]


def test_interrupts_at_any_moment_hang_nothing(interrupted: Any, state: dict[str, bytes]) -> None:
    lengths, chance = [0.003], random.Random(5)
    for _ in range(40):
        # A server of its own: rewinds are rate-limited.
        with serving(factory) as server, reading(server) as consumer:
            began = time.monotonic()
            after_s = chance.uniform(2e-5, sorted(lengths)[len(lengths) // 2])
            interrupted(after_s, lambda: consumer.load_state_dict(state))
            lengths.append(time.monotonic() - began)
            step = step_of(consumer.state_dict())
            assert step in (0, AT)
            assert [batch.step for batch in consumer] == [*range(step, NUM)]


def test_another_thread_that_waits_for_a_batch_is_told_that_a_state_was_loaded(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, bytes]
) -> None:
    """It waited at a queue that nothing came to any more, also after `close`."""
    with serving(factory, queues=2) as server, reading(server, queue=0) as consumer:
        calls = CallsOf(monkeypatch, (OneShotEvent, "wait"))
        waits = Aside(lambda: next(consumer))
        calls.wait_until(lambda: consumer._inbox.batches.waited_since is not None)
        consumer.load_state_dict(state)
        with pytest.raises(feeder.ClosedError, match="another thread has loaded a state"):
            waits.result()
        with reading(server, queue=1, resume=state) as other:
            assert [next(one).step for one in (consumer, other)] == [AT, AT + 1]


def test_a_close_that_is_interrupted_leaves_nothing_when_the_consumer_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(consumer: feeder.Consumer) -> None:
        raise Interrupt

    calls = CallsOf(monkeypatch, (ConsumerGroup, "leave"), (ConsumerGroup, "lose"))
    with serving(factory) as server:
        consumer = feeder.connect(server.addresses[0])
        with monkeypatch.context() as patch:
            patch.setattr(feeder.Consumer, "_drop_ready", interrupt)
            with pytest.raises(Interrupt):
                consumer.close()
        del consumer
        gc.collect()
        # Else the queue is held for as long as this process lives.
        calls.wait_until(lambda: not server._groups["train"].leases)
        with reading(server) as again:
            assert next(again).step == 0


def test_a_snapshot_is_of_what_is_being_loaded(state: dict[str, bytes]) -> None:
    with serving(factory) as server, reading(server) as consumer:
        # As by an interrupt before the I/O thread was asked.
        consumer._ready = Loading(1, state["feeder"])
        while True:
            with suppress(feeder.RemoteError):  # It is about to be loaded.
                assert consumer.snapshot().states[0].summary[2] == AT
                break
        assert next(consumer).step == AT
