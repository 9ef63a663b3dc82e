"""One consumer's lease of one queue, on the server: what it was sent, has used, and still holds.

State and rules, without sockets and threads. Owned by the server's I/O thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from feeder.devices.layout import MAX_ARENA_BYTES, credit_for
from feeder.errors import ConfigError
from feeder.service.memory.fdpass import DescriptorConnection
from feeder.service.memory.memfd import NOTHING, Wanted
from feeder.service.net.listener import Peer
from feeder.service.protocol.session import SERVER, Receipts, Session
from feeder.service.server.run import StreamIncarnation
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import LazyPosition
from feeder.workers.stream.resuming import Resume

# One slot is being written while one waits to be sent. Of small batches more, up to 4 MiB, so that
# the next ones are there when the consumer's `Used` for a quarter of its credit arrives.
_SPARE_SLOTS, _SPARE_BYTES = 2, 4 * 1024 * 1024
"""Slots of an arena beside those that the consumer may hold."""


class News(NamedTuple):
    """The batches that one `Used` has reported as used. Immutable."""

    batches: list[Batch]
    """These batches, in order."""
    num_stale: int
    """How many of them, the first ones, were made by earlier runs, whose buffers are gone."""
    run: StreamIncarnation | None
    """The run that made the others."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """A consumer's right to the batches of one queue, and what has gone back and forth under it.

    Owned by the server's I/O thread, which alone writes it. One exception: the batcher's thread
    asks `num_slots` when an arena is made, which fills in `credit` or `excess`; both are single
    assignments, and the I/O thread looks at them at its next turn.
    """

    peer: Peer
    queue: int
    """Number of the queue."""
    generation: bytes
    """The fencing token: 16 random bytes of the server's run and a counter. A message that carries
    another one is from a lease that is over."""
    who: str
    """The consumer in words, for logs and errors."""
    consumer: bytes
    """Its random identity, by which it may take its own place again: connections prove nothing."""
    attempt: int
    """How often this consumer had asked before."""
    credit: int
    """Batches that may be sent beyond those that are used; 0 until their size is known."""
    hold: int
    """Batches that its user may keep beside these."""
    checksum: str
    """How batches are to be checked: "off", "sampled", "full", or "auto" (by the data path)."""
    rejoins: bool
    """Whether it came back within a run of training, wherever the others stand."""
    expires: float
    """When its right ends unless it is heard of before (monotonic clock)."""
    resume: Resume | None = None
    """The position that it came with; None for the start of the feed."""
    place: LazyPosition | None = None
    """The position after the last batch that it was sent; None before the first."""
    agrees: bool = False
    """Whether its position is known to lie in this feed's stream, and not in another run's."""
    session: Session = field(default_factory=lambda: Session(SERVER))
    shared: bool = False
    """Whether its batches go through shared memory."""
    connection: DescriptorConnection | None = None
    """The unix connection over which it gets descriptors of arenas."""
    arenas: set[int] = field(default_factory=set)
    """The arenas whose descriptors it has been given."""
    sequence: int = 0
    """Number of the next batch to be sent."""
    used: int = 0
    """Number of batches that the user has been handed."""
    out_of_step_since: float | None = None
    """Since when its user waits for a batch in vain, because the other queues have gone on."""
    pending: int = 0
    """Batches of its earlier leases that its user has not been handed yet, as it last said. Who has
    received everything has not used it."""
    ended: bool = False
    """Whether it has been sent the end, or an error in its place."""
    failed: bool = False
    """Whether that was an error."""
    is_over: bool = False
    """Whether the lease is over, for any reason."""
    excess: ConfigError | None = None
    """Why it cannot be given what it asks for: an error of this consumer, not of the feed."""
    run: StreamIncarnation | None = None
    """The run whose batches it was last sent."""
    sent: deque[Batch] = field(default_factory=deque)
    """The batches sent and not used yet."""
    num_stale: int = 0
    """How many of these, the first ones, are of earlier runs."""
    used_place: LazyPosition | None = None
    """The position after the last used batch: a snapshot may still be asked for there."""
    answers: Receipts = field(default_factory=Receipts)
    """Allows one unread snapshot."""
    last_waiting: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """What the last `Waiting` said: the queues waited for, and the queues that have ended."""

    @property
    def known_generation(self) -> bytes:
        """The generation that its consumer knows; empty before `Opened` was sent."""
        return b"" if self.session.state == "opening" else self.generation

    @property
    def room(self) -> int:
        """Batches that it may be sent now."""
        return self.credit - (self.sequence - self.used)

    @property
    def mode(self) -> Literal["off", "sampled", "full"]:
        """How batches are checked."""
        # Memory that both sides map is damaged by a stray write, of which a sample sees most. What
        # crosses a network is read in full.
        if self.checksum == "auto":
            return "sampled" if self.shared else "full"
        return self.checksum  # type: ignore[return-value]

    @property
    def wanted(self) -> Wanted:
        """How the assembler is to make batches for this lease."""
        # Frames are sent from the chunks themselves, and full sums are made of the chunks while
        # they are copied. A sample is taken of a batch that lies in one piece, so it needs a slot.
        if not (self.shared or self.mode == "sampled"):
            return Wanted(sums=self.mode == "full", keeps=True)
        return Wanted(sums=True) if self.mode == "full" else NOTHING

    @property
    def has_attached(self) -> bool:
        """Whether it can take batches."""
        return self.session.state in ("streaming", "ended")

    @property
    def is_settled(self) -> bool:
        """Whether the consumer has been sent the end, or an error in its place, and its user has
        been handed everything before that."""
        return self.ended and self.used == self.sequence and not self.pending

    @property
    def has_all(self) -> bool:
        """Whether the user has been handed everything, up to the end of the stream."""
        return self.is_settled and not self.failed

    def num_slots(self, slot_bytes: int) -> int:
        """How many slots an arena for this lease needs; where it wants too many, as many as an
        arena for nobody has, and `excess` is set. The batcher's thread asks."""
        self.credit = self.credit or credit_for(slot_bytes)
        spare = max(_SPARE_SLOTS, min(self.credit, _SPARE_BYTES // slot_bytes))
        num = self.credit + self.hold + spare
        usual = credit_for(slot_bytes)
        # Batches so large that even the usual number of slots is beyond the bound are allowed: the
        # consumer asked for nothing special.
        if num * slot_bytes <= MAX_ARENA_BYTES or num <= usual + 1 + spare:
            return num
        self.excess = ConfigError(
            f"credit is {self.credit} and hold {self.hold}: for batches of {slot_bytes} bytes that "
            f"is shared memory of {num * slot_bytes} bytes, expected at most {MAX_ARENA_BYTES}"
        )
        return usual

    def note(self, batches: list[Batch], run: StreamIncarnation) -> None:
        """Note that batches go out."""
        if run is not self.run:
            self.run, self.num_stale = run, len(self.sent)
        if self.last_waiting[0]:
            self.last_waiting = (), self.last_waiting[1]  # Batches say that nobody is waited for.
        self.sent.extend(batches)
        self.place = batches[-1].place
        self.sequence += len(batches)

    def use(self, sequence: int) -> News:
        """Note that the user has been handed the batches before `sequence`; returns those of them
        that are news."""
        take = self.sent.popleft
        news = News([take() for _ in range(sequence - self.used)], self.num_stale, self.run)
        self.num_stale = max(0, self.num_stale - len(news.batches))
        self.used = sequence
        if news.batches:
            self.used_place = news.batches[-1].place
        return news

    def place_after(self, sequence: int) -> LazyPosition | None:
        """The position after the first `sequence` batches of this lease; None where it is not
        known."""
        # Positions are kept of batches under way and of the last used one. A user stands at the
        # latter, or further on, where its `Used` is still to come.
        i = sequence - self.used
        if i == 0:
            return self.used_place
        return self.sent[i - 1].place if 0 < i <= len(self.sent) else None
