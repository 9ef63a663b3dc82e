"""One lease as its consumer sees it: what came, what was handed out, and what is told of that."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from numpy.typing import NDArray

from feeder import errors
from feeder.devices.cuda.landing import Landing
from feeder.devices.cuda.pinned import PinnedSlot
from feeder.devices.layout import Layout, credit_for, layout
from feeder.devices.slots import HostSlot
from feeder.errors import (
    ConfigError,
    FeedError,
    FetchError,
    ProtocolError,
    RemoteError,
    TransportError,
)
from feeder.service.client.options import ConsumerOptions
from feeder.service.faults import point
from feeder.service.memory import forking
from feeder.service.memory.fdpass import Attachment, attach
from feeder.service.memory.mapping import FrameSlots, Lease, MappedArena, keep_freed_memory, view
from feeder.service.memory.memfd import SLOTS_PER_ARENA
from feeder.service.protocol import messages as say
from feeder.service.protocol.checksums import checksum, full_checksum
from feeder.service.protocol.messages import Report
from feeder.state import codec
from feeder.state.snapshot import Snapshot, StreamState, summarise
from feeder.state.token import StreamId, check_fingerprint, is_token, make_fingerprint
from feeder.workers.errors import ChunkError
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.chunks import Column, Columns
from feeder.workers.stream.dtypes import read_dtype
from feeder.workers.stream.position import (
    Cut,
    Frame,
    LazyPosition,
    PartialChunk,
    Partitions,
    Position,
    Span,
)

# ---- What a consumer makes of a server's messages: positions, columns, errors.


@dataclass(frozen=True, slots=True)
class Identity:
    """The stream that a consumer reads."""

    name: str
    """Its feed's name."""
    number: int
    """Its number among the streams of that name."""
    fingerprint: dict[str, Any]
    """The declared fields that must be equal for a position to fit."""
    epochs: int | None
    """Its epochs."""

    @property
    def id(self) -> StreamId:
        """Whose tokens they are."""
        return StreamId(self.name, self.number, make_fingerprint(self.fingerprint))


def identity_of(opened: say.Opened) -> Identity:
    """The stream that a server says it serves. Raises `ProtocolError` where it says nonsense."""
    try:
        fingerprint = codec.unpack(opened.fingerprint)
        check_fingerprint(fingerprint)
    except (TypeError, ValueError) as error:
        raise errors.ProtocolError(f"server sent a fingerprint that is none: {error}") from error
    return Identity(opened.name, opened.number, fingerprint, opened.epochs)


class RemotePosition:
    """Where a batch ended: a token, or a snapshot with leftover rows. It is the `at`-th of a group
    that tells it, and the token is made when somebody asks."""

    __slots__ = ("_at", "_group", "_identity", "_token")

    def __init__(
        self, identity: Identity, token: bytes | None, group: say.Group | None = None, at: int = 0
    ) -> None:
        self._identity = identity
        self._token = token
        self._group = group
        self._at = at

    @property
    def token(self) -> bytes:
        """The token, or the snapshot."""
        if self._token is None:
            assert self._group is not None
            self._token = token_of(self._identity, self._group, self._at)
            self._group = None
        return self._token

    def cut(self) -> Cut:
        """The place as the user is given it."""
        token = self.token
        if not is_token(token):
            (state,) = Snapshot.from_bytes(token).states
            token = state.token
        return self._identity.id.decode(token, self._identity.epochs)

    def state(self, columns: Columns | None) -> bytes:
        """The place as the bytes of a state dict: the same that a feed in process gives."""
        token = self.token
        if not is_token(token):
            return token
        identity = self._identity
        state = StreamState(
            name=identity.name,
            number=identity.number,
            fingerprint=identity.fingerprint,
            token=token,
            columns=columns,
            rows=None,
            summary=summarise(self.cut()),
        )
        return bytes(Snapshot((state,)))


