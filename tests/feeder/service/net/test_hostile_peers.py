"""Peers that say what they may not say: each is told so by name, and nobody else notices."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from threading import Event, Thread
from typing import Any

import msgpack
import pytest
import xxhash
import zmq

import feeder
from conformance.served import serving
from feeder import Coordinator, ProtocolError
from feeder.service.memory.fdpass import attach
from feeder.service.net import guard as guard_module
from feeder.service.net.kernel import boot_id
from feeder.service.net.security import MAX_POSITION_BYTES, MAX_REQUEST_BYTES
from feeder.service.protocol import messages as say
from feeder.service.protocol.coding import encode
from feeder.service.server import delivery as lease_module
from feeder.service.server.group import ConsumerGroup
from feeds import make
from fetches import BATCH_SIZE, make_rows
from peers import (
    GREETING,
    OPEN,
    READY,
    WAIT_S,
    Peer,
    RawPeer,
    is_hung_up,
    peer_of,
    raw_socket,
    used,
)

pytestmark = pytest.mark.served

WIRED = msgpack.packb({"type": "Open", **OPEN})
schemes = pytest.mark.parametrize("scheme", ("ipc", "tcp"))


def factory() -> Coordinator:
    """Return two feeds without an end."""
    coordinator = Coordinator()
    for name in ("plain", "good"):
        make(
            lambda call: make_rows(0, 0, call.index, BATCH_SIZE),
            coordinator=coordinator, input_source_name=name, epochs=None,
        )  # fmt: skip
    return coordinator


class Good:
    """A consumer that sees its stream go on."""

    def __init__(self, address: str) -> None:
        self.consumer = feeder.connect(address, feed="good")
        self.step = 0

    def reads(self, batches: int) -> None:
        """See more batches come than were on their way."""
        for _ in range(batches + self.consumer.stats()["prefetched_batches"]):
            batch = next(self.consumer)
            assert batch.step == self.step
            assert batch["id"].tolist() == make_rows(0, 0, self.step, BATCH_SIZE)["id"].tolist()
            self.step += 1


@pytest.fixture
def address(scheme: str) -> Iterator[str]:
    """Where a server is, on whom a good consumer reads on whatever the test does to it."""
    with serving(factory, scheme) as server:
        (address,) = server.addresses
        good = Good(address)
        with closing(good.consumer):
            good.reads(3)
            yield address
            good.reads(50)
            assert good.consumer.stats()["reconnects"] == 0


@pytest.fixture
def scheme() -> str:
    return "ipc"


@pytest.fixture
def peer(address: str) -> Iterator[Peer]:
    with peer_of(address) as peer:
        yield peer
        # Whatever was wrong, the queue is free again, and this same peer may have it.
        peer.opens()


def changed(**fields: Any) -> bytes:
    left = {"type": "Open", **OPEN} | fields
    return msgpack.packb({name: value for name, value in left.items() if value is not ...})


BAD_BYTES: dict[str, bytes] = {
    "nothing": b"",
    "half a message": WIRED[: len(WIRED) // 2],
    "type of a server's message": changed(type="Batches"),
    "extra key": changed(load="os.system"),
}
"""What else there is of this kind is tried at `decode`."""
UNKNOWN = b"g" * 24
GROUP = say.Group(0, 0, 0, 0, 1, 1, 1, (-1,), (0,), None, (b"",), None, (), (), ())
BEFORE_OPEN: dict[str, say.Message] = {
    "Used": used(UNKNOWN, 0),
    "Attached": say.Attached(generation=UNKNOWN, plane="frames", reason=""),
    "Snapshot": say.Snapshot(generation=UNKNOWN, sequence=0, receipt=b""),
    "Bye": say.Bye(generation=UNKNOWN),
    "Batches": say.Batches(generation=UNKNOWN, groups=(GROUP,)),
}


@schemes
def test_what_may_not_be_said_before_a_queue_is_opened(peer: Peer) -> None:
    """One after the other by the same peer, which is told each time."""
    for data in BAD_BYTES.values():
        peer.say(data)
        peer.is_refused("ProtocolError", "consumer sent")
    for version in (0, 2**31, None, "1"):
        peer.say(changed(version=version))
        expected = f"expected {say.PROTOCOL_VERSION}"
        peer.is_refused("ProtocolError", repr(version), expected)
    for message in BEFORE_OPEN.values():
        peer.say(message)
        peer.is_refused("ProtocolError")
    peer.say(*[WIRED] * 500)
    peer.is_refused("ProtocolError", "500 frames")


Said = Callable[[bytes], say.Message]
WRONG: dict[str, Said] = {
    "used beyond what was sent": lambda g: used(g, 9),
    "slot that was never given": lambda g: used(g, 0, (0,)),
    "attached twice": lambda g: say.Attached(generation=g, plane="frames", reason=""),
    "attached twice otherwise": lambda g: say.Attached(generation=g, plane="shared", reason=""),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_message_in_a_stream(peer: Peer, wrong: Said) -> None:
    peer.say(wrong(peer.streams()))
    peer.is_refused("ProtocolError")


def test_used_going_back(peer: Peer) -> None:
    generation = peer.streams()
    for sequence in (1, 0):
        peer.say(used(generation, sequence))
    peer.is_refused("ProtocolError", "used 0 batches, expected from 1")


def test_shared_memory_without_having_fetched_it(peer: Peer) -> None:
    generation = peer.opens(boot_id=boot_id()).generation
    peer.say(say.Attached(generation=generation, plane="shared", reason=""))
    peer.is_refused("ProtocolError", "unix socket")


@pytest.mark.parametrize(
    "release", [lambda given: (2**16 - 1,), lambda given: (given[0], 2**62)],
    ids=["not given", "one of two"],
)  # fmt: skip
def test_released_slots_that_are_not_held(peer: Peer, release: Any) -> None:
    with sharing(peer) as (generation, given):
        peer.say(used(generation, 1, release(given)))
        peer.is_refused("ProtocolError", "slots")


@contextmanager
def sharing(peer: Peer, **settings: Any) -> Iterator[tuple[bytes, tuple[int, ...]]]:
    """Take batches through shared memory; yield the generation and their slots."""
    opened = peer.opens(boot_id=boot_id(), **settings)
    with closing(attach(opened.shared.path, opened.shared.nonce, WAIT_S)):
        peer.say(say.Attached(generation=opened.generation, plane="shared", reason=""))
        groups = peer.hear(say.Batches).groups
        yield opened.generation, tuple(slot for group in groups for slot in group.slots)


@schemes
def test_oversize_message_ends_the_connection(address: str) -> None:
    with peer_of(address) as peer:
        monitor = peer.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        peer.opens()
        # Who comes over a unix socket may bring a position with its leftover rows.
        most = MAX_REQUEST_BYTES if address.startswith("tcp") else MAX_POSITION_BYTES
        peer.say(bytes(most + 1))
        assert monitor.poll(WAIT_S * 1000)
        peer.socket.disable_monitor()
        monitor.close()


RAW: dict[str, bytes] = {
    "silence": b"",
    "old protocol": b"\x01\x00\x05\x00hello" * 100,
    "garbage after the greeting": GREETING + random.Random(3).randbytes(1000),
    "endless frame": GREETING + READY + b"\x02" + (2**62).to_bytes(8, "big") + b"x" * 1000,
}


@pytest.mark.parametrize("scheme", ["tcp"])
def test_whatever_a_raw_connection_sends_it_is_hung_up(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All at once: some of them are waited for until their handshake has taken too long."""
    socks = {name: raw_socket(address) for name in RAW}
    try:
        for name, sock in socks.items():
            try:
                sock.sendall(RAW[name])
            except (BrokenPipeError, ConnectionResetError):
                continue
        for name, sock in socks.items():
            assert is_hung_up(sock), name
        assert "before it had asked for anything" in caplog.text
    finally:
        for sock in socks.values():
            sock.close()


