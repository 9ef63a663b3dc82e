"""What one device, or the user in its place, sees of a feed."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from typing import Any

from feeder.devices.cuda.queue import CudaQueue
from feeder.errors import ClosedError, ConfigError, read_again, read_by_two
from feeder.feeds.length import num_batches
from feeder.feeds.stream import Stream
from feeder.workers.fetch.scheduler import Held
from feeder.workers.public import public
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import LazyPosition


@public("feeder")
class DeviceFeed:
    """The batches of one device, in order and once: an iterator, used by one thread at a time.

    `next` raises `FeedError` while another thread is in it, and `iter` raises
    `ConfigError` where all batches have been handed out already.
    """

    def __init__(self, stream: Stream, device: int) -> None:
        self._stream = stream
        self._device = device
        self._queue = queue = stream.queues[device]
        # What a GPU's queue still has to do for a batch when it is handed out.
        self._receive = queue.receive if isinstance(queue, CudaQueue) else None
        self._progress = stream.progress
        self._ends_rounds = 0 < device == len(stream.queues) - 1
        self._ready: deque[Batch] = deque()
        self._handed = stream.counted.handed[device]
        self._held = Held(0, 0, 0, 0)
        # Where something is to be done at a batch: those after it, and where its round ends.
        self._later: deque[Batch] = deque()
        self._mark = 0
        self._has_ended = False
        # Where the end was told by a `StopIteration`.
        self._end_is_told = False
        self._is_read = False

    @property
    def device(self) -> str:
        """The name of the device."""
        return self._stream.config.devices[self._device]

    def __iter__(self) -> DeviceFeed:
        stream = self._stream
        if self._end_is_told and not stream.stopped:
            stream.check_usable()
            config = stream.config
            raise read_again(f"feed {config.name!r}", config.stream.epochs)
        return self

    def __next__(self) -> Batch:
        # A try-lock: no call lies between the look and the mark, so no other thread comes between,
        # and an interrupt cannot leave the mark behind, as it could leave a lock.
        if self._is_read:
            self._stream.check_usable()
            raise read_by_two(f"feed {self._stream.config.name!r}")
        try:
            self._is_read = True
            while not (ready := self._ready):
                self._refill()
            if self._receive is None:
                batch, is_last = ready[0], len(ready) == 1
            else:
                batch, is_last = self._receive(ready.popleft()), not ready
            if is_last:
                self._stream.pipeline.channel.hand_out(self._device, self._held)
            handed, device = self._progress.handed, self._device
            before = handed[device]
            after = before[0] + 1, batch.place
            if self._ends_rounds:
                self._progress.note(*after)
            # What an interrupt takes from the user does not count as handed out, and comes next:
            # from here on it finds the user's own code, but at a mark.
            handed[device] = after
            if is_last and self._mark:
                try:
                    self._reach_mark()
                except BaseException:
                    if self._receive is None:
                        handed[device] = before
                    raise
            if self._receive is None:
                del ready[0]
            return batch
        finally:
            self._is_read = False

    def __len__(self) -> int:
        """Batches of the whole stream on this device, also after a resume, as if no record were
        left out; `TypeError` where that is not known: it is for sources and a number of epochs."""
        length = num_batches(self._stream.config, self._device)
        if length is None:
            raise TypeError("the length of this feed is not known")
        return length

    def __bool__(self) -> bool:
        return True  # Else `if feed` would ask for its length.

    def work_on(self, stream: Any) -> None:
        """Say which stream of the GPU the work on its batches goes to. Raises `ConfigError`."""
        if not isinstance(self._queue, CudaQueue):
            raise ConfigError(f"stream is {stream!r}, but {self.device!r} is no GPU; leave it out")
        self._queue.work_on(stream)

    def _refill(self) -> None:
        """Wait for batches; raises what has taken the place of the next."""
        stream = self._stream
        stream.check_usable()
        got, later, mark = self._later or self._queue.get(), deque[Batch](), 0
        if isinstance(got, LazyPosition):
            self._end(got)
            self._end_is_told = True
            raise StopIteration
        if stream.marks is not None:
            num, mark = stream.marks.first(got)
            if num:
                got, later = deque(islice(got, num)), deque(islice(got, num, None))
        rows = sum([batch.rows for batch in got])
        num_bytes = sum([batch.held_bytes for batch in got])
        kept_rows = sum([batch.kept_rows for batch in got])
        held = Held(len(got), rows, num_bytes, kept_rows)
        taken = self._handed.after(len(got), rows, num_bytes)
        # No call in between: an interrupt finds all of it or nothing.
        self._held, self._later, self._mark = held, later, mark
        self._ready = self._handed.left = got
        self._handed.taken = taken
        self._queue.given = None
        if stream.stopped:
            # In the meantime, from another thread, which may have missed these batches.
            self.drop()
            raise ClosedError(f"feed {stream.config.name!r} is stopped")

    def _end(self, place: LazyPosition) -> None:
        """There are no more batches: the stream has ended at `place`."""
        stream, progress = self._stream, self._progress
        # A stream that had ended before it began stays where it was, leftover and all.
        if not stream.pipeline.start_cut.finished and not self._has_ended:
            progress.handed[self._device] = math.inf, place
            if stream.marks is not None and progress.place is place:
                stream.marks.reached()
            self._has_ended = True

    def _reach_mark(self) -> None:
        """With several devices the last that comes to the end of the round does what is to be."""
        marks, place = self._stream.marks, self._progress.place
        if marks is not None and place is not None and place.step == self._mark:
            marks.reached()
        self._mark = 0

    def drop(self) -> None:
        """Forget the batches at hand: the stream has been stopped, or this is a forked child."""
        self._handed.drop()
        # Not cleared: the user's thread may be about to hand one out.
        self._ready, self._later = deque(), deque()

    def __repr__(self) -> str:
        return f"<DeviceFeed {self._stream.config.name!r} on {self.device!r}>"
