"""Messages between this process and the processes of an executor, over a private socket pair.

A message is a header and a msgpack body; descriptors travel with the header. The other end is a
process that this one has started, or an actor on another host, from which no pickle is taken.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from typing import Any

import msgspec

_HEADER = struct.Struct("<II")
"""Bytes of the body, and how many descriptors come with it."""

MOST_DESCRIPTORS = 250
"""In one message; Linux takes 253 (SCM_MAX_FD)."""


FULL, NOTHING, END, ERROR = range(4)
"""Outcomes: a limit was reached; the call gave None; it ended the epoch; it raised."""


class Load(msgspec.Struct, array_like=True, tag=0):
    """To a new process: the fetch function, and what is the same at each call."""

    function: bytes
    """Pickled, or the text ``MODULE:ATTR``."""
    is_path: bool
    sizes: list[int]
    """The lengths of the buffers that belong to the pickle; they lie in the descriptor that comes
    along, each at a multiple of 64 bytes."""
    names: list[str]
    axes: list[int]
    rows_per_call: int | None
    pure: bool
    seekable: bool
    seed_globals: bool
    first_worker_id: int
    num_workers: int
    seed: int
    log_level: int
    is_far: bool
    """Whether it is an actor, which sends no pickles."""
    begins: list[Any] | None
    """The call and the cursor that a pure function with cursors is given first."""


PROGRESS_BYTES = 4096
"""A page that comes along with `Load`: the process writes there which ticket it answers, and how
many of its calls it has begun. So a death is told of the call that was under way."""


class Calls(msgspec.Struct, array_like=True, tag=1):
    """Make calls until a limit is reached: of a pure function from index `first` on, otherwise of
    one worker, whose next call is its `first`-th."""

    first: int
    epoch: int
    worker_id: int
    batch_size: int
    most_calls: int
    most_bytes: int
    restore: Any
    """What comes before the calls, in a process that has not made the worker's last one: None, the
    bytes of a cursor, or how many chunks and ends of epochs the worker has given."""
    freed: list[int]
    """Blocks that may be written again."""
    number: int = 0
    """Counted for each process; with it the process notes which call it has begun."""


class Ask(msgspec.Struct, array_like=True, tag=2):
    """Ask for a cursor, or put a worker to one."""

    worker_id: int
    cursor: bytes | None
    """None asks for it."""
    call: list[int] | None
    """The call whose cursor is asked for, of a pure function."""
    restore: Any
    freed: list[int]
    number: int = 0


class Place(msgspec.Struct, array_like=True):
    """An array: where it lies, and what it is."""

    block: int
    offset: int
    dtype: int
    shape: tuple[int, ...]


class Made(msgspec.Struct, array_like=True, tag=3):
    """What the calls gave: chunks, and why there are no more."""

    chunks: list[bytes | list[Place]]
    """A list of places; or, for what is no tuple of arrays, its pickle, which no actor sends."""
    cursors: list[bytes]
    """The worker's cursor after each chunk, of functions that have one; and after an end."""
    outcome: int
    error: bytes
    """The exception of the call after the chunks (`plain.write_error`)."""
    dtypes: list[bytes]
    """Dtypes that are new, as plain values; numbered from the first message on."""
    blocks: list[tuple[int, int]]
    """The blocks that the chunks lie in, and how many bytes of each are used."""
    fresh: list[tuple[int, int]]
    """Blocks that are new, and their bytes; their descriptors come along."""
    dropped: list[int]
    """Blocks that are used no more."""
    skipped: int = 0
    """How many defective records a source left out in these calls."""
    number: int = 0
    """The ticket's."""
    left_out: list[tuple[int, int, str, str]] = []
    """Those of them that are listed."""
    stores: dict[str, int | float] = {}
    """What these calls have met with in object stores."""

    @property
    def num_calls(self) -> int:
        """How many calls were made, the one that gave no chunk included."""
        return len(self.chunks) + (self.outcome != FULL)


class Answered(msgspec.Struct, array_like=True, tag=4):
    """The cursor that was asked for; or the exception."""

    cursor: bytes
    error: bytes
    number: int = 0


class Said(msgspec.Struct, array_like=True, tag=5):
    """Text that was printed: to stdout, or to stderr."""

    is_error: bool
    text: str


class Logged(msgspec.Struct, array_like=True, tag=6):
    """A log record (`plain.write_record`)."""

    record: bytes


class Fork(msgspec.Struct, array_like=True, tag=7):
    """To the zygote: fork a process."""


