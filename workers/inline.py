"""The caller drives: calls and batches are made in the thread that asks for a batch.

The same fetcher, queue and enqueuer as with threads, and so the same batches, but nothing runs
while nobody asks, and nothing is read ahead. That is for functions that only their own thread may
call, and for a debugger.

An interrupt may come between any two instructions of this work, which is built for threads that
nobody interrupts. So such a stream is not gone on with; its position, which is that of the last
batch that the user has, is as exact as ever.
"""

from __future__ import annotations

from collections.abc import Iterator

from feeder.workers.enqueuer import Enqueuer, RoundRobinRouter, fail
from feeder.workers.errors import FeedError
from feeder.workers.fetch.bound import Bound
from feeder.workers.fetch.fetcher import Fetcher


class Inline:
    """Drives one stream. Owner: the thread that is inside `next` of its only device."""

    def __init__(
        self, name: str, batch_size: int, bound: Bound, fetcher: Fetcher, enqueuer: Enqueuer,
        router: RoundRobinRouter,
    ) -> None:  # fmt: skip
        self._name, self._batch_size, self._bound = name, batch_size, bound
        self._fetcher, self._enqueuer, self._router = fetcher, enqueuer, router
        self._steps = self._make()
        self._is_inside = False

    def advance(self) -> None:
        """Make the next batch, or what ends the stream: both are in the device queue then."""
        # Left set by what was interrupted.
        if self._is_inside:
            raise FeedError(
                f"feed {self._name!r} was interrupted while it made a batch in the user's thread "
                "(num_threads=0), and cannot go on: take its position, make a feed anew, and "
                "resume it there"
            )
        self._is_inside = True
        try:
            next(self._steps, None)
        except Exception as error:
            fail(self._router, error)
        self._is_inside = False

    def _make(self) -> Iterator[None]:
        for needs_chunks in self._enqueuer.steps():
            if not needs_chunks:
                yield
            while needs_chunks and not self._enqueuer.has_come():
                call_rows = self._bound.call_rows
                # Those of one batch together, once it is known how many: one by one they are merged
                # one by one.
                self._fetcher.make_some(max(1, self._batch_size // call_rows) if call_rows else 1)
