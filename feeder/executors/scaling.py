"""How many actors a stream needs: a rule over what the stream has counted, without a clock.

It is the verdict's rule in numbers: a feed whose merge waits for chunks while all actors have work
is fetch-bound and takes more; one whose actors are idle, while nobody waits for chunks, gives some
back.
"""

from __future__ import annotations

from typing import NamedTuple

_EVERY_S = 1.0
"""How often it is looked: a new actor takes about a second to come."""

_STARVED = 0.3
"""The share of its time for which the merge waits for chunks, from which on there are too few."""

_FED = 0.05
"""Up to this share there may be too many: the same share from which on a trainer starves for the
verdict."""

_AT_WORK, _IDLE = 0.8, 0.5
"""The share of their time for which actors have tickets: below the first the bound on what is
buffered holds the feed up, and more actors would wait too. Below the second some have nothing to
do."""

_PATIENCE = 5
"""So many looks in a row that say "fewer" make one actor go: a trainer may have stopped for a
checkpoint. More come at the first look, since somebody waits."""


class Seen(NamedTuple):
    """What is known at one moment; seconds are counted from the start on."""

    at: float
    starved_s: float
    """For how long the merge has waited for chunks."""
    busy_s: float
    """For how long actors have had tickets, added up over them."""
    ready: float
    """Actors that may be asked."""


class Scaling:
    """The number of actors that is wanted, between two ends. Owner: the pool's lock."""

    def __init__(self, fewest: int, most: int) -> None:
        self._fewest, self._most = fewest, most
        self.wanted = fewest
        """How many there are to be."""
        self._last: Seen | None = None
        self._num_idle = 0

    def look(self, seen: Seen) -> bool:
        """Decide anew where it is time; whether the number is another one."""
        last = self._last
        if self._fewest == self._most:
            return False
        if last is not None and seen.at - last.at < _EVERY_S:
            return False
        self._last = seen
        if last is None or not seen.ready:
            return False
        seconds = seen.at - last.at
        starved = (seen.starved_s - last.starved_s) / seconds
        at_work = (seen.busy_s - last.busy_s) / seconds / seen.ready
        before = self.wanted
        if starved >= _STARVED and at_work >= _AT_WORK:
            self._num_idle = 0
            # Those that were asked for come first: what they change is not seen yet.
            if seen.ready >= self.wanted:
                self.wanted = min(self._most, self.wanted + max(1, self.wanted // 2))
        elif starved <= _FED and at_work <= _IDLE:
            self._num_idle += 1
            if self._num_idle >= _PATIENCE:
                self.wanted = max(self._fewest, self.wanted - 1)
        else:
            self._num_idle = 0
        return self.wanted != before
