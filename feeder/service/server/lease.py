"""One consumer's lease of one queue, on the server: what it was sent, has used, and still holds.

State and rules, without sockets and threads. Owned by the server's I/O thread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

from feeder.devices.layout import MAX_ARENA_BYTES, credit_for
from feeder.errors import ConfigError
from feeder.service.memory.fdpass import DescriptorConnection
from feeder.service.memory.memfd import NOTHING, Wanted
from feeder.service.net.listener import Peer
from feeder.service.protocol.membership import Member, Membership
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
    membership: Membership
    """Is told what goes out."""
    member: Member
    """What the membership knows of its consumer."""
    credit: int
    """Batches that may be sent beyond those that are used; 0 until their size is known."""
    hold: int
    """Batches that its user may keep beside these."""
    checksum: str
    """How batches are to be checked: "off", "sampled", "full", or "auto" (by the data path)."""
    resume: Resume | None = None
    """The position that it came with; None for the start of the feed."""
    session: Session = field(default_factory=lambda: Session(SERVER))
    shared: bool = False
    """Whether its batches go through shared memory."""
    connection: DescriptorConnection | None = None
    """The unix connection over which it gets descriptors of arenas."""
    arenas: set[int] = field(default_factory=set)
    """The arenas whose descriptors it has been given."""
    is_over: bool = False
    """Whether the lease is over, for any reason."""
    excess: ConfigError | None = None
    """Why it cannot be given what it asks for: an error of this consumer, not of the feed."""
    run: StreamIncarnation | None = None
    """The run whose batches it was last sent."""
    under_way: deque[Batch] = field(default_factory=deque)
    """The batches sent and not used yet."""
    num_stale: int = 0
    """How many of these, the first ones, are of earlier runs."""
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
        return self.credit - (self.member.sent - self.member.used)

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
            self.run, self.num_stale = run, len(self.under_way)
        if self.last_waiting[0]:
            self.last_waiting = (), self.last_waiting[1]  # Batches say that nobody is waited for.
        self.under_way.extend(batches)
        self.membership.note_sent(self.queue, len(batches), batches[-1].place)

    def finish(self, ending: Literal["end", "fault"]) -> None:
        """Note that nothing more goes out."""
        self.membership.note_ending(self.queue, ending)

    def take_used(self, num: int) -> News:
        """Take out the first `num` batches under way: the user has been handed them, or never will
        be."""
        take = self.under_way.popleft
        news = News([take() for _ in range(num)], self.num_stale, self.run)
        self.num_stale = max(0, self.num_stale - num)
        return news

    def place_after(self, sequence: int) -> LazyPosition | None:
        """The position after the first `sequence` batches of this lease; None where it is not
        known."""
        # Positions are kept of batches under way and of the last used one. A user stands at the
        # latter, or further on, where its `Used` is still to come.
        i = sequence - self.member.used
        if i == 0:
            return cast("LazyPosition | None", self.member.used_to)
        return self.under_way[i - 1].place if 0 < i <= len(self.under_way) else None
