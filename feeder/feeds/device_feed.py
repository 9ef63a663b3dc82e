"""The batches of one device, handed out to one user thread with the position after each.

What has been handed out is one tuple for each device, assigned once per batch: the round and the
place of the stream after it. It is the position, so a snapshot in another thread, and an interrupt
in this one, find it before a batch or after it, and never in between. All that can fail or wait
comes before that assignment.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from typing import Any

from feeder.devices.cuda.queue import CudaQueue
from feeder.errors import ClosedError, ConfigError, FeedError, read_again
from feeder.feeds.epochs import EpochReader
from feeder.feeds.length import num_batches
from feeder.feeds.reading import records_of_batch
from feeder.feeds.records import Rows
from feeder.feeds.running import Running
from feeder.feeds.stream import Stream
from feeder.workers.fetch.bound import Held
from feeder.workers.public import public
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import LazyPosition


@public("feeder")
class DeviceFeed(EpochReader):
    """The batches of one device, in order and once: an iterator, used by one thread at a time.

    `next` raises `FeedError` while another thread is in it, and `iter` raises
    `ConfigError` where all batches have been handed out already.

    `drop` replaces the deques from other threads.
    """

    def __init__(self, stream: Stream, device: int, running: Running) -> None:
        super().__init__(f"feed {stream.config.name!r}")
        # Held, so that the threads are not ended while somebody may ask for a batch.
        self._running = running
        running.devices.add(self)
        self._device = device
        # Of several devices the last one's batch completes a round, and where rounds end with an
        # epoch perhaps that of another.
        self._num_devices, spec = len(stream.queues), stream.config.stream
        self._ends_rounds = 0 < device == self._num_devices - 1
        is_uneven = spec.rounds == "epoch" and spec.last_round == "uneven"
        self._may_end_rounds = is_uneven and device < self._num_devices - 1
        self._read(stream)
        self._held = Held(0, 0, 0, 0)
        # Batches behind the one at which a checkpoint is due: handed out once it has been taken.
        self._later: deque[Batch] = deque()
        # The round of that batch, from 1; 0 where none of `_ready` is such a one.
        self._trigger_at = 0
        self._has_ended = False
        # The batch that was handed out last, until the next one is asked for, if a position says
        # what its last call gave: that is found here if the user has let it go.
        self._newest: Batch | None = None

    def _read(self, stream: Stream) -> None:
        """The next batches are those of this stream."""
        queue = stream.queues[self._device]
        # A GPU's queue still has to order its copy before the user's work when a batch is handed
        # out; a host's batch is ready as it is.
        receive = queue.receive if isinstance(queue, CudaQueue) else None
        transcript = stream.transcripts[self._device] if stream.transcripts else None
        # Assignments alone, without a call between them.
        self._stream, self._queue, self._receive = stream, queue, receive
        self._on_device = stream.on_device if receive is None else None
        self._progress, self._counts = stream.progress, stream.counted.handed
        self._transcript = transcript

    @property
    def device(self) -> str:
        """The name of the device."""
        return self._stream.config.devices[self._device]

    def __iter__(self) -> DeviceFeed:
        stream = self._stream
        if self._end_is_told and not stream.stopped:
            stream.check_usable()
            raise read_again(self._name, stream.config.stream.epochs)
        return self

    def __next__(self) -> Batch:
        if self._is_read:
            self._refuse_second()
        try:
            self._is_read = True
            # Before the wait: its memory may be that of the next one.
            self._newest = None
            if (ready := self._claim()) is None:
                self._end_is_told = True
                raise StopIteration
            if self._receive is None:
                fed, is_last = ready[0], len(ready) == 1
                batch = fed if self._on_device is None else self._on_device(fed)
            else:
                fed = batch = self._receive(ready.popleft())
                is_last = not ready
            if is_last:
                self._stream.pipeline.queue.hand_out(self._device, self._held)
            if self._transcript is not None:
                self._transcript.note(fed)
            epoch = self._enter(batch.epoch)
            epoch.newest = batch.index
            batch.of = epoch
            handed, counts, device = self._progress.handed, self._counts, self._device
            before, counted = handed[device], counts[device]
            after = batch.turn // self._num_devices + 1, batch.place
            num, rows, num_bytes = counted
            one_more = num + 1, rows + batch.rows, num_bytes + batch.held_bytes
            if self._ends_rounds or (self._may_end_rounds and batch.place.ends(batch.epoch)):
                self._progress.note(after[0], device + 1, batch.place)
            # One assignment says that the batch is handed out. An interrupt before it leaves the
            # batch in `_ready`, so it comes next; one after it finds the user's own code, unless a
            # checkpoint is due here (below).
            handed[device] = after
            counts[device] = one_more
            if is_last and self._trigger_at:
                try:
                    self._fire_trigger()
                except BaseException:
                    # The user does not get this batch: the next call hands it out again.
                    if self._receive is None:
                        handed[device] = before
                        counts[device] = counted
                    raise
            if self._receive is None:
                del ready[0]
                self._newest = fed if fed.place.batch is not None else None
            return batch
        finally:
            self._is_read = False

    def __len__(self) -> int:
        """Batches of the whole stream on this device, also after a resume, as if no record were
        left out; `TypeError` where that is not known: it is for sources and a number of epochs."""
        stream = self._stream
        while stream.next is not None:
            stream = stream.next
        length = num_batches(stream.config, self._device)
        if length is None:
            raise TypeError("the length of this feed is not known")
        return length

    def work_on(self, stream: Any) -> None:
        """Say which stream of the GPU the work on its batches goes to. Raises `ConfigError`."""
        if not isinstance(self._queue, CudaQueue):
            raise ConfigError(f"stream is {stream!r}, but {self.device!r} is no GPU; leave it out")
        self._queue.work_on(stream)

    def records_of(self, batch: Batch) -> Rows:
        """The records that the rows of a batch were made of: see `Batch.records`."""
        return records_of_batch(self._stream.asked(), batch)

    def _check_usable(self) -> None:
        self._stream.check_usable()

    def _claim(self) -> deque[Batch] | None:
        """The batches at hand, waited for, of which the first is to be handed out; None after the
        last."""
        while True:
            if ready := self._ready:
                num = ready[0].turn // self._num_devices + 1
                if self._claims(num, num):
                    return ready
            if self._wait_for_some() is None:
                return None

    def _claims(self, num: float, at_most: float) -> bool:
        """Claim the batch of a round, if rounds up to `at_most` are handed out; whether they are.

        It is claimed before the look, as an edit sets `last` before it looks at the claims: either
        the edit finds the claim, or the claim is seen here to have come too late. One that has is
        taken back; if the edit has found it nevertheless, `last` lets the batch out.
        """
        progress = self._progress
        before, progress.claimed[self._device] = progress.claimed[self._device], num
        if at_most <= progress.last:
            return True
        progress.claimed[self._device] = before
        return False

    def _wait_for_some(self, *, is_end: bool = True) -> deque[Batch] | None:
        while (ready := super()._wait_for_some(is_end=is_end)) is not None:
            num = ready[0].turn // self._num_devices + 1
            if num <= self._progress.last:
                return ready
            self._wait_for_edit(num)
        return None

    def _wait_for_edit(self, num: float) -> None:
        """Wait for an edit that is being made. If round `num` is not handed out before it, go on
        with the stream after it."""
        old, new = self._stream, self._stream.wait_for_edit()
        if new is None or num <= old.progress.last:
            return
        if self._transcript is not None:
            self._transcript.go_on_as(new.positions.id.fingerprint)
        self.drop()
        new.counted.handed[self._device] = old.counted.handed[self._device]
        new.end_before()
        self._read(new)

    def _refill(self) -> LazyPosition | None:
        stream, progress = self._stream, self._progress
        stream.check_usable()
        try:
            got, later, trigger_at = self._later or self._queue.get(), deque[Batch](), 0
        except FeedError:
            # What comes after the last round before an edit is that of the stream after it.
            last, num = progress.last, progress.handed[self._device][0] + 1
            if last == math.inf or num <= last:
                raise
            self._wait_for_edit(num)
            return None
        if isinstance(got, LazyPosition):
            if self._claims(math.inf, math.inf):
                return got
            self._wait_for_edit(progress.handed[self._device][0] + 1)
            return None
        if stream.triggers is not None:
            num, trigger_at = stream.triggers.first_in(got)
            if num:
                got, later = deque(islice(got, num)), deque(islice(got, num, None))
        rows = sum([batch.rows for batch in got])
        num_bytes = sum([batch.held_bytes for batch in got])
        kept_rows = sum([batch.kept_rows for batch in got])
        held = Held(len(got), rows, num_bytes, kept_rows)
        # Assignments alone, without a call between them: Python looks for signals at calls, so an
        # interrupt finds the batches either in the queue or in `_ready`, and never in neither.
        self._held, self._later, self._trigger_at = held, later, trigger_at
        self._ready = got
        self._queue.given = None
        if stream.stopped:
            # Another thread has stopped the stream meanwhile; its `drop` may have come before the
            # assignments above, and would have missed these batches.
            self.drop()
            raise ClosedError(f"feed {stream.config.name!r} is stopped")
        return None

    def _end(self, place: LazyPosition) -> None:
        stream, progress = self._stream, self._progress
        # A stream that was resumed at its end keeps the position it was given, leftover and all.
        if not stream.pipeline.start_cut.finished and not self._has_ended:
            progress.handed[self._device] = math.inf, place
            if stream.triggers is not None and progress.place is place:
                stream.triggers.fire()
            self._has_ended = True

    def _fire_trigger(self) -> None:
        """Take the checkpoint that is due at the end of this round: with several devices, in the
        thread of the one that is last to get there."""
        triggers = self._stream.triggers
        if triggers is not None and self._progress.round == self._trigger_at:
            triggers.fire()
        self._trigger_at = 0

    def drop(self) -> None:
        """Forget the batches at hand: the stream has been stopped, or this is a forked child."""
        # Replaced and not cleared: the user's thread may be about to hand out the first of them.
        self._ready, self._later, self._newest = deque(), deque(), None

    def __repr__(self) -> str:
        return f"<DeviceFeed {self._stream.config.name!r} on {self.device!r}>"
