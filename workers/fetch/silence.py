"""When a fetch function has given nothing for too long. Rules; the channel's lock guards them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from feeder.workers.errors import FetchTimeout, in_words
from feeder.workers.fetch.ledger import Ledger
from feeder.workers.fetch.scheduler import Lane, Rota
from feeder.workers.fetch.threads import stack

SLOW_S = 10.0
"""No wait for a lane is longer before it is looked at again."""


class Silence:
    """The timeout of a stream: it counts from when a batch is waited for, the last row came, or
    the call began, whichever was last."""

    def __init__(
        self,
        rota: Rota,
        ledger: Ledger,
        timeout_s: float,
        describe: Callable[[int, int], tuple[int, int]],
        waited_since: Callable[[], float | None],
    ) -> None:
        self._rota = rota
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._describe = describe
        self._waited_since = waited_since
        self.hungry_since: float | None = None
        """Since when the merge has waited without a row having come."""

    def check(self, lanes: Sequence[Lane], now: float) -> float:
        """Seconds to wait on for lanes; raises `FetchTimeout` where there are none left."""
        waited_since = self._waited_since()
        if waited_since is None or self._held_back(lanes):
            return min(SLOW_S, self._timeout_s / 4)
        suspects = [lane for lane in lanes if lane.silent_since is not None]
        suspects = suspects or [lane for lane in self._rota.lanes if lane.running]
        last = max(suspects, key=lambda lane: lane.silent_since or 0.0, default=None)
        silent_since = last.silent_since or 0.0 if last is not None else 0.0
        since = max(waited_since, self.hungry_since or 0.0, silent_since)
        if now - since >= self._timeout_s:
            raise self._timeout(last if last is not None else lanes[0], now)
        return min(SLOW_S, since + self._timeout_s - now)

    def _held_back(self, lanes: Sequence[Lane]) -> bool:
        """Whether it is the user who is waited for: the bound is reached, batches are there."""
        ledger = self._ledger
        idle = not any(lane.running or lane.silent_since is not None for lane in lanes)
        return idle and not (ledger.below_bound or ledger.starving)

    def _timeout(self, lane: Lane, now: float) -> FetchTimeout:
        worker_id, call = self._describe(lane.number, lane.next)
        failure = lane.failure
        why = f"; its last call raised {in_words(failure)}" if failure else ""
        cure = "raise timeout, or end the epoch with StopIteration"
        lasted = now - max(lane.called_at, lane.silent_since or 0.0)
        # Else calls return, and give nothing.
        if lane.running and lasted > self._timeout_s / 2:
            why += f"; the call was made {lasted:.1f} s ago and has not returned"
            cure = "see in its stack what it waits for, or raise timeout"
        error = FetchTimeout(
            f"worker {worker_id}, call {call}: no chunk for {self._timeout_s} s{why}; {cure}",
            worker_id=worker_id,
            call=call,
        )
        error.__cause__ = failure
        if lane.running:
            error.add_note(f"the call has not returned:\n{stack(lane.ident)}")
        return error
