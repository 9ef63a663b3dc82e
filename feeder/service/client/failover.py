"""Which of several addresses a consumer tries next, and for how long: without socket and clock."""

from __future__ import annotations

import math
import random

from feeder.errors import FeedError

_TURN_S, _MAX_DOUBLED = 0.25, 2
"""How long one of several addresses is tried before the next one. The turn is twice as long in each
of two further rounds: one second is enough for any host to show that somebody listens there, and
longer turns made a failover last half as long again as the outage."""
_ANSWER_S, _MOST_ANSWER_S = 1.0, 8.0
"""Once somebody listens there it may take so long to give the queue, twice as long in each round: a
position of 100 MB over a slow link takes seconds, and a silent forwarder must not cost them in the
first round. An address that was given up after a fixed time never served a slow client."""
_PAUSE_S = 0.1
"""A listener that is no server (a proxy, a health check) is left alone for so long. ZeroMQ does not
connect again to what does not speak its protocol, so the consumer does, ten times a second."""
_LEASES_AT_FIRST = 4
"""A server at the first address is waited with so many times longer than one elsewhere: consumers
that wait for each other at two servers meet at the first."""


class Failover:
    """Whose turn it is among the addresses of one consumer.

    Owned by the consumer's I/O thread. Times are those of a monotonic clock and are passed in.
    """

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._addresses = addresses
        # Turns in all, which say whose turn it is, and turns since the last reset, which say how
        # long a turn lasts.
        self._num = self._num_since = 0
        self.try_at = -math.inf
        """When the next turn may begin."""
        self.turn_ends_at = math.inf
        """When the present turn is given up."""
        self._refused_by: set[int] = set()
        self.refusal: FeedError | None = None
        """The last refusal of this client since the last reset; None if there was none."""

    def next_address(self, now: float) -> str:
        """Begin a turn; returns the address to try."""
        address = self._addresses[self._num % len(self._addresses)]
        # A single address has nobody to give way to: ZeroMQ tries it until the time is up.
        if len(self._addresses) > 1:
            doubled = min(_MAX_DOUBLED, self._num_since // len(self._addresses))
            self.turn_ends_at = now + _TURN_S * 2**doubled
        self._num += 1
        self._num_since += 1
        return address

    def note_reached(self, at: float | None) -> None:
        """Prolong the turn: somebody has listened there since `at`; None if nobody is known."""
        if at is not None and self.turn_ends_at < math.inf:
            # Bounded before the power: after days without a server it would overflow a float.
            round_ = min(16, (self._num_since - 1) // len(self._addresses))
            answer_s = min(_MOST_ANSWER_S, _ANSWER_S * 2**round_)
            self.turn_ends_at = max(self.turn_ends_at, at + answer_s)

    def pause(self, now: float) -> None:
        """Wait before the next turn: what listens there is no server."""
        self.try_at = now + _PAUSE_S

    def note_refusal(self, why: FeedError, now: float | None = None) -> bool:
        """Note that the address refuses this client, or has not its queue; returns whether all of
        them have. With `now`, a pause comes before the first is asked again.

        One refusal alone proves nothing if there are several addresses: a forwarder with nobody
        behind it ends the handshake in the same way.
        """
        self.refusal = why
        if now is not None and self._num % len(self._addresses) == 0:
            self.pause(now)
        self._refused_by.add((self._num - 1) % len(self._addresses))
        return len(self._refused_by) == len(self._addresses)

    def patience_s(self, lease_s: float) -> float:
        """Return how long to stay with a server that lacks other consumers.

        They may be at another address. Infinite if there is but one. Each consumer adds a random
        part, so that two which wait for each other do not change places at once, for ever.
        """
        if len(self._addresses) == 1:
            return math.inf
        is_first = (self._num - 1) % len(self._addresses) == 0
        return lease_s * (_LEASES_AT_FIRST if is_first else 1) * (1 + random.random())

    def stay(self) -> None:
        """The next turn is the present address's."""
        self._num -= 1

    def move_on(self) -> None:
        """Leave the server of the present address, for the first one, or from there the second."""
        self._num = 1 if (self._num - 1) % len(self._addresses) == 0 else 0

    def reset(self) -> None:
        """End the search: a server has given the queue, or none will."""
        # `_num` stays: after an outage the next address is tried, and not the one that was lost.
        self._num_since, self.refusal = 0, None
        self._refused_by.clear()
        self.turn_ends_at = math.inf
