"""The messages between consumer and server: their fields, and what each field may hold.

A message is one msgpack map with exactly the keys of its class, and the class's name under
``"type"``. `coding.decode` checks these types in what a peer sent; messages that this side makes
are not checked. All messages are immutable.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from feeder.service.protocol.batches import Batches as Batches
from feeder.service.protocol.batches import Group as Group
from feeder.service.protocol.batches import Span as Span
from feeder.service.protocol.fields import ANSWERS as ANSWERS
from feeder.service.protocol.fields import HEADER_BYTES as HEADER_BYTES
from feeder.service.protocol.fields import (
    KINDS,
    MAX_COUNT,
    MAX_NAME,
    SEEN_BYTES,
    Count,
    Counts,
    Credit,
    DType,
    Generation,
    Name,
    Positive,
    Receipt,
    Rows,
    Seconds,
    Seed,
    Shape,
    Text,
    Weight,
)
from feeder.service.protocol.fields import MAX_CREDIT as MAX_CREDIT
from feeder.service.protocol.fields import MAX_ITEMS as MAX_ITEMS
from feeder.service.protocol.fields import MAX_OPENS as MAX_OPENS
from feeder.service.protocol.fields import MAX_TEXT as MAX_TEXT
from feeder.service.protocol.fields import PROTOCOL_VERSION as PROTOCOL_VERSION
from feeder.service.protocol.fields import ROWS_BYTES as ROWS_BYTES
from feeder.service.protocol.fields import TOKEN_BYTES as TOKEN_BYTES
from feeder.service.protocol.fields import Message as Message
from feeder.workers.stream.dtypes import is_name

# ---- Parts of messages.


class Report(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What a consumer has counted since its last report: increments, so that a lost lease loses
    little, and the server's sums never fall."""

    waited_s: Seconds
    """Seconds for which its trainer waited for batches."""
    checked_s: Seconds
    """Seconds that checksums took."""
    corrupt: Count
    """Batches that arrived with other bytes than were sent."""
    positions: Count
    """How often its position was asked for."""


# The real size is not looked up: that would need the package, and a consumer that lacks ml_dtypes
# is to be told so by name, not by a message that does not decode.
_MOST_NAMED_BYTES = 16
"""No type of ml_dtypes has more bytes."""


class ColumnSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One column of a feed."""

    name: Name
    dtype: DType
    """As `numpy.dtype.str`; or the name of a type of ml_dtypes."""
    axis: Annotated[int, Meta(ge=0, le=31)]
    """The axis that is rows."""
    shape: Shape
    """The shape without that axis."""

    def __post_init__(self) -> None:
        # A row that memory cannot hold is refused here, so that no later product overflows.
        item_bytes = _MOST_NAMED_BYTES if is_name(self.dtype) else self._find_item_bytes()
        if self.axis > len(self.shape):
            raise ValueError(f"axis is {self.axis}, expected at most {len(self.shape)}")
        if math.prod(self.shape) * item_bytes > MAX_COUNT:
            raise ValueError(f"a row of shape {self.shape!r} has more than {MAX_COUNT} bytes")

    def _find_item_bytes(self) -> int:
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"dtype is {self.dtype!r}, which numpy does not know") from None
        # Only the canonical spelling, so that both sides compare dtypes as text.
        if dtype.str != self.dtype:
            raise ValueError(f"dtype is {self.dtype!r}, expected {dtype.str!r}")
        return dtype.itemsize


class Offer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a consumer on the same host may ask for the arenas."""

    path: Name
    """A unix socket."""
    nonce: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """The consumer presents it there, once: so the server knows whose connection it is."""


