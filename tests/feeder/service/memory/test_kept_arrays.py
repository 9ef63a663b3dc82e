"""What becomes of arrays that are kept, of forks, and of consumers that are another user's."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import TRANSPORTS, reading, served, serving
from feeder import Call, Coordinator
from feeder.service.client import lease as lease_module
from feeder.service.client.session import ClientSession
from feeder.service.memory.arena import ArenaSlots
from feeder.service.protocol import messages as say
from feeder.service.server.group import ConsumerGroup
from feeder.workers.pipeline import Pipeline
from feeds import make
from peers import WAIT_S, peer_of

pytestmark = pytest.mark.served

NUM_BATCHES, ROWS = 100, 4
transports = pytest.mark.parametrize("transport", TRANSPORTS)


def fetch(call: Call) -> Any:
    if call.index == NUM_BATCHES:
        raise StopIteration
    return [np.full((ROWS, 100), call.index + 1), np.arange(ROWS) + 1000 * call.index]


def factory() -> Coordinator:
    return make(fetch, input_blob_names=["value", "id"], batch_size=ROWS)


def assert_whole(batches: list[Any]) -> None:
    for i, batch in enumerate(batches):
        assert (batch["value"] == i + 1).all(), i
        assert batch["id"].tolist() == [1000 * i + row for row in range(ROWS)], i


@transports
def test_list_of_a_consumer_holds_every_batch(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole and read-only, also when the consumer and its server are gone and others come."""
    with served(transport, factory) as seen:
        batches = list(seen)
        assert len(batches) == NUM_BATCHES
        kept = [batch["value"][1:, ::2] for batch in batches[:3]]
    for array in batches[0].arrays():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    # One warning in all, and none where memory is the consumer's own.
    warnings = [record for record in caplog.records if "batches are kept" in record.message]
    assert len(warnings) == (1 if transport == "shared" else 0)
    with served(transport, factory) as seen:
        list(seen)
    assert_whole(batches)
    assert [int(array.min()) for array in kept] == [1, 2, 3] == [int(a.max()) for a in kept]


@transports
def test_batch_that_is_kept_is_never_written_again(transport: str) -> None:
    with served(transport, factory) as seen:
        first = next(seen)
        kept = [np.asarray(first["value"])[2:], memoryview(first["id"])]
        del first
        for _ in range(NUM_BATCHES - 1):
            next(seen)
        assert (kept[0] == 1).all() and kept[1].tolist() == list(range(ROWS))


@pytest.mark.parametrize("keeps", (False, True))
def test_memory_is_used_again_after_a_goodbye_unless_somebody_looks_at_it(keeps: bool) -> None:
    """The next consumer's batches lie where the last one's did, but for those that are kept."""
    kept = []
    with serving(factory) as server:
        slots = server._feeds[0].slots
        with reading(server, credit=4) as first:
            for batch in first:
                kept[:] = [batch] if keeps else []
            del batch
        num_made = slots.num_made
        with reading(server, credit=4) as second:
            assert_whole(list(islice(second, 50)))
            # When it leaves, what it was sent is not used again either.
            assert slots.num_made == (2 * num_made if keeps else num_made)
    if keeps:
        assert (kept[0]["value"] == NUM_BATCHES).all()


def test_batches_under_way_are_bounded_by_credit_beside_the_buffers() -> None:
    """Who has used nothing is sent half of its credit at once, however few may be buffered; the
    server takes its time with the other half."""

    def small() -> Coordinator:
        return make(fetch, input_blob_names=["value", "id"], batch_size=ROWS,
                    max_buffered_batches=1)  # fmt: skip

    with serving(small) as server, peer_of(server.addresses[0]) as peer:
        generation = peer.opens(feed="", credit=20).generation
        peer.say(say.Attached(generation=generation, plane="frames", reason=""))
        steps = [peer.hear(say.Batches).groups[0].step for _ in range(10)]
    assert steps == list(range(10))


class Counting:
    """A device queue of which nobody takes; tells when so many batches have been put."""

    waited_since = None

    def __init__(self, wanted: int) -> None:
        self.left, self.is_full = wanted, threading.Event()

    def put(self, batches: list[Any]) -> None:
        self.left -= len(batches)
        if self.left <= 0:
            self.is_full.set()

    def grow(self, capacity: int) -> None:
        """It takes any number."""

    def finish(self, ending: Any) -> None:
        """The stream is stopped before."""


# With room for few batches each goes by itself; with much room they would wait for their group.
@pytest.mark.parametrize("max_buffered_batches", [2, 1000], ids=["small", "in a group"])
def test_all_slots_are_filled_and_handed_over(max_buffered_batches: int) -> None:
    """Their number is fixed: copies need not wait until batches have been sent. And what was made
    is handed over before a slot is waited for, which comes back only when that was used."""

    def fetch_much(call: Call) -> Any:
        return [np.arange(50 * ROWS)]

    coordinator = make(
        fetch_much, input_blob_names=["value"], batch_size=ROWS,
        max_buffered_batches=max_buffered_batches,
    )  # fmt: skip
    (stream,) = coordinator["train"].streams
    queue, slots = Counting(20), ArenaSlots(1, lambda device, slot_bytes: 20)
    pipeline = Pipeline(
        stream.config.stream, stream.config.run, "train", [queue], slots,
        encode=stream.positions.id.encode,
    )  # fmt: skip
    pipeline.start()
    try:
        assert queue.is_full.wait(10.0), f"{queue.left} slots are not filled"
    finally:
        pipeline.close()
        slots.close()
        pipeline.join(10.0)


