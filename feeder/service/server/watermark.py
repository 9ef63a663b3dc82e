"""How far a served feed has been used by all: the newest round of which every queue has used its
batch, and of a shared queue each of its replicas.

A server stores this position, and trainers that come without one begin there. Only what users were
handed counts, never what was sent: a stored position may stand still for a while, and is never
ahead of a trainer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from feeder.service.server.factory import FeedFactory
from feeder.state.positions import Positions
from feeder.state.snapshot import StreamState
from feeder.workers.stream.chunks import Columns
from feeder.workers.stream.position import LazyPosition
from feeder.workers.stream.rounds import Counting


class LowWatermark:
    """The newest position up to which all consumers of one feed have used it.

    Written by the I/O thread. Any thread may call `state`: the fields that it reads are replaced as
    a whole, so it finds an older position at worst.
    """

    def __init__(self, factory: FeedFactory) -> None:
        self._positions = factory.positions
        self._counting = factory.counting
        # For each seat whose batches are made here the number of rounds of which it has used its
        # batch; infinity at the end.
        own, replicas = factory.own_queues, factory.replicas
        self._seats = range(own.start * replicas, own.stop * replicas)
        self._rounds: list[float] = [0] * len(self._seats)
        # Where those rounds ended that the last seat has used and some other has not. A round ends
        # with the last queue's batch, so only the positions of that queue's last seat are kept.
        # (Where other servers make the queues behind it, its position means the end of the round.)
        self._ends: deque[tuple[int, LazyPosition]] = deque()
        # The newest such place, and what says what it means; None before the first.
        self._at: tuple[Positions, LazyPosition, Columns | None] | None = None
        # While some consumers are missing their batches are discarded, and nothing is noted.
        self._stands = False
        self._state = factory.start_state()

    def restart_at(
        self, first_steps: Sequence[float], *, lacks_some: bool = False,
        counting: Counting | None = None,
    ) -> None:  # fmt: skip
        """The feed begins at another position: of each seat the batches before its first number
        count as used. `counting` says which rounds there are.

        The position so far stands until a whole round has been used from there on; if the feed
        lacks some consumers, until it begins again with them.
        """
        self._counting = counting or self._counting
        self._rounds = [
            step if step == math.inf else self._counting.round(int(step))
            for step in first_steps[self._seats.start : self._seats.stop]
        ]
        self._ends.clear()
        self._stands = lacks_some

    def note(self, seat: int, places: Sequence[LazyPosition], columns: Columns | None) -> None:
        """A seat's user has been handed the batches that end at these positions."""
        if self._stands or not places:
            return
        is_last, counting = seat == self._seats[-1], self._counting
        noted = places if is_last else places[-1:]
        # The rounds before that of the next batch but one: the place is after the last one.
        rounds = [counting.round(counting.number(place) - 1) + 1 for place in noted]
        self._rounds[seat - self._seats.start] = rounds[-1]
        if is_last:
            self._ends.extend(zip(rounds, places, strict=True))
        self._settle(columns)

    def leave_out(self, seat: int, columns: Columns | None) -> None:
        """A seat's user has been handed everything."""
        if not self._stands:
            self._rounds[seat - self._seats.start] = math.inf
            self._settle(columns)

    def _settle(self, columns: Columns | None) -> None:
        used = min(self._rounds)
        while self._ends and self._ends[0][0] <= used:
            self._at = self._positions, self._ends.popleft()[1], columns

    def finish_at(self, place: LazyPosition, columns: Columns | None) -> None:
        """All users have been handed everything: the stream has ended at `place`."""
        self._at = self._positions, place, columns

    def go_on_as(self, positions: Positions, state: StreamState) -> None:
        """The feed is edited, and goes on as another run, of which this is the position so far."""
        self._positions, self._state, self._at = positions, state, None
        self._ends.clear()

    @property
    def place(self) -> LazyPosition | None:
        """The position; None before the first batch that all have used since the feed began there.
        Any thread."""
        return None if self._at is None else self._at[1]

    def state(self) -> StreamState:
        """The position with its leftover rows. Any thread."""
        # Made when somebody asks: to encode one costs more than to use a small batch.
        if (at := self._at) is None:
            return self._state
        positions, place, columns = at
        return positions.state_at(place, columns, with_rows=True)
