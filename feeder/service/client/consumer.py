"""The trainer's end: an iterable of the batches of one queue of a served feed."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from feeder.errors import (
    ClosedError,
    ConfigError,
    FeedError,
    ForkedError,
    RemoteError,
    ResumeError,
    SnapshotFormatError,
    read_again,
    read_by_two,
)
from feeder.service.client.inbox import Loading
from feeder.service.client.io_loop import ClientLoop
from feeder.service.client.lease import ClientLease
from feeder.service.faults import point
from feeder.service.memory import forking
from feeder.state.snapshot import Snapshot
from feeder.state.statedict import STATE_KEY, unpack_state_dict
from feeder.workers.fetch.threads import ThreadGroup
from feeder.workers.stats import Handed
from feeder.workers.stream.batch import Batch

logger = logging.getLogger("feeder")

_STOP_S = 5.0
_ANSWER_S = 10.0
"""How long a server may take to answer a question."""


class Consumer:
    """The batches of one queue of a served feed, in order, once: iterable and iterator.

    Made by `feeder.connect`. It is read by one thread at a time: `next` raises `FeedError` while
    another thread is in it. Positions may be asked for by any thread. When its server goes away it
    looks for one again, at each of its addresses, and goes on where it was. Arrays may be kept for
    as long as they are wanted: a consumer that keeps more batches than there are slots for is given
    private copies. `iter` raises `ConfigError` where all batches have been handed out already.
    """

    def __init__(self, receiver: ClientLoop) -> None:
        self._receiver = receiver
        self._inbox = receiver.inbox
        # Beside those, the one that is being handed out.
        self._most_held = receiver.wish.hold
        self._ready: deque[Batch] = deque()
        self._place: Any = None
        self._handed = Handed()
        self._told_at = 0
        # Batches that are dropped tell of themselves, through their slots; so later than that.
        self._tell_every = 1
        self._unusable: FeedError | None = None
        self._copies = False
        self._is_read = False
        # Where the end was told by a `StopIteration`.
        self._end_is_told = False
        self._loaded: bytes | None = None
        self._num_loads = 0
        self._scope = ThreadGroup()
        self._scope.start("feeder consumer", receiver.run)
        forking.enter(self)
        # One that is forgotten must not hold its queue for ever.
        self._forgotten = weakref.finalize(self, receiver.ask, receiver.stop)
        self._forgotten.atexit = False
        if self._inbox.landing is not None:
            weakref.finalize(self, self._inbox.landing.end_thread).atexit = False
        try:
            self._inbox.wait_for_opened(0)
        except BaseException:
            self.close()
            raise

    # ---- batches

    def __iter__(self) -> Iterator[Batch]:
        if self._end_is_told and self._unusable is None:
            opened = self._reading.opened
            raise read_again(f"feed {opened.name!r}", opened.epochs)
        return self

    def __next__(self) -> Batch:
        # A try-lock, as in `DeviceFeed`.
        if self._is_read:
            self._check_usable()
            raise read_by_two("the consumer")
        try:
            self._is_read = True
            while not (ready := self._ready):
                self._refill()
            inbox = self._inbox
            reading: Any = inbox.reading
            handed = inbox.handed + 1
            on_host = inbox.landing is None
            batch = ready[0] if on_host else self._land(ready.popleft())
            point("consumer.handed")
            kept = handed - reading.base - reading.plane.num_released if reading.lends else 0
            if kept > self._most_held:
                batch = self._copy(batch)
            if handed - self._told_at > self._tell_every:
                # Of those before this one: what the server has been told is not taken back.
                self._receiver.waker.wake()
                self._told_at = handed - 1
            # What an interrupt takes from the user does not count as handed out, and comes next.
            self._place, inbox.handed = batch.place, handed
            if on_host:
                del ready[0]
            return batch
        finally:
            self._is_read = False

    def _refill(self) -> None:
        """Wait for batches; raises what has taken the place of the next."""
        if self._unusable is not None:
            raise self._unusable
        if isinstance(self._ready, Loading):
            self._finish_loading(self._ready)
        self._inbox.begun = True
        if not len(self._inbox.batches):
            # Nothing is there: what has been used and let go of must be known before the wait.
            self._receiver.waker.wake()
        got = self._inbox.batches.get()
        self._tell_every = 2 * self._reading.tell_every
        if not isinstance(got, deque):
            self._place = got
            self._end_is_told = True
            raise StopIteration
        rows, counted, queue = sum([batch.rows for batch in got]), self._handed, self._inbox.batches
        taken = counted.after(len(got), rows, self._reading.count_bytes(got, rows))
        # No call in between: an interrupt finds all of it or nothing.
        self._ready = counted.left = got
        counted.taken = taken
        queue.given = None

    def _land(self, batch: Batch) -> Batch:
        """The batch on the GPU."""
        queue: Any = self._inbox.batches
        landed: Batch = queue.receive(batch)
        return landed

    def _copy(self, batch: Batch) -> Batch:
        """The batch in memory of its own, so that its slot goes back."""
        if not self._copies:
            self._copies = True
            logger.warning(
                "more than %d batches are kept: from now on batches are copied for as long as "
                "that is so; drop them, or connect with hold=",
                self._most_held,
            )
        arrays = tuple([array.copy() for array in batch.arrays])
        for array in arrays:
            array.flags.writeable = False
        return batch.with_arrays(arrays)

    def __len__(self) -> int:
        """Batches of the whole stream on this queue, as if no record were left out; `TypeError`
        where the server cannot know: it does for sources and a number of epochs."""
        length = self._reading.opened.length
        if length is None:
            raise TypeError("the length of this feed is not known")
        return length

    def __bool__(self) -> bool:
        return True  # Else `if consumer` would ask for its length.

    @property
    def _reading(self) -> ClientLease:
        reading = self._inbox.reading
        assert reading is not None
        return reading

    # ---- position

    def state_dict(self) -> dict[str, bytes]:
        """The position after the last batch handed out, for a trainer's checkpoint: one key, the
        same bytes that the feed gives in process. Pure; valid at any time."""
        self._check_forked()
        self._inbox.tally.ask(time.monotonic())
        if self._place is not None:
            return {STATE_KEY: self._place.state(self._reading.columns)}
        loaded = self._ready.position if isinstance(self._ready, Loading) else self._loaded
        return {STATE_KEY: loaded or self._inbox.start}

    def load_state_dict(self, state_dict: dict[str, bytes]) -> None:
        """Go on from a state dict; before the first batch alone. Raises `ResumeError`."""
        self._check_usable()
        if self._place is not None:
            raise ResumeError("batches have been handed out already; load the state into a fresh "
                              "consumer")  # fmt: skip
        position = bytes(unpack_state_dict(state_dict))
        self._num_loads += 1
        # What an interrupted `next` had taken, and not handed out, goes with this.
        self._ready = Loading(self._num_loads, position)
        self._finish_loading(self._ready)

    def _finish_loading(self, state: Loading) -> None:
        """Wait until a server has given the queue where a state says; also one whose loading was
        interrupted."""
        self._handed.drop()
        self._receiver.ask(lambda: self._receiver.reopen(state.number, state.position))
        try:
            self._inbox.wait_for_opened(state.number)
            self._loaded = state.position
        except (ConfigError, ResumeError):
            self._ready = deque()  # It is refused.
            raise
        except FeedError:
            self._drop_ready()
            raise
        self._ready = deque()

    def _drop_ready(self) -> None:
        """Nothing more is handed out. A state that was to be gone on from stays the position."""
        if isinstance(self._ready, Loading):
            self._loaded = self._ready.position
        self._ready = deque()

    def snapshot(self) -> Snapshot:
        """The position with the leftover rows, as the server has them. Raises `RemoteError` where
        there is no server, or it does not know them, as just after it was found again
        (`state_dict` is always there); `ClosedError` after `close`."""
        self._check_usable()
        self._inbox.tally.ask(time.monotonic())
        state = self._ready
        if isinstance(state, Loading):  # It may have been interrupted before that was asked.
            self._receiver.ask(lambda: self._receiver.reopen(state.number, state.position))
        question = self._receiver.ask_snapshot()
        try:
            return Snapshot.from_bytes(question.result(_ANSWER_S))
        except SnapshotFormatError as error:
            raise RemoteError(f"the server sent a bad snapshot: {error}") from error

    # ---- what is told

    @property
    def plane(self) -> str:
        """How the batches come: "shared" or "frames"."""
        return self._reading.plane.kind

    @property
    def path(self) -> str:
        """What the GPU copies from: "registered memory", where shared memory is read by the GPU
        itself, or "pinned slots", which batches are written into first; "" without a GPU."""
        landing = self._inbox.landing
        return "" if landing is None else landing.path

    def stats(self) -> dict[str, Any]:
        """What the consumer has done, in a flat dictionary of numbers, and the plane by name.
        Seconds include a wait under way. Any thread may call it at any time."""
        _, rows, num_bytes = self._handed.counts()
        figures = self._inbox.stats(rows, num_bytes)
        return {**figures, "plane": self.plane, "path": self.path}

    # ---- life

    def close(self) -> None:
        """Leave; batches that were handed out stay valid. Harmless when done before."""
        if isinstance(self._unusable, ForkedError):
            return
        self._unusable = ClosedError("the consumer is closed")
        self._drop_ready()
        self._receiver.ask(self._receiver.stop)
        # Not before: where this is interrupted, who forgets the consumer ends it.
        self._forgotten.detach()
        self._scope.close(_STOP_S)
        self._handed.drop()
        if self._inbox.landing is not None:
            self._inbox.landing.close()
        forking.leave(self)

    def fork(self) -> None:
        """This is a forked child: the sockets and the thread are the parent's."""
        self._unusable = ForkedError(
            "the consumer was connected in the parent process; connect after the fork, or start "
            "children with the spawn method"
        )
        self._handed.drop()
        self._ready = deque()
        self._forgotten.detach()
        self._receiver.waker.silence()
        if self._inbox.landing is None:
            self._inbox.drop()

    def _check_usable(self) -> None:
        error = self._unusable or self._receiver.failure
        if error is not None:
            raise error.with_traceback(None)

    def _check_forked(self) -> None:
        if isinstance(self._unusable, ForkedError):
            raise self._unusable

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        wish = self._receiver.wish
        way = f"{self.plane}, {self.path}" if self.path else self.plane
        return f"<Consumer of queue {wish.queue} of {wish.feed or 'the feed'!r}, {way}>"
