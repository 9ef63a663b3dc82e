"""Which message is legal when: the state tables of one session, for the server and the consumer.

Each table is {state: {event: next state}}. An event is the name of a message, sent or received
alike, or something local in lower case:

- connect, connected, disconnected: a connection is begun, stands, is gone
- expired: the time for an answer, or of the lease, is over; a consumer drops the connection then
- renewed: the consumer has shown that it lives
- taken_over: another consumer holds the queue
- close: this side ends the session

Messages of the two sides may cross on the way; the tables make them legal where they arrive.
The tables are drawn in the README of this folder.
"""

from __future__ import annotations

from collections import deque

from feeder.errors import ProtocolError

Table = dict[str, dict[str, str]]

# Enough to see in an error's text what led to an illegal event; few enough to print in one line.
_MAX_REMEMBERED = 8


def _stay(state: str, events: str, **others: str) -> dict[str, str]:
    """The transitions of a state: `events` stay in it, `others` lead to another one."""
    return {**dict.fromkeys(events.split(), state), **others}


_GONE = {"disconnected": "gone", "close": "gone"}
_LEAVES = {"Bye": "gone", **_GONE}
_LOSES = {"taken_over": "fenced", "Farewell": "draining", **_LEAVES}

SERVER: Table = {
    # A connection stands, and nothing has been said.
    "new": {"Open": "opening", "Look": "watched", "Edit": "watched", "Fault": "refused",
            "Farewell": "draining", "expired": "gone", **_GONE},
    # A monitor is shown figures, or has a feed edited. It has a state of its own, so that a peer
    # that was let in so can never take a queue: `Open` is illegal here.
    "watched": _stay("watched", "Look Seen Edit Edited", Fault="refused", Farewell="draining",
                     expired="gone", **_GONE),
    # The server works out whether the consumer may have the queue.
    "opening": _stay("opening", "Waiting", Opened="opened", Fault="refused",
                     Farewell="draining", expired="gone", **_LEAVES),
    # The consumer holds the queue and maps its arenas. `Used` is legal before `Attached`, because
    # a consumer that maps slowly renews its lease by it.
    "opened": _stay("opened", "Spec Arena Waiting Used renewed expired",
                    Attached="streaming", Fault="ended", **_LOSES),
    "streaming": _stay("streaming", "Spec Arena Batches Waiting Used Snapshot "
                       "State renewed", End="ended", Fault="ended", expired="hung", **_LOSES),
    # The lease has run out, the connection has not: any newcomer gets the queue, but a consumer
    # that was stopped and continued goes on as if nothing had been.
    "hung": _stay("hung", "Spec Arena Batches Waiting Snapshot State expired",
                  Used="streaming", renewed="streaming", End="ended", Fault="ended", **_LOSES),
    # The stream's end, or an error in its place, has been sent. The lease goes on: the consumer
    # still gives back slots and may still ask for snapshots.
    "ended": _stay("ended", "Attached Used Snapshot State Waiting Fault renewed expired",
                   **_LOSES),
    # Another consumer has the queue. What this one sent before it knew is legal and ignored.
    "fenced": _stay("fenced", "Attached Used Snapshot Fault renewed expired",
                    Farewell="draining", **_LEAVES),
    # The consumer gets no queue; it may ask again over the same connection.
    "refused": _stay("refused", "Open Look Edit Fault", Farewell="draining", expired="gone",
                     **_LEAVES),
    # The server stops. Whatever arrives now was sent before the consumer knew.
    "draining": _stay("draining", "Open Look Edit Attached Used Snapshot Fault renewed",
                      expired="gone", **_LEAVES),
    "gone": _stay("gone", "disconnected close"),
}  # fmt: skip
"""A consumer's lease as the server sees it, from "new" to "gone"."""

_CLOSES = {"Bye": "closed", "close": "closed"}
_BREAKS = {"Farewell": "lost", "disconnected": "lost", "expired": "lost", **_CLOSES}

