"""What a process of an executor does: it calls the fetch function, ticket after ticket.

It has one thread and no state between tickets but the function's own, so that a process can be
killed at any moment and another one go on: which calls are made again, the parent decides. Rows are
written where they are sent from, since to copy them would cost more than most functions.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import logging.handlers
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from feeder.executors import pickles, plain
from feeder.executors.blocks import Writer, map_shared
from feeder.executors.options import resolve
from feeder.executors.wire import (
    END,
    ERROR,
    FULL,
    NOTHING,
    PROGRESS_BYTES,
    Answered,
    Ask,
    Calls,
    Load,
    Logged,
    Made,
    Place,
    Said,
    Wire,
)
from feeder.state import codec
from feeder.workers import forks
from feeder.workers.fetch.calls import FIRST_NONE_PAUSE_S, as_tuple
from feeder.workers.fetch.seeding import RECORD_SEEDS, follow_imports, seed_for_call
from feeder.workers.stream import placement
from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import count_bytes, native, with_arrays
from feeder.workers.stream.copying import is_sole_owner
from feeder.workers.stream.dtypes import write_dtype
from feeder.workers.stream.memory import POOL

_BUNDLE_S = 0.001
"""Small chunks travel together, of calls that took so long: a round trip takes a tenth of it."""


def answer_over(wire: Wire, load: Load, descriptors: list[int]) -> None:
    """Answer tickets over a socket, for ever. Raises `HungUp`. The function's large arrays and the
    page of its progress have come along."""
    function, page = descriptors
    progress = map_shared(page, PROGRESS_BYTES)
    os.close(page)
    server = Server(wire, load, function, progress)
    while True:
        ticket, _ = wire.receive()
        wire.send(*server.answer(ticket))
        server.blocks.sent()


class Speaker(Protocol):
    """The way to whoever has sent the function."""

    def send(self, message: Any, descriptors: list[int] | None = None) -> None:
        """Send a message."""

    def forget(self) -> None:
        """This process is a forked child, which has no part in it."""


class Server:
    """The one of a process that answers tickets. Owner: the process's one thread.

    From then on the process prints and logs through `wire`.
    """

    def __init__(
        self, wire: Speaker, load: Load, descriptor: int, progress: NDArray[np.uint8]
    ) -> None:
        """`descriptor`: the large arrays of the function; it is closed. `progress`: where the
        process notes which call it has begun."""
        self.blocks = Writer()
        """Where chunks lie."""
        self._progress = progress.view(np.uint64)
        # What the sources make lies where it is sent from.
        POOL.lend_from(self.blocks.empty)
        _speak_through(wire)
        _forward_logs(wire, load.log_level)
        self._wire = wire
        forks.call_in_child(self._forget)
        self._function = _Function(load, descriptor, self._progress, self.blocks)

    def answer(self, ticket: Any) -> tuple[Any, list[int]]:
        """The answer to a ticket, and the descriptors of blocks that are new."""
        # In this order: never does it seem to have begun a call of a ticket that it has not seen.
        self._progress[1] = 0
        self._progress[0] = ticket.number
        self.blocks.free(ticket.freed)
        is_question = isinstance(ticket, Ask)
        function = self._function
        answer, new = function.ask(ticket) if is_question else function.call(ticket)
        answer.number = ticket.number
        return answer, new

    def _forget(self) -> None:
        """This is a child that a fetch function has forked: the connection is not its own, and the
        parent would wait for it to be closed."""
        self._wire.forget()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        logging.getLogger().handlers.clear()


class _Speech(io.RawIOBase):
    """What is written here is printed by the parent. Any thread writes, one at a time: the buffer
    above has a lock."""

    def __init__(self, wire: Speaker, is_error: bool) -> None:
        self._wire = wire
        self._is_error = is_error
        # A character may be cut in two where a buffer ends.
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2 if self._is_error else 1

    def write(self, data: Any) -> int:
        data = bytes(data)
        text = self._decode(data)
        if text:
            self._wire.send(Said(self._is_error, text))
        return len(data)


def _speak_through(wire: Speaker) -> None:
    """Have `sys.stdout` and `sys.stderr` be the parent's."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Speech(wire, is_error)), "utf-8", "backslashreplace",
            line_buffering=True,
        )
        for is_error in (False, True)
    )  # fmt: skip


