"""The thread that copies one device's batches from pinned slots into slots on the device.

It does what it is told through one queue, which may be written to from anywhere, a finaliser
included; it alone touches the rules and the copy stream.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from feeder.devices.cuda.driver import Driver, Memory, Stream
from feeder.devices.cuda.leases import Lease
from feeder.devices.cuda.packed import Made, Packed, joined
from feeder.devices.cuda.pinned import empty
from feeder.devices.cuda.rules import Block, DeviceSlot, Traffic, Transfer, packed_of
from feeder.devices.host import HostQueue
from feeder.devices.layout import ALIGNMENT, Layout, credit_for
from feeder.devices.ondevice import OnDevice
from feeder.errors import DeviceError, FeedError
from feeder.workers.errors import in_words
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import LazyPosition

logger = logging.getLogger("feeder")


class Flight:
    """A copy that may not be done yet. Owned by the copier's thread."""

    __slots__ = ("done", "packed")

    def __init__(self, packed: list[Packed], done: Any) -> None:
        self.packed = packed
        self.done = done


class Copier:
    """What the copier's thread does, step by step.

    If a function makes something of the batches (`on_device`), each is copied to one place, the
    function reads it there, and what it makes is copied to a slot: all on the copy stream, so that
    nothing is waited for in between, and no other stream sees the memory that the function's
    library has lent.

    Batches come in through `inbox` and go out through `ready`, in order, each with its slot in
    `placed`. None in `inbox` ends the thread. The thread owns all of it but the inbox, which any
    thread writes to, a finaliser included, and `placed`, from which the user's thread takes.
    """

    def __init__(
        self, driver: Driver, depth: int, hold: int, lower: str, on_device: OnDevice | None = None
    ) -> None:
        self.driver = driver
        self._on_device = on_device
        # What the function is to be called with, where it lies then, and its memory.
        self._raw: deque[Batch] = deque()
        self._landing: Memory | None = None
        self._depth = depth
        self.num_ahead = depth
        """Batches on the device ahead of the user at most; 0 until their size is known."""
        self._hold = hold
        self._lower = lower
        self.inbox: SimpleQueue[list[Batch] | Lease | LazyPosition | FeedError | None] = (
            SimpleQueue()
        )
        """What the thread is told: batches to copy, leases that have ended, the end."""
        self.placed: deque[DeviceSlot] = deque()
        """The slots of the batches that go out."""
        self._traffic = Traffic()
        self._flights: deque[Flight] = deque()
        # Events are used again: to make one takes the driver as long as a small copy.
        self._events: list[Any] = []
        self._stream: Stream | None = None
        self._ending: LazyPosition | FeedError | None = None
        self._is_over = False

    # ---- the thread's steps

    def open_stream(self) -> None:
        """The first step, in the thread."""
        self.driver.bind()
        self._stream = self.driver.make_stream()

    def step(self, ready: HostQueue) -> bool:
        """Take in what there is, waiting where nothing else is to be done; begin copies, or see
        one end. False where the thread is to end."""
        self._take_in()
        if self._is_over:
            return False
        if self._can_make:
            self._make()
        if self._traffic.wants_slots_of:
            self._make_block()
        # Copies are begun before any is waited for, so that the device is never idle while batches
        # wait.
        if self._traffic.can_load:
            while self._traffic.can_load:
                ready.put(self._load(self._traffic.next_load()))
        elif self._flights and not self._can_make:
            self._land()
        # After the last batch has been put: the end, or the error, has its place in the order.
        if self._ending is not None and not (self._traffic.filled or self._raw):
            ready.finish(self._ending)
        return True

    def drain(self) -> None:
        """The last step: no copy is under way any more, and no memory is held."""
        stream, self._stream = self._stream, None
        try:
            if stream is not None:
                self.driver.drain(stream)
        except Exception as error:
            logger.error("%s: copies under way cannot be waited for: %s", self.driver.name, error)
        for flight in self._flights:
            _give_back(flight.packed)
        self._flights.clear()
        self._raw.clear()
        self._traffic, self._landing = Traffic(), None

    def forget(self) -> None:
        """Let go of the batches that nobody took, and of leases that ended since; when the thread
        has ended."""
        self.placed.clear()
        empty(self.inbox)

    # ---- what comes in

    def _take_in(self) -> None:
        """All that is in the inbox, waiting for it where there is nothing else to do."""
        traffic = self._traffic
        # The only wait of this thread; while copies run it must come back to see them end.
        block = not (self._flights or traffic.can_load or traffic.wants_slots_of or self._can_make)
        ended: list[Lease] = []
        with contextlib.suppress(Empty):
            while not self._is_over:
                told = self.inbox.get(block)
                block = False
                if isinstance(told, Lease):
                    ended.append(told)
                elif told is None:
                    self._is_over = True
                elif self._ending is not None:
                    pass  # Nothing comes after the end.
                elif isinstance(told, list):
                    (traffic.filled if self._on_device is None else self._raw).extend(told)
                else:
                    self._ending = told
        if ended:
            self._let_go(ended)

    def _let_go(self, ended: list[Lease]) -> None:
        """The user has let go of slots: they come back after what he has given his streams."""
        left: dict[int, Any] = {}
        for lease in reversed(ended):
            # One event after all that a stream was given will do for all of its slots.
            if lease.slot is not None and lease.stream.ptr not in left:
                left[lease.stream.ptr] = lease.slot.freed
                self.driver.record(lease.slot.freed, lease.stream)
        for lease in ended:
            if lease.slot is not None:
                self._traffic.let_go(lease.slot, left[lease.stream.ptr])
            # Memory of the user's own goes here; freeing it waits for all work of the device.
            lease.memory = None

    # ---- copies

    def _load(self, transfer: Transfer) -> list[Batch]:
        """Begin a copy; return its batches, which may be handed out at once."""
        driver, stream, slots = self.driver, self._stream, transfer.slots
        assert stream is not None
        for event in transfer.waits:
            # On the device: the copy waits for the user's last work on the slot, and no thread
            # does.
            driver.wait(stream, event)
        made = transfer.packed[0]
        if isinstance(made, Made):
            for source, at, num_bytes in made.pieces:
                driver.copy_within(transfer.target + at, source, num_bytes, stream)
        else:
            driver.copy_in(transfer.target, transfer.source, transfer.num_bytes, stream)
        # Two events: `ready` is waited for by the user's stream, and belongs to the slot; the other
        # one is for the host, which gives the pinned memory back.
        ready = slots[-1].copied
        driver.record(ready, stream)
        if not isinstance(made, Made):
            self._note_flight(transfer.packed)
        for slot in slots:
            slot.ready = ready
            slot.life.on("place")
        self.placed.extend(slots)
        # Without the host's arrays: they go back when the copy is done, whoever has the batch.
        return [batch.with_arrays(()) for batch in transfer.batches]

    def _note_flight(self, packed: list[Packed]) -> None:
        assert self._stream is not None
        done = self._events.pop() if self._events else self.driver.make_event()
        self.driver.record(done, self._stream)
        self._flights.append(Flight(packed, done))

    def _land(self) -> None:
        """Wait for the oldest copy; the pinned memory of all that are done goes back."""
        flights = self._flights
        self.driver.synchronize(flights[0].done)
        while True:
            flight = flights.popleft()
            self._events.append(flight.done)
            _give_back(flight.packed)
            if not flights or not self.driver.is_done(flights[0].done):
                return

    # ---- what the function makes

    @property
    def _can_make(self) -> bool:
        # One ahead of the slots, since its size is known only then.
        return bool(self._raw) and not self._traffic.filled

    def _make(self) -> None:
        """Copy a batch, and have the function make what is to lie in the next slot."""
        driver, stream, on_device = self.driver, self._stream, self._on_device
        assert stream is not None and on_device is not None
        batch = self._raw.popleft()
        packed = packed_of(batch)
        layout, size = packed.layout, packed.layout.num_bytes
        assert isinstance(layout, Layout)
        landing = self._find_landing(size)
        # After all that was made of the batch before it: the stream is the same.
        driver.copy_in(landing.address, packed.address, size, stream)
        self._note_flight([packed])
        with driver.working_on(stream):
            arrays = driver.arrays(landing.address, size, landing, layout.places, packed.length)
            made = on_device(batch.with_arrays(joined(arrays, packed.on_host)))
            try:
                lies = Made.of(driver, made.columns)
            except ValueError as error:
                raise on_device.error(batch, f"returned {error}") from None
        self._traffic.filled.append(made.with_arrays(lies))

    def _find_landing(self, num_bytes: int) -> Memory:
        if self._landing is None or self._landing.num_bytes < num_bytes:
            self._landing = None
            try:
                self._landing = self.driver.alloc_device(num_bytes)
            except Exception as error:
                raise DeviceError(
                    f"{self.driver.name}: {num_bytes} bytes for the batch that on_device is given "
                    f"were refused: {error}; {self.driver.free_bytes()} bytes are free; lower "
                    f"{self._lower}"
                ) from error
        return self._landing

    def _make_block(self) -> None:
        """Make slots on the device, at least twice as large as those that were too small."""
        traffic, driver = self._traffic, self.driver
        slot_bytes = num_bytes = traffic.wants_slots_of
        if traffic.block is not None:
            # Twice: batches that grow (`dont_rebatch`) make few blocks.
            slot_bytes = max(num_bytes, 2 * traffic.block.slot_bytes)
        slot_bytes += -slot_bytes % ALIGNMENT
        self.num_ahead = self._depth or credit_for(num_bytes)
        num = self.num_ahead + self._hold
        try:
            memory = driver.alloc_device(num * slot_bytes)
        except Exception as error:
            raise DeviceError(
                f"{driver.name}: {num * slot_bytes} bytes for {num} slots of {slot_bytes} bytes "
                f"were refused: {error}; {driver.free_bytes()} bytes are free; lower {self._lower}"
            ) from error
        block = Block(memory, slot_bytes)
        traffic.use(block, block.slots(num, driver.make_event))


def _give_back(packed: list[Packed]) -> None:
    for one in packed:
        one.give_back()


def run_copier(copier: Copier, ready: HostQueue, on_failure: Callable[[FeedError], None]) -> None:
    """Thread body: copy batches until told to end, or until the device fails."""
    try:
        copier.open_stream()
        while copier.step(ready):
            pass
    except Exception as error:
        # Any exception: the user waits for what this thread makes, and is told why nothing comes.
        failure = as_device_error(copier.driver.name, error)
        on_failure(failure)
    finally:
        copier.drain()


def as_device_error(name: str, error: Exception) -> FeedError:
    """An error of feeder's for what a device said; whoever keeps it keeps no slots by it."""
    failure = error
    if not isinstance(error, FeedError):
        failure = DeviceError(f"{name} failed: {in_words(error)}")
        failure.__cause__ = error
    assert isinstance(failure, FeedError)
    told: BaseException | None = failure
    while told is not None:
        traceback.clear_frames(told.__traceback__)
        told = told.__cause__
    return failure
