"""What a consumer was told to ask a server for, checked, and the message that asks."""

from __future__ import annotations

from typing import Literal, NamedTuple

from feeder.service.net.kernel import boot_id
from feeder.service.protocol import messages as say


class ConsumerOptions(NamedTuple):
    """The arguments of `feeder.connect`, checked. Immutable, so any thread may read them."""

    addresses: tuple[str, ...]
    """Addresses of servers, which are tried in turn."""
    feed: str
    """Name of the feed; empty means the only feed of the server."""
    queue: int
    """Number of the queue."""
    credit: int
    """Batches that may be on their way; 0 lets the server choose by their size."""
    hold: int
    """Batches that the user may keep, beside those on their way."""
    skip: int
    """How many rounds of all queues are left out where it starts."""
    rejoins: bool
    """Whether this consumer comes back alone, wherever the other queues stand."""
    takes_over: bool
    """Whether to take the queue from a consumer that is alive."""
    plane: Literal["auto", "shared", "frames"]
    """How batches shall come; "auto" tries shared memory first."""
    checksum: Literal["auto", "off", "sampled", "full"]
    """How batches are checked."""
    writable: bool
    """Whether batches are copied for the user to write into, whatever the feed says."""
    timeout_s: float
    """Seconds that a server may take to give the queue the first time."""
    reconnect_s: float
    """Seconds without a server, later, after which `next` raises."""
    who: str
    """Name of this consumer, for messages to people."""
    why_frames: str = "frames were asked for"
    """Why batches come in frames, where `plane` is "frames"; the server shows it."""
    replica: int = 0
    """Which of the queue's replicas it is."""

    def open_message(
        self,
        *,
        token: bytes | None,
        skip: int,
        rejoins: bool,
        undecided: bool,
        takes_over: bool,
        consumer: bytes,
        attempt: int,
        ended: tuple[int, ...],
    ) -> say.Open:
        """Return the message that asks for the queue."""
        return say.Open(
            version=say.PROTOCOL_VERSION,
            feed=self.feed,
            queue=self.queue,
            replica=self.replica,
            token=token,
            skip=skip,
            credit=self.credit,
            hold=self.hold,
            intent="rejoin" if rejoins else "start",
            undecided=undecided,
            takeover=takes_over,
            # These two fence off this consumer's own older questions, whatever connection they
            # came over: the connection proves nothing.
            consumer=consumer,
            attempt=attempt,
            ended=ended,
            # For people: messages name the consumer, nothing depends on the text.
            who=self.who,
            # Equal boot ids mean one kernel, so one that can pass descriptors. An empty id asks the
            # server not to offer shared memory, and to make no arenas for this consumer.
            boot_id=boot_id() if self.plane != "frames" else "",
            checksum=self.checksum,
        )
