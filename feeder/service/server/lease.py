"""One consumer's lease of one queue, as the server sees it: what it was sent, has used, and holds.

State and rules, without sockets and threads; the I/O thread alone touches it.
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
from feeder.service.protocol.receipts import Receipts
from feeder.service.protocol.session import SERVER, Session
from feeder.service.server.run import StreamIncarnation
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import LazyPosition

_SPARE_SLOTS, _SPARE_BYTES = 2, 4 * 1024 * 1024
"""Slots beside those that the consumer may have: one is being written, one waits; more of small
ones, so that batches are there when the consumer has used others."""


class News(NamedTuple):
    """What a consumer has used since it was last heard of."""

    batches: list[Batch]
    """The batches, in order."""
    num_stale: int
    """How many of them, the first ones, were made by earlier runs: they count in no buffer."""
    run: StreamIncarnation | None
    """The run that made the others."""


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """A consumer's right to the batches of one queue."""

    peer: Peer
    queue: int
    """Number of the queue."""
    generation: bytes
    """What fences it off: 16 random bytes of the server's run and a counter."""
    who: str
    """The consumer, in words for messages."""
    consumer: bytes
    """What it calls itself: it may take its own place again."""
    attempt: int
    """How often it had asked before."""
    credit: int
    """Batches that it may be sent beyond those that it has used; 0 until their size is known."""
    hold: int
    """Batches that its user may keep beside them."""
    checksum: str
    """How batches are to be checked: "off", "sampled", "full", or "auto" by the plane."""
    rejoins: bool
    """Whether it goes on alone, wherever the others stand."""
    expires: float
    """When its right ends unless it is heard of (monotonic clock)."""
    place: LazyPosition | None = None
    """Where the last batch that it was sent ended."""
    agrees: bool = False
    """Whether its position is known to be one of the feed's stream."""
    session: Session = field(default_factory=lambda: Session(SERVER))
    shared: bool = False
    """Whether its batches go through shared memory."""
    connection: DescriptorConnection | None = None
    """The unix connection that its arenas' descriptors go over."""
    arenas: set[int] = field(default_factory=set)
    """The arenas whose descriptors it has been given."""
    sequence: int = 0
    """Number of the next batch to be sent."""
    used: int = 0
    """Batches that have been handed to the user."""
    out_of_step_since: float | None = None
    """Since when its user has asked for a batch that others keep it from: they have gone on."""
    pending: int = 0
    """Those of its earlier leases that have not, as far as is known."""
    ended: bool = False
    """Whether it has been sent the end, or an error in its place."""
    failed: bool = False
    """Whether that was an error."""
    is_over: bool = False
    """Whether it has ended for any reason."""
    excess: ConfigError | None = None
    """Why it cannot be given what it asks for: so it alone is told, and not the feed."""
    run: StreamIncarnation | None = None
    """The run whose batches it was last sent."""
    sent: deque[Batch] = field(default_factory=deque)
    """The batches sent and not used yet."""
    num_stale: int = 0
    """How many of those, the first ones, are of earlier runs."""
    used_place: LazyPosition | None = None
    """Where the last used batch ended: a snapshot may still be asked for there."""
    answers: Receipts = field(default_factory=Receipts)
    """The snapshots that it was given."""
    told: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """The queues that it was last told are waited for, and those that have ended."""

    @property
    def told_generation(self) -> bytes:
        """The generation that its consumer knows; empty until it has been told."""
        return b"" if self.session.state == "opening" else self.generation

    @property
    def room(self) -> int:
        """Batches that it may be sent now."""
        return self.credit - (self.sequence - self.used)

    @property
    def mode(self) -> Literal["off", "sampled", "full"]:
        """How batches are checked: through shared memory a sample will do."""
        if self.checksum == "auto":
            return "sampled" if self.shared else "full"
        return self.checksum  # type: ignore[return-value]

    @property
    def wanted(self) -> Wanted:
        """How its batches are to be made. ZeroMQ sends a column from anywhere; a sample is taken
        of a batch that lies in one place."""
        if not (self.shared or self.mode == "sampled"):
            return Wanted(sums=self.mode == "full", keeps=True)
        return Wanted(sums=True) if self.mode == "full" else NOTHING

    @property
    def has_attached(self) -> bool:
        """Whether it can take batches."""
        return self.session.state in ("streaming", "ended")

    @property
    def is_settled(self) -> bool:
        """Whether the consumer has been sent the end, or an error in its place, and has used all
        that came before."""
        return self.ended and self.used == self.sequence and not self.pending

    @property
    def has_all(self) -> bool:
        """Whether that was the end."""
        return self.is_settled and not self.failed

    def num_slots(self, slot_bytes: int) -> int:
        """How many slots an arena for it needs; as many as for nobody where it wants too much."""
        self.credit = self.credit or credit_for(slot_bytes)
        spare = max(_SPARE_SLOTS, min(self.credit, _SPARE_BYTES // slot_bytes))
        num = self.credit + self.hold + spare
        usual = credit_for(slot_bytes)
        if num * slot_bytes <= MAX_ARENA_BYTES or num <= usual + 1 + spare:
            return num
        self.excess = ConfigError(
            f"credit is {self.credit} and hold {self.hold}: for batches of {slot_bytes} bytes that "
            f"is shared memory of {num * slot_bytes} bytes, expected at most {MAX_ARENA_BYTES}"
        )
        return usual

    def note(self, batches: list[Batch], run: StreamIncarnation) -> None:
        """Batches go out."""
        if run is not self.run:
            self.run, self.num_stale = run, len(self.sent)
        if self.told[0]:
            self.told = (), self.told[1]  # Batches tell that nobody is waited for.
        self.sent.extend(batches)
        self.place = batches[-1].place
        self.sequence += len(batches)

    def use(self, sequence: int) -> News:
        """The consumer has handed out the batches before `sequence`; those of them that are
        news."""
        take = self.sent.popleft
        news = News([take() for _ in range(sequence - self.used)], self.num_stale, self.run)
        self.num_stale = max(0, self.num_stale - len(news.batches))
        self.used = sequence
        if news.batches:
            self.used_place = news.batches[-1].place
        return news

    def place_after(self, sequence: int) -> LazyPosition | None:
        """Where the stream stood after the first `sequence` batches of this lease, if known."""
        i = sequence - self.used
        if i == 0:
            return self.used_place
        return self.sent[i - 1].place if 0 < i <= len(self.sent) else None
