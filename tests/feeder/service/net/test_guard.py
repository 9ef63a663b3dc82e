"""Connections by their descriptors: who sends too much or nothing, and how many there may be."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

import feeder
from feeder.service.net import guard as guard_module
from feeder.service.net import kernel
from feeder.service.net.guard import ConnectionGuard
from feeder.service.net.kernel import SocketInspector, SocketRef
from feeder.service.net.listener import FrameReader, Peer
from feeder.service.net.security import Event
from feeder.service.ratelimited_log import RateLimitedLog
from peers import WAIT_S, RawPeer
from project import ROOT, TESTS

MOST = 1000
LIMIT_S, AGAIN_S, SLACK = guard_module._LIMIT_S, guard_module._AGAIN_S, guard_module._SLACK_BYTES
PACE = guard_module._SLOWEST_BYTES


class Server:
    """Callers, connections to them, and a clock that stands at the time of the next look."""

    def __init__(self) -> None:
        self.served: set[int] = set()
        self.lost: list[Peer] = []
        self.guard = ConnectionGuard(
            RateLimitedLog(),
            lambda peer: int(peer.identity) in self.served,
            self.lost.append,
            [MOST],
        )
        self.now = time.monotonic()
        self._stack = ExitStack()
        self._stack.callback(self.guard.close)

    def accept(self, kind: str) -> tuple[socket.socket, socket.socket]:
        """The peer's end and the server's of a new connection."""
        if kind == "tcp":
            with socket.create_server(("127.0.0.1", 0)) as listener:
                theirs = socket.create_connection(listener.getsockname())
                ours, _ = listener.accept()
        else:
            theirs, ours = socket.socketpair()
        for sock in (theirs, ours):
            self._stack.enter_context(sock)
        self.hear(zmq.EVENT_ACCEPTED, ours.fileno())
        self.enter(ours, b"%d" % ours.fileno())
        return theirs, ours

    def enter(self, ours: socket.socket, identity: bytes) -> None:
        self.guard.bind_peer(self.guard._strangers[0, ours.fileno()], Peer(0, identity))

    def hear(self, kind: Any, descriptor: int) -> None:
        self.guard.on_event(0, Event(kind=zmq.Event(kind), value=descriptor, endpoint="here"))

    def look(self, after_s: float = 0.0) -> None:
        """Look at everybody, in vain before it is time."""
        self.now += after_s
        self.guard._check_at = self.now
        assert self.guard.check(self.now) > self.now

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as server:
        yield server


def is_open(ours: socket.socket, theirs: socket.socket) -> bool:
    """Whether nobody has hung up on this side."""
    theirs.setblocking(False)
    try:
        return theirs.recv(1) != b""
    except BlockingIOError:
        return True


kinds = pytest.mark.parametrize("kind", ["tcp", "unix"])


@kinds
def test_a_stranger_has_so_long_and_is_looked_at_twice(server: Server, kind: str) -> None:
    theirs, ours = server.accept(kind)
    for wait_s in (LIMIT_S - 0.1, 0.2, AGAIN_S - 0.1):
        server.look(wait_s)
        assert is_open(ours, theirs)
    server.look(0.2)
    assert not is_open(ours, theirs)


@kinds
def test_who_is_served_may_say_nothing_until_it_is_not(server: Server, kind: str) -> None:
    theirs, ours = server.accept(kind)
    server.served.add(ours.fileno())
    for _ in range(10):
        server.look(60.0)
    server.served.clear()
    server.look(60.0)
    server.look(LIMIT_S - 0.1)
    server.look(0.2)
    assert is_open(ours, theirs)
    server.look(AGAIN_S)
    assert not is_open(ours, theirs)


def send_and_read(theirs: socket.socket, ours: socket.socket, num_bytes: int) -> None:
    left = num_bytes
    while left:
        theirs.sendall(bytes(min(left, 65536)))
        got = 0
        while got < min(left, 65536):
            got += len(ours.recv(65536))
        left -= got


def test_a_position_over_a_slow_link_has_more_time(server: Server) -> None:
    theirs, ours = server.accept("tcp")
    send_and_read(theirs, ours, PACE)
    server.look(LIMIT_S + 0.9)
    server.look(AGAIN_S)
    assert is_open(ours, theirs)
    server.look(AGAIN_S)
    assert not is_open(ours, theirs)


@pytest.mark.parametrize("is_served", [False, True])
def test_bytes_that_make_no_message_are_counted(server: Server, is_served: bool) -> None:
    theirs, ours = server.accept("tcp")
    if is_served:
        server.served.add(ours.fileno())
        server.look(0.1)
    send_and_read(theirs, ours, MOST + SLACK)
    server.look(0.1)
    assert is_open(ours, theirs)
    send_and_read(theirs, ours, 1)
    server.look(0.1)
    assert not is_open(ours, theirs)


def test_nor_do_those_count_that_were_understood(server: Server) -> None:
    theirs, ours = server.accept("tcp")
    server.served.add(ours.fileno())
    for _ in range(3):
        send_and_read(theirs, ours, MOST + SLACK)
        server.look(0.1)
        assert is_open(ours, theirs)
        server.guard.note_message((0, ours.fileno()))
        server.look(0.1)
        server.look(0.1)


def test_a_unix_socket_where_bytes_lie_at_every_look(server: Server) -> None:
    theirs, ours = server.accept("unix")
    server.served.add(ours.fileno())
    theirs.sendall(b"x")
    for wait_s in (0.1, guard_module._UNREAD_S - 0.2, 0.1):
        server.look(wait_s)
        assert is_open(ours, theirs)
    server.guard.note_message((0, ours.fileno()))
    for wait_s in (0.1, 0.1, guard_module._UNREAD_S - 0.1, 0.0):
        server.look(wait_s)
        assert is_open(ours, theirs)
    server.look(0.2)
    assert not is_open(ours, theirs)


def test_whose_descriptor_another_has_is_gone(server: Server) -> None:
    """What it said last was read when the other had come."""
    _, ours = server.accept("unix")
    for peer in (b"1", b"1", b"2"):
        server.enter(ours, peer)
    first = b"%d" % ours.fileno()
    assert [peer.identity for peer in server.lost] == [first, b"1"]
    server.hear(zmq.EVENT_DISCONNECTED, ours.fileno())
    assert server.lost[2:] == [Peer(0, b"2")]
    assert server.guard.note_message((0, ours.fileno())) is None


def test_the_oldest_stranger_makes_room(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [server.accept("unix") for _ in range(3)]
    server.served.add(pairs[0][1].fileno())
    monkeypatch.setattr(guard_module, "are_few_left", lambda descriptor: True)
    pairs += [server.accept("unix") for _ in range(2)]
    server.guard.check(server.now)
    assert [is_open(ours, theirs) for theirs, ours in pairs] == [True, False, False, True, True]
    server.served |= {ours.fileno() for _, ours in pairs}
    last = server.accept("unix")
    server.guard.check(server.now)
    assert not is_open(*last[::-1])


def test_strangers_are_so_many_at_most(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "_MOST_STRANGERS", 2)
    pairs = [server.accept("unix") for _ in range(3)]
    server.guard.check(server.now)
    assert [is_open(ours, theirs) for theirs, ours in pairs] == [False, True, True]


def test_all_strangers_together_are_bounded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_module, "_STRANGERS_BYTES", 5000)
    pairs = [server.accept("tcp") for _ in range(4)]
    for (theirs, ours), num in zip(pairs, (1500, 2000, 1000, 2400), strict=True):
        send_and_read(theirs, ours, num)
    server.served.add(pairs[3][1].fileno())
    server.look(0.1)
    assert all(is_open(ours, theirs) for theirs, ours in pairs)
    send_and_read(*pairs[2], 1600)
    server.look(0.1)
    assert [is_open(ours, theirs) for theirs, ours in pairs] == [True, True, False, True]


# ---- messages of many frames


class Frames:
    """A ROUTER with messages of so many frames."""

    def __init__(self, *messages: int) -> None:
        self.more = [i < num for num in messages for i in range(num + 1)]
        self.num_read = 0

    def getsockopt(self, option: int) -> int:
        return zmq.POLLIN if self.num_read < len(self.more) else 0

    def recv(self, flags: int, copy: bool = True) -> Any:
        i, self.num_read = self.num_read, self.num_read + 1
        return b"who" if copy else SimpleNamespace(more=self.more[i])


def test_a_message_of_many_frames_takes_no_turn_for_itself() -> None:
    frames = Frames(1, 5000, 1)
    reader, turns = FrameReader(cast(Any, frames)), list[list[int]]()
    while frames.getsockopt(zmq.EVENTS):
        before = frames.num_read
        turns.append([received.num for received in reader.read_messages()])
        assert frames.num_read - before <= 1100
    assert [num for turn in turns for num in turn] == [1, 5000, 1]
    assert len(turns) >= 5


# ---- sockets of others


def test_what_is_not_the_same_connection_any_more_is_left_alone() -> None:
    left, right = socket.socketpair()
    inspector = SocketInspector()
    with left, right, closing(inspector):
        other = SocketRef(left.fileno(), SocketRef.at(right.fileno()).inode)
        inspector.hang_up(other)
        left.sendall(b"still")
        assert (inspector.unread(other), inspector.unread(SocketRef.at(right.fileno()))) == (0, 5)
        assert right.recv(5) == b"still"
        inspector.hang_up(SocketRef.at(left.fileno()))
        assert right.recv(1) == b""


def test_a_descriptor_that_is_closed_or_no_socket_is_nothing() -> None:
    with closing(SocketInspector()) as inspector, open(os.devnull) as file:
        for foreign in (
            SocketRef.at(file.fileno()),
            SocketRef.at(10**6),
            SocketRef(10**6, 1),
        ):
            assert (inspector.received(foreign), inspector.unread(foreign)) == (None, 0)
            inspector.hang_up(foreign)


def test_in_a_child_no_more_is_closed_than_what_leads_there(tmp_path: Path) -> None:
    """A number may be a file's by the time that it is noted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        theirs = socket.create_connection(("127.0.0.1", port))
        with theirs, open(tmp_path / "file", "w") as file:
            for descriptor in (file.fileno(), theirs.fileno(), listener.fileno(), 10**6):
                SocketRef.at(descriptor).close("tcp://127.0.0.1:1")
                SocketRef.at(descriptor).close("ipc:///nowhere")
            SocketRef.at(file.fileno()).close(f"tcp://127.0.0.1:{port}")
            for open_one in (file.fileno(), theirs.fileno(), listener.fileno()):
                os.fstat(open_one)
            SocketRef(theirs.fileno(), 1).close(f"tcp://127.0.0.1:{port}")
            os.fstat(theirs.fileno())
            SocketRef.at(theirs.fileno()).close(f"tcp://127.0.0.1:{port}")
            with pytest.raises(OSError):
                os.fstat(theirs.fileno())
            theirs.detach()


