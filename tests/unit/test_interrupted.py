"""A step that is interrupted, as by Ctrl-C, while it asks for a batch: that batch comes next, and
does not count as used before."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import TRANSPORTS, served
from feeder.devices.host import HostQueue
from feeder.stream import Progress
from feeder.transport.waker import Waker
from feeds import make
from workers.channel import Channel
from workers.stats import Handed

NUM_BATCHES, ROWS = 60, 8_000
STREAMS = {"in process": None, **TRANSPORTS}


class Interrupt(Exception):
    """What a signal's handler raises."""


def factory(num_devices: int = 1, **settings: Any) -> feeder.Coordinator:
    def fetch(call: feeder.Call) -> Any:
        if call.index == NUM_BATCHES:
            raise StopIteration
        return [np.full(ROWS, call.index)]

    devices = [f"cpu:{i}" for i in range(num_devices)]
    settings = {"max_buffered_batches": 4, **settings}
    return make(fetch, input_blob_names=["id"], batch_size=ROWS, devices=devices, **settings)


@contextmanager
def reading(stream: str, num_devices: int = 1) -> Iterator[Any]:
    """The feed, and what tells its position."""
    if stream == "in process":
        with factory(num_devices) as coordinator:
            yield coordinator["train"], coordinator.state_dict
    else:
        with served(stream, factory, credit=4) as seen:
            yield seen.on(0), seen.on(0).state_dict


def check_position(state: dict[str, bytes], num_used: int) -> None:
    with factory(resume=state) as coordinator:
        steps = [batch.step for batch in coordinator["train"]]
    assert steps == list(range(num_used, NUM_BATCHES))


def read(batches: Any, ids: list[int]) -> None:
    for batch in batches:
        ids.append(int(batch["id"][0]))


WHERE = {
    "the batches are taken": (HostQueue, "get", [*STREAMS]),
    "they are counted": (Handed, "take", [*STREAMS]),
    "they are let go of": (Channel, "hand_out", ["in process"]),
    "the server is told": (Waker, "wake", [*TRANSPORTS]),
}


@pytest.mark.parametrize(
    ("where", "stream"),
    [(where, stream) for where, (_, _, streams) in WHERE.items() for stream in streams],
)
@pytest.mark.parametrize("is_done", [False, True])
def test_an_interrupt_in_a_call_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, where: str, stream: str, is_done: bool
) -> None:
    owner, name, _ = WHERE[where]
    with reading(stream) as (batches, state_dict):
        ids: list[int] = []
        for batch in batches:
            ids.append(int(batch["id"][0]))
            if len(ids) == 7:
                break
        with monkeypatch.context() as patch:
            interrupt_once(patch, owner, name, is_done=is_done)
            with pytest.raises(Interrupt):
                read(batches, ids)
        state, num_used = state_dict(), len(ids)
        read(batches, ids)
    assert ids == list(range(NUM_BATCHES))
    check_position(state, num_used)


def interrupt_once(patch: pytest.MonkeyPatch, owner: type, name: str, *, is_done: bool) -> None:
    """Have the next call of a method by this thread interrupted, before or after it is done."""
    method: Callable[..., Any] = getattr(owner, name)
    thread, interrupts = threading.get_ident(), [Interrupt()]

    def interrupted(*args: Any) -> Any:
        is_ours = threading.get_ident() == thread
        if is_ours and interrupts and not is_done:
            raise interrupts.pop()
        result = method(*args)
        if is_ours and interrupts:
            raise interrupts.pop()
        return result

    patch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("device", [0, 1])
def test_nor_does_one_of_several_devices(
    monkeypatch: pytest.MonkeyPatch, device: int, is_done: bool
) -> None:
    with reading("in process", 2) as (feed, state_dict):
        left, right = feed.on(0), feed.on(1)
        ids = [int(next(queue)["id"][0]) for _ in range(3) for queue in (left, right)]
        ids += [int(next(left)["id"][0])] if device else []
        with monkeypatch.context() as patch:
            interrupt_once(patch, Progress, "note", is_done=is_done)
            with pytest.raises(Interrupt):
                next(feed.on(device))
        ids += [int(next(feed.on(i))["id"][0]) for i in range(device, 2)]
        assert ids == list(range(8))
        state = state_dict()
        rest = [int(batch["id"][0]) for pair in zip(left, right, strict=True) for batch in pair]
    assert ids + rest == list(range(NUM_BATCHES))
    check_position(state, 8)


# A finaliser that is interrupted says so to nobody else.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("stream", "num"), [("in process", 150), ("shared", 25), ("tcp", 25)])
def test_interrupts_at_any_moment_lose_nothing(stream: str, num: int) -> None:
    is_on, lengths, chance = False, [0.01], random.Random(7)

    def interrupt(number: int, frame: object) -> None:
        nonlocal is_on
        if is_on:
            is_on = False
            raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(num):
            with reading(stream) as (batches, state_dict):
                ids: list[int] = []
                began, batch, state = time.monotonic(), None, None
                signal.setitimer(
                    signal.ITIMER_REAL, chance.uniform(2e-5, sorted(lengths)[len(lengths) // 2])
                )
                try:
                    is_on = True
                    for batch in batches:
                        ids.append(int(batch["id"][0]))
                    is_on = False
                except (Interrupt, RuntimeError) as error:
                    # Python's own Condition, where it is interrupted as it wakes: "release unlocked
                    # lock", in the interrupt's place.
                    assert isinstance(error, Interrupt) or isinstance(error.__context__, Interrupt)
                    # The loop had it, and was interrupted in its own code.
                    if batch is not None and batch.step == len(ids):
                        ids.append(batch.step)
                    state, num_used = state_dict(), len(ids)
                    read(batches, ids)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                lengths.append(time.monotonic() - began)
            assert ids == list(range(NUM_BATCHES))
            if state is not None:
                check_position(state, num_used)
    finally:
        signal.signal(signal.SIGALRM, before)