class _Forward(logging.handlers.QueueHandler):
    """Sends log records to the parent, whose handlers know what to do with them. Any thread logs;
    the handler's lock lets one in at a time."""

    def __init__(self, wire: Speaker) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._wire = wire

    def enqueue(self, record: logging.LogRecord) -> None:
        self._wire.send(Logged(plain.write_record(record)))


def _forward_logs(wire: Speaker, level: int) -> None:
    root = logging.getLogger()
    root.handlers[:] = [_Forward(wire)]
    root.setLevel(level)


class _Function:
    """The fetch function as this process has it. Owner: the process's one thread."""

    def __init__(
        self, load: Load, descriptor: int, progress: NDArray[np.uint64], blocks: Writer
    ) -> None:
        self._load = load
        self._progress = progress
        self._blocks = blocks
        self._names = tuple(load.names)
        self._dtypes: dict[Any, int] = {}
        # Shape and dtype of each column of a whole call, once they are known.
        self._likes: list[tuple[tuple[int, ...], np.dtype[Any]]] | None = None
        self._fresh: list[bytes] = []
        self._seed = seed_for_call if load.seed_globals else _seed_nothing
        RECORD_SEEDS.are_on = load.seed_globals
        if load.seed_globals:
            follow_imports()
        # It is told at each call: at the first one somebody waits for an answer.
        self._broken: BaseException | None = None
        self._fetch: Any = None
        self._cursor: Callable[..., Any] | None = None
        self._seek: Callable[..., Any] | None = None
        try:
            self._fetch = _load(load, descriptor)
            self._cursor, self._seek = (_method(self._fetch, name) for name in ("cursor", "seek"))
            if load.begins is not None and self._seek is not None:
                fields, cursor = load.begins
                self._seek(Call(*fields), cursor)
        except BaseException as error:
            self._broken = error

    # ---- calls

    def call(self, ticket: Calls) -> tuple[Made, list[int]]:
        """Make calls until a limit is reached."""
        chunks: list[bytes | list[Place]] = []
        cursors: list[bytes] = []
        outcome, error = FULL, b""
        skipped, stores = self._skipped(), self._stores()
        try:
            self._get_ready(ticket.worker_id, ticket.restore)
        except BaseException as raised:
            # Whatever it is: it ends no epoch.
            outcome, error = ERROR, plain.write_error(raised)
        else:
            try:
                outcome = self._make(ticket, chunks, cursors)
            except StopIteration:
                outcome = END
            except BaseException as raised:
                outcome, error = ERROR, plain.write_error(raised)
        if outcome == END and self._load.seekable:
            try:
                cursors.append(self._cursor_of(ticket.worker_id))
            except BaseException as raised:
                outcome, error = ERROR, plain.write_error(raised)
        self._flush()
        blocks, fresh, descriptors, dropped = self._blocks.lend()
        dtypes, self._fresh = self._fresh, []
        answer = Made(
            chunks, cursors, outcome, error, dtypes, blocks, fresh, dropped,
            self._skipped() - skipped,
        )  # fmt: skip
        answer.stores = {
            name: value - stores.get(name, 0)
            for name, value in self._stores().items()
            # Of others only the newest is of use, and only while the process lives.
            if name not in ("wanted", "coming", "ahead")
        }
        if answer.skipped:
            numbers = range(ticket.first, ticket.first + answer.num_calls)
            answer.left_out = [
                one
                for one in self._fetch.left_out
                if one.epoch == ticket.epoch and one.call in numbers
            ]
        return answer, descriptors

    def _skipped(self) -> int:
        """How many records the source has left out; 0 of a function that counts none."""
        skipped: int = self._fetch.skipped if hasattr(self._fetch, "count_skipped") else 0
        return skipped

    def _stores(self) -> dict[str, float]:
        """What the source has met with in object stores; nothing of a function that reads none."""
        counts = getattr(self._fetch, "_store_counts", None)
        return (counts and counts()) or {}

    def _make(self, ticket: Calls, chunks: list[bytes | list[Place]], cursors: list[bytes]) -> int:
        load, num_bytes = self._load, 0
        ends = time.monotonic() + _BUNDLE_S
        for number in range(ticket.most_calls):
            self._progress[1] = number + 1
            index = ticket.first + number
            if load.pure:
                call = Call(
                    index, ticket.epoch, load.first_worker_id + index % load.num_workers,
                    ticket.batch_size, load.seed,
                )  # fmt: skip
                self._seed(load.seed, ticket.epoch, index)
                chunk = self._call(call)
            else:
                self._seed(load.seed, ticket.worker_id, index)
                chunk = self._fetch(ticket.worker_id, ticket.batch_size)
            if chunk is None:
                return NOTHING
            chunk = as_tuple(chunk, self._names)
            sent = self._place(chunk)
            if load.seekable:
                cursors.append(self._cursor_of(ticket.worker_id))
            chunks.append(sent)
            num_bytes += count_bytes(chunk)
            if num_bytes >= ticket.most_bytes or time.monotonic() > ends:
                break
        return FULL

    def _call(self, call: Call) -> Any:
        """Call a pure function; with `rows_per_call` its rows have a place from the second call
        on: memory that is sent, and copied to the batch where it arrives."""
        load = self._load
        if self._likes is None:
            chunk = self._fetch(call)
            self._learn(as_tuple(chunk, self._names))
            return chunk
        arrays = tuple([self._blocks.empty(shape, dtype) for shape, dtype in self._likes])
        place = placement.Place(load.names, load.axes, arrays)
        with placement.writing_to(place, call):
            return self._fetch(call)

    def _learn(self, chunk: Any) -> None:
        """What the columns of a call are like, from one that gave all of its rows."""
        rows = self._load.rows_per_call
        if rows is None or not isinstance(chunk, tuple) or not all(map(_is_array, chunk)):
            return
        shapes = [array.shape for array in chunk]
        axes = self._load.axes
        if len(shapes) == len(axes) and all(
            len(shape) > axis and shape[axis] == rows
            for shape, axis in zip(shapes, axes, strict=True)
        ):
            self._likes = [(array.shape, native(array.dtype)) for array in chunk]

    def _place(self, chunk: Any) -> list[Place] | bytes:
        """A chunk as it is sent: where its arrays lie; of what is no tuple of arrays its pickle, if
        that stays on this host."""
        chunk = with_arrays(chunk)
        if not isinstance(chunk, tuple) or not all(map(self._is_plain, chunk)):
            try:
                if self._load.is_far:
                    raise TypeError(f"it is {_told(chunk)}")
                return pickles.dump(chunk)
            except Exception as error:
                raise plain.CallError(
                    f"what it returned cannot be sent: {error}; return a list, tuple or dict of "
                    "arrays"
                ) from error
        # Before any other name refers to an array. An array of a block is a view.
        kept = [
            chunk[i].base is not None and not is_sole_owner(chunk, i) for i in range(len(chunk))
        ]
        return [
            self._blocks.place(array, self._number(array.dtype), is_kept=is_kept)
            for array, is_kept in zip(chunk, kept, strict=True)
        ]

    def _is_plain(self, array: Any) -> bool:
        if not _is_array(array):
            return False
        if array.dtype not in self._dtypes:
            try:
                write_dtype(array.dtype)
            except TypeError:
                return False
        return True

    def _number(self, dtype: np.dtype[Any]) -> int:
        number = self._dtypes.get(dtype)
        if number is None:
            number = self._dtypes[dtype] = len(self._dtypes)
            self._fresh.append(codec.pack(write_dtype(dtype)))
        return number

    # ---- cursors

    def ask(self, ticket: Ask) -> tuple[Answered, list[int]]:
        """Tell a cursor, or put a worker to one."""
        cursor, error = b"", b""
        try:
            if ticket.call is not None:
                self._check()
                assert self._cursor is not None
                cursor = _encoded(self._cursor(Call(*ticket.call)))
            elif ticket.cursor is None:
                self._get_ready(ticket.worker_id, ticket.restore)
                assert self._cursor is not None
                cursor = _encoded(self._cursor(ticket.worker_id))
            else:
                self._get_ready(ticket.worker_id, ticket.cursor)
        except BaseException as raised:
            error = plain.write_error(raised)
        self._flush()
        return Answered(cursor, error), []

    def _cursor_of(self, worker_id: int) -> bytes:
        assert self._cursor is not None
        return _encoded(self._cursor(worker_id))

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _get_ready(self, worker_id: int, restore: Any) -> None:
        """Put a worker to where it stood in another process."""
        self._check()
        if restore is None:
            return
        if isinstance(restore, bytes):
            assert self._seek is not None
            self._seek(worker_id, codec.unpack(restore))
            return
        self._replay(worker_id, *restore)

    def _replay(self, worker_id: int, size: int, num_chunks: int, num_ends: int) -> None:
        """Call a new function as often as the old one was called, and discard what it gives."""
        chunks = ends = 0
        while chunks < num_chunks or ends < num_ends:
            self._seed(self._load.seed, worker_id, chunks)
            try:
                chunk = self._fetch(worker_id, size)
            except StopIteration:
                ends += 1
                if ends > num_ends:
                    raise plain.CallError(
                        f"fetch function is not deterministic: its epoch ended after {chunks} of "
                        f"{num_chunks} calls when they were made again in a new process"
                    ) from None
                continue
            if chunk is None:
                time.sleep(FIRST_NONE_PAUSE_S)  # noqa: TID251  # the function's own pace
                continue
            chunks += 1

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            # A function may have put something else in their place.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()