def run(script: str, *args: str, **settings: Any) -> str:
    """Run a script in a process of its own; return what it writes."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *args],
        env={**os.environ, "PYTHONPATH": str(Path(feeder.__file__).parents[1])},
        capture_output=True, text=True, timeout=40, **settings,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


FORK = """
    import os, sys
    import feeder
    with feeder.connect(sys.argv[1]) as consumer:
        first = next(consumer)["value"].tolist()
        child = os.fork()
        if child == 0:
            told = []
            for use in (lambda: next(consumer), consumer.state_dict, consumer.snapshot):
                try:
                    use()
                except feeder.ForkedError:
                    told.append("ForkedError")
            consumer.close()
            sys.stdout.write(" ".join(told) + "\\n")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        rest = list(consumer)
        sys.stdout.write(str(1 + len(rest)))
"""


@pytest.mark.process
def test_fork_after_connect() -> None:
    with serving(factory, "tcp") as server:
        told = run(FORK, server.addresses[0])
    assert told.split() == ["ForkedError"] * 3 + [str(NUM_BATCHES)]


LIGHT = """
    import sys
    import feeder
    with feeder.connect(sys.argv[1]) as consumer:
        assert len([batch.rows for batch in consumer]) == int(sys.argv[2])
        consumer.state_dict()
    heavy = ("feeder.feeds.coordinator", "feeder.service.server.serve",
             "feeder.service.memory.arena", "cupy", "lmdb", "ray", "torch", "asyncio")
    sys.stdout.write(" ".join(name for name in heavy if name in sys.modules))
"""


@pytest.mark.process
@pytest.mark.fresh
def test_consumer_loads_little() -> None:
    with serving(factory) as server:
        assert run(LIGHT, server.addresses[0], str(NUM_BATCHES)) == ""


ANOTHER = """
    import os, sys
    import feeder
    def read(plane):
        with feeder.connect(sys.argv[1], feed="train", plane=plane) as consumer:
            rows = sum(batch.rows for batch in consumer)
            return f"{consumer.plane} {rows}"
    told = [read("auto")]  # also loads what the other user cannot read
    os.setuid(int(sys.argv[2]))
    told.append(read("auto"))
    try:
        told.append(read("shared"))
    except feeder.TransportError as error:
        told.append(type(error).__name__)
    sys.stdout.write(", ".join(told))
"""


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user in a child")
def test_consumer_of_another_user_gets_no_shared_memory() -> None:
    def values() -> Coordinator:
        coordinator = factory()
        make(fetch, input_blob_names=["value", "id"], batch_size=ROWS, coordinator=coordinator,
             input_source_name="good")  # fmt: skip
        return coordinator

    with serving(values, "tcp") as server, reading(server, feed="good") as good:
        batches = [next(good)]
        assert good.plane == "shared"
        told = run(ANOTHER, server.addresses[0], "65534").split(", ")
        rows = NUM_BATCHES * ROWS
        assert told == [f"shared {rows}", f"frames {rows}", "TransportError"]
        batches += list(good)
        assert_whole(batches)
    assert len(batches) == NUM_BATCHES


def test_a_slot_that_is_let_go_of_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the consumer says that it lives: the server may have nowhere to write."""
    told = SimpleQueue[tuple[int, ...]]()
    use = ConsumerGroup.use

    def note(group: ConsumerGroup, lease: Any, message: say.Used) -> None:
        use(group, lease, message)
        told.put(message.slots)

    all_there, take = threading.Event(), ClientSession._take_batches

    def note_batches(session: ClientSession, message: say.Batches, frames: list[Any]) -> None:
        take(session, message, frames)
        if (
            message.groups[-1].step + len(message.groups[-1].slots) == 3
        ):  # One is used, and two are its credit.
            all_there.set()

    monkeypatch.setattr(ClientSession, "_take_batches", note_batches)
    monkeypatch.setattr(ConsumerGroup, "use", note)
    monkeypatch.setattr(lease_module, "_TELL_S", 300.0)
    with serving(factory, lease=900) as server, reading(server, credit=2) as consumer:
        batch = next(consumer)
        consumer.snapshot()  # Answered after what it has used was told.
        assert all_there.wait(WAIT_S)  # What comes would have it told, too.
        has_told = threading.Event()
        consumer._loop.call_soon(has_told.set)
        assert has_told.wait(WAIT_S)
        assert not any(told.get() for _ in range(told.qsize()))
        del batch
        while not told.get(timeout=WAIT_S):
            pass
