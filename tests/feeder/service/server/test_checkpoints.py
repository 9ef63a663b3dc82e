"""A server stores how far all its consumers have used a feed, and those that come without a
position begin there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import reading, serving
from feeder.checkpoint.parts import find_lowest
from feeder.checkpoint.store import CheckpointStore
from feeder.service.client import machine
from feeder.service.protocol import messages as say
from feeder.service.server.factory import FeedFactory
from feeder.service.server.io_loop import ServerLoop
from feeder.service.server.serve import Server
from feeder.service.server.watermark import LowWatermark
from feeder.state.token import start_of
from feeder.workers.stream.position import LazyPosition
from peers import Stalled, peer_of, used
from small import WAIT_S, Pure, ids, make
from watching import around

pytestmark = pytest.mark.served

NUM_BATCHES = 50


@pytest.fixture(autouse=True)
def farewells_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is: what a consumer says last is stored."""
    monkeypatch.setattr(machine, "_FAREWELL_S", WAIT_S)


def factory(**settings: Any) -> Callable[[], feeder.Coordinator]:
    return lambda: make(Pure(num_calls=67), **({"max_buffered_batches": 4} | settings))


def whole(num_queues: int = 1) -> list[list[int]]:
    """Return the ids that each queue is due."""
    with factory()() as coordinator:
        batches = list(coordinator["train"])
    assert len(batches) == NUM_BATCHES + 1
    return [ids(batches[queue::num_queues]) for queue in range(num_queues)]


def step_in(folder: Path | str) -> int:
    (state,) = CheckpointStore(folder).load().states
    return state.summary[2]


def test_a_server_that_is_started_again_goes_on_after_what_was_used(tmp_path: Path) -> None:
    seen: list[int] = []
    for _ in range(4):  # the same lines each time, and consumers that bring no position
        with (
            serving(factory(), checkpoints=tmp_path / "run", resume="latest") as server,
            reading(server, credit=4) as consumer,
        ):
            for _, batch in zip(range(13), consumer, strict=False):
                seen += ids([batch])
            assert server.figures().feeds[0].checkpoint is not None
    assert seen == whole()[0]


def test_with_two_queues_it_is_the_newest_round_that_both_have_used(tmp_path: Path) -> None:
    wanted = whole(2)
    with (
        serving(factory(), checkpoints=tmp_path, queues=2) as server,
        reading(server, queue=0) as left,
        reading(server, queue=1) as right,
    ):
        assert ids(next(left) for _ in range(2)) == wanted[0][:8]
        assert ids(next(right) for _ in range(3)) == wanted[1][:12]
    assert step_in(tmp_path) == 4
    with (
        serving(factory(), resume=tmp_path, queues=2) as server,
        reading(server, queue=0) as left,
        reading(server, queue=1) as right,
    ):
        again = [threading.Thread(target=lambda: ids(left))]
        again[0].start()
        assert ids(right) == wanted[1][8:]
        again[0].join(WAIT_S)
    with serving(factory(), resume=tmp_path, queues=3) as server, ExitStack() as stack:
        queues = [stack.enter_context(reading(server, queue=i)) for i in range(3)]
        assert [next(queue).step for queue in queues] == [4, 5, 6]


def test_a_trainers_own_position_goes_before_it(tmp_path: Path) -> None:
    with serving(factory(), checkpoints=tmp_path) as server, reading(server, credit=1) as consumer:
        next(consumer)
        state = consumer.state_dict()
        for _ in range(9):
            next(consumer)
    assert step_in(tmp_path) == 10
    with serving(factory(), resume=tmp_path) as server, reading(server, resume=state) as consumer:
        assert ids(consumer) == whole()[0][4:]


def test_it_is_stored_every_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = threading.Event()

    def note(*_: Any) -> None:
        if step_in(tmp_path) >= 10:
            saved.set()

    around(monkeypatch, CheckpointStore, "save", after=note)
    policy = feeder.Checkpointing(tmp_path, every_s=0.01)
    with serving(factory(), checkpoints=policy) as server, reading(server, credit=1) as consumer:
        for _ in range(10):
            next(consumer)
        next(consumer)  # which tells that ten have been used
        assert saved.wait(WAIT_S)