# ---- limits


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 10**6), (65536, 10**6)),
        ((1024, resource.RLIM_INFINITY), (65536, resource.RLIM_INFINITY)),
        ((4096, 4096), None),
        ((100_000, 10**6), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_a_server_lets_itself_have_descriptors_for_many_consumers(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], wanted: tuple[int, int] | None
) -> None:
    got: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: before)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: got.append(new))
    kernel.raise_limit()
    assert got == ([] if wanted is None else [wanted])


@pytest.mark.parametrize(
    ("limit", "descriptor", "wanted"),
    [
        (8000, 6999, False),
        (8000, 7000, True),
        (1024, 511, False),
        (1024, 512, True),
        (200, 99, False),
        (200, 100, True),
        (resource.RLIM_INFINITY, 10**9, False),
    ],
)
def test_the_last_descriptors_are_few(
    monkeypatch: pytest.MonkeyPatch, limit: int, descriptor: int, wanted: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert kernel.are_few_left(descriptor) is wanted


FEW = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))
import feeder
from feeds import make
from fetches import BATCH_SIZE, make_rows
def factory():
    return make(lambda call: make_rows(0, 0, call.index, BATCH_SIZE), epochs=None)
with feeder.serve(factory, sys.argv[1]) as server:
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.process
def test_more_peers_than_descriptors_end_no_server(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    command = [sys.executable, "-c", FEW, address]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}"}
    with ExitStack() as stack:
        child = stack.enter_context(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        )
        stack.callback(child.kill)
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for _ in range(1100):
            stack.enter_context(closing(RawPeer(address)))
        with feeder.connect(address, timeout=2 * WAIT_S) as consumer:
            assert [next(consumer).step for _ in range(20)] == list(range(20))
        child.stdin.close()
        assert child.wait(WAIT_S) == 0