class Forked(msgspec.Struct, array_like=True, tag=8):
    """Its process id, and its socket comes along; or why there is none."""

    pid: int
    error: str


class Reap(msgspec.Struct, array_like=True, tag=9):
    """To the zygote: end a process and say how it ended."""

    pid: int


class Reaped(msgspec.Struct, array_like=True, tag=10):
    """The wait status of a process, and the most memory it had, in KiB."""

    status: int
    peak_kb: int


class Look(msgspec.Struct, array_like=True, tag=11):
    """To the zygote: say where a process is."""

    pid: int


class Seen(msgspec.Struct, array_like=True, tag=12):
    """The Python stacks of a process; empty where it does not answer."""

    stack: str


class Come(msgspec.Struct, array_like=True, tag=13):
    """To a process of an actor that holds several: answer the driver, which is there."""

    generation: int
    unix: bytes
    tcp: str
    key: bytes
    public: bytes
    """The pair of keys of the process, which its actor has made for it."""
    secret: bytes


class Left(msgspec.Struct, array_like=True, tag=14):
    """The driver has hung up; or why it was not reached."""

    error: str


Message = (
    Load | Calls | Ask | Made | Answered | Said | Logged
    | Fork | Forked | Reap | Reaped | Look | Seen | Come | Left
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Any) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode(data: Any) -> Any:
    """The reverse of `encode`. Raises `msgspec.MsgspecError`."""
    return _decoder.decode(data)


class HungUp(Exception):
    """The other end is gone."""


class Wire:
    """One end of a connection. Who sends and who receives is up to its owner; a thread may send
    while another receives."""

    decode: Any = staticmethod(_decoder.decode)
    """Reads a message's body; another kind of connection has other messages."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        # A message may go in parts. Reentrant: a garbage collection in the middle may print.
        self._sends = threading.RLock()

    def send(self, message: Any, descriptors: list[int] | None = None) -> None:
        """Send a message. Raises `HungUp`."""
        body = _encoder.encode(message)
        num = len(descriptors) if descriptors else 0
        parts = [_HEADER.pack(len(body), num), body]
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _ints(descriptors))] if num else []
        try:
            with self._sends:
                sent = self.sock.sendmsg(parts, ancillary)
                if sent < _HEADER.size + len(body):
                    self.sock.sendall(b"".join(parts)[sent:])
        except OSError as error:
            raise HungUp(str(error)) from error

    def receive(self) -> tuple[Any, list[int]]:
        """The next message and its descriptors. Raises `HungUp`; and `OSError` where this process
        may not have so many descriptors."""
        header, descriptors, is_cut = self._receive_header()
        try:
            size, num = _HEADER.unpack(header)
            body = bytearray(size)
            self._fill(memoryview(body))
            if is_cut or len(descriptors) != num:
                raise OSError(
                    f"{num} descriptors came, and this process has no room for them: raise its "
                    "limit (ulimit -n)"
                )
            return self.decode(body), descriptors
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def _receive_header(self) -> tuple[bytes, list[int], bool]:
        room = socket.CMSG_SPACE(MOST_DESCRIPTORS * 4)
        try:
            header, ancillary, flags, _ = self.sock.recvmsg(
                _HEADER.size, room, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL
            )
        except OSError as error:
            raise HungUp(str(error)) from error
        descriptors = [
            number
            for level, kind, content in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            for (number,) in struct.iter_unpack("i", content[: len(content) // 4 * 4])
        ]
        if len(header) < _HEADER.size:
            for descriptor in descriptors:
                os.close(descriptor)
            raise HungUp("end of file")
        return header, descriptors, bool(flags & socket.MSG_CTRUNC)

    def _fill(self, body: memoryview) -> None:
        while body:
            try:
                num = self.sock.recv_into(body)
            except OSError as error:
                raise HungUp(str(error)) from error
            if not num:
                raise HungUp("end of file")
            body = body[num:]

    def forget(self) -> None:
        """This process is a forked child: the connection is its parent's, and goes on."""
        self.sock.close()

    def hang_up(self) -> None:
        """Both ends see it, also where a forked child holds this socket too. Any thread."""
        with contextlib.suppress(OSError):  # The other end has hung up already.
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, when nobody waits here any more."""
        self.hang_up()
        self.sock.close()


def _ints(numbers: list[int] | None) -> bytes:
    return struct.pack(f"{len(numbers or ())}i", *(numbers or ()))
