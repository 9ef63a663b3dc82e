"""Descriptors of arenas: given to the process that was meant, and checked before use."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from feeder.errors import AuthError, ConnectTimeout, ProtocolError, TransportError
from feeder.service.memory import fdpass
from feeder.service.memory.arena import Arena
from feeder.service.memory.fdpass import (
    Attachment,
    DescriptorConnection,
    DescriptorListener,
    OwnLimitError,
    attach,
)
from small import WAIT_S

NONCE = bytes(range(16))


class Door:
    """A listener, its clock, and what it said of those whom it sent away."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.now = 0.0
        self.refused: list[str] = []
        self.listener = DescriptorListener(
            str(path), clock=lambda: self.now, refused=self.refused.append, **settings
        )
        self.listener.expect(NONCE)

    def accept(self) -> list[DescriptorConnection]:
        """Serve the listener until it has nothing to do."""
        connections: list[DescriptorConnection] = []
        while _is_ready(self.listener.fileno(), 0.0):
            connections += self.listener.on_readable()
        return connections

    def connect(self, path: Path) -> tuple[DescriptorConnection, Attachment]:
        attachment = attach(str(path), NONCE, WAIT_S)
        (connection,) = self.accept()
        return connection, attachment


def _is_ready(descriptor: int, timeout_s: float = WAIT_S) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arenas"


@pytest.fixture
def door(path: Path) -> Iterator[Door]:
    door = Door(path)
    yield door
    door.listener.close()


def raw(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(path))
    return sock


def hung_up(sock: socket.socket) -> bool:
    sock.settimeout(WAIT_S)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_an_arena_is_given_to_who_presents_the_nonce(door: Door, path: Path) -> None:
    connection, attachment = door.connect(path)
    arena = Arena(4096, 3)
    arena.memory[:4] = b"rows"
    connection.send_descriptor(arena.descriptor, 7, 4096, 3)
    descriptor, *given = attachment.receive()
    assert given == [7, 4096, 3]
    assert os.pread(descriptor, 4, 0) == b"rows"
    assert not os.get_inheritable(descriptor)
    assert (connection.nonce, connection.pid) == (NONCE, os.getpid())
    os.close(descriptor)
    attachment.close()
    assert connection.is_gone()
    connection.close()


def test_the_socket_is_the_users_alone_and_goes_when_closed(path: Path) -> None:
    mask = os.umask(0)
    try:
        door = Door(path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    door.listener.close()
    assert not path.exists()


def test_a_live_socket_is_not_stolen_and_a_dead_one_is_replaced(door: Door, path: Path) -> None:
    with pytest.raises(TransportError, match="cannot listen at"):
        DescriptorListener(str(path))
    dead = path.with_name("dead")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(dead))
    other = Door(dead)
    connection, attachment = other.connect(dead)
    attachment.close()
    connection.close()
    other.listener.close()


def test_a_wrong_nonce_is_sent_away(door: Door, path: Path) -> None:
    for num, said in enumerate([b"x" * 16, NONCE[:15], NONCE + b"x", b""], 1):
        with raw(path) as sock:
            sock.send(said)
            assert door.accept() == []
            assert hung_up(sock)
        assert len(door.refused) == num and "nonce" in door.refused[-1]
        assert str(os.getpid()) in door.refused[-1]


@pytest.mark.parametrize("how", ["used", "withdrawn"])
def test_a_nonce_is_good_once_and_until_it_is_withdrawn(door: Door, path: Path, how: str) -> None:
    if how == "used":
        for end in door.connect(path):
            end.close()
    else:
        door.listener.withdraw(NONCE)
    attachment = attach(str(path), NONCE, WAIT_S)
    assert door.accept() == []
    with pytest.raises(TransportError, match=r"hung up|reset"):
        attachment.receive()
    attachment.close()
    # Whose consumer has left is no stranger: nobody is told of it.
    assert len(door.refused) == (how == "used")


def test_who_says_nothing_is_sent_away_in_time(door: Door, path: Path) -> None:
    with raw(path) as silent:
        door.accept()
        assert door.listener.deadline == 2.0
        door.listener.expire(1.9)
        assert door.refused == []
        door.listener.expire(2.0)
        assert hung_up(silent)
    assert door.listener.deadline == float("inf")
    assert len(door.refused) == 1 and "presented no nonce in 2.0 s" in door.refused[0]


OTHER = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.setuid(65534)
sock.connect(sys.argv[1])
try:
    sock.send(bytes(range(16)))
    sys.exit(sock.recv(1) != b"")
except (BrokenPipeError, ConnectionResetError):
    pass