# Where no queue is shared, the messages say nothing of replicas.
class Open(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A consumer asks for a queue, or for one replica of it."""

    version: Count
    """`PROTOCOL_VERSION` of the consumer."""
    feed: Name
    """Name of the feed; empty means the only one."""
    queue: Count
    """Number of the queue."""
    replica: Count = 0
    """Which of the queue's replicas it is; 0 is left out."""
    token: Rows | None
    """Where to go on; None means wherever the queue stands."""
    # Left out where it is 0, so that a server that does not know it serves all others.
    skip: Count = 0
    """How many rounds of all queues are to be left out there."""
    credit: Credit
    """Batches that may be under way; 0 leaves it to the server."""
    hold: Credit
    """Batches that the user may keep beside them."""
    intent: Literal["start", "rejoin"]
    """Whether a trainer starts from its checkpoint, or comes back after a lost connection."""
    undecided: bool
    """Whether it came without a position, and its user may still load a state."""
    takeover: bool
    """Whether to take the queue from a consumer that lives."""
    consumer: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Random identity of the consumer, by which it may take its own place again."""
    attempt: Count
    """How often this consumer has asked before. ZeroMQ may deliver an old question after a new one;
    the lower attempt is refused."""
    ended: Counts
    """Seats that are known to have had everything: a server that was just started cannot know."""
    who: Name
    """The consumer in words, for logs and errors."""
    boot_id: Name
    """The boot id of its kernel, to find out whether both share memory; empty asks for frames."""
    checksum: Literal["auto", "off", "sampled", "full"]
    """How much of a batch's memory is to be checked."""


class Attached(Message, frozen=True, kw_only=True):
    """The consumer is ready for batches."""

    generation: Generation
    plane: Literal["shared", "frames"]
    """How the batches' memory is to come."""
    reason: Name
    """Why it is not shared memory; empty where it is."""


class Used(Message, frozen=True, kw_only=True):
    """How many batches of the lease the user was handed, and which slots are free; renews the
    lease.

    One message for both, and one at most for each quarter of the credit: a message costs both sides
    a wake-up of 50 µs, which is more than a batch of 8 KB costs.
    """

    generation: Generation
    sequence: Count
    pending: Count
    """Batches of this consumer's earlier leases that are still to be handed to the user."""
    begun: bool
    """Whether the user has asked for a batch, and so means to start where it stands."""
    slots: Counts
    """Slots that no array refers to any more, in any order: arena number * 2**16 + slot."""
    report: Report


class Snapshot(Message, frozen=True, kw_only=True):
    """The consumer asks for the state of the feed after so many of its batches."""

    generation: Generation
    sequence: Count
    receipt: Receipt
    """Receipt of the last answer in this lease: that was read. Empty before the first."""


class Bye(Message, frozen=True, kw_only=True):
    """The consumer leaves on purpose."""

    generation: Generation


class Look(Message, frozen=True, kw_only=True):
    """A monitor asks what the feeds have done; it gets no queue, and may ask again."""

    version: Count
    """`PROTOCOL_VERSION` of the monitor."""
    receipt: Receipt
    """Receipt of the last answer over this connection; empty before the first."""


class Edit(Message, frozen=True, kw_only=True):
    """Somebody who takes no queue has a feed go on with other numbers: see `feeder edit`."""

    version: Count
    """`PROTOCOL_VERSION` of who asks."""
    feed: Name
    """Name of the feed; empty means the only one."""
    why: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    """Why, in words."""
    weights: Annotated[tuple[tuple[Name, Weight], ...], Meta(max_length=MAX_ITEMS)]
    """The sources of a mixture, each with its weight; none leaves them as they are."""
    batch_size: Positive | None
    """Rows of each batch."""
    global_batch_size: Positive | None
    """Rows of all queues together."""
    seed: Seed | None
    """The seed of passes to come."""


class Spec(Message, frozen=True, kw_only=True):
    """The batches of a feed, known after its first chunk."""

    generation: Generation
    batch_size: Positive
    columns: Annotated[tuple[ColumnSpec, ...], Meta(min_length=1, max_length=MAX_ITEMS)]


class Opened(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The consumer holds the queue."""

    generation: Generation
    credit: Count
    """Batches that may be under way; 0 means that their size decides."""
    shared: Offer | None
    """None where batches come as frames."""
    lease_s: Annotated[float, Meta(gt=0, le=1e9)]
    """Seconds until a lease that is not renewed ends."""
    length: Count | None
    """Batches of the whole stream on this queue, where known."""
    name: Name
    """The feed's name."""
    number: Count
    """Number of the stream among those of that name."""
    fingerprint: Annotated[bytes, Meta(max_length=MAX_TEXT)]
    """The declared fields that must be equal for a position to fit, in `feeder.state.codec`."""
    epochs: Positive | None
    """Epochs of the stream; None means without end."""
    token: Rows
    """Where this queue stands."""
    writable: bool
    """Whether the feed's batches are to be the user's own, to write into."""
    replicas: Positive = 1
    """How many consumers are given the batches of each queue; 1 is left out."""


class Arena(Message, frozen=True, kw_only=True):
    """A new arena; its descriptor comes over the unix socket."""

    generation: Generation
    number: Annotated[int, Meta(ge=0, lt=2**31)]
    slot_bytes: Positive
    num_slots: Annotated[int, Meta(ge=1, le=2**16)]


class Waiting(Message, frozen=True, kw_only=True):
    """Where the other seats stand: queue * replicas + replica. Said when it changes, and again as
    the answer to a renewal, which shows that the server lives."""

    generation: Generation
    queues: Counts
    """Seats that the feed waits for: nobody holds them."""
    ended: Counts
    """Seats whose consumers have had everything, and need not be there any more."""


class State(Message, frozen=True, kw_only=True):
    """The answer to `Snapshot`."""

    generation: Generation
    data: Rows | None
    """None where the server does not know that state any more."""
    receipt: Receipt
    """Random; the next question has to bring it."""


class Seen(Message, frozen=True, kw_only=True):
    """The answer to `Look`."""

    data: Annotated[bytes, Meta(max_length=SEEN_BYTES)]
    """`feeder.observe.figures.Figures` as JSON."""
    receipt: Receipt
    """Random; the next question has to bring it."""


class Edited(Message, frozen=True, kw_only=True):
    """The answer to `Edit`."""

    feed: Name
    """The feed's name."""
    step: Count
    """The first batch that the edit is for."""


class Fault(Message, frozen=True, kw_only=True):
    """An error of feeder that the consumer is to raise."""

    generation: Annotated[bytes, Meta(max_length=24)]
    """Empty before `Opened`."""
    sequence: Count | None
    """Its place among the batches; None where it takes none, and ends the lease."""
    kind: Annotated[str, Meta(pattern=rf"^({KINDS})\Z")]
    """The error's class in `feeder.errors`."""
    text: Text
    fields: Annotated[dict[Name, Text | Annotated[int, Meta(ge=-(2**63), le=MAX_COUNT)] | None],
                      Meta(max_length=32)]  # fmt: skip
    """The error's fields."""
    note: Text
    """The server's traceback."""

    def __post_init__(self) -> None:
        if len(self.generation) not in (0, 24):
            raise ValueError(f"generation has {len(self.generation)} bytes, expected 0 or 24")


class End(Message, frozen=True, kw_only=True):
    """The stream ends after `sequence` batches of the lease."""

    generation: Generation
    sequence: Count
    token: Rows


class Farewell(Message, frozen=True, kw_only=True):
    """A lease has ended, or the server stops, on purpose."""

    generation: Annotated[bytes, Meta(max_length=24)]
    """The lease that has ended, as the answer to `Bye`; empty where the server stops."""
    reason: Text


# Two tables, since each side has messages of its own: a consumer that sends `Opened` is refused
# by name before its fields are looked at.
FROM_CONSUMER: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Open, Attached, Used, Snapshot, Bye, Look, Edit)
}
"""What a consumer may send, by name."""
FROM_SERVER: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (Opened, Spec, Arena, Batches, Waiting, State, Seen, Edited, Fault, End, Farewell)
}
"""What a server may send, by name."""