def token_of(identity: Identity, group: say.Group, at: int) -> bytes:
    """Where the `at`-th batch of a group ended: the token that the server would have made."""
    told = group.span
    if told is None:
        return group.tokens[at]
    num_chunks, taken = group.chunks[at], group.taken[at] if group.taken else 0
    start = Position(told.epoch, told.turn, told.live, told.calls, told.rows, told.marks)
    marks = [None if runs is None else _spread(runs) for runs in told.new_marks]
    span = Span(start, told.ring, told.firsts, [told.chunk_rows] * num_chunks, marks)
    partitions = Partitions(num_partitions=len(told.live), pure=told.pure, arrival=False)
    ended_in = PartialChunk((), (), told.chunk_rows, 0, group.digests[at]) if taken else None
    frame = Frame(partitions, identity.id.encode, identity.epochs)
    place = LazyPosition(frame, span, num_chunks, taken, ended_in, group.epoch)
    place.index = group.index + at * group.stride + 1
    place.step = group.step + at * group.stride + 1
    return place.cut().token()


def _spread(runs: Sequence[tuple[int, bytes]]) -> list[bytes]:
    """The marks of a partition, one for each chunk."""
    marks: list[bytes] = []
    for end, mark in runs:
        marks += [mark] * (end - len(marks))
    return marks


def columns_of(spec: say.Spec) -> Columns:
    """The columns that a server tells. Raises `ConfigError` where a dtype needs ml_dtypes, which is
    not installed."""
    return tuple(
        Column(name=column.name, axis=column.axis, dtype=read_dtype(column.dtype),
               shape=tuple(column.shape))
        for column in spec.columns
    )  # fmt: skip


def columns_in(position: bytes | None, name: str) -> Columns | None:
    """The columns of a feed, where a position that its server has taken has them."""
    if position is None or is_token(position):
        return None
    states = Snapshot.from_bytes(position).states
    return next((state.columns for state in states if state.name == name), None)


def error_of(fault: say.Fault) -> FeedError:
    """The error that a server tells, with its traceback there as a note."""
    kind = getattr(errors, fault.kind)
    if issubclass(kind, FetchError):
        known = ("worker_id", "call", "column", "got", "expected")
        names = known if issubclass(kind, ChunkError) else known[:2]
        error: FeedError = kind(
            fault.text, **{name: fault.fields[name] for name in names if name in fault.fields}
        )
    elif kind is errors.FeedError:
        error = RemoteError(fault.text)
    else:
        error = kind(fault.text)
    if fault.note:
        error.add_note(f"on the server:\n{fault.note}")
    return error


# ---- How the memory of batches reaches a consumer: through shared memory, or in frames.


logger = logging.getLogger("feeder")

_ATTACH_S = 2.0
_LARGE_BYTES = 64 * 1024
"""Smaller batches in frames are copied: they are to lie at multiples of 64 bytes."""

Arrays = tuple[NDArray[Any], ...]


class ConsumerStats:
    """A consumer's own counts. The I/O thread tells them; `ask` is called by any thread."""

    def __init__(self) -> None:
        self.checked_s = 0.0
        """Seconds that checksums took."""
        self.corrupt = 0
        """Batches that came with bytes that were not sent."""
        self.positions = 0
        """Times that the position was asked for."""
        self.asked_at: float | None = None
        """When it last was."""
        self._told = (0.0, 0.0, 0, 0)

    def ask(self, now: float) -> None:
        """The position is asked for."""
        self.positions += 1
        self.asked_at = now

    def news(self, waited_s: float) -> Report:
        """What has come to be since this was last asked; `waited_s`: the trainer's waits in all."""
        seen = (waited_s, self.checked_s, self.corrupt, self.positions)
        told, self._told = self._told, seen
        return Report(
            max(0.0, seen[0] - told[0]),
            max(0.0, seen[1] - told[1]),
            seen[2] - told[2],
            seen[3] - told[3],
        )


