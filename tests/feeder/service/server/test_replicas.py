"""Shared queues: several trainers are given the same batches, out of one copy."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import feeder
import replica_child
import small
from conformance.served import TRANSPORTS, reading, serving
from feeder import Batch, ConfigError, Consumer, Coordinator, LeaseLost
from feeder.devices import host
from feeder.observe import prometheus
from feeder.service.server.run import Laggard
from feeder.workers.stream import copying
from feeds import Record, assert_same, digest, expected, make, note
from fetches import BATCH_SIZE, make_fetch

pytestmark = pytest.mark.served

EPOCHS = 2
WAIT_S = 10.0


def factory(**settings: Any) -> Coordinator:
    return make(make_fetch("pure", "ragged"), **({"epochs": EPOCHS} | settings))


@pytest.fixture(scope="module")
def stream() -> list[Record]:
    return expected(make_fetch("pure", "ragged"), pure=True, epochs=EPOCHS)


@contextmanager
def sharing(
    server: feeder.Server, *seats: tuple[int, int], resume: Any = None, **settings: Any
) -> Iterator[list[Consumer]]:
    """A consumer in each of these seats: queue and replica."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                reading(server, queue=queue, replica=replica, resume=resume, **settings)
            )
            for queue, replica in seats
        ]


def all_seats(queues: int, replicas: int) -> list[tuple[int, int]]:
    return [(queue, replica) for queue in range(queues) for replica in range(replicas)]


def read_together(consumers: Sequence[Consumer]) -> list[list[Record]]:
    """What each is handed, up to its end: all of them take a batch before one takes the next."""
    rounds = zip_longest(*[map(note, consumer) for consumer in consumers])
    columns = zip(*rounds, strict=True)
    return [[record for record in column if record is not None] for column in columns]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("queues", [1, 2, 3])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_all_replicas_get_the_batches_of_their_queue(
    stream: list[Record], transport: str, queues: int, replicas: int
) -> None:
    scheme, plane = TRANSPORTS[transport]
    seats = all_seats(queues, replicas)
    with (
        serving(factory, scheme, queues=queues, replicas=replicas) as server,
        sharing(server, *seats, plane=plane) as consumers,
    ):
        got = read_together(consumers)
        for (queue, _), records in zip(seats, got, strict=True):
            assert_same(records, stream[queue::queues], queue)
        (figures,) = server.figures().feeds
        assert figures.buffered_rows == 0


@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("pattern", ["ragged", "whole"])
def test_one_may_read_frames_and_another_shared_memory(pattern: str, repeatable: bool) -> None:
    fetch = make_fetch("pure", pattern)
    stream = expected(fetch, pure=True, epochs=EPOCHS)
    with (
        # As large columns are, those of whole chunks are sent from where they lie, where no replica
        # reads a slot.
        mock.patch.object(copying, "_KEPT_BYTES", 0),
        serving(lambda: make(fetch, epochs=EPOCHS, repeatable=repeatable), replicas=3) as server,
        reading(server, plane="frames") as one,
        reading(server, replica=1, plane="shared", checksum="full") as two,
        reading(server, replica=2, plane="frames", checksum="sampled") as three,
    ):
        for records in read_together([one, two, three]):
            assert_same(records, stream)


def test_a_replica_runs_ahead_within_the_slots_and_no_further(stream: list[Record]) -> None:
    with (
        serving(factory, replicas=2) as server,
        sharing(server, (0, 0), (0, 1), credit=2, hold=0) as (fast, slow),
    ):
        ahead = [note(next(fast))]
        behind = [note(next(slow))]
        num_slots = server._groups["train"].feed.slots.num_slots(0)
        assert 0 < num_slots < len(stream) - 2
        reader = threading.Thread(target=lambda: ahead.extend(map(note, fast)))
        reader.start()
        for batch in slow:
            assert len(ahead) <= len(behind) + num_slots + 1
            behind.append(note(batch))
        reader.join(WAIT_S)
        assert_same(ahead, stream)
        assert_same(behind, stream)


