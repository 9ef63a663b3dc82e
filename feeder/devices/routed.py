"""The devices that one stream is routed to: their queues, and the slots of their batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from feeder.devices.cuda.driver import is_gpu, open_driver
from feeder.devices.cuda.pinned import PinnedSlots
from feeder.devices.cuda.queue import CudaQueue
from feeder.devices.host import HostQueue
from feeder.devices.ondevice import OnDevice
from feeder.devices.slots import HostSlots, PrivateSlots
from feeder.errors import ClosedError, ConfigError, FeedError
from feeder.workers.stream.buffers import OpenSlot, Slot, Slots
from feeder.workers.stream.chunks import Columns
from feeder.workers.stream.position import HasColumns

HOLD = 3
"""Batches that the user of a GPU may hold without their being copied, the one at hand included:
a loop holds one while it takes the next, and one that looks ahead another."""

_LOWER = "depth= or batch_size"


class HostHalf:
    """Slots of host memory beside those of a GPU: here every array is copied. Owned by the thread
    that merges, as `HostSlots` is."""

    def __init__(self, slots: HostSlots | PrivateSlots) -> None:
        self._slots = slots

    def take_slot(self, columns: Columns, rows: int) -> Slot:
        """A slot for a batch of `rows` rows."""
        slot = self._slots.take_slot(0, columns, rows)
        # A batch of another size comes here too (`dont_rebatch`, a last batch that is repeated).
        # Free slots that do not fit it are let go of, and then one is made.
        while slot.columns is not columns or slot.rows != rows:
            slot = self._slots.take_slot(0, columns, rows)
        return slot

    def wait_for_slot(self) -> None:
        """Never needed: where no slot is free one is made."""

    def take_back(self, batch: HasColumns) -> None:
        """Nothing: its memory comes back when its last array is gone."""

    def put_back(self, slot: OpenSlot) -> None:
        """A slot is not used: its memory comes back when the arrays over it are gone."""
        self._slots.put_back(0, slot)


class RoutedSlots:
    """Slots of devices of several kinds (`feeder.workers.stream.buffers.Slots`): each call goes to
    the slots of its device. Owned by the thread that merges."""

    passes, writable, reserved, opens = False, False, False, True

    def __init__(self, halves: Sequence[HostHalf | PinnedSlots]) -> None:
        self._halves = halves

    def take_slot(self, device: int, columns: Columns, rows: int) -> Slot | None:
        """A slot for a batch of `rows` rows; None where it is a GPU's and none is free."""
        return self._halves[device].take_slot(columns, rows)

    def wait_for_slot(self, device: int) -> None:
        """Wait for a slot of that device."""
        self._halves[device].wait_for_slot()

    def take_back(self, device: int, batch: HasColumns) -> None:
        """A batch of that device is thrown away: its slot is free."""
        self._halves[device].take_back(batch)

    def put_back(self, device: int, slot: OpenSlot) -> None:
        """A slot of that device that was taken is not used."""
        self._halves[device].put_back(slot)


class Devices:
    """The device queues of one stream. GPUs copy in threads of their own.

    `capacity` bounds each host queue, `depth` the slots of each GPU (0: by the batches' size). A
    user who waits calls `describe_wait` every `look_s` seconds at the latest, or makes the batches
    by `advance` if no thread does. GPUs call `on_device` for each batch. Raises `ConfigError` where
    a GPU cannot be had.

    The stream's owner makes, starts, closes and joins it; nothing is assigned after it was made.
    """

    def __init__(
        self,
        names: Sequence[str],
        describe_wait: Callable[[], str],
        *,
        capacity: int,
        depth: int,
        writable: bool,
        look_s: float,
        advance: Callable[[], None] | None = None,
        on_device: OnDevice | None = None,
    ) -> None:
        if advance is not None and (len(names) > 1 or is_gpu(names[0])):
            raise ConfigError(
                f"num_threads is 0 and the devices are {tuple(names)!r}: nobody would read ahead "
                "for the others while the user reads one; give num_threads=1 or more, or leave "
                "devices= out"
            )
        self._on_device = on_device
        # All host devices share one pool: slots go to whichever is next.
        host = PrivateSlots() if writable else HostSlots()
        self._pinned: list[PinnedSlots] = []
        self._gpus: list[CudaQueue] = []
        self.queues: list[HostQueue | CudaQueue] = []
        """One for each device."""
        halves: list[HostHalf | PinnedSlots] = []
        for name in names:
            if is_gpu(name):
                halves.append(self._add_gpu(name, describe_wait, depth, look_s))
            else:
                self.queues.append(HostQueue(capacity, describe_wait, look_s, advance))
                halves.append(HostHalf(host))
        # Said, and not ignored: a typing error in a device's name would go unnoticed.
        if depth and not self._gpus:
            raise ConfigError(
                f"depth is {depth}, but none of the devices {tuple(names)!r} is a GPU; leave it "
                "out, or name one: 'cuda:0'"
            )
        self.slots: Slots = RoutedSlots(halves) if self._gpus else host
        """Where the assembler writes."""

    def _add_gpu(
        self, name: str, describe_wait: Callable[[], str], depth: int, look_s: float
    ) -> PinnedSlots:
        driver = open_driver(name)
        slots = PinnedSlots(driver, depth)
        queue = CudaQueue(
            driver, describe_wait, depth=depth, hold=HOLD, lower=_LOWER, on_failure=slots.fail,
            look_s=look_s, on_device=self._on_device,
        )  # fmt: skip
        # One watch: the enqueuer waits for a slot, and the user of another device asks the queue
        # how long.
        queue.blocked = slots.blocked
        self._pinned.append(slots)
        self._gpus.append(queue)
        self.queues.append(queue)
        return slots

    def start(self) -> None:
        """Start the threads; once."""
        for gpu in self._gpus:
            gpu.start()

    def close(self) -> None:
        """Wake everything that waits, so that it ends."""
        # Slots first: the enqueuer may be waiting for one, and would put what it makes into closed
        # queues.
        stopped: FeedError = ClosedError("the feed is stopped")
        for slots in self._pinned:
            slots.fail(stopped)
        for queue in self.queues:
            queue.close()

    def join(self, deadline_s: float) -> None:
        """Wait for the copiers, after the enqueuer has ended; raises `StuckWorkerError`."""
        # One deadline for all of them together.
        end = time.monotonic() + deadline_s
        for gpu in self._gpus:
            gpu.join(max(0.0, end - time.monotonic()))
        for slots in self._pinned:
            # Last: until the copiers have ended they read from these.
            slots.forget()