def _encoded(cursor: Any) -> bytes:
    try:
        return codec.pack(cursor)
    except (TypeError, ValueError) as error:
        raise plain.CursorError(str(error)) from error


def _load(load: Load, descriptor: int) -> Any:
    """The fetch function: imported by its name, or made of a pickle and its buffers."""
    try:
        if load.is_path:
            return resolve(load.function.decode())
        return pickles.unpack_function(load.function, _map_buffers(load.sizes, descriptor))
    finally:
        os.close(descriptor)


def _map_buffers(sizes: list[int], descriptor: int) -> list[Any]:
    """Large arrays of a function: all processes share one copy, and what is written stays here."""
    if not sizes:
        return []
    memory = memoryview(mmap.mmap(descriptor, 0, mmap.MAP_PRIVATE))
    buffers, at = [], 0
    for size in sizes:
        buffers.append(memory[at : at + size])
        at = pickles.aligned(at + size)
    return buffers


def _method(fetch: Any, name: str) -> Any:
    """`cursor` or `seek`, of a function or of the object that it is a method of."""
    owners = (fetch, getattr(fetch, "__self__", None))
    return next((f for f in (getattr(owner, name, None) for owner in owners) if callable(f)), None)


def _told(chunk: Any) -> str:
    """What a chunk is, in words: "an int", or "a tuple of int64, list"."""
    if isinstance(chunk, tuple):
        kinds = [one.dtype if type(one) is np.ndarray else type(one).__name__ for one in chunk]
        return f"a tuple of {', '.join(map(str, kinds))}"
    name = type(chunk).__name__
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


def _is_array(array: Any) -> bool:
    kind = type(array)
    return (kind is np.ndarray or kind is np.memmap) and not array.dtype.hasobject


def _seed_nothing(seed: int, epoch: int, index: int) -> None:
    """Generators are left as they are."""
