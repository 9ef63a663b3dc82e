"""Which of a consumer's addresses is tried, since when, and for how long. Rules: no clock."""

from __future__ import annotations

import math
import random

from feeder.errors import AuthError

_TURN_S, _MAX_DOUBLED = 0.25, 2
"""How long one of several addresses is tried before the next: twice as long in each of two rounds,
which is enough for a host to show that somebody listens there."""
_ANSWER_S, _MOST_ANSWER_S = 1.0, 8.0
"""From then on it may take so long to give the queue: twice as long in each round."""
_PAUSE_S = 0.1
"""What listens there and is no server is let alone for so long."""
_LEASES_AT_FIRST = 4
"""So many times longer than elsewhere a server at the first address is waited with."""


class Tries:
    """The tries of one consumer. Times are those of a monotonic clock."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._addresses = addresses
        self._num = self._num_since = 0
        self.begins_at = -math.inf
        """When the next try may begin."""
        self.ends_at = math.inf
        """When this one is given up."""
        self._refused_by: set[int] = set()
        self.refusal: AuthError | None = None
        """What one of them said that does not take this client; None where none did."""

    def begin(self, now: float) -> str:
        """The address to try."""
        address = self._addresses[self._num % len(self._addresses)]
        if len(self._addresses) > 1:
            doubled = min(_MAX_DOUBLED, self._num_since // len(self._addresses))
            self.ends_at = now + _TURN_S * 2**doubled
        self._num += 1
        self._num_since += 1
        return address

    def reach(self, at: float | None) -> None:
        """Somebody listens there since then, or nobody as far as is known."""
        if at is not None and self.ends_at < math.inf:
            round_ = min(16, (self._num_since - 1) // len(self._addresses))
            self.ends_at = max(self.ends_at, at + min(_MOST_ANSWER_S, _ANSWER_S * 2**round_))

    def fail(self, now: float) -> None:
        """It was no server."""
        self.begins_at = now + _PAUSE_S

    def refuse(self, why: AuthError) -> bool:
        """It does not take this client; whether every address has said so. A forwarder with nobody
        behind it looks the same."""
        self.refusal = why
        self._refused_by.add((self._num - 1) % len(self._addresses))
        return len(self._refused_by) == len(self._addresses)

    def patience_s(self, lease_s: float) -> float:
        """How long to stay with a server that waits for other consumers, who may be at another:
        without end where there is but one address. Consumers that wait for each other at two
        servers should not change places at once, so each adds a random part of the time."""
        if len(self._addresses) == 1:
            return math.inf
        is_first = (self._num - 1) % len(self._addresses) == 0
        return lease_s * (_LEASES_AT_FIRST if is_first else 1) * (1 + random.random())

    def move_on(self) -> None:
        """Leave the server of the present address: the first one is tried next, or the second by
        those who are at the first."""
        self._num = 1 if (self._num - 1) % len(self._addresses) == 0 else 0

    def end(self) -> None:
        """Nothing has to be tried any more: a server has given the queue, or none will."""
        self._num_since, self.refusal = 0, None
        self._refused_by.clear()
        self.ends_at = math.inf


class Patience:
    """How often a server may give what cannot be taken before it gives a batch."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num, self._received = 0, -1

    def ends(self, received: int) -> bool:
        """Once more; so many batches have come. Whether that is too often."""
        if received != self._received:
            self._num, self._received = 0, received
        self._num += 1
        return self._num > self._most
