"""What a consumer counts of itself, and reports to its server."""

from __future__ import annotations

from feeder.service.protocol.messages import Report


class ConsumerStats:
    """A consumer's own counts.

    The I/O thread owns `checked_s` and `corrupt`, and calls `take_report`. The two counts of
    positions are written by whichever thread asks for one: a lost increment there is harmless,
    so no lock guards them.
    """

    def __init__(self) -> None:
        self.checked_s = 0.0
        """Seconds spent on checksums."""
        self.corrupt = 0
        """Batches whose bytes did not match their checksum."""
        self.positions = 0
        """How often the position was asked for."""
        self.position_asked_at: float | None = None
        """When it was last asked for (monotonic clock); None before the first time."""
        self._told = (0.0, 0.0, 0, 0)

    def note_position_asked(self, now: float) -> None:
        """Count that the user asks for the position."""
        self.positions += 1
        self.position_asked_at = now

    def take_report(self, waited_s: float) -> Report:
        """Return the increments since the last report; `waited_s` is the trainer's whole wait."""
        # Increments and not totals: a server that has just taken the queue over must not count
        # what its predecessor was told already.
        seen = (waited_s, self.checked_s, self.corrupt, self.positions)
        told, self._told = self._told, seen
        # Never negative: the server adds these up into counters, and a counter must not fall.
        return Report(
            max(0.0, seen[0] - told[0]),
            max(0.0, seen[1] - told[1]),
            seen[2] - told[2],
            seen[3] - told[3],
        )