class Child:
    """A trainer in a process of its own, in the last seat of two queues with two replicas."""

    def __init__(self, stack: ExitStack, server: feeder.Server, position: str = "") -> None:
        script = str(Path(replica_child.__file__))
        command = [sys.executable, script, server.addresses[0], "1", "1", position]
        self._process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        self.kill = self._process.kill
        stack.callback(self.kill)

    def read(self) -> list[str]:
        """The step, digest and position of its next batch."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().split()


@pytest.mark.process
def test_one_that_is_killed_goes_on_where_it_stood_and_the_others_see_nothing(
    stream: list[Record],
) -> None:
    wanted = stream[1::2]
    others = [(0, 0), (0, 1), (1, 0)]
    with serving(factory, queues=2, replicas=2) as server, ExitStack() as stack:
        child = Child(stack, server)
        consumers = stack.enter_context(sharing(server, *others))
        got: list[list[Record]] = [[], [], []]
        told: list[list[str]] = []
        for kill_after in (3, 8, len(wanted)):
            while len(told) < kill_after:
                told.append(child.read())
                for consumer, records in zip(consumers, got, strict=True):
                    batch = next(consumer, None)
                    records += [] if batch is None else [note(batch)]
            child.kill()
            if kill_after < len(wanted):
                # It comes back at an older position than its last one: it had saved that before.
                del told[-1]
                child = Child(stack, server, told[-1][2])
        assert [int(step) for step, _, _ in told] == [record[2] for record in wanted]
        assert [one for _, one, _ in told] == [digest([record]) for record in wanted]
        # They have been asked for two batches more than there are.
        for (queue, _), records in zip(others, got, strict=True):
            assert_same(records, stream[queue::2], queue)


@pytest.mark.parametrize("replica", range(3))
def test_a_position_of_one_replica_is_one_of_all(stream: list[Record], replica: int) -> None:
    seats = all_seats(1, 3)
    with (
        serving(factory, replicas=3) as server,
        sharing(server, *seats) as consumers,
    ):
        for _ in range(5):
            assert len({note(next(consumer)) for consumer in consumers}) == 1
        assert len({tuple(consumer.state_dict().values()) for consumer in consumers}) == 1
        state = consumers[replica].state_dict()
    with (
        serving(factory, replicas=3) as server,
        sharing(server, *seats, resume=state) as consumers,
    ):
        for records in read_together(consumers):
            assert_same(records, stream[5:])


def test_the_feed_begins_once_all_replicas_are_there() -> None:
    with (
        serving(factory, queues=2, replicas=2) as server,
        sharing(server, (0, 0), (0, 1), (1, 0)) as (one, two, three),
    ):
        assert server._groups["train"].membership.missing() == [3]
        assert server._groups["train"].feed.run is None
        with reading(server, queue=1, replica=1) as four:
            assert [next(each).step for each in (one, two, three, four)] == [0, 0, 1, 1]


def test_a_wait_names_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_SLOW_S", 0.05)
    heard = small.Heard("the feed waits for a consumer on queue 0, replica 1; queue 1, replica 0")
    logging.getLogger("feeder").addHandler(heard)
    try:
        with (
            serving(factory, queues=2, replicas=2) as server,
            sharing(server, (0, 0), (1, 1)) as (first, _),
        ):
            thread = threading.Thread(target=lambda: next(first))
            thread.start()
            assert heard.event.wait(WAIT_S)
            with sharing(server, (0, 1), (1, 0)):
                thread.join(WAIT_S)
    finally:
        logging.getLogger("feeder").removeHandler(heard)


def test_figures_tell_of_each_replica(stream: list[Record]) -> None:
    with (
        serving(factory, queues=2, replicas=2) as server,
        sharing(server, *all_seats(2, 2)) as consumers,
    ):
        read_together(consumers)
        (figures,) = server.figures().feeds
        metric = next(one for one in prometheus.METRICS if one.name == "feeder_batches_total")
        told = prometheus.samples(metric, server.figures())
    assert [queue.name for queue in figures.queues] == ["0.0", "0.1", "1.0", "1.1"]
    assert {labels[1] for labels in told} == {"0.0", "0.1", "1.0", "1.1"}
    # Made once, whoever reads them.
    assert figures.batches == len(stream)


@pytest.mark.parametrize("credit", [0, 1, 4])
def test_memory_does_not_grow_with_the_replicas(credit: int) -> None:
    sizes = []
    for replicas in (1, 2, 4):
        with (
            serving(lambda: factory(epochs=20), replicas=replicas) as server,
            sharing(server, *all_seats(1, replicas), credit=credit) as consumers,
        ):
            read_together(consumers)
            (figures,) = server.figures().feeds
            assert figures.service is not None
            sizes.append(figures.service.arena_bytes)
    assert len(set(sizes)) == 1 and sizes[0] > 0


def test_replicas_that_keep_different_batches_hold_nobody_up(stream: list[Record]) -> None:
    """Six batches are kept in all, and no slot is free but those that are there for this."""
    replicas, hold = 3, 2
    kept: list[list[Batch]] = [[] for _ in range(replicas)]
    with (
        serving(factory, replicas=replicas) as server,
        sharing(server, *all_seats(1, replicas), credit=1, hold=hold) as consumers,
    ):
        for i in range(len(stream)):
            for replica, consumer in enumerate(consumers):
                batch = next(consumer)
                assert note(batch) == stream[i]
                if i // hold == replica:
                    kept[replica].append(batch)
        for replica, batches in enumerate(kept):
            assert [note(one) for one in batches] == stream[hold * replica :][:hold]


def test_what_a_replica_keeps_is_written_by_nobody_when_another_is_gone(
    stream: list[Record],
) -> None:
    with (
        serving(lambda: factory(epochs=40), replicas=2) as server,
        sharing(server, (0, 0)) as (one,),
    ):
        with reading(server, replica=1) as two:
            kept = [(next(one), next(two))[0] for _ in range(2)]
        with reading(server, replica=1, rejoin=True) as two:
            for _ in range(200):
                next(two)
                next(one, None)
        assert [note(batch) for batch in kept] == stream[:2]


def test_a_seat_has_one_consumer() -> None:
    with (
        serving(lambda: factory(epochs=None), replicas=2) as server,
        sharing(server, (0, 0), (0, 1)) as (one, two),
    ):
        for _ in range(3):
            next(one), next(two)
        with pytest.raises(LeaseLost, match=r"queue 0, replica 1 is held by pid"):
            feeder.connect(server.addresses[0], replica=1)
        with reading(server, replica=1, takeover=True, resume=two.state_dict(), rejoin=True) as new:
            for step in range(3, 300):
                assert next(new).step == next(one).step == step
            with pytest.raises(LeaseLost, match=r"queue 0, replica 1 was taken over"):
                list(two)


def in_chunks_of(rows: int) -> Callable[[], Coordinator]:
    """200 batches of the same rows, whose positions depend on how many come at once."""

    def fetch(call: feeder.Call) -> tuple[np.ndarray]:
        if call.index >= 800 // rows:
            raise StopIteration
        return (np.arange(rows) + rows * call.index + 1,)

    return lambda: small.make(fetch)


def test_a_replica_with_a_position_of_another_run_is_told_so_alone() -> None:
    with in_chunks_of(2)() as coordinator:
        for _ in range(60):
            token = next(coordinator["train"]).cut.token()
    with serving(in_chunks_of(4), replicas=2) as server, reading(server, credit=2) as innocent:
        with reading(server, replica=1) as first:
            pairs = [(next(first), next(innocent)) for _ in range(20)]
            got, seen = (small.ids(batches) for batches in zip(*pairs, strict=True))
            state = first.state_dict()
        with reading(server, replica=1, resume=token, rejoin=True) as foreign:
            rest = small.Aside(lambda: small.ids(innocent))
            with pytest.raises(
                feeder.ResumeError, match=r"of queue 0, replica \d .* and queue 0, replica \d "
            ):
                list(foreign)
        with reading(server, replica=1, resume=state, rejoin=True) as again:
            wanted = [*range(1, 801)]
            assert got + small.ids(again) == wanted
        assert seen + rest.result() == wanted
        assert innocent.stats()["reconnects"] == 0


def test_all_replicas_are_sent_the_error_of_the_feed() -> None:
    def fetch(call: feeder.Call) -> list[np.ndarray]:
        if call.index == 2:
            raise OSError("the disk is gone")
        return [np.full(BATCH_SIZE, call.index)]

    def failing() -> Coordinator:
        return make(fetch, input_blob_names=["x"])

    with (
        serving(failing, replicas=2, exit_when="acknowledged") as server,
        sharing(server, (0, 0), (0, 1)) as consumers,
    ):
        for consumer in consumers:
            assert [next(consumer).step for _ in range(2)] == [0, 1]
            with pytest.raises(feeder.FetchError, match="the disk is gone"):
                next(consumer)
        assert server.wait(WAIT_S)


def test_a_server_ends_once_all_replicas_have_had_everything(stream: list[Record]) -> None:
    with serving(factory, replicas=2, exit_when="acknowledged") as server:
        with sharing(server, (0, 0), (0, 1)) as consumers:
            read_together(consumers)
        assert server.wait(WAIT_S) and server.failure is None


def test_replicas_of_different_steps_do_not_start() -> None:
    with (
        serving(factory, replicas=2) as server,
        sharing(server, (0, 0), (0, 1)) as (one, two),
    ):
        states = []
        for _ in range(2):
            next(one), next(two)
            states.append(one.state_dict())
    with (
        serving(factory, replicas=2) as server,
        reading(server, resume=states[0]),
        pytest.raises(
            feeder.ResumeError,
            match=r"queue 0, replica 1's checkpoint is of step 2 .*, and queue 0, replica 0's "
            "checkpoint is of step 1 ",
        ),
    ):
        feeder.connect(server.addresses[0], replica=1, resume=states[1])


@pytest.mark.parametrize("replicas", [0, -1, True, 1.5, "2", None, 1025])
def test_a_number_of_replicas_that_cannot_be_is_refused(replicas: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"replicas is {replicas!r}, expected")):
        feeder.serve(factory, "ipc://replicas", replicas=replicas)


def test_more_seats_than_a_message_can_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 2 queues with 513 replicas, expected at most 1024"):
        feeder.serve(factory, "ipc://replicas", queues=2, replicas=513)


@pytest.mark.parametrize("replica", [-1, True, 1.5, "1", None])
def test_a_replica_that_is_no_number_is_refused(replica: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"replica is {replica!r}, expected")):
        feeder.connect("ipc://replicas", replica=replica)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replica_that_the_feed_has_not_is_refused(replicas: int) -> None:
    with (
        serving(factory, replicas=replicas) as server,
        pytest.raises(ConfigError, match=f"replica is {replicas}, but feed 'train' has {replicas}"),
    ):
        feeder.connect(server.addresses[0], replica=replicas)


def test_what_all_replicas_are_past_is_counted_once() -> None:
    laggard = Laggard(3)
    assert [laggard.advance(0, 5), laggard.advance(1, 2), laggard.advance(2, 3)] == [0, 0, 2]
    assert [laggard.advance(1, 4), laggard.advance(2, 1), laggard.advance(2, 9)] == [1, 1, 1]
    assert [laggard.advance(0, 1), laggard.advance(0, 7), laggard.advance(1, 7)] == [1, 0, 7]
    assert [Laggard(1).advance(0, num) for num in (3, 0)] == [3, 0]