class DataPath:
    """The data plane of one lease."""

    def __init__(
        self,
        opened: say.Opened,
        wish: ConsumerOptions,
        wake: Callable[[], None],
        tally: ConsumerStats,
        landing: Landing | None = None,
    ) -> None:
        self._wake = wake
        self._tally = tally
        self._landing = landing
        # What the user writes into is a copy. To map the slot privately instead, so that a write
        # copies a page, takes five to ten times as long where all is written, and never less.
        self._copies = landing is None and (wish.writable or opened.writable)
        self._arenas: dict[int, MappedArena] = {}
        self._released: deque[Lease] = deque()
        self._num_taken = 0
        # For each forked child that has not copied yet what it looks at.
        self._freezes: set[object] = set()
        self.tell_every = 1
        """After how many slots the server is told that they are free, at the latest."""
        self._frames = FrameSlots(1)
        self._columns: Columns = ()
        self._rows = 0
        self._layout = Layout((), 0)
        self.connection: Attachment | None = None
        """The unix connection that descriptors come over; None where frames come."""
        self.reason = ""
        """Why frames come."""
        if wish.plane == "frames":
            self.reason = wish.why_frames
        elif opened.shared is None:
            self.reason = "the server is on another host, or offers none"
        else:
            self._attach(opened.shared)
        if self.lends:
            forking.lend(self)
        auto = "full" if self.connection is None else "sampled"
        self._mode: Any = auto if wish.checksum == "auto" else wish.checksum
        if wish.plane == "shared" and self.connection is None:
            kind = ConfigError if opened.shared is None else TransportError
            raise kind(f"there is no shared memory to this server: {self.reason}")

    def _attach(self, offer: say.Offer) -> None:
        try:
            self.connection = attach(offer.path, offer.nonce, _ATTACH_S)
        except (OSError, TransportError) as error:
            self.reason = str(error)[:500]
            logger.info("consumer: no shared memory, because %s", self.reason)

    @property
    def kind(self) -> Literal["shared", "frames"]:
        """How batches come."""
        return "frames" if self.connection is None else "shared"

    @property
    def lends(self) -> bool:
        """Whether batches are the server's slots themselves, for as long as they are looked at."""
        return self.connection is not None and self._landing is None and not self._copies

    def set_columns(self, columns: Columns, rows: int, credit: int) -> None:
        """The columns of the batches, the rows of a full one, and how many may be under way."""
        self._columns, self._rows, self._layout = columns, rows, layout(columns, rows)
        self._frames = FrameSlots(credit, writable=self._copies)
        if self.kind == "frames" and self._layout.num_bytes >= _LARGE_BYTES:
            keep_freed_memory()
        if self._landing is not None:
            self._landing.check(columns)

    def add_arena(self, arena: say.Arena) -> None:
        """Map an arena that the server has announced."""
        if self.connection is None:
            raise ProtocolError("an arena came, but no shared memory was agreed on")
        given = self.connection.receive()
        if given.number != arena.number:
            raise ProtocolError(f"arena {given.number} came, expected {arena.number}")
        self._arenas[given.number] = mapped = MappedArena(
            given.descriptor, given.number, given.slot_bytes, given.num_slots, self._released,
            self._on_release,
        )  # fmt: skip
        if self._landing is not None:
            mapped.pin(self._landing.register)

    def arrays(self, group: say.Group, frames: list[Any]) -> Iterator[Arrays]:
        """The arrays of each batch of a group; raises `ProtocolError` where its memory is not what
        was sent."""
        columns, rows, whole = self._columns, self._rows, self._layout
        if group.shapes is not None:
            columns, rows = _shaped(columns, group), group.length
            whole = layout(columns, rows)
        if group.slots[0] < 0:
            yield self._take_frames(group, frames, columns, rows, whole)
            return
        length = group.length
        for at, slot in enumerate(group.slots):
            number, index = divmod(slot, SLOTS_PER_ARENA)
            arena = self._arenas.get(number)
            if arena is None:
                raise ProtocolError(f"slot {slot} is in an arena that was not announced")
            root = arena.root(index, whole.num_bytes)
            self._check([root.data], group, at)
            arrays = arena.lend(index, root, whole.places, rows, length)
            if self._copies:
                # The slot goes back at once.
                own = self._frames.take_slot(0, columns, rows)
                own.memory[:] = root.data
                yield own.lease(length)
            elif self._landing is None:
                yield arrays
            elif arena.pinned is not None:
                yield arena.pack(index, arrays, whole, rows, length)
            else:
                # The GPU may not read it: by way of a slot that it may, and it goes back at once.
                bounce = self._landing.take_slot(columns, rows)
                bounce.memory[:] = root.data
                yield bounce.lease(length)

    def _take_frames(
        self, group: say.Group, frames: list[Any], columns: Columns, rows: int, whole: Layout
    ) -> Arrays:
        memories = [frame.buffer for frame in frames]
        num_bytes = sum(map(len, memories))
        if num_bytes != whole.num_bytes:
            raise ProtocolError(f"frames hold {num_bytes} bytes, expected {whole.num_bytes}")
        is_in_parts = len(memories) > 1 and self._mode == "sampled"
        may_view = self._landing is None and not self._copies
        if may_view and num_bytes >= _LARGE_BYTES and not is_in_parts:
            arrays = view(memories, whole, rows, group.length)
            if arrays is not None:
                self._check(memories, group, 0)
                return arrays
        slot: HostSlot | PinnedSlot
        if self._landing is None:
            slot = self._frames.take_slot(0, columns, rows)
        else:
            slot = self._landing.take_slot(columns, rows)
        at, memory = 0, slot.memory
        for data in memories:
            # Not by NumPy, and not summed up one by one, though the caches hold it now: both let go
            # of the interpreter, and beside a busy trainer each time costs as much as ten frames.
            memory[at : at + len(data)] = data
            at += len(data)
        self._check([memory], group, 0)
        return slot.lease(group.length)

    def _check(self, memories: Sequence[memoryview], group: say.Group, at: int) -> None:
        if self._mode == "off":
            return
        began = time.monotonic()
        is_whole = len(memories) == 1
        found = checksum(memories[0], self._mode) if is_whole else full_checksum(memories)
        self._tally.checked_s += time.monotonic() - began
        if found != group.checksums[at]:
            self._tally.corrupt += 1
            raise ProtocolError(
                f"batch {group.step + at * group.stride} is corrupt: its "
                f"{sum(map(len, memories))} bytes do not give the checksum that was sent "
                f"({self._mode}): they were changed on the way, or by the fetch function after it "
                "had returned them (FEEDER_DEBUG=1 tells)"
            )

    @property
    def num_released(self) -> int:
        """Slots of shared memory that were looked at and are no more, counted since the start."""
        return self._num_taken + len(self._released)

    def _on_release(self) -> None:
        # In any thread, perhaps inside the garbage collector. One message tells of several.
        if len(self._released) >= self.tell_every:
            self._wake()

    def take_released(self) -> tuple[int, ...]:
        """The slots that have become free since last asked, at most as many as a message holds."""
        released = self._released
        num = min(len(released), say.MAX_ITEMS)
        if self._freezes:
            return ()  # Counted before: what comes back later, a child may look at.
        self._num_taken += num
        return tuple([self._take_back(released.popleft()) for _ in range(num)])

    def _take_back(self, lease: Lease) -> int:
        arena = self._arenas.get(lease.slot // SLOTS_PER_ARENA)
        if arena is not None:
            arena.take_back(lease)
        return lease.slot

    def freeze(self, why: object) -> None:
        """Tell of no slot that it is free, until it is told to thaw; from any thread."""
        self._freezes.add(why)

    def thaw(self, why: object) -> None:
        """The contrary."""
        self._freezes.discard(why)
        self._wake()

    def keep(self) -> None:
        """In a forked child: have what is looked at lie in this process's own memory."""
        for arena in self._arenas.values():
            arena.keep()

    def close(self) -> None:
        """No batch will come any more; arrays that exist stay as they are: the server does not
        write again what it gave to a lease that is over."""
        forking.forget(self)
        if self.connection is not None:
            self.connection.close()
        if self._landing is not None:
            # Nothing but copies under way looks at them: they need not stay pinned.
            self._arenas.clear()


def _shaped(columns: Columns, group: say.Group) -> Columns:
    assert group.shapes is not None
    if len(group.shapes) != len(columns):
        raise ProtocolError(f"{len(group.shapes)} shapes came for {len(columns)} columns")
    return tuple(
        replace(column, shape=tuple(shape))
        for column, shape in zip(columns, group.shapes, strict=True)
    )


_TELL_S = 0.5
"""The server is told at least so often, so that it can show how a slow trainer does."""


class ClientLease:
    """The batches of one lease, from the server's messages. Belongs to the I/O thread.

    `base` is the number of batches that the consumer had received before this lease.
    """

    def __init__(
        self,
        opened: say.Opened,
        plane: DataPath,
        base: int,
        tell: Callable[[say.Message], None],
        report: Callable[[], say.Report],
    ) -> None:
        self.opened = opened
        self.identity = identity_of(opened)
        self.plane = plane
        self.lends = plane.lends
        """Whether the user is given the server's own slots to look at."""
        self.base = base
        self._tell = tell
        self._report = report
        self._expected = 0
        self._has_begun = False
        self._told = -1  # Where nothing is pending is news, also before the first batch.
        self._names: tuple[str, ...] = ()
        self._row_bytes = 0
        self._is_uniform = True
        self.columns: Columns | None = None
        """The columns, where the server has told them or the position has them."""
        self.credit = max(1, opened.credit)
        """Batches that may be under way."""
        self.renew_at = time.monotonic() + min(_TELL_S, opened.lease_s / 3)
        """When the server is to be told that this consumer lives."""

    @property
    def tell_every(self) -> int:
        """After how many batches the server is told of them, at the latest."""
        return max(1, self.credit // 4)

    def begin(self) -> None:
        """Say that batches can come."""
        self._tell(
            say.Attached(
                generation=self.opened.generation, plane=self.plane.kind, reason=self.plane.reason
            )
        )

    # ---- what the server says

    def learn(self, spec: say.Spec) -> None:
        """The columns have come."""
        self.columns = columns_of(spec)
        self._names = tuple(column.name for column in self.columns)
        self._row_bytes = sum([column.row_bytes for column in self.columns])
        batch_bytes = layout(self.columns, spec.batch_size).num_bytes
        self.credit = self.opened.credit or credit_for(batch_bytes)
        self.plane.set_columns(self.columns, spec.batch_size, self.credit)
        self.plane.tell_every = self.tell_every

    def read(self, message: say.Batches, frames: list[Any]) -> list[Batch]:
        """The batches of a message. Raises `ProtocolError` where they are not the next ones, or
        not what was sent."""
        if not self._names:
            raise ProtocolError("batches came before their columns")
        batches: list[Batch] = []
        for group in message.groups:
            if group.sequence != self._expected:
                raise ProtocolError(f"batch {group.sequence} came, expected {self._expected}")
            batches += self._take(group, frames)
            if group.shapes is not None:
                self._is_uniform = False
            self._expected += len(group.slots)
        return batches

    def count_bytes(self, batches: Sequence[Batch], rows: int) -> int:
        """Bytes of batches that have `rows` rows in all."""
        if self._is_uniform:
            return rows * self._row_bytes
        return sum([array.nbytes for batch in batches for array in batch.arrays])

    def _take(self, group: say.Group, frames: list[Any]) -> Iterator[Batch]:
        names, identity, stride = self._names, self.identity, group.stride
        index, step = group.index, group.step
        for at, arrays in enumerate(self.plane.arrays(group, frames)):
            place: Any = RemotePosition(identity, None, group, at)
            yield Batch(names, arrays, place, group.epoch, index, step, group.rows)
            index += stride
            step += stride

    # ---- what the server is told

    def tell(self, handed: int, *, begun: bool = False, renew: bool = False) -> None:
        """Tell how many batches have been handed out and which slots nobody looks at any more, and
        that the user has begun, where that is news or is to be renewed."""
        used = handed - self.base
        renew = renew or begun > self._has_begun
        self._has_begun = self._has_begun or begun
        slots = self.plane.take_released()
        while slots or used > self._told or renew:
            renew, self._told = False, max(used, self._told)
            point("consumer.before_used")
            self._tell(
                say.Used(
                    generation=self.opened.generation, sequence=max(0, used),
                    pending=max(0, -used), begun=self._has_begun, slots=slots,
                    report=self._report(),
                )
            )  # fmt: skip
            point("consumer.used")
            self.renew_at = time.monotonic() + min(_TELL_S, self.opened.lease_s / 3)
            slots = self.plane.take_released()

    def ask_snapshot(self, handed: int, receipt: bytes) -> bool:
        """Ask for the state after so many batches, with the receipt of the last answer; False
        where this lease cannot know it."""
        if handed < self.base:
            return False
        self.tell(handed)
        self._tell(
            say.Snapshot(
                generation=self.opened.generation, sequence=handed - self.base, receipt=receipt
            )
        )
        return True

    def leave(self, handed: int) -> None:
        """Say goodbye."""
        self.tell(handed)
        self._tell(say.Bye(generation=self.opened.generation))
