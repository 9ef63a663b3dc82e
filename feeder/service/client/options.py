"""What a consumer asks a server for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from feeder.service.net.kernel import boot_id
from feeder.service.protocol import messages as say


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """What a consumer asks for."""

    addresses: tuple[str, ...]
    """Where servers may be; tried in turn."""
    feed: str
    """Name of the feed; empty is the only one."""
    queue: int
    """Number of the queue."""
    credit: int
    """Batches that may be under way; 0 goes by their size."""
    hold: int
    """Batches that the user may keep beside them."""
    rejoins: bool
    """Whether this consumer goes on alone, wherever the others stand."""
    takes_over: bool
    """Whether to take the queue from a consumer that lives."""
    plane: Literal["auto", "shared", "frames"]
    """How batches are to come."""
    why_frames: str = "frames were asked for"
    """Why in frames, where they are to come so."""
    checksum: Literal["auto", "off", "sampled", "full"]
    """How they are checked."""
    writable: bool
    """Whether batches are to be the user's own, to write into, whatever the feed says."""
    timeout_s: float
    """How long a server may take to answer at first."""
    reconnect_s: float
    """How long a server may be away later."""
    who: str
    """This consumer, in words for messages."""

    def ask(
        self,
        *,
        token: bytes | None,
        rejoins: bool,
        undecided: bool,
        takes_over: bool,
        consumer: bytes,
        attempt: int,
        ended: tuple[int, ...],
    ) -> say.Open:
        """The message that asks for the queue."""
        return say.Open(
            version=say.PROTOCOL_VERSION,
            feed=self.feed,
            queue=self.queue,
            token=token,
            credit=self.credit,
            hold=self.hold,
            intent="rejoin" if rejoins else "start",
            undecided=undecided,
            takeover=takes_over,
            consumer=consumer,
            attempt=attempt,
            ended=ended,
            who=self.who,
            boot_id=boot_id() if self.plane != "frames" else "",
            checksum=self.checksum,
        )
