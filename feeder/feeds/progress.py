"""How far the devices of one stream have come."""

from __future__ import annotations

import math
import threading

from feeder.workers.stream.position import Place


class Progress:
    """The position of a stream: that of the last batch handed out; with several devices, that of
    the last batch of the newest round that every device has been handed.

    A device's thread says what it is handed by assigning to `handed`, as nothing interrupts an
    assignment; it may take back the last. Any thread may ask for `place`.
    """

    def __init__(self, num_devices: int) -> None:
        self.handed: list[tuple[float, Place | None]] = [(0, None)] * num_devices
        """How many batches each device has been handed, and where the last of them ended; infinite
        where it has had all, and where that is."""
        self._lock = threading.Lock()
        # Where rounds end, of several devices: from number `_first` to number `_last`.
        self._ends: dict[float, Place] = {}
        self._first = self._last = 0.0

    @property
    def _rounds(self) -> float:
        return min([num for num, _ in self.handed])

    @property
    def place(self) -> Place | None:
        """Where the stream stands; None before the first batch."""
        if len(self.handed) == 1 or self._rounds == math.inf:
            return self.handed[0][1]
        with self._lock:
            return self._ends.get(min(self._rounds, self._last))

    def note(self, num: float, place: Place) -> None:
        """The last of several devices is about to be handed its `num`-th batch, which ends at
        `place`: to be said again where an interrupt has come in between."""
        with self._lock:
            self._ends[num], self._last = place, num
            # The newest round stays, and the one before it, since a batch may be taken back.
            while self._first < min(self._rounds, num) - 1:
                self._ends.pop(self._first, None)
                self._first += 1
