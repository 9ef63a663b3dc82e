"""How far a served feed has been used: the newest round of which every queue has used its batch.

Rules without sockets and clocks. The I/O thread notes what consumers say; any thread may ask.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from feeder.state.snapshot import StreamState
from feeder.service.server.recipes import Recipe
from feeder.workers.stream.chunks import Columns
from feeder.workers.stream.position import Place


class Used:
    """What all consumers of one feed have used."""

    def __init__(self, recipe: Recipe) -> None:
        self._positions = recipe.positions
        self._num = len(recipe.config.devices)
        # For each queue the number of rounds of which it has used its batch.
        self._rounds: list[float] = [0] * self._num
        # Where the rounds ended that the last queue has used, and not all others.
        self._ends: deque[Place] = deque()
        self._place: Place | None = None
        self._columns: Columns | None = None
        self._stands = False
        self._state = recipe.start_state()

    def begin(self, first_steps: Sequence[float], *, lacks_some: bool = False) -> None:
        """The feed begins at another place: of each queue the batches before its first step are
        used. What was used before stands until a round has been used from there on; where the
        feed lacks some consumers it stands until it begins anew with them."""
        self._rounds = [step if step == math.inf else step // self._num for step in first_steps]
        self._ends.clear()
        self._stands = lacks_some

    def note(self, queue: int, places: Iterable[Place], columns: Columns | None) -> None:
        """A consumer has used the batches that end at these places."""
        if self._stands:
            return
        for place in places:
            self._rounds[queue] = (place.step - 1) // self._num + 1
            if queue == self._num - 1:
                self._ends.append(place)
        self._settle(columns)

    def leave_out(self, queue: int, columns: Columns | None) -> None:
        """A consumer has used everything."""
        if not self._stands:
            self._rounds[queue] = math.inf
            self._settle(columns)

    def _settle(self, columns: Columns | None) -> None:
        used = min(self._rounds)
        while self._ends and self._ends[0].step <= used * self._num:
            self._columns, self._place = columns, self._ends.popleft()

    def end(self, place: Place, columns: Columns | None) -> None:
        """Every consumer has used everything: the stream has ended at `place`."""
        self._columns, self._place = columns, place

    def state(self) -> StreamState:
        """The position of what was used, with its leftover rows."""
        place = self._place
        if place is not None:
            self._state = self._positions.state_at(place, self._columns, with_rows=True)
        return self._state
