"""A step that is interrupted, as by Ctrl-C, while it asks for a batch: that batch comes next, and
does not count as used before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import feeder
from conformance.served import TRANSPORTS, served
from feeder.devices.host import HostQueue
from feeder.feeds.device_feed import DeviceFeed
from feeder.feeds.stream import Progress, Stream
from feeder.service.server.group import ConsumerGroup
from feeder.waking import OneShotEvent, Waker
from feeder.workers.fetch.queue import Queue
from feeder.workers.stream.position import LazyPosition
from feeds import make
from small import Calls
from watching import CallsOf, around

pytestmark = pytest.mark.served

NUM_BATCHES, ROWS = 60, 8_000
STREAMS = {"in process": None, **TRANSPORTS}


class Interrupt(Exception):
    """What a signal's handler raises."""


def factory(num_devices: int = 1, **settings: Any) -> feeder.Coordinator:
    settings = {
        "input_blob_names": ["id"], "batch_size": ROWS, "max_buffered_batches": 4,
        "devices": [f"cpu:{i}" for i in range(num_devices)], **settings,
    }  # fmt: skip
    return make(Calls(NUM_BATCHES, lambda call: [np.full(ROWS, call.index)]), **settings)


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
    "they are let go of": (Queue, "hand_out", ["in process"]),
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
        stats = batches.stats()
    assert ids == list(range(NUM_BATCHES))
    assert stats["handed_batches" if stream == "in process" else "batches"] == NUM_BATCHES
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


def test_a_device_may_take_its_last_batch_back_whatever_the_others_do() -> None:
    progress, places = (
        Progress(2),
        [cast(LazyPosition, SimpleNamespace(step=i)) for i in range(200)],
    )
    for num in range(1, 90):
        progress.handed[0] = num, places[2 * num - 2]
        progress.note(num, 2, places[2 * num - 1])
        progress.handed[1] = num, places[2 * num - 1]
        assert progress.place is places[2 * num - 1]
    # Meanwhile the other is about to be handed its next.
    progress.note(90, 2, places[179])
    progress.handed[0] = 88, places[174]
    assert progress.place is places[175]
    assert len(progress._ends) <= 4


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_server_is_told_of_what_the_loop_has_alone(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    told, is_told = list[int](), threading.Semaphore(0)

    def note(group: ConsumerGroup, lease: Any, message: Any) -> None:
        told.append(message.sequence)
        is_told.release()

    around(monkeypatch, ConsumerGroup, "use", after=note)
    with reading(transport) as (batches, _):
        ids: list[int] = []
        for num in (7, 3, 6, 8, 5):
            read(islice(batches, num), ids)
            with monkeypatch.context() as patch:
                interrupt_once(patch, Waker, "wake", is_done=True)
                with suppress(Interrupt):
                    read(islice(batches, num), ids)
            while is_told.acquire(blocking=False):
                pass
            # It tells where it stands by itself, also one who has nothing new to tell.
            assert is_told.acquire(timeout=10.0)
            assert told[-1] <= len(ids)
        read(batches, ids)
    assert ids == list(range(NUM_BATCHES))


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("every", [2, 10])
def test_an_interrupt_at_a_trigger_loses_neither_the_batch_nor_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every: int, num_devices: int, is_done: bool
) -> None:
    policy = feeder.Checkpointing(tmp_path, every_batches=every)
    with factory(num_devices, coordinator=feeder.Coordinator(policy)) as coordinator:
        feed, ids, marked = coordinator["train"], list[int](), list[int]()
        (stream,) = feed.streams
        assert stream.triggers is not None
        monkeypatch.setattr(stream.triggers, "fire", lambda: marked.append(step_of(stream)))
        while len(ids) < NUM_BATCHES:
            queue = feed.on(len(ids) % num_devices)
            with monkeypatch.context() as patch:
                interrupt_once(patch, DeviceFeed, "_fire_trigger", is_done=is_done)
                try:
                    ids.append(int(next(queue)["id"][0]))
                except Interrupt:
                    check_position(coordinator.state_dict(), len(ids) // num_devices * num_devices)
                    ids.append(int(next(queue)["id"][0]))
        for queue in map(feed.on, range(num_devices)):
            assert list(queue) == []
    assert ids == list(range(NUM_BATCHES))
    assert sorted(set(marked)) == [*range(every, NUM_BATCHES + 1, every)]


def step_of(stream: Stream) -> int:
    place = stream.progress.place
    assert place is not None
    return place.step


def test_a_wait_that_was_interrupted_does_not_hold_up_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = CallsOf(monkeypatch, (OneShotEvent, "wait"))
    queue = HostQueue(4, lambda: "")
    # What is left of a wait that is interrupted as it begins.
    queue._events.append(OneShotEvent())
    got: list[Any] = []
    reader = threading.Thread(target=lambda: got.append(queue.get()))
    reader.start()
    calls.wait_until(lambda: queue._user_waits)
    queue.put([SimpleNamespace(held_bytes=0, _is_copied=False)])
    reader.join(5.0)
    queue.close()
    reader.join()
    assert len(got[0]) == 1


# A finaliser that is interrupted says so to nobody else.


def test_a_producer_that_was_to_be_woken_is_not_held_up_by_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = HostQueue(1, lambda: "")
    calls = CallsOf(monkeypatch, (queue._drained, "wait"))
    batch: Any = SimpleNamespace(held_bytes=0, _is_copied=False)
    queue.put([batch])
    # What is left where the one who wakes is interrupted as it does so.
    stale = threading.Lock()
    stale.acquire()
    queue._drained._waiters.append(stale)
    writer = threading.Thread(target=lambda: queue.put([batch]))
    writer.start()
    calls.wait_until(lambda: queue._enqueuer_waits)
    queue.get()
    writer.join(5.0)
    is_stuck = writer.is_alive()
    queue.close()
    writer.join()
    assert not is_stuck
