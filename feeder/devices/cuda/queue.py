"""A device queue on a GPU: batches are copied there ahead of the user, and handed out as arrays
of the device."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from feeder.devices.cuda.copier import Copier, as_device_error, run_copier
from feeder.devices.cuda.driver import Driver, Stream
from feeder.devices.cuda.leases import Lease, Leases
from feeder.devices.cuda.packed import joined
from feeder.devices.cuda.rules import DeviceSlot
from feeder.devices.host import HostQueue
from feeder.devices.ondevice import OnDevice
from feeder.errors import DeviceError, FeedError
from feeder.workers.fetch.threads import ThreadGroup
from feeder.workers.stats import Stopwatch, Waits
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import LazyPosition

logger = logging.getLogger("feeder")

_UNBOUNDED = 2**62


class CudaQueue:
    """Batches on their way from the enqueuer to the user of one GPU.

    The thread that merges calls `put` and `finish`, the user's thread `get` and `receive`, any
    thread `close`; a thread of the queue's own copies. At most `depth` batches are on the device
    beside those that the user holds (0: by their size). The user may hold `hold` batches, the one
    at hand included; beyond that the user gets copies in memory of their own. `on_failure` is
    called when the device fails, by the copier's thread; `lower` names the settings that make
    memory smaller. `on_device` makes of each batch what is handed out, in the queue's own thread.
    """

    def __init__(
        self,
        driver: Driver,
        describe_wait: Callable[[], str],
        *,
        depth: int,
        hold: int,
        lower: str,
        on_failure: Callable[[FeedError], None] = lambda error: None,
        look_s: float = math.inf,
        on_device: OnDevice | None = None,
    ) -> None:
        self.driver = driver
        self._hold = hold
        self._on_failure = on_failure
        self._copier = Copier(driver, depth, hold, lower, on_device)
        self._ready = HostQueue(_UNBOUNDED, describe_wait, look_s)
        self._leases = Leases(driver, self._on_lease_end)
        self._named_stream: Stream | None = None
        # What was waited for last: the copy, the user's stream, the current stream.
        self._waited: tuple[int, int, int] | None = None
        self._num_put = self._num_got = 0
        self._over = False
        self._failure: FeedError | None = None
        self.blocked = Stopwatch()
        """The enqueuer's waits for a pinned slot to be free."""
        self.num_copies = 0
        """Batches that were copied because the user holds too many."""
        self._scope = ThreadGroup()

    # ---- life

    def start(self) -> None:
        """Start the thread; once."""
        name = f"feeder {self.driver.name} copier"
        self._scope.start(name, run_copier, self._copier, self._ready, self._fail)

    def close(self) -> None:
        """End the queue at once: what is in it is dropped, and whoever waits is woken."""
        self._ready.close()
        self.end_thread()

    def end_thread(self) -> None:
        """Have the thread end; for finalisers, since it neither waits nor locks."""
        self._over = True
        self._copier.inbox.put(None)

    def join(self, deadline_s: float) -> None:
        """Wait until no copy is under way any more; raises `StuckWorkerError`."""
        self._scope.close(deadline_s)
        self._copier.forget()

    def _fail(self, error: FeedError) -> None:
        self._over = True
        self._ready.finish(error)
        self._on_failure(error)

    # ---- the merging thread's

    def put(self, batches: list[Batch]) -> None:
        """Add batches in order; how many there are at once is bounded by their pinned slots."""
        self._num_put += len(batches)
        self._copier.inbox.put(batches)

    def finish(self, ending: LazyPosition | FeedError) -> None:
        """After the batches put so far comes the end of the stream, or an error."""
        self._copier.inbox.put(ending)

    # ---- the user's

    def __len__(self) -> int:
        return self._num_put - self._num_got

    @property
    def waited_since(self) -> float | None:
        """Since when the user has been waiting for a batch; None while not."""
        return self._ready.waited_since

    @property
    def starved(self) -> Waits:
        """The user's waits for a batch."""
        return self._ready.starved

    @starved.setter
    def starved(self, watch: Waits) -> None:
        self._ready.starved = watch

    @property
    def ending(self) -> LazyPosition | FeedError | None:
        """What comes after the batches that are here; None where more batches do."""
        return self._ready.ending

    @property
    def capacity(self) -> int:
        """Batches on the device ahead of the user at most; 0 until their size is known."""
        return self._copier.num_ahead

    @property
    def is_full(self) -> bool:
        """Whether batches wait for the user, and no pinned slot is free for the next."""
        return len(self._ready) > 0 and self.blocked.since is not None

    def work_on(self, stream: Any) -> None:
        """The user's work goes to this stream; None is the current one at each batch. Raises
        `ConfigError` for what is none."""
        self._named_stream = None if stream is None else self.driver.stream_of(stream)

    def go_on(self, before: CudaQueue) -> None:
        """Be the queue of the same user after another one."""
        self._ready.go_on(before._ready)
        self._named_stream = before._named_stream

    @property
    def given(self) -> deque[Batch] | None:
        """What `get` gave last, until the user has it and says None."""
        return self._ready.given

    @given.setter
    def given(self, given: None) -> None:
        self._ready.given = given

    def get(self) -> deque[Batch] | LazyPosition:
        """All batches that are there, each to be received before it is used, waiting for the
        first; after them the end of the stream. Raises the error in the next one's place."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        got = self._ready.get()
        if isinstance(got, deque):
            self._num_got += len(got)
        return got

    def receive(self, batch: Batch) -> Batch:
        """A batch got before, in order, with its arrays on the device. What the stream of the
        user is given from now on comes after the copy. Raises `DeviceError`."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        try:
            slot = self._copier.placed.popleft()
            # Read before the slot is handed out: then it may be the next batch's.
            on_host, slot.on_host = slot.on_host, {}
            arrays = self._hand_out(slot)
            return batch.with_arrays(joined(arrays, on_host) if on_host else arrays)
        except Exception as error:
            # What comes after it may not be handed out in its place.
            self._failure = as_device_error(self.driver.name, error)
            raise self._failure from self._failure.__cause__

    def _hand_out(self, slot: DeviceSlot) -> tuple[Any, ...]:
        current = self.driver.current_stream()
        stream = self._named_stream or current
        seen = (slot.run, stream.ptr, current.ptr)
        if seen != self._waited:
            # One copy may have brought several batches: what was waited for once is there.
            self.driver.wait(stream, slot.ready)
            if stream.ptr != current.ptr:
                # DLPack orders other frameworks after the current stream of CuPy or PyTorch.
                self.driver.wait(current, slot.ready)
            self._waited = seen
        slot.life.on("hand")
        # Else the copier would run out of slots, and the stream stand still until the user lets go.
        if self._leases.num_slots < self._hold:
            return self._leases.lend(slot, stream)
        return self._copy(slot, stream)

    def _copy(self, slot: DeviceSlot, stream: Stream) -> tuple[Any, ...]:
        """What is in a slot, in memory of its own; the slot goes back after the copy."""
        if not self.num_copies:
            logger.warning(
                "%s: more than %d batches are kept: from now on batches are copied for as long "
                "as that is so; drop them", self.driver.name, self._hold,
            )  # fmt: skip
        self.num_copies += 1
        num_bytes = slot.layout.num_bytes
        try:
            memory = self.driver.alloc_device(num_bytes)
        except Exception as error:
            raise DeviceError(
                f"{self.driver.name}: {num_bytes} bytes for one more batch, beside "
                f"{self._leases.num_slots + self._leases.num_own} that are kept, were refused: "
                f"{error}; {self.driver.free_bytes()} bytes are free; keep fewer batches"
            ) from error
        # On the user's own stream, which has the data already: no other stream waits.
        self.driver.copy_within(memory.address, slot.address, num_bytes, stream)
        arrays = self._leases.give(memory, slot, stream)
        # Last: from now on the slot may be another batch's.
        self._leases.give_back(slot, stream)
        return arrays

    def _on_lease_end(self, lease: Lease) -> None:
        # In any thread, perhaps inside the garbage collector: it neither waits nor locks.
        if not self._over:
            self._copier.inbox.put(lease)