"""


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_sent_away(door: Door) -> None:
    # In a folder that everybody can enter: else the kernel keeps it away and not the listener.
    place = Path(f"/tmp/feeder-test-{os.getpid()}")
    other = Door(place)
    os.chmod(place, 0o666)
    with subprocess.Popen([sys.executable, "-c", OTHER, str(place)]) as child:
        assert _is_ready(other.listener.fileno())
        assert other.accept() == []
        assert child.wait(WAIT_S) == 0
    other.listener.close()
    assert len(other.refused) == 1 and "is of user 65534" in other.refused[0]


FORKER = """
import os, sys
from feeder.service.memory.fdpass import attach
attachment = attach(sys.argv[1], bytes(range(16)), 10.0)
if not os.fork():
    sys.stdin.read()
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.mark.process
def test_the_death_of_a_consumer_shows_also_where_its_child_holds_the_socket(
    door: Door, path: Path
) -> None:
    command = [sys.executable, "-c", FORKER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        (connection,) = door.accept()
        assert (connection.pid, connection.is_gone()) == (pid, False)
        child.kill()
        assert connection.pidfd is not None and _is_ready(connection.pidfd)
        assert not _is_ready(connection.fileno(), 0.0)
        assert connection.is_gone()
        connection.close()


def bad_memory(kind: str) -> tuple[int, list[int]]:
    """A descriptor that no server should send, and what is said of it."""
    if kind == "not memory":
        return os.open("/dev/zero", os.O_RDONLY), [1, 4096, 1]
    descriptor = os.memfd_create("bad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 8192)
    if kind != "can shrink":
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    said = {"too small": [1, 4096, 3], "too large": [1, 4096, 1], "no slot": [1, 8192, 0]}
    return descriptor, said.get(kind, [1, 4096, 2])


@pytest.mark.parametrize("kind", ["not memory", "can shrink", "too small", "too large", "no slot"])
def test_memory_that_could_kill_its_reader_is_refused(door: Door, path: Path, kind: str) -> None:
    connection, attachment = door.connect(path)
    descriptor, said = bad_memory(kind)
    connection.send_descriptor(descriptor, *said)
    os.close(descriptor)
    with pytest.raises(ProtocolError, match="in memory that cannot shrink"):
        attachment.receive()
    attachment.close()
    connection.close()


def test_a_message_of_another_form_is_refused_and_leaves_no_descriptor(
    door: Door, path: Path
) -> None:
    connection, attachment = door.connect(path)
    arena = Arena(4096, 1)
    for size, num in ((24, 0), (24, 2), (23, 1), (25, 1), (24, 5)):
        data = (struct.pack("<QQQ", 1, 4096, 1) + b"x")[:size]
        socket.send_fds(connection._sock, [data], [arena.descriptor] * num)
        with pytest.raises(ProtocolError, match="expected 24 bytes and 1"):
            attachment.receive()
    attachment.close()
    connection.close()


def test_a_server_of_another_user_is_not_believed(
    door: Door, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fdpass, "peer_of", lambda sock: (1, 12345))
    with pytest.raises(AuthError, match="is of user 12345, expected"):
        attach(str(path), NONCE, WAIT_S)


def test_nobody_there_is_an_error(path: Path) -> None:
    with pytest.raises(TransportError, match="cannot attach to"):
        attach(str(path), NONCE, WAIT_S)


def test_a_server_that_sends_nothing_is_a_timeout(door: Door, path: Path) -> None:
    attachment = attach(str(path), NONCE, 0.05)
    with pytest.raises(ConnectTimeout, match="in time"):
        attachment.receive()
    attachment.close()


def test_a_consumer_that_does_not_read_is_an_error_and_no_wait(door: Door, path: Path) -> None:
    connection, attachment = door.connect(path)
    arena = Arena(4096, 1)
    with pytest.raises(OSError, match=r"unavailable|references"):
        for number in range(100_000):
            connection.send_descriptor(arena.descriptor, number, 4096, 1)
    attachment.close()
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        connection.send_descriptor(arena.descriptor, 1, 4096, 1)
    connection.close()


def test_a_descriptor_that_there_was_no_room_for_is_a_limit_of_ones_own() -> None:
    sock: Any = SimpleNamespace(recvmsg=lambda *args: (bytes(24), [], socket.MSG_CTRUNC, None))
    with pytest.raises(OwnLimitError, match=r"no descriptor left for it; .*ulimit -n"):
        Attachment(sock, "/there").receive()


def test_who_presents_its_nonce_comes_in_however_many_say_nothing(path: Path) -> None:
    door = Door(path, max_half_open=2)
    silent = [raw(path) for _ in range(3)]
    nonces = [bytes([i]) * 16 for i in range(100)]
    for nonce in nonces:
        door.listener.expect(nonce)
    attachments = [attach(str(path), nonce, WAIT_S) for nonce in nonces]
    connections = door.accept()
    assert [connection.nonce for connection in connections] == nonces
    assert len(door.refused) == 1 and hung_up(silent[0])
    for end in (*connections, *attachments, *silent):
        end.close()
    door.listener.close()
