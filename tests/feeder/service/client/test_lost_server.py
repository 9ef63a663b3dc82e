"""Servers that are away while something happens, and what is in their place meanwhile."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import pytest

import feeder
from conformance.served import reading, serving
from feeder.service.client.session import ClientSession
from feeder.service.net.keys import make_keys
from feeder.service.protocol import membership
from feeder.service.protocol import messages as say
from feeder.service.protocol.membership import (
    Asks,
    Attaches,
    Died,
    Membership,
    NoteHung,
    NoteLacking,
    StartRun,
    StopRun,
    Ticked,
)
from feeder.service.server.group import ConsumerGroup
from feeder.service.server.io_loop import ServerLoop
from peers import OPEN, RawPeer, peer_of, used
from small import Aside, Heard, Pure, make

pytestmark = pytest.mark.served

WAIT_S = 10.0
NUM = 200
"""Batches of each of two queues: more than there are slots for a queue that nobody holds."""


def ten() -> feeder.Coordinator:
    return make(Pure(10, rows=4))


def two_queues() -> feeder.Coordinator:
    return make(Pure(2 * NUM, rows=4), devices=2)


def end_one_of_two(address: str, knows: bool) -> Iterator[feeder.Consumer]:
    """Read one queue to its end, and of the other five batches and what has come; then the server
    goes, and the first consumer. The other goes on at the next server."""
    with contextlib.ExitStack() as stack:
        with feeder.serve(two_queues, address):
            first = stack.enter_context(feeder.connect(address, queue=0))
            other = stack.enter_context(feeder.connect(address, queue=1, credit=4, hold=250))
            assert len(list(islice(other, 5))) == 5
            assert len(list(first)) == NUM
            if knows:
                # Both are answered after what was told before.
                first.snapshot()
                other.snapshot()
        first.close()
        yield other


@pytest.mark.parametrize("knows", [True, False])
def test_who_ends_while_no_server_is_there_holds_nobody_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, knows: bool
) -> None:
    monkeypatch.setattr(membership, "RETURN_S", 60.0 if knows else 0.2)
    if not knows:
        # As one whose server was killed before it had heard of the end.
        monkeypatch.setattr(ConsumerGroup, "tell_waiting", lambda group: None)
    address = f"ipc://{tmp_path}/feed"
    for other in end_one_of_two(address, knows):
        with feeder.serve(two_queues, address):
            rest = Aside(lambda other=other: [batch.step for batch in other])
            assert rest.result() == [*range(11, 2 * NUM, 2)]


def test_a_queue_that_has_ended_by_hearsay_is_waited_for_before_the_server_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever says it, perhaps to end the server, nobody has held the queue here."""
    with two_queues() as whole:
        for _ in zip(whole["train"].on(0), whole["train"].on(1), strict=True):
            pass
        token = whole.snapshot().states[0].token
    address = f"ipc://{tmp_path}/feed"
    with (
        feeder.serve(two_queues, address, exit_when="acknowledged", lease=60) as server,
        peer_of(address) as peer,
    ):
        opened = peer.opens(feed="train", intent="rejoin", undecided=False, ended=(1,), token=token)
        generation = opened.generation
        peer.say(say.Attached(generation=generation, plane="frames", reason=""))
        peer.hear(say.End)
        peer.say(used(generation, 0))
        peer.say(say.Snapshot(generation=generation, sequence=0, receipt=b""))
        peer.hear(say.State)
        assert not server.wait(0.0)
        with feeder.connect(address, queue=1, rejoin=True) as consumer:
            assert [batch.step for batch in consumer] == [*range(1, 2 * NUM, 2)]
        assert server.wait(WAIT_S)


def test_what_was_known_before_a_restart_ends_the_server_after_a_lease(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/feed"
    for other in end_one_of_two(address, True):
        with feeder.serve(two_queues, address, exit_when="acknowledged", lease=0.5) as server:
            rest = Aside(lambda other=other: [batch.step for batch in other])
            assert rest.result() == [*range(11, 2 * NUM, 2)]
            other.close()
            assert server.wait(WAIT_S)


@pytest.mark.parametrize("goes_on", [True, False])
def test_who_comes_back_with_its_last_batches_unused_holds_the_end_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, goes_on: bool
) -> None:
    """Else its server ends, and who would start from its checkpoint finds none."""
    has_come, told = Event(), SimpleQueue[int]()
    take_end, use = ClientSession._take_end, ConsumerGroup.use

    def note_end(talk: ClientSession, message: say.End) -> None:
        take_end(talk, message)
        has_come.set()

    def note_use(group: ConsumerGroup, lease: Any, message: say.Used) -> None:
        told.put(message.pending)
        use(group, lease, message)

    monkeypatch.setattr(ClientSession, "_take_end", note_end)
    monkeypatch.setattr(ConsumerGroup, "use", note_use)
    # As servers that are killed.
    monkeypatch.setattr(ServerLoop, "_farewell", lambda serving: None)
    address, settings = f"ipc://{tmp_path}/feed", {"exit_when": "acknowledged"}
    with feeder.serve(ten, address):
        consumer = feeder.connect(address, credit=20)
        steps = [next(consumer).step for _ in range(3)]
        state = consumer.state_dict()
        assert has_come.wait(WAIT_S)
    with consumer, feeder.serve(ten, address, **settings) as server:
        # The second one comes where the first has not ended the server.
        for _ in range(2):
            while told.get(timeout=WAIT_S) != 7:
                pass
        assert not server.wait(0.0)
        if goes_on:
            steps += [batch.step for batch in consumer]
        else:
            consumer.close()
            with feeder.connect(address, resume=state) as again:
                steps += [batch.step for batch in again]
        assert server.wait(WAIT_S)
        assert steps == [*range(10)]


