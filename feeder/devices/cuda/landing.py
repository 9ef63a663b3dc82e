"""A consumer's GPU: where its batches land, on whatever way they come."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from feeder.devices.cuda.driver import Driver
from feeder.devices.cuda.packed import check_dtypes
from feeder.devices.cuda.pinned import PinnedRing, PinnedSlot, alloc_pinned, empty
from feeder.devices.cuda.queue import CudaQueue
from feeder.devices.layout import Layout, layout
from feeder.devices.ondevice import OnDevice
from feeder.errors import FeedError
from feeder.workers.errors import in_words
from feeder.workers.stream.chunks import Columns

logger = logging.getLogger("feeder")

_LOWER = "credit=, or the server's batch_size"
_CLOSE_S = 5.0


class Landing:
    """What a consumer's I/O thread needs of its GPU. Shared memory is pinned where it lies, and
    copied from there; where the driver refuses that, and for frames, batches are written into
    pinned slots, of which there are as many as copies may be under way.

    `depth`, `hold`, `stream` and `on_device` are those of `CudaQueue`.
    """

    def __init__(
        self, driver: Driver, *, depth: int, hold: int, stream: Any,
        on_device: OnDevice | None = None,
    ) -> None:  # fmt: skip
        self._driver = driver
        self._on_device = on_device
        self._depth = depth
        self._hold = hold
        self._stream = stream
        self._queue: CudaQueue | None = None
        self._free: SimpleQueue[PinnedSlot | FeedError] = SimpleQueue()
        self._known: tuple[Columns | None, int, Layout] = (None, 0, Layout((), 0))
        self.path = "pinned slots"
        """How batches are copied: from "registered memory", or by way of "pinned slots"."""
        if stream is not None:
            driver.stream_of(stream)  # What is no stream is told before anything is connected.

    # ---- the queue

    def make_queue(self, describe_wait: Callable[[], str]) -> CudaQueue:
        """A queue with its thread running, in the place of the one before."""
        self.close()
        queue = CudaQueue(
            self._driver, describe_wait, depth=self._depth, hold=self._hold, lower=_LOWER,
            on_device=self._on_device,
        )  # fmt: skip
        queue.work_on(self._stream)
        queue.start()
        self._queue = queue
        return queue

    def end_thread(self) -> None:
        """Have the thread end; for finalisers."""
        if self._queue is not None:
            self._queue.end_thread()

    def close(self) -> None:
        """End the thread; raises `StuckWorkerError`."""
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.close()
            queue.join(_CLOSE_S)
        empty(self._free)

    # ---- the I/O thread's

    def check(self, columns: Columns) -> None:
        """Raise `ConfigError` where the GPU has no arrays of a column's dtype."""
        check_dtypes(self._driver.name, columns)

    def register(self, memory: memoryview) -> object:
        """Pin shared memory where it lies; None where the driver refuses."""
        try:
            pinned = self._driver.register(memory)
        except Exception as error:
            logger.info(
                "consumer: the server's memory cannot be registered with %s (%s): batches go by "
                "way of pinned slots", self._driver.name, in_words(error),
            )  # fmt: skip
            return None
        self.path = "registered memory"
        return pinned

    def take_slot(self, columns: Columns, rows: int) -> PinnedSlot:
        """A pinned slot, laid out for `rows` rows, to be written through its `memory`."""
        if columns is not self._known[0] or rows != self._known[1]:
            self._known = (columns, rows, layout(columns, rows))
        slot = self._find(self._known[2].num_bytes)
        slot.life.on("take")
        slot.arrange(columns, rows, self._known[2])
        return slot

    def _find(self, num_bytes: int) -> PinnedSlot:
        """A free slot that is large enough, or a new one; smaller ones are let go of."""
        while True:
            try:
                slot = self._free.get_nowait()
            # None is free: one more is made. The number follows from how many copies are under way.
            except Empty:
                memory = alloc_pinned(self._driver, 1, num_bytes, _LOWER)
                PinnedRing(memory, num_bytes, self._free)
                continue
            assert isinstance(slot, PinnedSlot)
            if slot.ring.slot_bytes >= num_bytes:
                return slot
