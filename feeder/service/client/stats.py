"""What a consumer counts of itself, to be told to its server."""

from __future__ import annotations

from feeder.service.protocol.messages import Report


class ConsumerStats:
    """A consumer's own counts. The I/O thread tells them; `ask` is called by any thread."""

    def __init__(self) -> None:
        self.checked_s = 0.0
        """Seconds that checksums took."""
        self.corrupt = 0
        """Batches that came with bytes that were not sent."""
        self.positions = 0
        """Times that the position was asked for."""
        self.asked_at: float | None = None
        """When it last was."""
        self._told = (0.0, 0.0, 0, 0)

    def ask(self, now: float) -> None:
        """The position is asked for."""
        self.positions += 1
        self.asked_at = now

    def news(self, waited_s: float) -> Report:
        """What has come to be since this was last asked; `waited_s`: the trainer's waits in all."""
        seen = (waited_s, self.checked_s, self.corrupt, self.positions)
        told, self._told = self._told, seen
        return Report(
            max(0.0, seen[0] - told[0]),
            max(0.0, seen[1] - told[1]),
            seen[2] - told[2],
            seen[3] - told[3],
        )