def test_before_the_first_batch_the_position_stays_though_the_server_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next one is asked for what comes after all that was received."""
    monkeypatch.setattr(ServerLoop, "_farewell", lambda serving: None)
    address = f"ipc://{tmp_path}/feed"
    with feeder.serve(fifty, address):
        consumer = feeder.connect(address, credit=4)
        state = consumer.state_dict()
        while not consumer.stats()["prefetched_batches"]:
            consumer.snapshot()
        assert consumer.state_dict() == state
    with consumer, feeder.serve(fifty, address):
        while not consumer.stats()["reconnects"]:
            with contextlib.suppress(feeder.RemoteError):
                consumer.snapshot()
        assert consumer.state_dict() == state
        with make(Pure(50, rows=4)) as whole:
            assert whole.state_dict() == state
        assert [batch.step for batch in consumer] == [*range(50)]


def test_who_comes_back_late_is_given_all_that_is_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(membership, "RETURN_S", 0.2)
    address = f"ipc://{tmp_path}/feed"
    with feeder.serve(two_queues, address):
        late = feeder.connect(address, queue=0)
        other = feeder.connect(address, queue=1)
        assert [next(consumer).step for _ in range(5) for consumer in (late, other)] == [*range(10)]
        state = late.state_dict()
        late.close()
    with other, feeder.serve(two_queues, address):
        assert [batch.step for batch in islice(other, 150)] == [*range(11, 311, 2)]
        with feeder.connect(address, queue=0, resume=state, rejoin=True) as late:
            rest = Aside(lambda: [batch.step for batch in other])
            assert [batch.step for batch in late] == [*range(10, 2 * NUM, 2)]
            assert rest.result() == [*range(311, 2 * NUM, 2)]


@contextlib.contextmanager
def http(port: int) -> Iterator[SimpleQueue[None]]:
    """What answers as HTTP does, and counts how often it is asked."""
    asked: SimpleQueue[None] = SimpleQueue()

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            asked.put(None)
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                connection.settimeout(WAIT_S)
                while connection.recv(4096):
                    pass

    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = Thread(target=answer)
        thread.start()
        try:
            yield asked
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(WAIT_S)


def fifty() -> feeder.Coordinator:
    return make(Pure(50, rows=4))


def test_a_consumer_comes_back_to_a_server_that_something_else_stood_in_for() -> None:
    """As a proxy, or a check of health."""
    with serving(fifty, "tcp") as server, reading(server, credit=1) as consumer:
        first = [next(consumer).step for _ in range(3)]
        server.close()
        with http(int(server.addresses[0].rpartition(":")[2])) as asked:
            for _ in range(3):
                asked.get(timeout=WAIT_S)
        with feeder.serve(fifty, server.addresses[0]):
            assert first + [batch.step for batch in consumer] == [*range(50)]


def test_what_is_no_server_is_asked_now_and_then() -> None:
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    with http(port) as asked, pytest.raises(feeder.ConnectTimeout):
        feeder.connect(f"tcp://127.0.0.1:{port}", timeout=1.0)
    assert 2 <= asked.qsize() <= 12


def test_nor_has_it_longer_to_come_back_for_that() -> None:
    with serving(fifty, "tcp") as server, reading(server, credit=1, reconnect=0.5) as consumer:
        next(consumer)
        server.close()
        with (
            http(int(server.addresses[0].rpartition(":")[2])),
            pytest.raises(feeder.ConnectTimeout, match=r"within 0\.5 s"),
        ):
            list(consumer)


@contextlib.contextmanager
def forwarder() -> Iterator[str]:
    """What lets everybody in and has nobody behind it."""

    def let_in() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=let_in)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(WAIT_S)


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


@pytest.mark.parametrize("how", ["dies", "says goodbye", "hangs"])
def test_who_is_lost_before_it_could_take_batches_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(membership, "RETURN_S", 0.2)
    with serving(two_queues, lease=0.5) as server:
        peer = RawPeer(server.addresses[0])
        with closing(peer):
            peer.say(say.Open(**(OPEN | {"feed": "", "queue": 1, "intent": "rejoin"})))
            generation = peer.hear(say.Opened).generation
            with reading(server, queue=0, rejoin=True) as consumer:
                consumer.snapshot()  # Answered once it can take batches.
                if how == "dies":
                    peer.close()
                elif how == "says goodbye":
                    peer.say(say.Bye(generation=generation))
                assert [batch.step for batch in islice(consumer, NUM)] == [*range(0, 2 * NUM, 2)]


@pytest.mark.parametrize(("goes_back", "wait_s"), [(True, membership.RETURN_S), (False, 30.0)])
def test_how_long_those_who_come_back_wait_for_others(goes_back: bool, wait_s: float) -> None:
    """Where the feed could not go back for who comes later, for as long as for one that hangs."""
    feed = Membership(2, 30.0, goes_back=goes_back)
    feed.handle(Asks(0, "me", rejoins=True), 0.0)
    assert feed.look_at == 30.0  # It waits for nothing but that the lease runs out.
    assert feed.handle(Attaches(0), 1.0) == [StopRun()]
    # Who hangs before it can take batches is not here, and the time does not begin anew.
    feed.handle(Asks(1, "other", rejoins=True), 1.0)
    feed.members[0].expires, feed.members[1].expires = 100.0, 2.0
    feed.handle(Ticked(), 2.0)
    if not goes_back:  # Else it is waited for, until it is gone.
        assert feed.look_at == 100.0
        feed.handle(Died(1), 1.0)
    until = feed.look_at
    assert until == 1.0 + wait_s
    assert feed.handle(Ticked(), until - 0.01) == []
    assert feed.handle(Ticked(), until) == [
        NoteLacking([1], wait_s), StartRun((0,), [0, math.inf], [0, math.inf], True)
    ]  # fmt: skip
    assert feed.handle(membership.Used(0), until) == []


def test_who_goes_on_from_the_start_is_told_that_another_starts_from_a_checkpoint() -> None:
    """As a trainer that compiles for long, while another is put back to its own checkpoint: theirs
    are different weights. The one that is put back waits until the other comes with that step."""
    with serving(two_queues) as server, reading(server, queue=0, credit=4) as late:
        with reading(server, queue=1, credit=4) as early:
            assert [next(early).step for _ in range(6)] == [*range(1, 12, 2)]
            state = early.state_dict()
        with reading(server, queue=1, credit=4, resume=state) as early:
            rest = Aside(lambda: [batch.step for batch in early])
            with pytest.raises(feeder.ResumeError, match="queue 1's checkpoint is of step 12"):
                list(late)
            with reading(server, queue=0, credit=4, resume=state) as late:
                assert [batch.step for batch in late] == [*range(12, 2 * NUM, 2)]
            assert rest.result() == [*range(13, 2 * NUM, 2)]


def test_who_comes_back_to_its_checkpoint_alone_holds_nobody_up() -> None:
    with serving(two_queues) as server, reading(server, queue=0, credit=4) as late:
        with reading(server, queue=1, credit=4) as early:
            assert [next(early).step for _ in range(6)] == [*range(1, 12, 2)]
            state = early.state_dict()
        with reading(server, queue=1, credit=4, resume=state, rejoin=True) as early:
            rest = Aside(lambda: [batch.step for batch in early])
            assert [batch.step for batch in late] == [*range(0, 2 * NUM, 2)]
            assert rest.result() == [*range(13, 2 * NUM, 2)]


@pytest.mark.parametrize("when", ["before it is ready", "after"])
def test_who_was_taken_for_hung_and_goes_on_ends_the_others_wait(when: str) -> None:
    heard = Heard("was not heard of")
    logging.getLogger("feeder").addHandler(heard)
    try:
        with serving(two_queues, lease=0.5) as server, peer_of(server.addresses[0]) as peer:
            generation = peer.opens(feed="", queue=0).generation
            attached = say.Attached(generation=generation, plane="frames", reason="")
            if when == "after":
                peer.say(attached)
            assert heard.event.wait(WAIT_S)
            with reading(server, queue=1) as consumer:
                consumer.snapshot()  # Answered once it can take batches.
                peer.say(attached if when != "after" else used(generation, 0))
                assert next(consumer).step == 1
                peer.hear(say.Batches)
    finally:
        logging.getLogger("feeder").removeHandler(heard)


def test_where_everybody_has_had_everything_nothing_is_fetched() -> None:
    calls: list[int] = []

    def fetch(call: feeder.Call) -> Any:
        calls.append(call.index)
        return Pure(20, rows=4)(call)

    with serving(lambda: make(fetch)) as server:
        with reading(server) as consumer:
            assert len(list(consumer)) == 20
            state = consumer.state_dict()
        calls.clear()
        with reading(server, resume=state) as consumer:
            assert not list(consumer)
            consumer.snapshot()
    assert not calls


def test_a_feed_that_cannot_go_back_waits_for_who_hangs_before_it_is_ready() -> None:
    feed = Membership(2, 30.0, goes_back=False)
    for queue in range(2):
        feed.handle(Asks(queue, "somebody", rejoins=True), 0.0)
    feed.handle(Attaches(0), 20.0)
    feed.members[0].expires = math.inf
    assert [type(one) for one in feed.handle(Ticked(), 30.0)] == [NoteHung, StopRun]
    assert feed.look_at == math.inf
    assert feed.handle(Ticked(), 1e9) == []