@pytest.mark.parametrize("data", (b"\xc1", encode(say.Farewell(generation=b"", reason="x"))[:-1]))
def test_server_that_is_none_is_a_named_error(data: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def answer() -> None:
            for _ in range(2):
                assert router.poll(WAIT_S * 1000)
                router.send_multipart([router.recv_multipart()[0], data])

        thread = Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolError):
            feeder.connect(f"tcp://127.0.0.1:{port}", timeout=WAIT_S)
        thread.join()


def test_crowd_of_bad_peers_is_logged_once_a_second(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    with peer_of(address) as peer:
        for _ in range(300):
            peer.say(b"\xc1")
        for _ in range(300):
            peer.is_refused("ProtocolError")
    refusals = [record for record in caplog.records if "is refused" in record.message]
    assert 1 <= len(refusals) < 30


@schemes
def test_who_never_ends_a_message_is_hung_up_on_and_loses_its_queue(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard_module, "_UNREAD_S", 0.2)
    lost, lose = Event(), ConsumerGroup.lose
    monkeypatch.setattr(ConsumerGroup, "lose", lambda *args: (lose(*args), lost.set()))
    with closing(RawPeer(address)) as peer:
        peer.say(say.Open(**OPEN))
        peer.hear(say.Opened)
        peer.goes_on_until_hung_up()
        assert lost.wait(WAIT_S)
    with peer_of(address) as other:
        other.opens()
    assert "was hung up on" in caplog.text


# ---- answers that nobody reads


def test_a_question_that_comes_after_a_later_one_of_its_own_is_refused(address: str) -> None:
    """Two connections of one consumer: what was sent over the first may come last."""
    wish = {"consumer": b"the same trainer"}
    with peer_of(address) as late, peer_of(address) as early:
        generation = early.opens(**wish, attempt=5).generation
        late.say(say.Open(**(OPEN | wish | {"attempt": 4})))
        late.is_refused("ProtocolError", "came after a later one of its own")
        early.say(say.Attached(generation=generation, plane="frames", reason=""))
        early.hear(say.Batches)
        late.opens(**wish, attempt=6)


def test_a_connection_is_good_for_so_many_leases(address: str) -> None:
    with peer_of(address) as peer:
        for _ in range(16):
            generation = peer.opens().generation
            peer.say(say.Bye(generation=generation))
            peer.hear(say.Farewell)
        peer.say(say.Open(**OPEN))
        peer.is_refused("ProtocolError", "16 times; connect anew")
    with peer_of(address) as peer:
        peer.opens()


def test_a_monitor_that_reads_nothing_is_answered_once(address: str) -> None:
    look = say.Look(version=say.PROTOCOL_VERSION, receipt=b"")
    with peer_of(address) as peer:
        for _ in range(50):
            peer.say(look)
        peer.hear(say.Seen)
        peer.is_refused("ProtocolError", "before the answer to the last one was read")


# ---- positions that would take much


def token_of(body: bytes) -> bytes:
    return b"FT\x01" + xxhash.xxh3_64_digest(body) + body


def snapshot_of(header: bytes) -> bytes:
    body = len(header).to_bytes(4, "little") + header
    numbers = (1).to_bytes(4, "little") + len(body).to_bytes(8, "little")
    return b"FEEDSNAP" + numbers + xxhash.xxh3_128_digest(numbers + body) + body


NESTED = b"\xdc\xff\xff" + b"\x90" * 65535
BOMBS = {
    "token": token_of(b"\xdd" + (10**6).to_bytes(4, "big") + b"\x90" * 10**6),
    "snapshot": snapshot_of(b"\xdc\x00\x10" + NESTED * 16),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_position_of_many_small_values_is_not_unpacked(
    monkeypatch: pytest.MonkeyPatch, peer: Peer, bomb: bytes
) -> None:
    monkeypatch.setattr(msgpack, "unpackb", small_only(msgpack.unpackb))
    peer.say(changed(token=bomb))
    peer.is_refused("SnapshotFormatError", "expected at most")


def small_only(unpackb: Any) -> Any:
    def unpack(data: Any, *args: Any, **kwargs: Any) -> Any:
        # The message itself holds the position as bytes.
        assert len(data) < 10**5 or kwargs, "unpacked"
        return unpackb(data, *args, **kwargs)

    return unpack


# ---- wishes


def test_who_wants_more_memory_than_a_queue_may_have_is_told_so_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease_module, "MAX_ARENA_BYTES", 1024 * 1024)
    with (
        serving(factory, queues=2) as server,
        feeder.connect(server.addresses[0], feed="good", queue=0) as good,
    ):
        wish = {"feed": "good", "queue": 1, "credit": 1024, "hold": 1000}
        with (
            feeder.connect(server.addresses[0], **wish) as greedy,
            pytest.raises(feeder.ConfigError, match=r"credit is 1024 and hold 1000: .*1048576"),
        ):
            next(greedy)
        with feeder.connect(server.addresses[0], feed="good", queue=1, credit=64) as modest:
            steps = [next(queue).step for _ in range(20) for queue in (good, modest)]
        assert steps == list(range(40))
        assert good.stats()["reconnects"] == 0