def test_nothing_is_stored_before_all_feeds_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could resume from that: the next server would not start."""
    stored = SimpleQueue[int]()

    def wait(*_: Any) -> None:
        assert stored.get(timeout=WAIT_S) == 1

    around(
        monkeypatch, CheckpointStore, "save",
        after=lambda store, snapshot, *_: stored.put(len(snapshot.states)),
    )  # fmt: skip
    around(monkeypatch, Server, "_open", before=wait)
    with serving(factory(), checkpoints=feeder.Checkpointing(tmp_path, every_s=0.01)):
        pass


def test_what_was_said_before_a_server_stopped_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(factory(), checkpoints=tmp_path) as server, peer_of(server.addresses[0]) as peer:
        generation = peer.opens(feed="").generation
        peer.say(say.Attached(generation=generation, plane="frames", reason=""))
        peer.hear(say.Batches)
        stalled = Stalled(monkeypatch, server)
        around(monkeypatch, ServerLoop, "stop", after=lambda *_: stalled.go_on.set())
        peer.say(used(generation, 0))
        assert stalled.entered.wait(WAIT_S)
        peer.say(used(generation, 1))
        server.close()
    assert step_in(tmp_path) == 1


def test_when_all_has_been_used_the_end_is_stored(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoints": tmp_path, "exit_when": "acknowledged"}
    with serving(factory(), **settings) as server:
        with reading(server) as consumer:
            assert ids(consumer) == whole()[0]
        assert server.wait(WAIT_S)
    assert step_in(tmp_path) == NUM_BATCHES + 1
    with serving(factory(), resume="latest", **settings) as server:
        with reading(server) as consumer:
            assert list(consumer) == []
        assert server.wait(WAIT_S)


def test_what_does_not_fit_is_refused_before_anything_is_served(tmp_path: Path) -> None:
    with serving(factory(), checkpoints=tmp_path):
        pass
    with pytest.raises(feeder.ResumeError, match=r"feed\.0.*batch_size: 4 then, 5 now"):
        feeder.serve(factory(batch_size=5), resume=tmp_path)
    with pytest.raises(feeder.ConfigError, match="is 'latest', and nobody said of what"):
        feeder.serve(factory(), resume="latest")
    with pytest.raises(feeder.ConfigError, match="every_batches is 3, which a server cannot keep"):
        feeder.serve(factory(), checkpoints=feeder.Checkpointing(tmp_path, every_batches=3))
    with CheckpointStore(tmp_path) as other:
        other.claim()
        with pytest.raises(feeder.CheckpointError, match="has a writer 'feed' already"):
            feeder.serve(factory(), checkpoints=tmp_path)


# ---- the rules


def used_by(
    num_queues: int, replicas: int = 1
) -> tuple[LowWatermark, Callable[[int], LazyPosition]]:
    """Return what notes the use of a feed of so many queues, and what makes the place after each
    of its batches."""
    factory_of_feed = FeedFactory("train", factory()(), None, num_queues, replicas)
    with factory()() as coordinator:
        places = [batch.place for batch in coordinator["train"]]

    return LowWatermark(factory_of_feed), lambda step: places[step]


EVENTS = {
    "the slowest queue tells the round": (
        3, 1, "@0,1,2=0 2:2,5,8=0 1:1,4,7=0 0:0=3 0:3=6 0:6=9 0:9=9"
    ),
    "the slowest replica tells the round": (
        2, 2, "@0,0,1,1 3:1,3,5=0 0:0,2,4=0 2:1,3,5=0 1:0=2 1:2=4 1:4=6"
    ),
    "what was used stands until a round has been used from the new place on": (
        2, 1, "@0,1 0:0,2,4 1:1,3=4 @2,3=4 1:3=4 0:2=4 @0,1 0:0 1:1=2"
    ),
    "it stands while one of those that went back is behind it": (
        2, 1, "@0,1 0:0,2,4 1:1,3,5=6 @0,1 1:1,3=6 0:0=2"
    ),
    "it stands while a queue's consumer is away": (
        2, 1, "@0,1 0:0 1:1 ?inf,3 1:3,5=2 @2,7 0:2,4=2 1:7 0:6=8"
    ),
    # The last queue's batches end the rounds.
    "a queue that has had everything holds nobody back": (
        2, 1, "@0,inf 0:0,2=0 @inf,1 1:1,3=4"
    ),
    "nor does one that has used its last batches after all": (
        2, 1, "@0,1 1:1,3 ?inf,5 -0=0 @0,1 1:1,3 -0=4 -1=4"
    ),
}  # fmt: skip
"""Queues, replicas, and what happens. `@`: the feed begins where seats want these batches; `?`: and
some lack; `2:5,8`: seat 2 has used these; `-0`: seat 0 has had all; `=4`: the step from then on."""


@pytest.mark.parametrize(("num_queues", "replicas", "events"), EVENTS.values(), ids=EVENTS)
def test_how_far_all_have_used(num_queues: int, replicas: int, events: str) -> None:
    used, place = used_by(num_queues, replicas)
    for event in events.split():
        what, _, step = event.partition("=")
        seat, is_use, steps = what.partition(":")
        if is_use:
            used.note(int(seat), [place(int(one)) for one in steps.split(",")], None)
        elif what[0] == "-":
            used.leave_out(int(what[1:]), None)
        else:
            used.restart_at([*map(float, what[1:].split(","))], lacks_some=what[0] == "?")
        if step:
            assert used.state().summary[2] == int(step), event


# ---- several servers of one stream


def even(**settings: Any) -> Callable[[], feeder.Coordinator]:
    """Batches of one call each, of a source that says how many rows there are."""
    source = feeder.sources.arrays(np.arange(1, 161))
    return lambda: make(source, batch_size=4, **settings)


def test_servers_begin_at_the_lowest_that_any_of_them_has_stored(tmp_path: Path) -> None:
    """And one server of all queues, which counts on from there; then three."""
    store = {"checkpoints": tmp_path, "resume": "latest"}
    for queues in (2, 3):
        with (
            serving(even(), queues="0/3", **store) as left,
            serving(even(), queues="1-2/3", **store) as right,
            ExitStack() as stack,
        ):
            consumers = [stack.enter_context(reading(left, queue=0))]
            consumers += [stack.enter_context(reading(right, queue=i)) for i in (1, 2)]
            at = 0 if queues == 2 else 6
            for consumer, num in zip(consumers, (5, 2, 3), strict=True):
                steps = [next(consumer).step for _ in range(num)]
                assert steps[0] == at + consumers.index(consumer)
        found = find_lowest(CheckpointStore(tmp_path))
        assert found is not None
        # A queue of the right server has used two rounds, all others more.
        assert [start_of(state.token)[0] for state in found.snapshot.states] == [at + 6]
    with serving(even(), queues=2, **store) as server, ExitStack() as stack:
        consumers = [stack.enter_context(reading(server, queue=i)) for i in range(2)]
        assert [next(one).step for one in consumers] == [12, 13]
    with (
        serving(even(), queues="0/2", **store) as left,
        serving(even(), queues="1/2", **store) as right,
        reading(left, queue=0) as first,
        reading(right, queue=1) as second,
    ):
        assert (next(first).step, next(second).step) == (14, 15)


def test_a_server_of_some_queues_stores_at_once_where_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that others know what it has used, before its first trainer comes."""
    saved = threading.Event()
    around(monkeypatch, CheckpointStore, "save", after=lambda *_: saved.set())
    with serving(even(), queues="0/2", checkpoints=tmp_path):
        assert saved.wait(WAIT_S)
        assert CheckpointStore(tmp_path).names() == ["queues-0-0-of-2.00000000"]