CONSUMER: Table = {
    "idle": {"connect": "connecting", "close": "closed"},
    # ZeroMQ connects in its own time and keeps messages until then, so `Open` may come before
    # "connected".
    "connecting": _stay("connecting", "connected", Open="opening", Look="looking", Edit="looking",
                        Fault="refused", Farewell="lost", disconnected="lost", expired="refused",
                        close="closed"),
    "opening": _stay("opening", "connected Waiting", Opened="attaching", Fault="refused",
                     Farewell="lost", disconnected="lost", expired="refused", **_CLOSES),
    # This side is a monitor and never becomes a consumer.
    "looking": _stay("looking", "connected Look Seen Edit Edited", Fault="refused", Farewell="lost",
                     disconnected="lost", expired="refused", close="closed"),
    "attaching": _stay("attaching", "Spec Arena Waiting Used", Attached="streaming",
                       Fault="failed", **_BREAKS),
    "streaming": _stay("streaming", "Spec Arena Batches Waiting Used Snapshot "
                       "State", End="ended", Fault="failed", **_BREAKS),
    # Everything has been received, so a server that is gone is no loss any more. Slots that the
    # user still holds are given back as long as a server listens.
    "ended": _stay("ended", "Used Snapshot State Waiting Farewell disconnected expired",
                   Fault="failed", **_CLOSES),
    # An error has been received. If it says that the lease is lost, the consumer asks again.
    "failed": _stay("failed", "Used Snapshot State Waiting Fault Farewell disconnected "
                    "expired",
                    connect="connecting", **_CLOSES),
    # The server gave no queue, or no answer in time.
    "refused": _stay("refused", "Fault Farewell disconnected", connect="connecting",
                     close="closed"),
    # The connection is gone and the stream is not over: failover looks for a server again.
    "lost": {"connect": "connecting", "expired": "refused", "close": "closed"},
    "closed": _stay("closed", "disconnected close"),
}  # fmt: skip
"""A session as the consumer sees it, from "idle" to "closed"."""


class Session:
    """One side of a session: the state it is in, moved by the events of its table.

    Owned by the I/O thread of its side. Nothing else in the protocol holds state.
    """

    __slots__ = ("_events", "_moves", "_table", "state")

    def __init__(self, table: Table, state: str | None = None) -> None:
        # Tables are written with their first state first, and dicts keep that order.
        state = next(iter(table)) if state is None else state
        self._table = table
        self._moves = table[state]
        self._events: deque[str] = deque(maxlen=_MAX_REMEMBERED)
        self.state = state
        """The present state, a key of the table."""

    def on(self, event: str) -> str:
        """Move, and return the new state. Raises `ProtocolError` if the table has no such
        transition; the session then stays where it was."""
        state = self._moves.get(event)
        if state is None:
            raise ProtocolError(
                f"{event!r} in state {self.state!r}, expected one of "
                f"{', '.join(sorted(self._moves))}; events before it: "
                f"{', '.join(self._events) or 'none'}"
            )
        self._events.append(event)
        # Most events are batches and stay in "streaming": no second look-up for these.
        if state != self.state:
            self.state, self._moves = state, self._table[state]
        return state


class Receipts:
    """Allows one unread answer per asker: a question has to bring the last answer's receipt.

    Snapshots and figures may be large. ZeroMQ bounds how many messages wait for a peer and not
    their bytes, and nobody sees from outside what a peer has read. (400 snapshots of 5 MB that
    nobody read took 2 GB in 4 s.) Owned by the server's I/O thread.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = b""

    def check(self, receipt: bytes) -> None:
        """A question has come. Raises `ProtocolError` if the last answer was not read."""
        if receipt != self._last:
            raise ProtocolError("a question came before the answer to the last one was read")

    def make(self, drawn: bytes) -> bytes:
        """The receipt that goes out with the next answer: `RECEIPT_BYTES` that the caller has
        drawn, so that it cannot be guessed without reading the answer."""
        self._last = drawn
        return drawn
