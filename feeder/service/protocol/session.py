"""What may be said when: a session of one consumer, as the server and as the consumer see it.

Each table is {state: {event: next state}}. An event is the name of a message, sent or received
alike, or something local in lower case:

- connect, connected, disconnected: a connection is begun, stands, is gone
- expired: the time for an answer, or of the lease, is over; a consumer drops the connection then
- renewed: the consumer has shown that it lives
- taken_over: another consumer holds the queue
- close: this side wants no more

The tables are made so that messages that cross on the way are legal where they arrive.
"""

from __future__ import annotations

from collections import deque

from feeder.errors import ProtocolError

Table = dict[str, dict[str, str]]

_MAX_REMEMBERED = 8


def _stay(state: str, events: str, **others: str) -> dict[str, str]:
    """Moves of a state: `events` stay in it, the others leave it."""
    return {**dict.fromkeys(events.split(), state), **others}


_GONE = {"disconnected": "gone", "close": "gone"}
_LEAVES = {"Bye": "gone", **_GONE}
_LOSES = {"taken_over": "fenced", "Farewell": "draining", **_LEAVES}

SERVER: Table = {
    # A connection stands, and nothing has been said.
    "new": {"Open": "opening", "Look": "watched", "Fault": "refused", "Farewell": "draining",
            "expired": "gone", **_GONE},
    # A monitor: it is shown figures, and no more.
    "watched": _stay("watched", "Look Seen", Fault="refused", Farewell="draining",
                     expired="gone", **_GONE),
    # The server looks for an answer.
    "opening": _stay("opening", "Waiting", Opened="opened", Fault="refused",
                     Farewell="draining", expired="gone", **_LEAVES),
    # The consumer holds the queue and makes itself ready.
    "opened": _stay("opened", "Spec Arena Waiting Used renewed expired",
                    Attached="streaming", Fault="ended", **_LOSES),
    "streaming": _stay("streaming", "Spec Arena Batches Waiting Used Snapshot "
                       "State renewed", End="ended", Fault="ended", expired="hung", **_LOSES),
    # It has not been heard of for a lease: a newcomer wins.
    "hung": _stay("hung", "Spec Arena Batches Waiting Snapshot State expired",
                  Used="streaming", renewed="streaming", End="ended", Fault="ended", **_LOSES),
    # The stream's end, or an error, has been sent.
    "ended": _stay("ended", "Attached Used Snapshot State Waiting Fault renewed expired",
                   **_LOSES),
    # Another consumer has the queue; what this one sends may still be on its way.
    "fenced": _stay("fenced", "Attached Used Snapshot Fault renewed expired",
                    Farewell="draining", **_LEAVES),
    # It gets no queue.
    "refused": _stay("refused", "Open Look Fault", Farewell="draining", expired="gone", **_LEAVES),
    # The server stops.
    "draining": _stay("draining", "Open Look Attached Used Snapshot Fault renewed",
                      expired="gone", **_LEAVES),
    "gone": _stay("gone", "disconnected close"),
}  # fmt: skip
"""A consumer's lease as the server sees it, from "new" to "gone"."""

_CLOSES = {"Bye": "closed", "close": "closed"}
_BREAKS = {"Farewell": "lost", "disconnected": "lost", "expired": "lost", **_CLOSES}

CONSUMER: Table = {
    "idle": {"connect": "connecting", "close": "closed"},
    # ZeroMQ connects in its own time; `Open` may be given to it before.
    "connecting": _stay("connecting", "connected", Open="opening", Look="looking", Fault="refused",
                        Farewell="lost", disconnected="lost", expired="refused", close="closed"),
    "opening": _stay("opening", "connected Waiting", Opened="attaching", Fault="refused",
                     Farewell="lost", disconnected="lost", expired="refused", **_CLOSES),
    # This side is a monitor, and no consumer.
    "looking": _stay("looking", "connected Look Seen", Fault="refused", Farewell="lost",
                     disconnected="lost", expired="refused", close="closed"),
    "attaching": _stay("attaching", "Spec Arena Waiting Used", Attached="streaming",
                       Fault="failed", **_BREAKS),
    "streaming": _stay("streaming", "Spec Arena Batches Waiting Used Snapshot "
                       "State", End="ended", Fault="failed", **_BREAKS),
    # All has been received. What the user still holds is given back while somebody listens.
    "ended": _stay("ended", "Used Snapshot State Waiting Farewell disconnected expired",
                   Fault="failed", **_CLOSES),
    # An error has been received; a lost lease is asked for again.
    "failed": _stay("failed", "Used Snapshot State Waiting Fault Farewell disconnected "
                    "expired",
                    connect="connecting", **_CLOSES),
    # No queue was given, or no answer in time.
    "refused": _stay("refused", "Fault Farewell disconnected", connect="connecting",
                     close="closed"),
    "lost": {"connect": "connecting", "expired": "refused", "close": "closed"},
    "closed": _stay("closed", "disconnected close"),
}  # fmt: skip
"""A session as the consumer sees it, from "idle" to "closed"."""


class Session:
    """Walks a table, from its first state where no other is given. Belongs to one thread."""

    __slots__ = ("_events", "_moves", "_table", "state")

    def __init__(self, table: Table, state: str | None = None) -> None:
        state = next(iter(table)) if state is None else state
        self._table = table
        self._moves = table[state]
        self._events: deque[str] = deque(maxlen=_MAX_REMEMBERED)
        self.state = state
        """Where the session is."""

    def on(self, event: str) -> str:
        """Move, and return the new state. Raises `ProtocolError` where the table has no such
        move; the session is then where it was."""
        state = self._moves.get(event)
        if state is None:
            raise ProtocolError(
                f"{event!r} in state {self.state!r}, expected one of "
                f"{', '.join(sorted(self._moves))}; events before it: "
                f"{', '.join(self._events) or 'none'}"
            )
        self._events.append(event)
        if state != self.state:
            self.state, self._moves = state, self._table[state]
        return state
